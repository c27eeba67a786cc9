"""Layers of ranks side by side: which layer is named, and what noise, machines and waits do not name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from measured_layers import NAMES, window

from traceml_ray.analysis.thresholds import LayerLimits
from traceml_ray.signals.layers.judge import REST, Layers, RankLayers, layers_of, of_windows


def ranks(
    world: int = 8, change: Callable[[int, str, float], float] = lambda *given: given[2], **more: Any
) -> list[RankLayers]:
    made = []
    for rank in range(world):
        rng = np.random.default_rng(rank)
        times = {}
        for name, ms in NAMES.items():
            jitter = 1 + 0.02 * rng.standard_normal()
            times[name] = jitter * change(rank, name, ms), 2 * jitter * ms
        made.append(of_windows(rank, f"node-{rank // 4}", [window(times, **more)]))
    return made


def found(which: list[RankLayers]) -> Layers:
    return layers_of(which, LayerLimits())


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_layer_that_takes_longer_on_one_rank_is_named(world: int) -> None:
    late = world - 1
    shown = found(ranks(world, lambda rank, name, ms: ms + 12 * (rank == late and name == "blocks.1.mlp")))
    (one,) = shown.findings
    assert (one.rank, one.layer, one.phase) == (late, "blocks.1.mlp", "forward")
    assert one.excess_ms == pytest.approx(12, abs=0.8) and one.peers_ms == pytest.approx(4, rel=0.1)
    assert f"takes {one.excess_ms:.3g}" in one.why and f"on rank {late} (node-{late // 4})" in one.why


def test_container_is_named_where_a_little_of_all_in_it_takes_longer() -> None:
    parts = {f"blocks.1.parts.{n}": 0.2 for n in range(12)}
    made = []
    for rank in range(8):
        more = 0.3 * (rank == 5)
        times = {name: (ms, ms) for name, ms in NAMES.items()}
        times |= {name: (ms, ms + more) for name, ms in {"blocks.1.parts": 0.0, **parts}.items()}
        made.append(of_windows(rank, None, [window(times)]))
    (one,) = found(made).findings
    assert (one.rank, one.layer, one.phase) == (5, "blocks.1.parts", "backward")


def test_rank_that_is_slower_in_all_layers_is_no_layer() -> None:
    made = ranks(8)
    for name in ("forward", "backward"):
        made[3].columns[name][:] *= 1.4
    (one,) = found(made).findings
    assert (one.rank, one.layer) == (3, None) and "or its machine" in one.why


def test_noise_names_nobody() -> None:
    assert found(ranks(8)).findings == []
    wild = found(ranks(4, lambda rank, name, ms: ms + (rank == 2 and name == "head") * 2, noise=3.0))
    assert wild.findings == []
    few = found(ranks(4, lambda rank, name, ms: ms + (rank == 2 and name == "head") * 9, steps=3))
    assert few.findings == []


def test_waits_inside_layers_name_nobody_and_say_so() -> None:
    shown = found(ranks(4, lambda rank, name, ms: ms + 9 * (rank == 2 and name == "head"), waits=True))
    assert shown.findings == [] and any("no rank is named" in limit for limit in shown.limits)


def test_totals_have_what_is_inside() -> None:
    shown = found(ranks(1))
    by_name = {one.name: one for one in shown.layers}
    inside = sum(by_name[name].forward_ms + by_name[name].backward_ms for name in NAMES if "blocks.0" in name)
    assert by_name["blocks.0"].total_ms == pytest.approx(inside)
    assert by_name[""].share == pytest.approx(1) and by_name[""].total_ms == pytest.approx(shown.model_ms)
    assert by_name["blocks.0.qkv"].parent == [*by_name].index("blocks.0")
    assert by_name["head"].parent == 0 and by_name["head"].worst_rank is None
    assert by_name["head"].gradient_bytes is None and shown.cost_pct == 2.0


def test_windows_are_added_up_and_layers_not_listed_are_one() -> None:
    first = window({"": (1, 1), "a": (2, 2), REST: (3, 3)}, steps=10, others=7)
    second = window({"": (1, 1), "b": (4, 4), REST: (5, 5)}, steps=30, others=7)
    one = of_windows(0, None, [first, second])
    shown = found([one])
    by_name = {layer.name: layer for layer in shown.layers}
    assert by_name["a"].forward_ms == pytest.approx(2) and by_name["b"].forward_ms == pytest.approx(4)
    assert by_name[REST].forward_ms == pytest.approx(4.5) and by_name[REST].parent is None
    assert any("7 layers" in limit for limit in shown.limits) and shown.steps == 40


def test_ranks_with_other_layers_are_compared_where_both_have_them() -> None:
    one = of_windows(0, None, [window({"": (1, 1), "a": (2, 2)})])
    other = of_windows(1, None, [window({"": (1, 1), "b": (2, 2)})])
    shown = found([one, other])
    assert [layer.name for layer in shown.layers] == ["", "a", "b"]
    assert shown.per_rank_ms[0][2] is None and shown.findings == []
    assert found([]) == Layers()
