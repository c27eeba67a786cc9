"""What travels about layers: what a person asks for, and what a rank has measured of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from traceml_ray.codec import FEW, Count, Int64, Name, Part, Value

MAX_LAYERS = 200
"""Layers of one window, those that take longest; what the others take is one row."""
MAX_LAYER_STEPS = 1000
LAYERS_EVENT = "layers_request"
"""The event by which a relay hands on what a person asks for."""
OTHERS = ""
"""Kind of the row that is all other layers together."""

Region = Literal["", "compiled", "graph", "sharded"]
"""
Why nothing inside a layer is measured: torch compiles it, a CUDA graph is replayed, FSDP gathers it as one.
"""


class LayersRequest(Part, frozen=True):
    """For how many steps of which run a person wants to have the layers measured."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYER_STEPS)] = 20
    run: str | None = None
    """Id or name; None: the newest."""

    @classmethod
    def checked(cls, steps: int, run: str | None = None) -> LayersRequest:
        """Return it. Raises ValueError where there cannot be so many steps."""
        if not 1 <= steps <= MAX_LAYER_STEPS:
            raise ValueError(f"steps={steps} must be an integer from 1 to {MAX_LAYER_STEPS}")
        return cls(steps, run)

    def event_data(self, asked: str) -> dict[str, Value]:
        """Return the data of `LAYERS_EVENT`, with the id of the request."""
        return {"steps": self.steps, "run": self.run, "request": asked}

    @classmethod
    def of_event(cls, data: Mapping[str, Value]) -> tuple[LayersRequest, str]:
        """Return what `event_data` was made of. Raises ValueError."""
        steps, run = data.get("steps"), data.get("run")
        if not isinstance(steps, int) or not isinstance(run, str | None):
            raise ValueError(f"no request for layers: {str(data)[:100]}")
        return cls.checked(steps, run), str(data.get("request"))


class LayersCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the command `layers`, see `wire.Command`."""

    id: Name
    run: str | None = None
    ranks: str = "all"
    steps: Count


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
