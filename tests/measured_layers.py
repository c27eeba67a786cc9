"""Windows of layers, in the form that a rank sends."""

from __future__ import annotations

from typing import Any

from played import Played

from traceml_ray.signals.layers.judge import REST
from traceml_ray.signals.layers.records import OTHERS, LayerSum, LayerWindow

MS = 1_000_000
NAMES = {
    "": 0.5,
    "blocks.0": 1.0,
    "blocks.0.qkv": 2.0,
    "blocks.0.mlp": 4.0,
    "blocks.1": 1.0,
    "blocks.1.qkv": 2.0,
}
NAMES |= {"blocks.1.mlp": 4.0, "head": 3.0}
LATE, LAYER = 5, "blocks.1.mlp"


def window(
    times: dict[str, tuple[float, float]], steps: int = 40, noise: float = 0.05, **more: Any
) -> LayerWindow:
    """Return a window of layers that take the given ms per step in forward and backward."""
    layers = []
    for name, (forward, backward) in times.items():
        mean = forward + backward
        squares = steps * (mean**2 + (noise * mean) ** 2) * 1e12
        kind = OTHERS if name == REST else "Linear"
        layer_name = name if name != REST else ""
        ns = [round(steps * ms * MS) for ms in (forward, backward)]
        layers.append(LayerSum(layer_name, kind, "", steps, 0, *ns, squares, 1000, 400, None))
    usual: dict[str, Any] = {
        "number": 0, "t_ns": 0, "first_step": 8, "last_step": 90, "every": 2, "clock": "host",
        "accelerated": False, "waits": False, "cost_ns": 2 * MS, "spent_ns": 100 * MS,
    }  # fmt: skip
    return LayerWindow(steps=steps, layers=layers, **{**usual, **more})


def measured(played: Played, n: int = 1, **more: Any) -> None:
    """Let all ranks send `n` windows. Rank LATE takes 12 ms longer in LAYER."""
    for number in range(n):
        for node, relay in enumerate(played.relays):
            batches = []
            for rank in played.ranks:
                if rank.identity.node_rank == node:
                    late = {LAYER: 12.0} if rank.identity.global_rank == LATE else {}
                    times = {name: (ms + late.get(name, 0), 2 * ms) for name, ms in NAMES.items()}
                    batches.append(rank.batch(0, layers=[window(times, number=number, **more)]))
            played.aggregator.ingest(relay.message(*batches))
    assert played.aggregator.commit()
