"""Which rows a rank × time heatmap has: a rank each, or of many each node, as its worst rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.spread import MISSING, excess
from traceml_ray.analysis.window import UInt8

HEIGHT = 278
"""px of all rows, where they are many."""
_MOST_ROWS = 128
"""Of ranks: with more, a row of one rank is too thin to be seen."""
_WORST = 40
"""Ranks of more that have a row of their own, the costliest first."""
_MOST_GROUPS, _MOST_NAMED = 200, 8


class Row(NamedTuple):
    """What is drawn as one row."""

    lines: Sequence[int]
    """Of the data's `z`: one, or several, of which the worst is drawn."""
    name: str
    """In full: "rank 5 (node-1)", "worst of node-1"."""
    node: str
    rank: int | None = None
    """Of a row that is one rank."""
    first: bool = False
    """Whether it is the first of its node."""
    named: bool = False
    """Whether the verdict names it."""
    height: int = 1
    href: str | None = None
    """Where a click leads, on a face that has links."""
    toggle: str | None = None
    """Link that opens or closes its node."""


def ordered(columns: Mapping[str, Any], absent: Mapping[int, str]) -> dict[str, Any]:
    """
    Return the columns of a run (`query.Columns`) with their lines in order of nodes and ranks, and one for
    each rank that is `absent` (by rank, where it belongs), unless a line is a node.
    """
    ranks, nodes = [*columns["ranks"]], [*columns["nodes"]]
    if columns["by"] != "node":
        ranks += absent
        nodes += absent.values()
    order = sorted(range(len(nodes)), key=lambda at: (text.natural(nodes[at]), ranks[at]))
    unknown = np.full((len(ranks) - len(columns["ranks"]), len(columns["first"])), MISSING, np.uint8)
    return {
        **columns,
        "ranks": [ranks[at] for at in order],
        "nodes": [nodes[at] for at in order],
        "z": np.concatenate([columns["z"], unknown])[order],
    }


def suspects(heat: Mapping[str, Any], verdict: Mapping[str, Any]) -> set[int]:
    """Return the lines of `heat` that a verdict names."""
    kind = "nodes" if heat["by"] == "node" else "ranks"
    named = () if verdict.get("label") == "healthy" else (verdict.get(kind) or ())[:_MOST_NAMED]
    return {at for at, line in enumerate(heat[kind]) if line in named}


def by_node(
    heat: Mapping[str, Any], named: set[int], opened: Collection[str] = (), shut: Collection[str] = ()
) -> list[Row]:
    """
    Return the rows by node. A node has a row for each rank where these are few, where one of them is `named`,
    or a person has `opened` it, unless it was `shut`.
    """
    nodes, count = heat["nodes"], len(heat["nodes"])
    few = count <= _MOST_ROWS
    starts = [at for at in range(count) if at == 0 or nodes[at] != nodes[at - 1]]
    groups = starts if few else starts[:: -(-len(starts) // _MOST_GROUPS)]
    spans = [range(*both) for both in pairwise([*groups, count])]
    chosen = [
        span
        for span in spans
        if nodes[span[0]] in opened or ((few or named & {*span}) and nodes[span[0]] not in shut)
    ]
    many = max(1, sum(map(len, chosen)))
    high = 1 if few else max(1, min(round(12 * len(spans) / HEIGHT), round(0.7 * len(spans) / many)))
    found = []
    for span in spans:
        if span in chosen:
            found += [_single(heat, at)._replace(first=at == span[0], height=high) for at in span]
        else:
            node = nodes[span[0]]
            found.append(Row(span, f"worst of {node}", node, first=True))
    return _marked(found, named)


def by_cost(heat: Mapping[str, Any], named: set[int]) -> list[Row]:
    """Return the rows by what they cost, the others of many as one."""
    order = np.argsort(-np.nan_to_num(excess(heat["z"]), nan=-1.0), kind="stable").tolist()
    if len(order) <= _MOST_ROWS:
        return _marked([_single(heat, at)._replace(first=True) for at in order], named)
    found = [_single(heat, at)._replace(first=True) for at in order[:_WORST]]
    rest = order[_WORST:]
    of = "node" if heat["by"] == "node" else "rank"
    others = Row(sorted(rest), f"worst of {text.count(len(rest), f'other {of}')}", "others", first=True)
    return _marked([*found, others], named)


def worst(heat: Mapping[str, Any], rows: Sequence[Row]) -> UInt8:
    """Return the levels of each row, those of its worst line: (rows, C)."""
    z = heat["z"] + np.uint8(1)  # what is missing is 255, and now 0: less than any other
    levels: UInt8 = np.array([z[np.asarray(row.lines)].max(axis=0) for row in rows]) - np.uint8(1)
    return levels


def _single(heat: Mapping[str, Any], at: int) -> Row:
    rank, node = heat["ranks"][at], heat["nodes"][at]
    return Row((at,), node, node) if heat["by"] == "node" else Row((at,), f"rank {rank} ({node})", node, rank)


def _marked(rows: Sequence[Row], named: set[int]) -> list[Row]:
    return [row._replace(named=len(row.lines) == 1 and row.lines[0] in named) for row in rows]
