"""Samples a machine: processor, memory, disk, network, and its GPUs through NVML."""

from __future__ import annotations

import errno
import importlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from traceml_ray.signals.nodes.records import GpuProcess, GpuSample, NodeSample, meaning
from traceml_ray.wire.messages import NOT_MEASURED, Event

NOT_SUPPORTED = "not supported by the device"
_WITHOUT = {
    "NVMLError_NotSupported": NOT_SUPPORTED,
    "NVMLError_NoPermission": "no permission",
    "NVMLError_FunctionNotFound": "unknown to this driver",
}
"""
Exceptions that mean "not available". NVML makes its exceptions at run time, so they are
identified by name.
"""
MIG = "values of MIG slices: NVML has power, clocks and temperature of the whole device only"
_UNSEEN = "its processes are in another pid namespace (a container without the host's pids)"
_BUSY_PCT = 50
"""A device with at least this utilization must have a process, in %."""

# nvmlClocksEventReasons*, formerly nvmlClocksThrottleReasons*: the numbers are the same in all versions.
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
# NVML_FI_DEV_*: (field, scope), size of one unit; the scope of all ones sums over the links.
_ALL_LINKS = 0xFFFFFFFF
_FIELDS = {
    "ecc_uncorrected": ((4, 0), 1),
    "pcie_rx_bytes": ((198, 0), 1),
    "pcie_tx_bytes": ((197, 0), 1),
    "nvlink_rx_bytes": ((139, _ALL_LINKS), 1024),
    "nvlink_tx_bytes": ((138, _ALL_LINKS), 1024),
}
_VALUES = "dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"
"""Field of the union for each NVML_VALUE_TYPE_*. The other fields contain bytes that were never written."""


class NotMeasuredError(Exception):
    """The value is not measured. The message is the reason."""


def lack(error: Exception, nvml: Any) -> str | None:
    """
    Return the reason if `error` means that NVML cannot provide a value here, which is no failure. Otherwise
    None.
    """
    if isinstance(error, AttributeError) and error.obj is nvml:
        return "unknown to this version of nvidia-ml-py"
    return str(error) if isinstance(error, NotMeasuredError) else _WITHOUT.get(type(error).__name__)


def counters(nvml: Any, handle: Any) -> dict[str, int | None]:
    """Return the counters of `_FIELDS`. No call measures over an interval of its own."""
    values = nvml.nvmlDeviceGetFieldValues(handle, [field for field, _ in _FIELDS.values()])
    return {
        name: int(getattr(value.value, _VALUES[value.valueType])) * unit if value.nvmlReturn == 0 else None
        for (name, (_, unit)), value in zip(_FIELDS.items(), values, strict=True)
    }


