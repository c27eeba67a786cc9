"""What a rank sends of its memory: a sample once a round, and now and then where its values come from."""

from __future__ import annotations

import time

from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.memory.samplers import MemorySampler

_SOURCES_EVERY = 30
"""In so many rounds it is sent once where values come from, if that does not change."""


class MemoryCollector(Collector):
    """
    Of one process.

    Args:
        rank: has the step that has begun, and takes the sources of values and why some are not known.
        sampler: takes the samples.
    """

    def __init__(self, rank: Rank, sampler: MemorySampler | None = None) -> None:
        self._rank, self._sampler = rank, sampler or MemorySampler()
        self._rounds = 0
        self._reasons: dict[str, str] = {}

    def collect(self, final: bool) -> list[MemorySample]:
        """Return a sample of each device in use, or that of a process without."""
        sampler, before = self._sampler, dict(self._sampler.sources)
        samples = sampler.sample(time.time_ns(), self._rank.recorder.open_stage().step)
        if sampler.sources != before or self._rounds % _SOURCES_EVERY == 0:
            self._rank.memory_from = dict(sampler.sources)
        self._rounds += 1
        for name in self._reasons.keys() - sampler.missing.keys():  # it could be read again
            self._rank.missing.pop(name, None)
        self._reasons = sampler.missing
        self._rank.missing.update(sampler.missing)
        return samples
