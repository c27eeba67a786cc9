"""
Samples the memory of this process and its devices, in the agent's thread. Sources: the kernel, torch's
allocator, and the driver.

Nothing here makes a context, launches or waits for work, or resets a statistic. The allocator only returns
counters that it keeps anyway. It has a lock, and torch holds the GIL while it waits for the lock, as for
`torch.cuda.memory_allocated`: while another thread is in a cudaMalloc, this call waits for it to end.

The peak since the sample before is derived without `reset_peak_memory_stats`, which would change what the
script reads. torch keeps one peak, since the start or the script's last reset:

- Nothing was allocated since (the total of all allocations is unchanged): the peak is the memory allocated at
  the sample before.
- The peak has risen: it was reached since, and is the result.
- As much is allocated now as the peak says: the peak is the result.
- Otherwise the largest value since is below an older peak, or the script has reset the peak: not known.

A reset that is followed by a higher peak within one interval is not detected. The memory reached before the
reset is then not included.

NVML makes no context and waits for no kernel, but a driver may hang. It is asked in a thread of its own, and
a late answer is ignored.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from traceml_ray.agent import cuda
from traceml_ray.errors import error_text
from traceml_ray.signals.memory.records import MemorySample

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CACHE = b"inactive_file", b"active_file"
"""Entries of `memory.stat`: file cache that the kernel releases before it kills a process."""


@dataclass(frozen=True)
class HostLimit:
    """A limit of host memory, and where its use is counted. `group` is None for the whole machine."""

    total: int
    group: Path | None = None
    legacy: bool = False
    """Whether the group is of cgroup v1."""


class HostMemory:
    """
    Reads the host memory of this process.

    Args:
        root: the folder that contains `proc` and `sys`.

    All methods raise OSError or ValueError if the kernel does not provide the value.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._statm = str(root / "proc/self/statm")
        self._meminfo = str(root / "proc/meminfo")

    def rss(self) -> int:
        """Return the resident bytes of this process."""
        return int(_read(self._statm).split()[1]) * _PAGE

    def uss(self) -> int:
        """Return the bytes that no other process shares. Takes 1 ms at 3 GB."""
        fields = _values(_read(str(self._root / "proc/self/smaps_rollup")), b":")
        return 1024 * sum(fields[name] for name in (b"Private_Clean", b"Private_Dirty"))

    def limit(self) -> HostLimit:
        """
        Return the tightest limit that applies to this process: of a cgroup, or the memory of
        the machine.
        """
        machine = HostLimit(1024 * self._machine()[b"MemTotal"])
        return min([machine, *self._groups()], key=lambda limit: limit.total)

    def used(self, limit: HostLimit) -> int:
        """Return the used part of `limit` in bytes, without reclaimable file cache."""
        if limit.group is None:
            fields = self._machine()
            return 1024 * (fields[b"MemTotal"] - fields[b"MemAvailable"])
        name, prefix = ("memory.usage_in_bytes", b"total_") if limit.legacy else ("memory.current", b"")
        current = int(_read(f"{limit.group}/{name}"))
        stat = _values(_read(f"{limit.group}/memory.stat"), b" ")
        return max(0, current - sum(stat.get(prefix + name, 0) for name in _CACHE))

    def _machine(self) -> dict[bytes, int]:
        return _values(_read(self._meminfo)[:512], b":")

    def _groups(self) -> Iterator[HostLimit]:
        """Yield the limits of this process's cgroup and of its ancestors, as far as they are visible."""
        for line in _read(str(self._root / "proc/self/cgroup")).decode(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            legacy = "memory" in controllers.split(",")
            if controllers and not legacy:
                continue
            own_group = Path(path.lstrip("/"))
            # Which of these exists depends on whether the process sees its cgroup from within.
            for part in dict.fromkeys([own_group, *own_group.parents]):
                group = self._root / "sys/fs/cgroup" / ("memory" if legacy else "") / part
                text = _read_if(f"{group}/memory.{'limit_in_bytes' if legacy else 'max'}").strip()
                if text.isdigit():
                    yield HostLimit(int(text), group, legacy)


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 1 << 16)
    finally:
        os.close(file)