def processes(nvml: Any, handle: Any, util_pct: float | None, seen: Callable[[int], bool]) -> list[Any]:
    """
    Return the processes that compute on a device. `seen` returns whether a pid belongs to a process here.

    Raises:
        NotMeasuredError: the pids belong to another pid namespace, or there are none although the device
            works.
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
"""Questions to NVML in every sample, by their name in errors. The names are fields of a `GpuSample`."""
LIMITS: _Questions = {
    "power limit": lambda nvml, handle: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3},
    "clock limit": lambda nvml, handle: {
        "sm_max_mhz": float(nvml.nvmlDeviceGetMaxClockInfo(handle, _CLOCK_SM))
    },
}


_T = TypeVar("_T")
_NO_GPUS = {"NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"}
"""
A machine without NVIDIA GPUs is no error. NVML makes its exceptions at run time, so they are identified by
name.
"""
_SLOW = 5
"""Calls that may be slow in the driver are made once in this many samples."""
_RETRY = 60
"""Number of samples after which a failed question is asked again."""
_NOT_THERE = {errno.ENOENT, errno.EOPNOTSUPP}
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_PARENTS = 32
_MAX_PROCESSES = 64
_XID = 8
"""nvmlEventTypeXidCriticalError"""
_ASKED_LATER = "util_pct", "mem_used_bytes", "mem_total_bytes"
_MAX_XIDS = 64
"""Largest number of errors read in one sample. The rest waits in the driver."""


class NodeSampler:
    """
    Samples this node.

    A value that cannot be read is None. A failure is counted in `errors`, each name once, and retried a
    minute later. A file or feature that the kernel does not have is no error. Values that NVML does not
    support are in `errors`, too, as NOT_MEASURED, with the number of devices.

    Args:
        nvml: the NVML binding. None: `pynvml` is imported. It is tried once, so a machine without a driver
            costs nothing afterwards.
        root: the folder that contains `proc` and `sys`.
    """

    def __init__(self, nvml: Any = None, root: Path = Path("/")) -> None:
        self.errors: Counter[str] = Counter()
        self._devices: list[tuple[int, str | None, Any]] | None = None
        self._proc = root / "proc"
        self._interfaces = root / "sys/class/net"
        self._samples = 0
        self._failed: dict[tuple[str, int], int] = {}
        """(name, device) → sample number of its last failure."""
        self._without: dict[str, set[int]] = {}
        """Name of a value → devices that do not support it."""
        self._limits: dict[int, dict[str, float]] = {}
        """Device → last answers to `LIMITS`."""
        self._processes: dict[int, GpuProcess] = {}
        self._known: dict[int, GpuProcess] = {}
        """Processes on any device in the last two samples, by pid."""
        self._listening: dict[int, Any] = {}
        """NVML's event set of each device, for its critical errors."""
        self._waited: dict[str, tuple[int, int]] = {}
        """Resource → (time of the last reading, µs that tasks had waited for it by then)."""
        self._nvml = nvml
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            devices = [self._device(index) for index in range(self._nvml.nvmlDeviceGetCount())]
            self._devices = [device for device in devices if device is not None]
        except Exception as error:
            if type(error).__name__ not in _NO_GPUS:
                self.errors[f"nvml: {type(error).__name__}"] += 1
        self._quotas = self._try("cgroup", lambda: quota_files(root)) or []
        self._have_cpu = False

    def sample(self, t_ns: int) -> NodeSample:
        """
        Return one sample with the timestamp `t_ns` (ns since the epoch). Shares are since the
        sample before.
        """
        if self._samples % _SLOW == 0:
            self._known, self._processes = self._processes, {}
        cpu = self._try("cpu", lambda: psutil.cpu_percent(None))
        memory = self._try("memory", psutil.virtual_memory)
        disk = self._try("disk", psutil.disk_io_counters)
        received, sent = self._try("net", self._traffic) or (None, None)
        sample = NodeSample(
            t_ns=t_ns,
            cpu_pct=cpu if self._have_cpu else None,  # there is no interval before the first value
            cpu_count=os.cpu_count(),
            load1=self._try("load", lambda: os.getloadavg()[0]),
            mem_used_bytes=memory.total - memory.available if memory else None,
            mem_total_bytes=memory.total if memory else None,
            disk_read_bytes=disk.read_bytes if disk else None,
            disk_write_bytes=disk.write_bytes if disk else None,
            net_rx_bytes=received,
            net_tx_bytes=sent,
            gpus=None if self._devices is None else [self._gpu(*device) for device in self._devices],
            swap_in_bytes=self._try("swap", self._swapped_in),
            psi_cpu=self._try("psi cpu", lambda: self._waiting("cpu", t_ns)),
            psi_memory=self._try("psi memory", lambda: self._waiting("memory", t_ns)),
            psi_io=self._try("psi io", lambda: self._waiting("io", t_ns)),
            cpu_throttled_ns=self._try("cgroup", lambda: held_back_ns(self._quotas)),
        )
        self._have_cpu = True
        self._samples += 1
        return sample

    def close(self) -> None:
        """Stop listening to the devices."""
        for index in [*self._listening]:
            self._release(index)

    def _traffic(self) -> tuple[int, int] | None:
        """
        Return the bytes received and sent by hardware interfaces.

        Loopback is excluded, and so are bridges and tunnels, whose bytes a hardware interface counts again. A
        container sees no hardware: then all interfaces but loopback count.
        """
        counters = psutil.net_io_counters(pernic=True)
        counters.pop("lo", None)
        devices = [name for name in counters if (self._interfaces / name / "device").exists()]
        counted = [counters[name] for name in devices or counters]
        if not counted:
            return None
        return sum(counters.bytes_recv for counters in counted), sum(
            counters.bytes_sent for counters in counted
        )

    def _swapped_in(self) -> int:
        text = (self._proc / "vmstat").read_bytes()
        return int(text.partition(b"\npswpin ")[2].split(maxsplit=1)[0]) * _PAGE

    def _waiting(self, resource: str, t_ns: int) -> float | None:
        """Return the share of the time since the sample before in which some task waited for `resource`."""
        some = (self._proc / "pressure" / resource).read_bytes().split(b"\n", 1)[0]
        total_us = int(some.rpartition(b"total=")[2])
        before = self._waited.get(resource)
        self._waited[resource] = t_ns, total_us
        if before is None or t_ns <= before[0]:
            return None
        return min(max((total_us - before[1]) * 1000 / (t_ns - before[0]), 0.0), 1.0)

    def _device(self, index: int) -> tuple[int, str | None, Any] | None:
        """Return a device. None if this container may not use it, or it is lost."""
        nvml = self._nvml
        handle = self._try("nvml device", lambda: nvml.nvmlDeviceGetHandleByIndex(index), index)
        if handle is None:
            return None
        name = self._try("nvml name", lambda: nvml.nvmlDeviceGetName(handle), index)
        name = name.decode() if isinstance(name, bytes) else name
        if self._try("nvml MIG mode", lambda: mig(nvml, handle), index):
            self._lacks(MIG, index)
            name = f"{name} (MIG)"
        return index, name, handle

    def _gpu(self, index: int, name: str | None, handle: Any) -> GpuSample:
        def ask(what: str, question: Callable[[Any, Any], _T]) -> _T | None:
            return self._try(f"nvml {what}", lambda: question(self._nvml, handle), index)

        known: dict[str, Any] = dict.fromkeys(_ASKED_LATER)
        if self._samples % _SLOW == 0:
            self._limits[index] = {}
            for what, question in LIMITS.items():
                self._limits[index] |= ask(what, question) or {}
            known |= ask("counters", counters) or {}
            for field in [field for field in known if known[field] is None and field not in _ASKED_LATER]:
                self._lacks(f"nvml {field}: {NOT_SUPPORTED}", index)
        for what, question in QUESTIONS.items():
            known |= ask(what, question) or {}
        if self._samples % _SLOW == 0:
            known["processes"] = ask("processes", partial(self._on_device, known["util_pct"]))
        known |= self._limits.get(index, {})
        return GpuSample(index=index, name=name, **known, xid=ask("xid", partial(self._xids, index)))

    def _xids(self, index: int, nvml: Any, handle: Any) -> list[int]:
        """Return the critical errors of a device since the call before. The first call starts listening."""
        xids = list[int]()
        try:
            if index not in self._listening:
                self._listening[index] = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(handle, _XID, self._listening[index])
            while len(xids) < _MAX_XIDS:
                xids.append(int(nvml.nvmlEventSetWait_v2(self._listening[index], 0).eventData))
        except Exception as error:
            if type(error).__name__ == "NVMLError_Timeout":
                return xids  # no more events are waiting
            self._release(index)
            if not xids:  # the reason for a lost device has just been returned
                raise
        return xids

    def _release(self, index: int) -> None:
        events = self._listening.pop(index, None)
        if events is not None:
            self._try("nvml events", lambda: self._nvml.nvmlEventSetFree(events))

    def _on_device(self, util_pct: float | None, nvml: Any, handle: Any) -> list[GpuProcess]:
        """Return the processes that compute on a device. The parents of each process are looked up once."""
        listed = []
        seen = lambda pid: (self._proc / str(pid)).exists()  # noqa: E731
        for process in processes(nvml, handle, util_pct, seen)[:_MAX_PROCESSES]:
            known = self._known.get(process.pid)
            name, parents = (known.name, known.parents) if known else self._family(process.pid)
            listed.append(GpuProcess(process.pid, process.usedGpuMemory, name, parents))
        self._processes.update((process.pid, process) for process in listed)
        return listed

    def _family(self, pid: int) -> tuple[str | None, list[int]]:
        """Return a process's name and its parents' pids, as far as they are visible."""
        name: str | None = None
        parents: list[int] = []
        while pid > 1 and len(parents) < _MAX_PARENTS:
            try:
                text = (self._proc / str(pid) / "stat").read_text(errors="replace")
            except OSError:
                break
            head, _, tail = text.rpartition(")")
            name = name or head.partition("(")[2]
            pid = int(tail.split()[1])
            parents.append(pid)
        return name, parents

    def _try(self, what: str, read: Callable[[], _T], device: int = -1) -> _T | None:
        if self._samples < self._failed.get((what, device), -_RETRY) + _RETRY:
            return None
        try:
            return read()
        except Exception as error:
            self._failed[what, device] = self._samples
            why = lack(error, self._nvml) if device >= 0 else None
            if why is not None:
                self._lacks(f"{what}: {why}", device)
            elif not (isinstance(error, OSError) and error.errno in _NOT_THERE):
                self.errors[f"{what}: {type(error).__name__}"] = 1
            return None

    def _lacks(self, what: str, device: int) -> None:
        """Record that a device does not provide a value."""
        devices = self._without.setdefault(NOT_MEASURED + what, set())
        devices.add(device)
        self.errors[NOT_MEASURED + what] = len(devices)


