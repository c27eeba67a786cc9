"""What is asked about all that was sampled of nodes. The shape of the answer is in `store.summary_shape`."""

from __future__ import annotations

from traceml_ray.store.query import OfRun
from traceml_ray.store.summary_shape import System


class GetSystem(OfRun[System], frozen=True):
    """Median and peak of each quantity of each node and its devices, over the whole session."""
