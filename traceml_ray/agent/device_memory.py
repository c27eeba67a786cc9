"""
Memory on the CUDA devices of this process: torch's allocator, and what the driver says beside it.

Nothing here makes a context, launches or waits for work, or resets a statistic. The allocator is asked for
what it counts anyway. It has a lock, and torch keeps the GIL while it waits for that, as it does for
`torch.cuda.memory_allocated`: while another thread is in a cudaMalloc, this call waits for it to end.

The peak since the sample before is had without `reset_peak_memory_stats`, which would change what the script
reads. torch keeps one peak, since the start or the script's last reset:

- nothing was allocated since (the sum of all that was ever allocated is the same): what was allocated then;
- the peak has risen: it was reached since, and is the most;
- as much is allocated now as the peak says: that is the most;
- otherwise the most since is below an older peak, or the script has reset it: not known.

A reset that is followed by a higher peak within one interval cannot be told from none; what was reached
before the reset is then not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from traceml_ray.agent import cuda
from traceml_ray.agent.driver_memory import DriverMemory, Reading, host_pids, own_bytes
from traceml_ray.errors import error_text

_NATIVE = "native"
_ALLOCATOR = "memory: torch's allocator"
_CURRENT = {
    "allocated_bytes": "allocated_bytes",
    "reserved_bytes": "reserved_bytes",
    "active_bytes": "active_bytes",
    "inactive_split_bytes": "inactive_split_bytes",
}
OF_TORCH = (*_CURRENT, "peak_bytes", "retries", "ooms")
OF_NVML = ("process_bytes", "device_used_bytes", "device_total_bytes")
"""Fields of `MemorySample` by where they come from."""


@dataclass
class Devices:
    """What this process has devices for; the parts that a test plays."""

    contexts: Callable[[], list[bool]]
    """Returns on which devices there is a context."""
    uuid: Callable[[int], str]


def cuda_devices() -> Devices:
    """Return those of the driver that torch has loaded. Raises OSError."""
    driver = cuda.load_driver()
    return Devices(lambda: cuda.contexts(driver), lambda index: cuda.device_uuid(driver, index))


@dataclass
class DeviceMemory:
    """
    Samples each device on which this process has a context, once torch has initialized CUDA.

    Args:
        driver: asks NVML.
        devices: returns the devices; raises OSError where there is no driver for them.
        torch: returns the module, None while it is not imported.
    """

    driver: DriverMemory = field(default_factory=DriverMemory)
    devices: Callable[[], Devices] = cuda_devices
    torch: Callable[[], Any] = lambda: sys.modules.get("torch")
    host_pids: bool = field(default_factory=host_pids)
    missing: dict[str, str] = field(default_factory=dict)
    """Why something is not known, by name; of the newest sample."""

    def __post_init__(self) -> None:
        self._devices: Devices | None = None
        self._uuids: dict[int, str] = {}
        self._peaks: dict[int, Peak] = {}

    def sample(self) -> dict[int, dict[str, int]]:
        """Return what is known of each device, by its index as torch counts; empty without one."""
        torch = self.torch()
        if torch is None or not torch.cuda.is_initialized():
            return {}
        self.missing = {}
        if torch.version.hip is not None:
            self.missing["memory: device"] = "only of CUDA devices, not with ROCm"
            return {}
        if self._devices is None:
            self._devices = self.devices()
        used = [index for index, active in enumerate(self._devices.contexts()) if active]
        by_device = {index: self._of_torch(torch, index) for index in used}
        for index in used:
            if index not in self._uuids:
                self._uuids[index] = self._devices.uuid(index)
        known = self.driver.ask([self._uuids[index] for index in used]) if used else {}
        for index, values in by_device.items():
            self._add_driver(values, known.get(self._uuids[index], Reading()))
        return by_device

    def _of_torch(self, torch: Any, index: int) -> dict[str, int]:
        """Return what torch's allocator says of a device."""
        backend = torch.cuda.get_allocator_backend()
        if backend != _NATIVE:  # the others ask the driver, or raise
            self.missing[_ALLOCATOR] = f"its backend is {backend}"
            return {}
        try:
            stats = torch.cuda.memory_stats_as_nested_dict(index)
            values = {name: stats[key]["all"]["current"] for name, key in _CURRENT.items()}
            values |= {"retries": stats["num_alloc_retries"], "ooms": stats["num_ooms"]}
            peak = self._peaks.setdefault(index, Peak()).since(stats["allocated_bytes"]["all"])
        except Exception as error:  # a device that the allocator does not know, or a torch that is another
            self.missing[_ALLOCATOR] = error_text(error)[:200]
            return {}
        return values | ({} if peak is None else {"peak_bytes": peak})

    def _add_driver(self, values: dict[str, int], known: Reading) -> None:
        why = dict(known.why)
        if known.used is not None and known.total is not None:
            values |= {"device_used_bytes": known.used, "device_total_bytes": known.total}
        if known.processes is not None:
            mine, lack = own_bytes(known.processes, values.get("reserved_bytes", 0), self.host_pids)
            if mine is not None:
                values["process_bytes"] = mine
            else:
                why["process_bytes"] = lack
        self.missing |= {f"memory: {name}": text[:200] for name, text in why.items()}


@dataclass
class Peak:
    """What torch said of the bytes that are allocated when it was asked last; -1 before."""

    current: int = -1
    peak: int = -1
    turnover: int = -1

    def since(self, stat: dict[str, int]) -> int | None:
        """Return the most that was allocated since, see the top of this module."""
        before = Peak(self.current, self.peak, self.turnover)
        self.current, self.peak, self.turnover = stat["current"], stat["peak"], stat["allocated"]
        if self.turnover == before.turnover:
            return before.current
        if self.peak > before.peak or (self.peak == before.peak and self.current == self.peak):
            return self.peak
        return None
