"""One run of a session: the newest answers about its steps, ranks, nodes and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from traceml_ray.analysis.labels import DEATHS
from traceml_ray.analysis.shapes import StepTimes
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.signals.view import SLOW_RANKS
from traceml_ray.signals.views import POLLED
from traceml_ray.store import query
from traceml_ray.store.query import Request
from traceml_ray.store.rank_processes import RankProcess, node_key, reporting, world_size
from traceml_ray.store.results import NodeInfo
from traceml_ray.store.step_shapes import EventRow
from traceml_ray.store.summary_shape import to_builtins

from .values import as_dict

MAX_EVENTS = 2000
SLOW_S = 5.0
"""From `SLOW_RANKS` ranks on, ranks and nodes are asked for only every `SLOW_S` seconds."""


class RunState:
    """The newest answers about one run: the numbers of its steps, its ranks, nodes, events and verdicts."""

    def __init__(self, run: str, limits: Thresholds) -> None:
        self.id = run
        self.viewed_at = 0.0
        self.times: StepTimes | None = None
        """The numbers of its steps, see `analysis.step_numbers.times`."""
        self.signals: dict[str, Any] = {}
        """The newest answer of each signal that is polled, by name."""
        self.verdict: Mapping[str, Any] | None = None
        self.ranks: dict[int, RankProcess] = {}
        self.world = 0
        """Number of ranks of the job, as far as known."""
        self._reporting: frozenset[int] = frozenset()
        self.nodes: list[NodeInfo] = []
        self.labels: dict[str, str] = {}
        """Label of each node, by id."""
        self.samples: dict[str, dict[str, Any]] = {}
        """Newest sample of each node, by id."""
        self.events: deque[EventRow] = deque(maxlen=MAX_EVENTS)
        self.verdicts: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._patience_ns = int(limits.report_timeout_s * 1e9)
        self._seen = 0, 0
        """Cursors of the newest event and the newest change of verdict that were read."""
        self._asked_ranks = float("-inf")

    @property
    def is_read_to_end(self) -> bool:
        """Whether all stored rows have been read."""
        return self.times is not None and self.times.whole

    @property
    def last_step(self) -> int | None:
        """The newest step that all ranks have reported."""
        return self.times.last_step if self.times else None

    def questions(self, now: float) -> list[Request[Any]]:
        """Return the questions to ask; `update` takes their answers."""
        asked: list[Request[Any]] = [query.GetVerdict(self.id), query.GetTimes(self.id)]
        asked += [view.question(self.id) for view in POLLED]
        asked.append(query.GetEvents(self.id, self._seen[0], brief=True, most=MAX_EVENTS))
        asked.append(query.GetVerdicts(self.id, self._seen[1]))
        if not self.ranks or len(self.ranks) < SLOW_RANKS or now - self._asked_ranks > SLOW_S:
            self._asked_ranks = now
            node_ids = tuple(node.node_id for node in self.nodes)
            asked += [
                query.GetRanks(self.id),
                query.GetNodes(self.id),
                query.GetNodeSamples(node_ids, last=1),
            ]
        return asked

    def update(self, asked: list[Request[Any]], answers: list[Any]) -> bool:
        """Apply the answers to `questions`; return whether anything is new."""
        answer_to = {type(request): answer for request, answer in zip(asked, answers, strict=True)}
        events, verdicts = answer_to[query.GetEvents], answer_to[query.GetVerdicts]
        self._seen = events.cursor, verdicts.cursor
        self.events.extend(events.items)
        self.verdicts.extend(map(to_builtins, verdicts.items))
        verdict = to_builtins(answer_to[query.GetVerdict]) or (self.verdicts[-1] if self.verdicts else None)
        new = bool(events.items or verdicts.items or verdict != self.verdict)
        self.verdict = verdict
        if query.GetRanks in answer_to:
            ranks, nodes = answer_to[query.GetRanks], answer_to[query.GetNodes]
            new |= (ranks, nodes) != (self.ranks, self.nodes)
            self.ranks, self.nodes = ranks, nodes
            self.world = world_size(ranks, None)
            self._reporting = frozenset(reporting(ranks, self._patience_ns))
            self.labels = {node.node_id: node.label for node in nodes}
            self.samples = {node: as_dict(sample) for node, sample in answer_to[query.GetNodeSamples]}
        self.signals = {view.name: answer_to[view.question] for view in POLLED}
        return self.update_times(answer_to[query.GetTimes]) or new

    def update_times(self, times: StepTimes) -> bool:
        """Replace the numbers of the run's steps; return whether there are new ones."""
        before, self.times = self.times, times
        return before is None or _state(before) != _state(times)

    @property
    def died(self) -> bool:
        """Whether the verdict names a rank that died."""
        return self.verdict is not None and self.verdict["label"] in DEATHS

    @property
    def named(self) -> dict[str, Sequence[Any]]:
        """The `ranks` and `nodes` that the verdict names."""
        verdict = {} if self.verdict is None or self.verdict["label"] == "healthy" else self.verdict
        return {name: verdict.get(name) or () for name in ("ranks", "nodes")}

    def reporting(self) -> frozenset[int]:
        """Return the ranks that may still deliver: not ended, and not silent for long while others report."""
        return self._reporting

    def node_of(self, rank: int | None) -> str | None:
        """Return the label of the node that a rank is on; None if not known."""
        process = self.ranks.get(rank) if rank is not None else None
        return self.labels.get(node_key(process), node_key(process)) if process and process.identity else None


def _state(times: StepTimes) -> tuple[object, ...]:
    return times.version, times.last_step, times.steps, times.whole, times.world
