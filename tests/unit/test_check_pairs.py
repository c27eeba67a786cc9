"""Pairs of nodes: which nodes are paired in each round, and what is named."""

from __future__ import annotations

from traceml_ray.signals.check.pairs import first_round


def test_neighbours_are_paired_first() -> None:
    assert first_round(5) == [(0, 1), (2, 3)]