def _read_if(path: str) -> bytes:
    try:
        return _read(path)
    except OSError:
        return b""


def _values(text: bytes, separator: bytes) -> dict[bytes, int]:
    """Return name → number of lines `name<separator> number …`. Other lines are ignored."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(separator)
        number = rest.split(None, 1)
        if number and number[0].isdigit():
            values[name] = int(number[0])
    return values


WAIT_S = 0.1
_HOST_PIDS = 0xEFFFFFFC
"""Inode of the kernel's first pid namespace. NVML reports pids of that namespace."""
_NO_PIDS = "NVML does not list this process on the device (a container has its own pids)"
_NO_BYTES = "NVML does not report the device memory of each process"
_LATE = f"NVML has not answered within {WAIT_S:g} s"


@dataclass
class Reading:
    """The reading of one device. None is not known; `why` has the reasons by name."""

    used: int | None = None
    total: int | None = None
    processes: list[tuple[int, int | None]] | None = None
    """(pid, bytes) of all processes that compute on it."""
    why: dict[str, str] = field(default_factory=dict)


class DriverMemory:
    """
    Asks NVML about devices by their uuid.

    Args:
        nvml: the binding. None: `pynvml` is imported on first use.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._ready = False
        self._handles: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._asked: list[str] | None = None
        self._found: dict[str, Reading] = {}
        self._thread: threading.Thread | None = None

    def ask(self, uuids: list[str]) -> Mapping[str, Reading]:
        """Return what is known about each of `uuids`. Waits at most `WAIT_S`."""
        with self._changed:
            if self._idle():
                self._asked, self._found = uuids, {}
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="traceml-nvml", daemon=True)
                    self._thread.start()
                self._changed.wait_for(self._idle, WAIT_S)
            if self._idle():
                return self._found
            # A late answer describes another moment.
            return {uuid: Reading(why={"nvml": _LATE}) for uuid in uuids}

    def _idle(self) -> bool:
        return self._asked is None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._idle())
                asked = self._asked or []
            readings = {uuid: self._read(uuid) for uuid in asked}
            with self._changed:
                self._asked, self._found = None, readings
                self._changed.notify_all()

    def _read(self, uuid: str) -> Reading:
        reading = Reading()
        try:
            handle = self._handle(uuid)
        except Exception as error:
            reading.why["nvml"] = _reason(error)
            return reading
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            reading.used, reading.total = int(memory.used), int(memory.total)
        except Exception as error:
            reading.why["device_used_bytes"] = _reason(error)
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            reading.processes = [(process.pid, process.usedGpuMemory) for process in processes]
        except Exception as error:
            reading.why["process_bytes"] = _reason(error)
        return reading

    def _handle(self, uuid: str) -> Any:
        if not self._ready:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._ready = True
        if uuid not in self._handles:
            try:
                self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except Exception as error:
                if type(error).__name__ != "NVMLError_NotFound":
                    raise
                self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        return self._handles[uuid]


def host_pids(root: Path = Path("/")) -> bool:
    """Return whether this process's pid is also its pid on the host, which NVML reports."""
    try:
        return (root / "proc/self/ns/pid").stat().st_ino == _HOST_PIDS
    except OSError:
        return False


def own_bytes(processes: list[tuple[int, int | None]], least: int, known: bool) -> tuple[int | None, str]:
    """
    Return (memory of this process on a device, ""), or (None, reason why it is not known).

    Args:
        processes: (pid, bytes) of the processes that compute on the device, on which this process has a
            context.
        least: bytes that torch has reserved there. A process with less is another one.
        known: whether the pids are those that this process sees, see `host_pids`. Otherwise the process is
            identified only if it is alone.
    """
    pid = os.getpid()
    mine = [process for process in processes if process[0] == pid] if known else processes
    if len(mine) != 1:
        return None, _NO_PIDS
    ((_, used_bytes),) = mine
    if used_bytes is None:
        return None, _NO_BYTES
    return (used_bytes, "") if used_bytes >= least else (None, _NO_PIDS)


