"""
Has the node of a straggler that lasts checked during training, and some nodes to compare it with
(`confirm=during`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.errors import Errors
from traceml_ray.monitor.live_steps import RunNow
from traceml_ray.settings import Settings
from traceml_ray.signals.check.confirm import STRAGGLERS
from traceml_ray.signals.check.during import PERIOD_S, TRIALS
from traceml_ray.signals.check.records import CHECKS, COMMAND, DURING
from traceml_ray.signals.kind import Kind
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import Value

LASTS_S = 60.0
"""Time for which the same ranks must be named, in s."""
_GAP_S = 10.0
"""Time for which they may be named less, in s: which finding is the first may change in a window."""
EVERY_S = 600.0
"""Shortest time between two checks of a run, in s."""
MOST = 12
"""Largest number of checks of a run."""
STRAGGLERS_NODES = 4
"""Largest number of nodes with stragglers that are checked."""
PEERS = 4
"""Largest number of other nodes that these are compared with."""
MOST_RANKS = 64
"""Largest number of ranks of a node that are looked at."""
AHEAD_S = 12.0
"""Time from the order to the first trial, in s: the order must arrive, and a process must start."""
_ORDER_S = AHEAD_S - 2.0
"""Time for which the order is sent, in s."""

_ANSWER_S = TRIALS * PERIOD_S + 30.0
"""Time after the order in which the nodes answer, in s. An older relay does not know the order."""


@dataclass
class _Named:
    """Ranks that are named as stragglers."""

    since_ns: int
    last_ns: int


@dataclass
class _Run:
    """State of one run."""

    named: dict[tuple[int, ...], _Named] = field(default_factory=dict)
    asked: set[tuple[int, ...]] = field(default_factory=set)
    """Ranks whose nodes were checked."""
    times: int = 0
    last_ns: int | None = None


@dataclass(eq=False)
class StragglerWatch:
    """
    Watches the verdicts of the live runs, and orders checks. Only the judging thread calls `tick`; any thread
    may call the rest.

    Args:
        settings: of the session.
        running: returns the live runs.
        clock: wall clock in ns.
        errors: the aggregator's error counts, by place.
    """

    settings: Settings
    running: Callable[[], Sequence[RunNow]]
    clock: Callable[[], int]
    errors: Errors

    def __post_init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._orders: dict[str, wire.Command] = {}
        """The present order of each node, by node id."""
        self._until_ns = 0
        self._waiting: set[str] = set()
        """Nodes whose answer has not arrived yet."""

    def commands(self, node_id: str) -> list[wire.Command]:
        """Return the command for the relay of a node."""
        order = self._orders.get(node_id)
        return [] if order is None or self.clock() > self._until_ns else [order]

    def answered(self, node_id: str, records: Iterable[tuple[Kind[Any], Any]]) -> None:
        """Note that records have arrived from a node. Called with the writer's lock."""
        if node_id in self._waiting and any(kind is CHECKS for kind, _ in records):
            self._waiting.discard(node_id)

    def tick(self) -> None:
        """Order the check that is due. An error is counted."""
        if self.settings.confirm != DURING:
            return
        try:
            self._tick()
        except Exception as error:
            self.errors.swallow("check during training", error)

    def _tick(self) -> None:
        now, live = self.clock(), self.running()
        if self._waiting and now > self._until_ns + _ANSWER_S * 1e9:
            self.errors.count("check during training: no answer", len(self._waiting))
            self._waiting = set()
        self._runs = {one.run: self._runs.get(one.run, _Run()) for one in live}
        for one in live:
            state = self._runs[one.run]
            for ranks in stragglers(one.verdict):
                state.named.setdefault(ranks, _Named(now, now)).last_ns = now
            state.named = {
                ranks: named for ranks, named in state.named.items() if now - named.last_ns <= _GAP_S * 1e9
            }
            self._order(one, state, now)

    def _order(self, live: RunNow, state: _Run, now: int) -> None:
        """Order a check if ranks have been named for long, and it is not too soon after the last check."""
        soon = state.last_ns is not None and now - state.last_ns < EVERY_S * 1e9
        if soon or state.times >= MOST or now <= self._until_ns:
            return
        lasting = [
            ranks
            for ranks, named in state.named.items()
            if ranks not in state.asked and named.last_ns - named.since_ns >= LASTS_S * 1e9
        ]
        for ranks in lasting[:1]:
            nodes = nodes_to_check(ranks, live.ranks)
            if not nodes:  # its process has ended: there may be another one later
                continue
            state.asked.add(ranks)
            state.times, state.last_ns = state.times + 1, now
            begin_ns, self._until_ns = now + int(AHEAD_S * 1e9), now + int(_ORDER_S * 1e9)
            orders = dict[str, wire.Command]()
            for node, processes in nodes.items():
                offset, bound = live.clocks.get(node, (0, 0))
                args: dict[str, Value] = {"id": f"{now:x}", "run": live.run, "rank": ranks[0]}
                args["begin_ns"] = begin_ns - (offset if abs(offset) > bound else 0)
                args["processes"] = " ".join(f"{rank}:{name}" for rank, name in processes.items())
                orders[node] = wire.Command(COMMAND, args)
            self._orders, self._waiting = orders, set(orders)


def stragglers(verdict: Verdict | None) -> Iterable[tuple[int, ...]]:
    """Return the ranks that a verdict names as stragglers, and those of its other findings."""
    if verdict is None:
        return []
    every = (verdict, *verdict.also)
    return [tuple(one.ranks) for one in every if one.label in STRAGGLERS and one.ranks]


def nodes_to_check(ranks: Sequence[int], of_rank: Mapping[int, RankProcess]) -> dict[str, dict[int, str]]:
    """
    Return the nodes of stragglers, at most STRAGGLERS_NODES, and at most PEERS nodes without stragglers that
    are spread over all of the run. By node id: the names of the processes of its ranks.

    Args:
        ranks: the stragglers. Nothing is checked if the process of the first one has ended.
        of_rank: the process of each rank of the run.
    """
    by_node: dict[str, dict[int, str]] = {}
    for rank, process in sorted(of_rank.items()):
        node = process.identity.node_id if process.identity is not None else None
        if node is not None and not process.ended:
            by_node.setdefault(node, {})[rank] = process.process_id
    node_of = {rank: node for node, processes in by_node.items() for rank in processes}
    if ranks[0] not in node_of:
        return {}
    named = [*dict.fromkeys(node_of[rank] for rank in ranks if rank in node_of)]
    others = [node for node in by_node if node not in named]
    count = min(PEERS, len(others))
    chosen = [
        *named[:STRAGGLERS_NODES],
        *(others[number * len(others) // count] for number in range(count)),
    ]
    return {node: dict([*by_node[node].items()][:MOST_RANKS]) for node in chosen}
