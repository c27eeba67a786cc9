"""What a signal does in a training process, on the agent's thread."""

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
    """What there is to collect from, in one training process."""

    recorder: Recorder
    instrumentation: Instrumentation
    device: DeviceUse
    settings: Settings
    add_event: Callable[[wire.Event], object]
    """Has an event sent with the next batch; any thread may."""
    spool: str | None = None
    """Folder for what may not be stored when the process ends."""
    memory_from: dict[str, str] = field(default_factory=dict)
    """Where fields of memory samples come from, for the next batch (`wire.RankBatch.memory_from`)."""
    spans: Sequence[wire.SpanSum] = ()
    """Those that were closed since the last round."""

    @property
    def errors(self) -> Errors:
        """Counts what goes wrong, by place."""
        return self.instrumentation.errors

    @property
    def missing(self) -> dict[str, str]:
        """Takes the reason why something is not known, by its name."""
        return self.instrumentation.missing


class Collector:
    """
    Collects the records of a signal. It is made when the agent is, perhaps before torch can be used. All
    calls are the agent's; what they raise is counted, and costs nothing else.
    """

    commands: tuple[str, ...] = ()
    """Names of the commands that `handle_command` takes, see `wire.Command`."""

    def install(self) -> None:
        """Begin: the process is known to be a rank."""

    def collect(self, final: bool) -> Iterable[Part]:
        """Return the records that are due, once a round; `final`: nothing comes after."""
        raise NotImplementedError

    def handle_command(self, command: wire.Command) -> None:
        """Do what a command for this rank asks; it is repeated until it is done."""

    def abandon(self, forked: bool) -> None:
        """Let go of torch: this process is no longer watched, or (`forked`) is a child of one that is."""

    def remove(self) -> None:
        """Put everything back, after the last round, or in a child."""
