"""All collectors of a training process, by signal. This module and its imports do not import numpy."""

from __future__ import annotations

from collections.abc import Callable

from traceml_ray.signals.check.agent import CheckReport
from traceml_ray.signals.collectives.agent import CollectivesReader
from traceml_ray.signals.collectives.timed import CollectiveCalls
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.experts.agent import RouterCollector
from traceml_ray.signals.goodput.agent import LifeReport
from traceml_ray.signals.layers.agent import LayerSampler
from traceml_ray.signals.logged.agent import MetricLog
from traceml_ray.signals.memory.agent import MemoryCollector, MemoryHistory
from traceml_ray.signals.output.tap import OutputTap
from traceml_ray.signals.sharding.agent import Shards
from traceml_ray.signals.throughput.agent import WorkReport

COLLECTORS: dict[str, Callable[[Rank], Collector]] = {
    "memory": MemoryCollector,
    "memory history": MemoryHistory.of_rank,
    "sharding": Shards.of_rank,
    "throughput": WorkReport.of_rank,
    "layers": LayerSampler.of_rank,
    "output": OutputTap.of_rank,
    "experts": RouterCollector,
    "logged": MetricLog.of_rank,
    "collectives": CollectiveCalls.of_rank,
    "goodput": LifeReport.of_rank,
    "check": CheckReport.of_rank,
    "last collectives": CollectivesReader,
}
"""Collectors by the name under which their failures are counted, in the order in which they run."""
