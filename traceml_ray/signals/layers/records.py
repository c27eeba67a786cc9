"""What a rank has measured of its layers."""

from __future__ import annotations

import zlib
from typing import Annotated, Literal

import msgspec

from traceml_ray.codec import FEW, Count, Int64, Part, ready
from traceml_ray.signals.kind import Form, Kind

MAX_LAYERS = 200
"""Layers of one window, those that take longest; what the others take is one row."""
WINDOWS = 16
"""Of a rank process that are kept."""
OTHERS = ""
"""Kind of the row that is all other layers together."""
_MAX_BYTES = 1 << 20

Region = Literal["", "compiled", "graph", "sharded"]
"""
Why nothing inside a layer is measured: torch compiles it, a CUDA graph is replayed, FSDP gathers it as one.
"""


class LayerSum(Part, frozen=True):
    """
    One layer, summed over the steps of a window that were measured. Times are without those of the layers
    inside it, so that they add up. Bytes are of one step. `None` is "not known", never 0.
    """

    name: str
    """As `named_modules` of the root has it; "": the root itself."""
    kind: str
    """Name of its class; OTHERS: this is all layers that are not listed."""
    region: Region
    calls: Count
    recomputed: Count
    """Calls inside a backward, as those of activation checkpointing; their time is that of the backward."""
    forward_ns: Count
    backward_ns: Count
    squares: float
    """Of forward and backward together, the sum over the steps of ns²: how much steps differ."""
    output_bytes: Count
    """Of what its calls return: an estimate of its activations."""
    parameter_bytes: Count | None
    """Of its own parameters, as far as they are on this rank."""
    gradient_bytes: Count | None


class LayerWindow(Part, frozen=True):
    """What a rank has measured of its layers from one step to another."""

    number: Count
    """Of the rank process, from 0."""
    t_ns: Int64
    first_step: Count
    last_step: Count
    steps: Count
    """How many of these were measured: one in `every`, at the end of the window."""
    every: Count
    clock: Literal["host", "device"]
    accelerated: bool
    """The parameters are on a device: times of the host's clock are those of launching its work."""
    waits: bool
    """Times contain waits for other ranks."""
    cost_ns: Count
    """What measuring has cost the training thread in this window,"""
    spent_ns: Count
    """which was so long."""
    layers: Annotated[list[LayerSum], FEW]
    others: Count = 0
    """How many layers the row of OTHERS is made of."""
    asked: str = ""
    """Id of the request that it was measured for; "": deep mode is on."""


def _packed(layers: list[LayerSum]) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(layers), 1)


def _unpacked(stored: bytes) -> list[LayerSum]:
    try:
        unpacked = zlib.decompressobj().decompress(stored, _MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"a window of layers that cannot be read: {error}") from None
    return msgspec.msgpack.decode(unpacked, type=ready(list[LayerSum]))


LAYERS = Kind(
    "layers",
    LayerWindow,
    "windows of layers",
    table="layer_window",
    exported="layers",
    keep=WINDOWS,
    slot=lambda window: window.number,
    bundle="nothing",
    forms={"layers": Form(_packed, _unpacked)},
)
