"""What travels about layers: what a person asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from traceml_ray.codec import Count, Name, Part, Value

MAX_LAYER_STEPS = 1000
LAYERS_EVENT = "layers_request"
"""The event by which a relay hands on what a person asks for."""


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
