"""What is asked about how a model is divided. The shape of the answer is in `signals.sharding.judge`."""

from __future__ import annotations

from traceml_ray.signals.sharding.judge import ShardingInfo
from traceml_ray.store.query import OfRun
from traceml_ray.wire.codec import Count

MOST_RANKS = 64
"""Ranks of each model that a page asks for."""


class GetSharding(OfRun[ShardingInfo | None], frozen=True):
    """
    How FSDP2 divides the model of the run, with those `most` ranks that hold most (None: all); None: it does
    not.
    """

    most: Count | None = None
