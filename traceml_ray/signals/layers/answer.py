"""What is asked about layers. The shape of the answer is in `analysis.layer_times`."""

from __future__ import annotations

from traceml_ray.analysis.layer_times import Layers
from traceml_ray.store.query import OfRun


class GetLayers(OfRun[Layers], frozen=True):
    """What was measured of the layers, or only for the request `asked` (its id); `ranks` may be empty."""

    asked: str = ""
