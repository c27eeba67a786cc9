"""
Plans and judges the rounds in which pairs of nodes exchange data, as DLRover's network check does.

In the first round neighbours are paired. In the second one the nodes of slow pairs are paired with nodes of
fast pairs. A node that is slow with both partners is slow; if both nodes of a slow pair are fast with others,
their link is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from traceml_ray.signals.check.judge import Level, Slow
from traceml_ray.signals.check.records import Measure

Pair = tuple[int, int]
"""Numbers (0 … n−1) of two nodes, the smaller one first."""
OPERATIONS = "all_reduce", "all_gather"
"""Probes of a pair. `Measure.values` are bytes per second and trial, algorithm bandwidth."""


def first_round(nodes: int) -> list[Pair]:
    """Return the pairs of the first round. With an odd number of nodes the last one waits for the second."""
    return [(node, node + 1) for node in range(0, nodes - 1, 2)]


def next_round(nodes: int, measured: Sequence[Mapping[Pair, Sequence[Measure]]]) -> list[Pair]:
    """
    Return the pairs of the next round, all of which may run at the same time; empty: it is decided.

    Args:
        nodes: number of nodes.
        measured: what each pair of each round so far measured. A pair that failed has no measures.
    """
    raise NotImplementedError


def judge_pairs(
    names: Sequence[str], measured: Sequence[Mapping[Pair, Sequence[Measure]]]
) -> tuple[list[Slow], list[Level], list[str]]:
    """
    Return slow nodes and links, the table of pairs, and sentences on what could not be decided.

    Args:
        names: label of each node.
        measured: as in `next_round`.
    """
    raise NotImplementedError
