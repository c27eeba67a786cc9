"""What is judged of a signal while its session runs, beside the verdict on the steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from traceml_ray.analysis.node_clock import UNCOMPARED_BOUND_NS
from traceml_ray.signals.kind import Kind
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.results import EventRow
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import messages as wire


@dataclass(frozen=True)
class Ranks:
    """Who is who in a run."""

    processes: Mapping[int, RankProcess]
    """Rank processes by id."""
    labels: Mapping[int, str]
    """Labels of their nodes, by process id."""
    world: int | None
    clocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Offset of each node's clock and its largest error, in ns, by node id; only where known."""

    def clock(self, process: RankProcess) -> tuple[int, int]:
        """Return that of a process's node; of one that is not known, nothing, and what clocks differ by."""
        node = process.identity.node_id if process.identity else None
        return self.clocks.get(node or "", (0, UNCOMPARED_BOUND_NS if self.several_nodes else 0))

    @cached_property
    def several_nodes(self) -> bool:
        """Whether there are clocks that may differ."""
        return len({self.labels.get(process) for process in self.processes}) > 1


class LiveSignal(Protocol):
    """
    Judges the records of a signal as they come. `add` and `add_span` are called with the writer's lock,
    `fresh` and `latest` by any thread, all else by the one that judges.
    """

    @property
    def name(self) -> str:
        """Return the name of its view."""

    @property
    def question(self) -> type[OfRun[Any]]:
        """Return the question of its view, which makes the answer of what `fresh` returns."""

    @property
    def kind(self) -> Kind[Any]:
        """Return the kind of the records that `add` takes."""

    def add(self, process: int, record: Any) -> None:
        """Take the next record of a rank process (its number)."""

    def add_span(self, process: int, span: wire.SpanSum) -> None:
        """Take a span of a rank process."""

    def resume(
        self, run: str, file: SessionFile, processes: Collection[int], events: Sequence[EventRow]
    ) -> None:
        """
        Take what is stored of a run that goes on, after a restart. Raises `SessionFileError`.

        Args:
            run: its id.
            file: reads it.
            processes: its rank processes, by number.
            events: those of these processes that are stored.
        """

    def judge(self, runs: Mapping[str, Ranks]) -> Collection[str]:
        """
        Judge for a moment; return the runs that have been judged anew.

        Args:
            runs: those that are live; all others are forgotten.
        """

    def events(self, run: str, now_ns: int) -> Sequence[tuple[int, wire.Event]]:
        """Return what is to be told of a run that was judged anew, each event with its rank."""

    def latest(self, run: str) -> Any:
        """Return what was found last in a run; None before the first time."""

    def fresh(self, run: str, ranks: Ranks) -> Any:
        """Return what is found now, or as `latest` where that takes too long."""

    def worst(self, run: str) -> Any:
        """Return what was found for sure, the most severe finding alone; None where there is none."""
