"""Samples the memory of this process and of its devices, in the agent's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from traceml_ray.agent.device_memory import OF_NVML, OF_TORCH, DeviceMemory
from traceml_ray.agent.host_memory import HostLimit, HostMemory
from traceml_ray.errors import error_text
from traceml_ray.signals.memory.records import MemorySample

USS_S = 30.0
"""Between two counts of what the process shares with no other, and between two looks for limits."""
_USS_SHARE = 1e-3
"""Of the time at most: a large process is counted less often."""
_T = TypeVar("_T")


class MemorySampler:
    """
    Takes `MemorySample`s; what cannot be read is None, with the reason in `missing`.

    Args:
        devices: samples the devices.
        root: where `proc` and `sys` are.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        devices: DeviceMemory | None = None,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sources: dict[str, str] = {}
        """Where each field that is known comes from, see `wire.RankBatch.memory_from`."""
        self.missing: dict[str, str] = {}
        self._devices = devices or DeviceMemory()
        self._host = HostMemory(root)
        self._clock = clock
        self._limit: HostLimit | None = None
        self._limit_due = self._uss_due = -USS_S

    def sample(self, t_ns: int, step: int | None) -> list[MemorySample]:
        """Return one sample for each device in use, or the one of a process without; takes some 50 µs."""
        self.missing = {}
        host = self._sample_host()
        by_device = self._try("device", self._devices.sample) or {}
        self.missing |= self._devices.missing
        for values in by_device.values():
            self.sources |= {name: "torch" for name in OF_TORCH if name in values}
            self.sources |= {name: "nvml" for name in OF_NVML if name in values}
        if not by_device:
            return [MemorySample(t_ns, step, None, **host)]
        return [
            MemorySample(t_ns, step, device, **values, **host) for device, values in sorted(by_device.items())
        ]

    def _sample_host(self) -> dict[str, int]:
        """Return what is known of the process; of the count that is taken now and then, when it is."""
        now, values = self._clock(), {}
        values["rss_bytes"] = self._try("rss_bytes", self._host.rss)
        if now >= self._uss_due:
            values["uss_bytes"] = self._try("uss_bytes", self._host.uss)
            self._uss_due = self._clock() + max(USS_S, (self._clock() - now) / _USS_SHARE)
        if now >= self._limit_due:
            self._limit, self._limit_due = self._try("limit_bytes", self._host.limit), now + USS_S
        if (limit := self._limit) is not None:
            values["limit_bytes"] = limit.total
            values["limit_used_bytes"] = self._try("limit_used_bytes", lambda: self._host.used(limit))
        known = {name: value for name, value in values.items() if value is not None}
        source = "kernel" if limit is None or limit.group is None else "cgroup"
        self.sources |= {name: source if name.startswith("limit") else "kernel" for name in known}
        return known

    def _try(self, what: str, read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except Exception as error:  # what is not to be had is null, which `missing` explains
            self.missing[f"memory: {what}"] = error_text(error)[:200]
            return None
