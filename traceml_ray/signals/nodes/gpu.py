"""What NVML is asked of a device, and what it means that it has no answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NOT_SUPPORTED = "not supported by the device"
_WITHOUT = {
    "NVMLError_NotSupported": NOT_SUPPORTED,
    "NVMLError_NoPermission": "no permission",
    "NVMLError_FunctionNotFound": "unknown to this driver",
}
"""Exceptions that are an answer; NVML's are made at run time, so they go by name."""
MIG = "values of MIG slices: NVML has power, clocks and temperature of the whole device only"
_UNSEEN = "its processes are those of another pid namespace (a container without the host's pids)"
_BUSY_PCT = 50
"""A device that works as much has a process."""

# nvmlClocksEventReasons*, once nvmlClocksThrottleReasons*: the numbers are the same in all versions.
_THROTTLE = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
_TEMPERATURE_GPU = 0
_CLOCK_SM = 1
# NVML_FI_DEV_*: (field, scope), what one unit of it is; links are summed over by the scope of all ones.
_ALL_LINKS = 0xFFFFFFFF
_FIELDS = {
    "ecc_uncorrected": ((4, 0), 1),
    "pcie_rx_bytes": ((198, 0), 1),
    "pcie_tx_bytes": ((197, 0), 1),
    "nvlink_rx_bytes": ((139, _ALL_LINKS), 1024),
    "nvlink_tx_bytes": ((138, _ALL_LINKS), 1024),
}
_VALUES = "dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"
"""The field of the union by NVML_VALUE_TYPE_*: the others have bytes that nothing was written to."""


class NotMeasuredError(Exception):
    """There is no answer, for the reason that is its text."""


def lack(error: Exception, nvml: Any) -> str | None:
    """Return what NVML's answer means where `error` is one: it cannot be had here, and that is no failure."""
    if isinstance(error, AttributeError) and error.obj is nvml:
        return "unknown to this version of nvidia-ml-py"
    return str(error) if isinstance(error, NotMeasuredError) else _WITHOUT.get(type(error).__name__)


def counters(nvml: Any, handle: Any) -> dict[str, int | None]:
    """Return the counters of `_FIELDS`: no call that measures over an interval of its own."""
    values = nvml.nvmlDeviceGetFieldValues(handle, [field for field, _ in _FIELDS.values()])
    return {
        name: int(getattr(value.value, _VALUES[value.valueType])) * unit if value.nvmlReturn == 0 else None
        for (name, (_, unit)), value in zip(_FIELDS.items(), values, strict=True)
    }


def processes(nvml: Any, handle: Any, util_pct: float | None, seen: Callable[[int], bool]) -> list[Any]:
    """
    Return the processes that compute on a device; `seen` tells whether a pid is that of a process here.

    Raises:
        NotMeasuredError: pids that mean something elsewhere, or none although the device works.
    """
    processes_here: list[Any] = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    if (
        not any(seen(process.pid) for process in processes_here)
        if processes_here
        else (util_pct or 0) >= _BUSY_PCT
    ):
        raise NotMeasuredError(_UNSEEN)
    return processes_here


def mig(nvml: Any, handle: Any) -> bool:
    """Return whether the device is divided into MIG slices."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except Exception as error:
        if lack(error, nvml) is None:
            raise
        return False


def _memory(nvml: Any, handle: Any) -> dict[str, int]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"mem_used_bytes": memory.used, "mem_total_bytes": memory.total}


def _throttle(nvml: Any, handle: Any) -> dict[str, list[str]]:
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except Exception as error:
        if lack(error, nvml) is None:
            raise
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    bits = [1 << bit for bit in range(64) if reasons >> bit & 1]
    return {"throttle": [_THROTTLE.get(bit, f"{bit:#x}") for bit in bits]}


_Questions = dict[str, Callable[[Any, Any], dict[str, Any]]]
QUESTIONS: _Questions = {
    "utilization": lambda nvml, handle: {"util_pct": float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)},
    "memory": _memory,
    "power": lambda nvml, handle: {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3},
    "temperature": lambda nvml, handle: {
        "temperature_c": float(nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU))
    },
    "clock": lambda nvml, handle: {"sm_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM))},
    "throttle": _throttle,
}
"""Questions to NVML in every sample, by their name in errors: fields of a `GpuSample`."""
LIMITS: _Questions = {
    "power limit": lambda nvml, handle: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3},
    "clock limit": lambda nvml, handle: {
        "sm_max_mhz": float(nvml.nvmlDeviceGetMaxClockInfo(handle, _CLOCK_SM))
    },
}
