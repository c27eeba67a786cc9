"""The part of a signal that runs in a training process, on the agent's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from traceml_ray.agent.device_use import DeviceUse
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.recorder import Recorder
from traceml_ray.errors import Errors
from traceml_ray.settings import Settings
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import Part


@dataclass
class Rank:
    """Everything in one training process that a collector may read from."""

    recorder: Recorder
    instrumentation: Instrumentation
    device: DeviceUse
    settings: Settings
    add_event: Callable[[wire.Event], object]
    """Sends an event with the next batch. Any thread may call it."""
    spool: str | None = None
    """Folder for data that is not confirmed as stored when the process ends."""
    part_of_run_ns: int | None = None
    """
    Time from which on the process can be part of the run (ns since the epoch), if it may be older: Ray
    keeps processes for later use. None: it was started for the run.
    """
    memory_from: dict[str, str] = field(default_factory=dict)
    """Source of each field of memory samples, for the next batch (`wire.RankBatch.memory_from`)."""
    spans: Sequence[wire.SpanSum] = ()
    """Spans that were closed since the last round."""

    @property
    def errors(self) -> Errors:
        """Counts errors, by place."""
        return self.instrumentation.errors

    @property
    def missing(self) -> dict[str, str]:
        """Reasons why values are not known, by name."""
        return self.instrumentation.missing


class Collector:
    """
    Collects the records of a signal.

    It is made together with the agent, possibly before torch can be used. Only the agent calls it. An
    exception is counted and has no other effect.
    """

    commands: tuple[str, ...] = ()
    """Names of the commands that `handle_command` accepts, see `wire.Command`."""

    def install(self) -> None:
        """Start: the process is now known to be a rank."""

    def collect(self, final: bool) -> Iterable[Part]:
        """Return the records that are due. Called once per round; `final`: this is the last call."""
        raise NotImplementedError

    def handle_command(self, command: wire.Command) -> None:
        """Execute a command for this rank. The command is repeated until it is done."""

    def abandon(self, forked: bool) -> None:
        """
        Stop using torch: this process is no longer watched, or (`forked`) is a child of a
        watched process.
        """

    def remove(self) -> None:
        """Restore everything, after the last round or in a child process."""