def _reason(error: Exception) -> str:
    return f"NVML: {error_text(error)}"


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
"""Fields of `MemorySample` by source: torch's allocator, and NVML."""


@dataclass
class Devices:
    """What this process needs to know about devices. Tests replace it."""

    contexts: Callable[[], list[bool]]
    """Returns for each device whether this process has a context on it."""
    uuid: Callable[[int], str]


def cuda_devices() -> Devices:
    """Return the devices of the driver that torch has loaded. Raises OSError."""
    driver = cuda.load_driver()
    return Devices(lambda: cuda.contexts(driver), lambda index: cuda.device_uuid(driver, index))


@dataclass
class DeviceMemory:
    """
    Samples each device on which this process has a context, once torch has initialized CUDA.

    Args:
        driver: asks NVML.
        devices: returns the devices. Raises OSError if there is no driver for them.
        torch: returns the module. None while it is not imported.
    """

    driver: DriverMemory = field(default_factory=DriverMemory)
    devices: Callable[[], Devices] = cuda_devices
    torch: Callable[[], Any] = lambda: sys.modules.get("torch")
    host_pids: bool = field(default_factory=host_pids)
    missing: dict[str, str] = field(default_factory=dict)
    """Why values of the newest sample are not known, by name."""

    def __post_init__(self) -> None:
        self._devices: Devices | None = None
        self._uuids: dict[int, str] = {}
        self._peaks: dict[int, Peak] = {}

    def sample(self) -> dict[int, dict[str, int]]:
        """Return what is known about each device, by torch's index. Empty without devices."""
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
        """Return the counters of torch's allocator for a device."""
        backend = torch.cuda.get_allocator_backend()
        if backend != _NATIVE:  # other backends ask the driver, or raise
            self.missing[_ALLOCATOR] = f"its backend is {backend}"
            return {}
        try:
            stats = torch.cuda.memory_stats_as_nested_dict(index)
            values = {name: stats[key]["all"]["current"] for name, key in _CURRENT.items()}
            values |= {"retries": stats["num_alloc_retries"], "ooms": stats["num_ooms"]}
            peak = self._peaks.setdefault(index, Peak()).since(stats["allocated_bytes"]["all"])
        except Exception as error:  # the allocator does not know the device, or this torch differs
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
    """The counters of torch's allocator at the last sample. -1 before the first."""

    current: int = -1
    peak: int = -1
    turnover: int = -1

    def since(self, stat: dict[str, int]) -> int | None:
        """Return the largest memory allocated since the last sample, see the docstring of this module."""
        before = Peak(self.current, self.peak, self.turnover)
        self.current, self.peak, self.turnover = stat["current"], stat["peak"], stat["allocated"]
        if self.turnover == before.turnover:
            return before.current
        if self.peak > before.peak or (self.peak == before.peak and self.current == self.peak):
            return self.peak
        return None


USS_S = 30.0
"""Time between two readings of USS, and between two searches for limits, in s."""
_USS_SHARE = 1e-3
"""Largest share of the time for reading USS. It is read less often for a large process."""
_T = TypeVar("_T")


class MemorySampler:
    """
    Takes `MemorySample`s. A value that cannot be read is None, with the reason in `missing`.

    Args:
        devices: samples the devices.
        root: the folder that contains `proc` and `sys`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        devices: DeviceMemory | None = None,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sources: dict[str, str] = {}
        """Source of each known field, see `wire.RankBatch.memory_from`."""
        self.missing: dict[str, str] = {}
        self._devices = devices or DeviceMemory()
        self._host = HostMemory(root)
        self._clock = clock
        self._limit: HostLimit | None = None
        self._limit_due = self._uss_due = -USS_S

    def sample(self, t_ns: int, step: int | None) -> list[MemorySample]:
        """
        Return one sample for each device in use, or one sample of a process without devices. Takes about 50
        µs.
        """
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
        """Return what is known about the process. USS is included only when it is read."""
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
        except Exception as error:  # an unreadable value is null, and `missing` has the reason
            self.missing[f"memory: {what}"] = error_text(error)[:200]
            return None