def quota_files(root: Path, process: str = "self") -> list[Path]:
    """
    Return the files in which the kernel counts time withheld by CPU quotas: of a process's cgroup and its
    ancestors. `process`: "self", or a pid.
    """
    files_here = []
    for line in (root / "proc" / process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = Path(path.lstrip("/"))
        # Which of these exists depends on whether the process sees its cgroup from within.
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        files = [base / part / "cpu.stat" for part in dict.fromkeys([group, *group.parents])]
        files_here += [file for file in files if file.is_file()]
    return files_here


def held_back_ns(files: list[Path]) -> int | None:
    """Return the CPU time withheld so far, in ns, from `quota_files`. Raises OSError, ValueError."""
    total = None
    for file in files:
        values = dict(line.split() for line in file.read_text().splitlines())
        ns = (
            int(values["throttled_usec"]) * 1000
            if "throttled_usec" in values
            else values.get("throttled_time")
        )
        if ns is not None:
            total = (total or 0) + int(ns)
    return total


def xid_events(sample: NodeSample) -> list[Event]:
    """Return the critical errors in a sample as events. Each number of a device is reported once."""
    return [
        Event(
            "xid",
            sample.t_ns,
            message=f"GPU {gpu.index}: {meaning(xid)}" + (f" ({times} times)" if times > 1 else ""),
            data={"gpu": gpu.index, "xid": xid, "times": times},
        )
        for gpu in sample.gpus or ()
        for xid, times in Counter(gpu.xid or ()).items()
    ]


class SamplerThread:
    """
    Samples once a second in its own thread, because a hanging driver must not block the relay.

    A sample with critical errors is not replaced by another before it has been read.
    """

    def __init__(self, sampler: NodeSampler, interval: float = 1.0) -> None:
        self.errors = sampler.errors
        self._sampler = sampler
        self._interval = interval
        self._latest: NodeSample | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="traceml-node-sampler", daemon=True).start()

    def latest(self) -> NodeSample | None:
        """Return the newest sample once; afterwards None until there is a newer one."""
        with self._lock:
            sample, self._latest = self._latest, None
        return sample

    def close(self) -> None:
        """End the thread. Resources of the driver are released once it has answered."""
        self._ended.set()

    def _run(self) -> None:
        while True:
            try:
                waiting = self._latest
                if waiting is None or not xid_events(waiting):
                    sample = self._sampler.sample(time.time_ns())
                    with self._lock:
                        self._latest = sample
            except Exception as error:
                self.errors[f"sample: {type(error).__name__}"] += 1
            if self._ended.wait(self._interval):
                return self._sampler.close()
