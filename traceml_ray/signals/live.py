"""Signals that are judged while their session runs, in addition to the verdict on the steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from traceml_ray.analysis.node_clock import UNCOMPARED_BOUND_NS
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.signals.kind import Kind
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.results import EventRow
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import messages as wire


@dataclass(frozen=True)
class Ranks:
    """The rank processes of a run, with the labels and clocks of their nodes."""

    processes: Mapping[int, RankProcess]
    """Rank processes by id."""
    labels: Mapping[int, str]
    """Labels of their nodes, by process id."""
    world: int | None
    current: Mapping[int, RankProcess] = field(default_factory=dict)
    """The present process of each rank."""
    clocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Offset of each node's clock and its largest error, in ns, by node id; only where known."""

    def clock(self, process: RankProcess) -> tuple[int, int]:
        """
        Return (offset, largest error) of the clock of a process's node. If it is not known: offset 0 and a
        default error.
        """
        node = process.identity.node_id if process.identity else None
        return self.clocks.get(node or "", (0, UNCOMPARED_BOUND_NS if self.several_nodes else 0))

    @cached_property
    def several_nodes(self) -> bool:
        """Return whether there is more than one clock, so that clocks may differ."""
        return len({self.labels.get(process) for process in self.processes}) > 1


ToStore = tuple[Kind[Any], int, Any]
"""A record to store: its kind, its rank process, and the record."""


class LiveSignal:
    """
    Judges a signal while its session runs, from records as they arrive and from the steps. It may also have
    records stored. Methods that a signal does not need do nothing.

    `add` and `add_spans` are called with the writer's lock, `add_steps` with the lock of the step histories.
    Any thread may call `fresh` and `latest`; only the thread that feeds the histories calls the rest.
    """

    name: str
    """Name of its view."""
    question: type[OfRun[Any]]
    """Question of its view, which converts the result of `fresh` to an answer."""
    kind: Kind[Any] | None = None
    """Kind of the records that `add` accepts. None: it needs no records."""

    def add(self, process: int, record: Any) -> None:
        """Add the next record of a rank process (its number)."""

    def add_spans(self, process: int, spans: Sequence[wire.SpanSum]) -> None:
        """Add spans of a rank process."""

    def add_steps(
        self, run: str, history: StepHistory, processes: Mapping[int, int], now_ns: int, ends: bool
    ) -> None:
        """
        Look at the steps of a live run so far, once all its stored rows have been read. The history may only
        be read during the call.

        Args:
            run: id of the run.
            history: its steps.
            processes: process of each rank.
            now_ns: when a rank was seen last (ns since the epoch).
            ends: whether this is the last call for this history: the run is over, or other processes follow.
        """

    def drain(self) -> Sequence[ToStore]:
        """Return the records to store, each with its kind and its rank process (its number)."""
        return ()

    def resume(
        self, run: str, file: SessionFile, processes: Collection[int], events: Sequence[EventRow]
    ) -> None:
        """
        Load what is stored of a run that continues after a restart. Raises `SessionFileError`.

        Args:
            run: id of the run.
            file: reads the run.
            processes: its rank processes, by number.
            events: stored events of these processes.
        """

    def judge(self, runs: Mapping[str, Ranks]) -> Collection[str]:
        """
        Judge for a short time. Return the runs whose result is new.

        Args:
            runs: the live runs. All others are forgotten.
        """
        return ()

    def events(self, run: str, now_ns: int) -> Sequence[tuple[int, wire.Event]]:
        """Return the events to report for a run with a new result, each with its rank."""
        return ()

    def latest(self, run: str) -> Any:
        """Return the last result for a run. None before the first one."""
        return None

    def fresh(self, run: str, ranks: Ranks) -> Any:
        """
        Return the current result. If that takes too long, return the same as `latest`. None: the view reads
        it from the file.
        """
        return None

    def worst(self, run: str) -> Any:
        """Return only the most severe finding that is certain. None if there is none."""
        return None
