"""A fake of `torch.cuda`'s allocator and the driver's contexts: what is allocated, and who may query it."""

from __future__ import annotations

import types
from typing import Any

from traceml_ray.signals.memory.samplers import Devices

GIB = 1 << 30


class FakeAllocator:
    """The caching allocator of one device. Its statistics have torch's names."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.inactive = self.peak = self.turnover = 0
        self.retries = self.ooms = 0

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.turnover += size
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.allocated)

    def free(self, size: int) -> None:
        self.allocated -= size

    def reset_peak(self) -> None:
        """Reset the peaks, like a script that measures its own peaks."""
        self.peak = self.allocated

    def stats(self) -> dict[str, Any]:
        def stat(current: int, **more: int) -> dict[str, dict[str, int]]:
            return {"all": {"current": current, "peak": 0, "allocated": 0, "freed": 0, **more}}

        return {
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
            "allocated_bytes": stat(self.allocated, peak=self.peak, allocated=self.turnover),
            "reserved_bytes": stat(self.reserved),
            "active_bytes": stat(self.allocated),
            "inactive_split_bytes": stat(self.inactive),
        }


class FakeCuda:
    """
    The parts of torch and of the driver that `DeviceMemory` uses, on `count` devices.

    A call that is missing here raises. So does a call for a device without a context, because torch would
    create one.
    """

    def __init__(self, count: int = 1) -> None:
        self.allocators = [FakeAllocator() for _ in range(count)]
        self.active = [True] * count
        self.initialized = True
        self.backend = "native"
        self.version = types.SimpleNamespace(hip=None)

    @property
    def cuda(self) -> FakeCuda:
        return self

    def is_initialized(self) -> bool:
        return self.initialized

    def get_allocator_backend(self) -> str:
        assert self.initialized
        return self.backend

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        assert self.initialized and self.active[index], "there is no context"
        assert self.backend == "native", "this backend asks the driver"
        return self.allocators[index].stats()

    def devices(self) -> Devices:
        assert self.initialized, "this loads the driver"
        return Devices(lambda: self.active, lambda index: f"uuid-{index}")
