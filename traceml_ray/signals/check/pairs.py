"""
Plans and judges the rounds in which pairs of nodes exchange data, as DLRover's network check does.

In the first round neighbours are paired. In the second one the nodes of slow pairs are paired with nodes of
fast pairs. A node that is slow with both partners is slow; if both nodes of a slow pair are fast with others,
their link is slow. Further rounds follow only while a slow pair is not explained, or a node was in no pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from traceml_ray import text
from traceml_ray.signals.check.judge import ALPHA, LIMITS, Level, Slow, logarithm, rate
from traceml_ray.signals.check.peers import compare, persists, trials_of
from traceml_ray.signals.check.records import Measure

Pair = tuple[int, int]
"""Numbers (0 … n−1) of two nodes, the smaller one first."""
Rounds = Sequence[Mapping[Pair, Sequence[Measure]]]
"""What each pair measured, by round. A pair that failed has no measures."""
OPERATIONS = "all_reduce", "all_gather"
"""Probes of a pair. `Measure.values` are bytes per second and trial, algorithm bandwidth."""
MOST_ROUNDS = 4
_MOST_NAMES = 8
"""Largest number of nodes in a sentence."""
_LEAST_FAST = 0.3
"""Smallest share of the pairs that may be the peers. Of three nodes, two pairs have the slow one."""


def first_round(nodes: int) -> list[Pair]:
    """Return the pairs of the first round. With an odd number of nodes the last one waits for the second."""
    return [(node, node + 1) for node in range(0, nodes - 1, 2)]


def next_round(nodes: int, measured: Rounds) -> list[Pair]:
    """
    Return the pairs of the next round, all of which may run at the same time; empty: it is decided.

    Args:
        nodes: number of nodes.
        measured: what was measured so far.
    """
    if nodes < 3 or len(measured) >= MOST_ROUNDS:
        return []
    done = {pair for one in measured for pair in one}
    if nodes == 3:  # all three links
        return [pair for pair in ((1, 2), (0, 2), (0, 1)) if pair not in done][:1]
    paired = {node for pair in done for node in pair}
    alone = [node for node in range(nodes) if node not in paired]
    pairs = _Pairs(nodes, measured)
    if len(measured) == 1:
        asking = [*alone, *_of_pairs(pairs.worst_first())]
        partners = [node for node in reversed(asking) if node not in alone]
        return _matched(asking, partners, done, nodes)
    asking = [*dict.fromkeys([*alone, *pairs.undecided(), *pairs.not_compared()])]
    return _matched(asking, pairs.good_partners(), done, nodes, only_asking=True) if asking else []


def _of_pairs(pairs: Iterable[Pair]) -> list[int]:
    return [*dict.fromkeys(chain.from_iterable(pairs))]


def _matched(
    asking: Sequence[int], partners: Sequence[int], done: set[Pair], nodes: int, only_asking: bool = False
) -> list[Pair]:
    """
    Return pairs that were not measured yet: each node of `asking`, in order, with the first free partner.
    The other nodes are paired with each other if not `only_asking`.
    """
    free, pairs = dict.fromkeys(range(nodes)), list[Pair]()
    others = [] if only_asking else [node for node in range(nodes) if node not in asking]
    for node in (*asking, *others):
        if node not in free:
            continue
        for partner in (*partners, *(free if only_asking else ()), *others):
            pair = min(node, partner), max(node, partner)
            if partner in free and partner != node and pair not in done:
                pairs.append(pair)
                del free[node], free[partner]
                break
    return sorted(pairs)


class _Judged(NamedTuple):
    """A pair, over all its exchanges."""

    slow: bool
    lower: float
    """Largest share by which it is below other pairs; NaN: not known."""
    compared: bool
    """Whether there are other pairs that it can be compared with."""


class _Pairs:
    """Judges all pairs of all rounds as peers of each other."""

    def __init__(self, nodes: int, measured: Rounds, alpha: float = ALPHA) -> None:
        self.levels = dict[tuple[Pair, str], Level]()
        self.failed = [pair for one in measured for pair, measures in one.items() if not measures]
        self._nodes = nodes
        groups = dict[tuple[str, str, str], list[tuple[Pair, Measure]]]()
        for one in measured:
            for pair, measures in one.items():
                for measure in measures:
                    groups.setdefault((measure.probe, measure.unit, measure.like), []).append((pair, measure))
        tests = sum(map(len, groups.values()))
        for group in groups.values():
            self._judge(group, alpha / max(1, tests))
        self.judged = {pair: self._of(pair) for one in measured for pair, measures in one.items() if measures}

    def _judge(self, group: Sequence[tuple[Pair, Measure]], alpha: float) -> None:
        limit = LIMITS[group[0][1].probe]
        trials = [trials_of(measure.values, measure.others) for _, measure in group]
        least = logarithm(limit.least)
        compared = compare(trials, least, limit.usual, alpha, _LEAST_FAST)
        known = compared.level == compared.level and len(group) > 1
        for index, ((pair, measure), one) in enumerate(zip(group, trials, strict=True)):
            row = Level(
                node="", subject="link", probe=measure.probe, unit=measure.unit,
                trials=len(one.values), peers=len(group) - 1,
            )  # fmt: skip
            self.levels[pair, measure.probe] = row
            if one.level != one.level:
                row.state, row.why = "unsure", f"only {text.count(row.trials, 'trial')}."
                continue
            row.value, row.spread = math.exp(one.level), math.expm1(one.spread)
            if not known:
                row.state = "unsure" if len(group) > 1 else "no peers"
                continue
            row.usual = math.exp(compared.level)
            row.lower = -math.expm1(-float(compared.lower[index]))
            row.sees = -math.expm1(-max(float(compared.needed[index]), least))
            row.state = "alike"
            if compared.lower[index] >= least and not compared.fast:
                sure = bool(compared.beyond[index]) and persists(one, compared.level, least)
                row.state = "slow" if sure else "unsure"
                row.why = "" if sure else f"{text.share(row.lower)} below other pairs, but its trials vary."

    def _of(self, pair: Pair) -> _Judged:
        rows = [self.levels[pair, probe] for probe in LIMITS if (pair, probe) in self.levels]
        lower = max((row.lower for row in rows if row.lower is not None), default=math.nan)
        compared = any(row.state != "no peers" for row in rows)
        return _Judged(any(row.state == "slow" for row in rows), lower, compared)

    def worst_first(self) -> list[Pair]:
        """Return the pairs: failed ones, those without peers, then by how much they are below others."""
        known = sorted(
            self.judged, key=lambda pair: (self.judged[pair].compared, -_or_zero(self.judged[pair].lower))
        )
        return [*dict.fromkeys([*self.failed, *known])]

    def with_node(self, node: int) -> tuple[list[Pair], list[Pair]]:
        """Return the slow or failed pairs of a node, and those that are as fast as other pairs."""
        slow = [pair for pair in self.judged if node in pair and self.judged[pair].slow]
        failed = [pair for pair in dict.fromkeys(self.failed) if node in pair]
        judged = [(pair, one) for pair, one in self.judged.items() if node in pair]
        fast = [pair for pair, one in judged if one.compared and not one.slow]
        return [*slow, *failed], fast

    def slow_pairs(self) -> list[Pair]:
        """Return the slow and failed pairs."""
        return [*(pair for pair, one in self.judged.items() if one.slow), *dict.fromkeys(self.failed)]

    def cleared(self, node: int) -> bool:
        """Return whether a node is fast with some partner."""
        return bool(self.with_node(node)[1])

    def accused(self, node: int) -> bool:
        """Return whether a node is slow with each of at least two partners."""
        slow, fast = self.with_node(node)
        return len(slow) > 1 and not fast

    def undecided(self) -> list[int]:
        """Return the nodes of slow pairs that neither a node nor the link explains."""
        open_pairs = [
            pair
            for pair in self.slow_pairs()
            if not any(self.accused(node) for node in pair) and not all(self.cleared(node) for node in pair)
        ]
        return [node for node in _of_pairs(open_pairs) if not self.cleared(node)]

    def not_compared(self) -> list[int]:
        """Return the nodes all of whose pairs are the only ones of their models."""
        compared = {node for pair, one in self.judged.items() if one.compared for node in pair}
        return [node for node in _of_pairs(self.judged) if node not in compared]

    def good_partners(self) -> list[int]:
        """Return the nodes that are fast with some partner, those in no slow pair first."""
        good = [node for node in range(self._nodes) if self.cleared(node)]
        return sorted(good, key=lambda node: len(self.with_node(node)[0]))


def _or_zero(value: float) -> float:
    return 0.0 if value != value else value


def judge_pairs(names: Sequence[str], measured: Rounds) -> tuple[list[Slow], list[Level], list[str]]:
    """
    Return slow nodes and links, the table of pairs, and sentences on what could not be decided.

    Args:
        names: label of each node.
        measured: what was measured in all rounds.
    """
    pairs = _Pairs(len(names), measured)
    for (pair, _), row in pairs.levels.items():
        row.node = " – ".join(names[node] for node in pair)
    slow, explained = list[Slow](), set[Pair]()
    for node, name in enumerate(names):
        mine = [pair for pair in pairs.with_node(node)[0] if pair in pairs.judged]
        if pairs.accused(node) and mine:
            partners = [names[sum(pair) - node] for pair in mine]
            slow.append(_slow("node", [name], partners, mine, pairs))
            explained |= {*mine}
    for pair in pairs.slow_pairs():
        if pair in explained or pair not in pairs.judged or not all(map(pairs.cleared, pair)):
            continue
        slow.append(_slow("link", [names[node] for node in pair], [], [pair], pairs))
        explained.add(pair)
    unsure = [*_undecided(names, pairs, explained)]
    return sorted(slow, key=lambda one: -one.lower), [*pairs.levels.values()], unsure


def _slow(what: str, nodes: list[str], partners: list[str], mine: Sequence[Pair], pairs: _Pairs) -> Slow:
    """Return a slow node or link, from the pairs that show it."""
    rows = [row for (pair, _), row in pairs.levels.items() if pair in mine and row.state == "slow"]
    worst = max(rows, key=lambda row: row.lower or 0.0)
    assert worst.value is not None and worst.usual is not None and worst.lower is not None
    also = {row.probe: row.lower for row in rows if row.probe != worst.probe and row.lower is not None}
    one = Slow(
        what="link" if what == "link" else "node", nodes=nodes, part="link" if what == "link" else "network",
        probe=worst.probe, lower=worst.lower, value=worst.value, usual=worst.usual, unit=worst.unit,
        peers=worst.peers, also=also,
    )  # fmt: skip
    slower = LIMITS[one.probe].slower.format(text.share(one.lower))
    figures = f"{rate(one.value, one.unit)}, other pairs {rate(one.usual, one.unit)}"
    if what == "link":
        one.why = f"The link of {text.listed(nodes)} {slower} ({figures}). Both nodes are fast with others."
        one.next = "Check cable, port and switch between the two nodes."
    else:
        one.why = f"{nodes[0]} {slower} with each partner: {text.listed(partners)} ({figures})."
        one.next = "Check network card, driver and cable of the node, or take it out of the job."
    return one


def _undecided(names: Sequence[str], pairs: _Pairs, explained: set[Pair]) -> Iterator[str]:
    if len(names) == 2 and pairs.judged:
        yield f"{' and '.join(names)}: of two nodes there is one link, and no other one to compare it with."
        return
    if single := [names[node] for node in pairs.not_compared()]:
        nodes = text.listed(single[:_MOST_NAMES], max(0, len(single) - _MOST_NAMES))
        yield f"{nodes}: no other pair has the same models to compare their links with."
    for pair in pairs.slow_pairs():
        if pair in pairs.failed:
            yield f"{' and '.join(names[node] for node in pair)} could not exchange data."
        elif pair not in explained:
            lower = text.share(pairs.judged[pair].lower)
            ends = " and ".join(names[node] for node in pair)
            slower = f"{ends} exchange data {lower} slower than other pairs"
            yield f"{slower}. The reason may be either node, or their link."
    for (_, probe), row in pairs.levels.items():
        if row.state == "unsure" and row.why:
            yield f"{LIMITS[probe].about}, {row.node}: {row.why}"
