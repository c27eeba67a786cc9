"""What is asked about layers. The shape of the answer is in `signals.layers.judge`."""

from __future__ import annotations

from traceml_ray.signals.layers.judge import Layers
from traceml_ray.store.query import OfRun


class GetLayers(OfRun[Layers], frozen=True):
    """What was measured of the layers, or only for the request `asked` (its id); `ranks` may be empty."""

    asked: str = ""
