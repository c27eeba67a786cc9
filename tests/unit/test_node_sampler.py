"""The node sampler, with an NVML of our own making and without any."""

# ruff: noqa: N802  (NVML's names)

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from traceml_ray.signals.nodes.records import GpuProcess, GpuSample, NodeSample
from traceml_ray.signals.nodes.sampler import NodeSampler, SamplerThread, xid_events

SECOND = 1_000_000_000


NO_NVLINK = "nvml nvlink_{}_bytes: not supported by the device"
WITHOUT = {f"not measured: {NO_NVLINK.format(way)}": 2 for way in ("rx", "tx")}


class NVMLError_Timeout(Exception):  # noqa: N801,N818 - as NVML names it
    pass


class Nvml:
    """Two devices; the second one cannot tell its utilisation and is too hot. Both count bytes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.processes: dict[int, list[Any]] = {0: [], 1: []}
        self.critical: dict[int, list[int | Exception]] = {0: [], 1: []}
        """What each device has to tell; an exception is raised."""
        self.sets: list[list[int]] = []
        """Event sets that are not freed, with the devices in them."""

    def nvmlInit(self) -> None:
        self.calls.append("init")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        self.calls.append("name")
        return b"old binding" if handle else "H200"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle:
            raise RuntimeError("not supported")
        return SimpleNamespace(gpu=37)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=10 + handle, total=100)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 650_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61 + handle

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return 1980 if kind == 1 else 0

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1200 if kind == 1 else 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x40 | 0x8 if handle else 0

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        self.calls.append("fields")
        known = {4: 0, 197: 11, 198: 12}  # no NVLink
        return [
            SimpleNamespace(
                nvmlReturn=0 if f in known else 3,
                valueType=3,
                value=SimpleNamespace(ullVal=known.get(f, 9)),
            )
            for f, _ in fields
        ]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return self.processes[handle]

    def nvmlEventSetCreate(self) -> list[int]:
        self.sets.append([])
        return self.sets[-1]

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: list[int]) -> None:
        assert kinds == 8
        events.append(handle)

    def nvmlEventSetWait_v2(self, events: list[int], timeout_ms: int) -> Any:
        assert timeout_ms == 0 and any(events is known for known in self.sets)
        if not self.critical[events[0]]:
            raise NVMLError_Timeout
        event = self.critical[events[0]].pop(0)
        if isinstance(event, Exception):
            raise event
        return SimpleNamespace(eventData=event)

    def nvmlEventSetFree(self, events: list[int]) -> None:
        self.sets = [known for known in self.sets if known is not events]


class NoDriver(Nvml):
    def nvmlInit(self) -> None:
        super().nvmlInit()
        raise OSError("no driver")


def test_devices_are_sampled_and_missing_values_are_none() -> None:
    nvml = Nvml()
    sampler = NodeSampler(nvml)
    first, sample = sampler.sample(5), sampler.sample(6)
    assert sample.t_ns == 6
    clocks = (650.5, 700.0, 61.0, 1200.0, 1980.0, [])
    hot = (650.5, 700.0, 62.0, 1200.0, 1980.0, ["hw_slowdown", "hw_thermal_slowdown"])
    assert sample.gpus == [
        GpuSample(0, "H200", 37.0, 10, 100, *clocks, xid=[]),
        GpuSample(1, "old binding", None, 11, 100, *hot, xid=[]),
    ]
    assert first.gpus is not None
    assert first.gpus[0] == GpuSample(0, "H200", 37.0, 10, 100, *clocks, 0, 12, 11, None, None, [], [])
    assert sampler.errors == {"nvml utilization: RuntimeError": 1, **WITHOUT}
    assert nvml.calls == ["init", "name", "name", "fields", "fields"]


def test_failing_reading_is_counted_once_and_retried_a_minute_later() -> None:
    class Broken(Nvml):
        def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
            self.calls.append("power")
            raise RuntimeError("not supported")

    nvml = Broken()
    sampler = NodeSampler(nvml)
    for t in range(60):
        sampler.sample(t)
    assert nvml.calls.count("power") == 2  # once a device
    sampler.sample(60)
    assert nvml.calls.count("power") == 4
    failed = {"nvml utilization: RuntimeError": 1, "nvml power: RuntimeError": 1}
    assert sampler.errors == failed | WITHOUT


def test_slow_readings_are_made_in_every_fifth_sample() -> None:
    nvml = Nvml()
    sampler = NodeSampler(nvml)
    asked = []
    for t in range(11):
        gpus = sampler.sample(t).gpus
        assert gpus is not None
        asked += [t] if gpus[0].processes is not None and gpus[0].pcie_rx_bytes is not None else []
        assert gpus[0].power_limit_w == 700.0
    assert asked == [0, 5, 10]


def test_device_processes_are_listed_with_their_parents(tmp_path: Path) -> None:
    _write(tmp_path, "proc/70/stat", "70 (data (loader) 1) S 60 1 1")
    _write(tmp_path, "proc/60/stat", "60 (python) S 1 1 1")
    nvml = Nvml()
    nvml.processes[1] = [
        SimpleNamespace(pid=70, usedGpuMemory=5),
        SimpleNamespace(pid=71, usedGpuMemory=None),
    ]
    sampler = NodeSampler(nvml, tmp_path)
    gpus = sampler.sample(0).gpus
    assert gpus is not None
    assert gpus[0].processes == []
    assert gpus[1].processes == [GpuProcess(70, 5, "data (loader) 1", [60, 1]), GpuProcess(71, None)]


def _xids(sampler: NodeSampler, t: int) -> list[list[int] | None]:
    return [gpu.xid for gpu in sampler.sample(t).gpus or ()]


def test_critical_errors_are_reported_once_and_as_events() -> None:
    nvml = Nvml()
    sampler = NodeSampler(nvml)
    assert _xids(sampler, 0) == [[], []]
    nvml.critical[1] += [31, 31, 4711]
    sample = sampler.sample(7)
    assert [gpu.xid for gpu in sample.gpus or ()] == [[], [31, 31, 4711]]
    assert [(event.kind, event.t_ns, event.data) for event in xid_events(sample)] == [
        ("xid", 7, {"gpu": 1, "xid": 31, "times": 2}),
        ("xid", 7, {"gpu": 1, "xid": 4711, "times": 1}),
    ]
    messages = [event.message for event in xid_events(sample)]
    assert messages[0].startswith("GPU 1: XID 31: GPU memory page fault") and messages[0].endswith(
        "(2 times)"
    )
    assert messages[1] == "GPU 1: XID 4711: see NVIDIA's XID list"
    assert _xids(sampler, 8) == [[], []]
    assert nvml.sets == [[0], [1]]
    sampler.close()
    assert nvml.sets == []


def test_critical_errors_of_a_flood_are_read_in_pieces() -> None:
    nvml = Nvml()
    nvml.critical[0] += [13] * 100
    sampler = NodeSampler(nvml)
    assert [len(_xids(sampler, t)[0] or ()) for t in range(3)] == [64, 36, 0]


def test_driver_without_events_is_counted_and_gives_no_errors() -> None:
    class Old(Nvml):
        def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: list[int]) -> None:
            raise RuntimeError("not supported")

    nvml = Old()
    sampler = NodeSampler(nvml)
    assert [_xids(sampler, t) for t in range(3)] == [[None, None]] * 3
    assert sampler.errors["nvml xid: RuntimeError"] == 1
    assert nvml.sets == []


def test_lost_device_gives_its_reason_and_is_retried_a_minute_later() -> None:
    nvml = Nvml()
    sampler = NodeSampler(nvml)
    _xids(sampler, 0)
    nvml.critical[0] += [79, RuntimeError("lost"), RuntimeError("lost")]
    assert _xids(sampler, 1) == [[79], []]
    assert _xids(sampler, 2) == [None, []]
    assert (nvml.sets, sampler.errors["nvml xid: RuntimeError"]) == ([[1]], 1)
    nvml.critical[0] += [48]
    seen = [_xids(sampler, t)[0] for t in range(3, 64)]
    assert seen == [None] * 59 + [[48], []]


def test_critical_errors_wait_until_they_are_taken() -> None:
    nvml = Nvml()
    nvml.critical[0] += [79]
    thread = SamplerThread(NodeSampler(nvml), interval=0.001)
    while len(nvml.sets) < 2:
        pass
    nvml.critical[1] += [48]
    xids: list[int] = []
    while len(xids) < 2:
        sample = thread.latest()
        xids += [xid for gpu in (sample and sample.gpus) or () for xid in gpu.xid or ()]
    assert xids == [79, 48]
    thread.close()
    while nvml.sets:
        pass


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _pressure(root: Path, us: int) -> None:
    for index, resource in enumerate(("cpu", "memory", "io")):
        some = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={1000 + us * (index + 1)}"
        _write(root, f"proc/pressure/{resource}", f"{some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n")


def test_pressure_is_the_share_of_time_since_the_previous_sample(tmp_path: Path) -> None:
    sampler = NodeSampler(NoDriver(), tmp_path)
    _pressure(tmp_path, 0)
    first = sampler.sample(0)
    assert (first.psi_cpu, first.psi_memory, first.psi_io) == (None, None, None)
    _pressure(tmp_path, 250_000)
    second = sampler.sample(SECOND)
    assert (second.psi_cpu, second.psi_memory, second.psi_io) == (0.25, 0.5, 0.75)
    _pressure(tmp_path, 900_000)
    third = sampler.sample(SECOND + 1)  # the kernel counted on for longer: never above 1
    assert third.psi_io == 1.0
    assert sampler.sample(SECOND).psi_io is None


@pytest.mark.parametrize(
    ("cgroup", "files", "throttled_ns"),
    [
        ("0::/pod/box", {"pod/box": "throttled_usec 30", "pod": "usage_usec 5\nthrottled_usec 4"}, 34_000),
        ("0::/pod/box", {"": "throttled_usec 7"}, 7_000),  # seen from within the container
        ("0::/", {"": "usage_usec 1"}, None),  # a machine's own root has no quota
        ("4:memory:/x\n3:cpu,cpuacct:/box\n0::/", {"cpu/box": "throttled_time 12"}, 12),
        ("9:name=systemd:/", {}, None),
    ],
)
def test_cpu_throttling_of_all_quotas_is_added_up(
    tmp_path: Path, cgroup: str, files: dict[str, str], throttled_ns: int | None
) -> None:
    _write(tmp_path, "proc/self/cgroup", cgroup + "\n")
    for where, text in files.items():
        _write(tmp_path, f"sys/fs/cgroup/{where}/cpu.stat", text + "\n")
    sampler = NodeSampler(NoDriver(), tmp_path)
    assert sampler.sample(0).cpu_throttled_ns == throttled_ns
    assert sampler.errors == {"nvml: OSError": 1}


def test_swap_in_is_in_bytes(tmp_path: Path) -> None:
    _write(tmp_path, "proc/vmstat", "pgpgin 9\npswpin 3\npswpout 8\n")
    assert NodeSampler(NoDriver(), tmp_path).sample(0).swap_in_bytes == 3 * os.sysconf("SC_PAGE_SIZE")


def test_kernel_without_these_files_is_no_error_and_a_broken_one_counts_once(tmp_path: Path) -> None:
    sampler = NodeSampler(NoDriver(), tmp_path)
    sample = sampler.sample(0)
    assert (sample.psi_io, sample.swap_in_bytes, sample.cpu_throttled_ns) == (None, None, None)
    assert sampler.errors == {"nvml: OSError": 1}
    _write(tmp_path, "proc/pressure/io", "nonsense")
    broken = NodeSampler(NoDriver(), tmp_path)
    for t in range(3):
        assert broken.sample(t).psi_io is None
    assert broken.errors == {"nvml: OSError": 1, "psi io: ValueError": 1}


def test_machine_without_gpus_is_no_error() -> None:
    class NVMLError_LibraryNotFound(Exception):  # noqa: N801,N818 - as NVML names it
        pass

    nvml = Nvml()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError_LibraryNotFound())  # type: ignore[method-assign]
    sampler = NodeSampler(nvml)
    assert sampler.sample(1).gpus is None and not sampler.errors


def test_devices_are_none_without_a_driver_which_is_tried_once() -> None:
    nvml = NoDriver()
    sampler = NodeSampler(nvml)
    assert [sampler.sample(t).gpus for t in (1, 2, 3)] == [None, None, None]
    assert nvml.calls == ["init"]
    assert sampler.errors == {"nvml: OSError": 1}


def test_own_machine_has_memory_cpus_and_cpu_percent_from_the_second_sample() -> None:
    sampler = NodeSampler(NoDriver())
    first, second = sampler.sample(1), sampler.sample(2)
    assert first.cpu_pct is None
    assert second.cpu_pct is not None
    assert second.mem_total_bytes == psutil.virtual_memory().total
    assert 0 < (second.mem_used_bytes or 0) < second.mem_total_bytes
    assert (second.cpu_count or 0) >= 1


def test_counters_that_the_system_lacks_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    monkeypatch.setattr(psutil, "net_io_counters", broken)
    sampler = NodeSampler(NoDriver())
    sample = sampler.sample(1)
    assert (sample.disk_read_bytes, sample.net_rx_bytes) == (None, None)
    assert sampler.errors["net: PermissionError"] == 1


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [(("eth0", "ib0"), (110, 220)), ((), (1111110, 2222220)), (None, (None, None))],
    ids=["a machine", "a container", "no network"],
)
def test_network_is_hardware_and_never_loopback(
    hardware: tuple[str, ...] | None,
    expected: tuple[int | None, int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("lo", "eth0", "ib0", "docker0", "veth1", "bond0", "tun0") if hardware is not None else ("lo",)
    counters = {
        name: SimpleNamespace(bytes_recv=10**power, bytes_sent=2 * 10**power)
        for power, name in enumerate(names)
    }
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: dict(counters))
    for name in names:
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    for name in hardware or ():
        (tmp_path / "sys/class/net" / name / "device").mkdir()
    sample = NodeSampler(NoDriver(), tmp_path).sample(1)
    assert (sample.net_rx_bytes, sample.net_tx_bytes) == expected


def test_sample_of_the_thread_is_given_out_once() -> None:
    thread = SamplerThread(NodeSampler(NoDriver()), interval=3600)
    while (sample := thread.latest()) is None:
        pass
    assert sample.t_ns > 0
    assert thread.latest() is None


class Stumbling(NodeSampler):
    """Its first sample goes wrong."""

    def sample(self, t_ns: int) -> NodeSample:
        if not self.errors["sample: ZeroDivisionError"]:
            raise ZeroDivisionError
        return super().sample(t_ns)


def test_failing_sample_is_counted_and_the_next_one_taken() -> None:
    thread = SamplerThread(Stumbling(NoDriver()), interval=0.001)
    while thread.latest() is None:
        pass
    assert thread.errors["sample: ZeroDivisionError"] == 1
    thread.close()
