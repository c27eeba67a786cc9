"""What a rank has measured of its layers."""

from __future__ import annotations

import zlib
from typing import Annotated, Literal

import msgspec

from traceml_ray.signals.kind import Form, Kind
from traceml_ray.wire.codec import FEW, Count, Int64, Part, ready

MAX_LAYERS = 200
"""Largest number of layers in a window: those that take longest. The others are summed in one row."""
WINDOWS = 16
"""Number of windows kept per rank process."""
OTHERS = ""
"""Kind of the row that sums all other layers."""
_MAX_BYTES = 1 << 20

Region = Literal["", "compiled", "graph", "sharded"]
"""
Why nothing inside a layer is measured: torch compiles it, a CUDA graph replays it, or FSDP gathers it as a
whole.
"""


class LayerSum(Part, frozen=True):
    """
    One layer, summed over the measured steps of a window.

    Times exclude the layers inside it, so that they add up. Bytes are of one step. `None` is "not known",
    never 0.
    """

    name: str
    """Name in `named_modules` of the root; "": the root itself."""
    kind: str
    """Name of its class. OTHERS: the sum of all layers that are not listed."""
    region: Region
    calls: Count
    recomputed: Count
    """Calls inside a backward, as in activation checkpointing. Their time counts as backward."""
    forward_ns: Count
    backward_ns: Count
    squares: float
    """
    Sum over the steps of the squared time (ns²) of forward and backward together. It gives the variance
    between steps.
    """
    output_bytes: Count
    """Size of its outputs, in bytes: an estimate of its activations."""
    parameter_bytes: Count | None
    """Size of its own parameters on this rank, in bytes."""
    gradient_bytes: Count | None


class LayerWindow(Part, frozen=True):
    """What a rank has measured of its layers over a range of steps."""

    number: Count
    """Number of the window in its rank process, from 0."""
    t_ns: Int64
    first_step: Count
    last_step: Count
    steps: Count
    """Number of measured steps: one in `every`, at the end of the window."""
    every: Count
    clock: Literal["host", "device"]
    accelerated: bool
    """
    Whether the parameters are on a device. Then times of the host's clock are the times to
    launch the work.
    """
    waits: bool
    """Whether times contain waits for other ranks."""
    cost_ns: Count
    """Time that measuring cost the training thread in this window, in ns."""
    spent_ns: Count
    """Length of the window, in ns."""
    layers: Annotated[list[LayerSum], FEW]
    others: Count = 0
    """Number of layers summed in the row OTHERS."""
    asked: str = ""
    """Id of the request for this measurement. "": deep mode is on."""


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
