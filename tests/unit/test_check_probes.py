"""Probes: what each measures of this machine, and what they say if they cannot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_device import FakeDevice
from played_nvml import Card, play

from traceml_ray.signals.check import cores, disk, probes
from traceml_ray.signals.check.disk import DiskProbe
from traceml_ray.signals.check.gpu import GpuProbe, gpu_probes
from traceml_ray.signals.check.judge import LIMITS, judged
from traceml_ray.signals.check.probe import ProbeError, ProbeSubject, ProbeTrial
from traceml_ray.signals.check.probes import ALL, Prober
from traceml_ray.signals.check.records import Checked, Measure
from traceml_ray.signals.check.state import CpuTime, StateWatch


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# -- cores ----------------------------------------------------------------------------------------


def test_cores_that_share_a_cache_are_a_group(tmp_path: Path) -> None:
    cpus = "sys/devices/system/cpu"
    files = {
        f"{cpus}/cpu{core}/cache/index3/shared_cpu_list": ("0-3,8-11" if core % 8 < 4 else "4-7,12-15")
        for core in range(16)
    }
    root = write(tmp_path, files)
    assert cores.groups(range(16), root) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert cores.groups([2, 3, 4, 12], root) == [[2, 3], [4, 12]], "a cpuset has only some of them"


def test_too_many_caches_give_way_to_numa_nodes(tmp_path: Path) -> None:
    cpus, nodes = "sys/devices/system/cpu", "sys/devices/system/node"
    files = {f"{cpus}/cpu{core}/cache/index3/shared_cpu_list": f"{core}" for core in range(64)}
    files |= {f"{nodes}/node0/cpulist": "0-31\n", f"{nodes}/node1/cpulist": "32-63\n"}
    root = write(tmp_path, files)
    assert cores.groups(range(64), root) == [[*range(32)], [*range(32, 64)]]
    assert cores.numa_nodes([1, 40], root) == [[1], [40]]


def test_cores_of_one_cache_are_divided_equally_and_siblings_stay_together(tmp_path: Path) -> None:
    cpus = "sys/devices/system/cpu"
    files = {
        f"{cpus}/cpu{core}/topology/thread_siblings_list": f"{core % 6},{core % 6 + 6}" for core in range(12)
    }
    root = write(tmp_path, files)
    assert cores.groups(range(12), root) == [[core, core + 6] for core in range(6)]
    assert cores.groups([3], tmp_path / "nothing") == [[3]]


def test_threads_return_to_their_cores() -> None:
    before = os.sched_getaffinity(0)
    with cores.running_on([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_threads_that_work_get_a_core_each_and_may_then_use_all() -> None:
    usable, done = cores.allowed(), list[int]()
    with cores.running_on(usable):
        cores.spread(usable, lambda: done.append(1))
        assert os.sched_getaffinity(0) == {*usable}
    assert done == [1]


# -- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_the_quota_of_the_container_is_known(tmp_path: Path, version: int) -> None:
    group = "sys/fs/cgroup/" + ("cpu/" if version == 1 else "")
    stat = "nr_periods 9\nnr_throttled 4\n" + (
        "throttled_time 7000\n" if version == 1 else "throttled_usec 7\n"
    )
    quota = (
        {"cpu.cfs_quota_us": "120000", "cpu.cfs_period_us": "100000"}
        if version == 1
        else {"cpu.max": "120000 100000"}
    )
    files = {f"{group}{name}": text for name, text in {"cpu.stat": stat, **quota}.items()}
    root = write(tmp_path, {"proc/self/cgroup": "1:cpu:/\n" if version == 1 else "0::/\n", **files})
    cpu_time = CpuTime(root)
    assert (cpu_time.quota_cores(), cpu_time.withheld_ns(), cpu_time.periods()) == (1.2, 7000, 4)


def test_what_a_quota_withheld_is_not_known_if_its_counter_cannot_be_read(tmp_path: Path) -> None:
    """A rank that ends during a check takes its cgroup with it."""
    stat = tmp_path / "sys/fs/cgroup/cpu.stat"
    count = "nr_periods 9\nnr_throttled 4\nthrottled_usec 7\n"
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.stat": count})
    watch = StateWatch(root, [0])
    stat.unlink()
    state = watch.result()
    assert (state.throttled_ns, state.throttled_periods) == (None, None)
    watch.restart()
    stat.write_text(count)
    state = watch.result()
    assert (state.throttled_ns, state.throttled_periods) == (None, None), "not all that was withheld before"


def test_no_quota_is_none(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.stat": "", "sys/fs/cgroup/cpu.max": "max 100000"},
    )
    assert CpuTime(root).quota_cores() is None
    assert CpuTime(tmp_path / "nothing").quota_cores() is None


def test_steal_and_clock_of_the_cores(tmp_path: Path) -> None:
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    files = {"proc/stat": "cpu 0 0 0 0 0 0 0 0\ncpu0 100 0 0 100 0 0 0 0 0 0\n"}
    files |= {f"{folder}/scaling_cur_freq": "1800000", f"{folder}/cpuinfo_max_freq": "3000000"}
    root = write(tmp_path, files | {f"{folder}/scaling_governor": "powersave\n"})
    watch = StateWatch(root, [0])
    watch.sample_cpu()
    write(root, {"proc/stat": "cpu 0 0 0 0 0 0 0 0\ncpu0 160 0 0 120 0 0 0 20 0 0\n"})
    state = watch.result()
    assert state.steal == pytest.approx(0.2)
    assert (state.cpu_mhz, state.cpu_max_mhz, state.governor) == (1800.0, 3000.0, "powersave")


def test_gpus_are_sampled_and_found_by_their_uuid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, Card(uuid="GPU-aa"), Card(uuid="GPU-bb", reasons=0x40))
    watch = StateWatch(tmp_path, [0])
    assert (watch.nvml_index("bb"), watch.nvml_index("cc")) == (1, None)
    for _ in range(3):
        watch.sample_gpu(1, "NVIDIA H200")
    (gpu,) = watch.result().gpus or ()
    assert (gpu.index, gpu.throttle, gpu.sm_mhz, gpu.sm_max_mhz) == (
        1,
        ["hw_thermal_slowdown"],
        1200.0,
        1980.0,
    )


# -- GPUs -----------------------------------------------------------------------------------------


class PlayedGpu:
    """A GPU on a played device. One piece of work takes `piece_ns`."""

    name = "NVIDIA H200"
    described = "bfloat16, 8192 × 8192"

    def __init__(self, index: int, piece_ns: int = 2_000_000, lacks: str = "") -> None:
        self.index, self._piece_ns, self._lacks = index, piece_ns, lacks
        self.device = FakeDevice()
        self._slots = 0

    def prepared(self, probe: str) -> tuple[float, Callable[[], object]]:
        if probe == self._lacks:
            raise ProbeError(f"GPU {self.index} was not measured: only 2 MB of it are free.")
        return 1e12, lambda: self.device.launch(self._piece_ns)

    def mark(self) -> int:
        self._slots += 1
        self.device.record(self._slots)
        return self._slots

    def elapsed_s(self, since: int, until: int) -> float:
        self.device.item()
        elapsed = self.device.elapsed_ns(since, until)
        assert elapsed is not None, "the host has waited for both"
        return elapsed / 1e9


def checked(gpus: list[PlayedGpu], trials: int = 10) -> Checked:
    """A check of played GPUs alone."""
    errors: list[str] = []
    measures = []
    for probe in gpu_probes(gpus, ALL, None, errors):
        rounds = [probe.trial(0.05) for _ in range(trials)]
        for place, subject in enumerate(probe.subjects):
            values = [trial[place].value for trial in rounds]
            measures.append(
                Measure(
                    subject.probe, subject.subject, subject.unit, values, subject.like, device=subject.device
                )
            )
    return Checked(0, "node-0", measures=measures, errors=errors)


def test_each_gpu_is_timed_by_its_events() -> None:
    result = judged(
        [checked([PlayedGpu(index, 2_000_000 if index != 2 else 2_326_000) for index in range(4)])]
    )
    assert [(slow.part, slow.device) for slow in result.slow] == [("GPU 2", 2)]
    assert result.slow[0].lower == pytest.approx(0.14, abs=0.005)
    assert {row.probe for row in result.levels} == {"gpu_matmul", "gpu_memory", "to_device", "to_host"}
    values = [row.value for row in result.levels if row.probe == "gpu_matmul" and row.state == "alike"]
    assert values == pytest.approx([1e12 / 2e-3] * 3, rel=0.01)


def test_gpus_multiply_together_and_copy_in_turn() -> None:
    gpus = [PlayedGpu(index) for index in range(2)]
    order: list[tuple[str, int]] = []
    for gpu in gpus:
        gpu.device.during = lambda name, _, index=gpu.index: order.append((name, index))  # type: ignore[misc]
    for probe, expected in (("gpu_matmul", [0, 0, 1, 1]), ("to_host", [0, 0, 1, 1])):
        one = GpuProbe(probe, "B/s", gpus, probe == "gpu_matmul")
        order.clear()
        one.trial(0.01)
        assert [index for name, index in order if name == "record"] == expected
        first_wait = [name for name, _ in order].index("elapsed_ns")
        assert first_wait == (4 if probe == "gpu_matmul" else 2)


def test_a_gpu_without_room_is_an_error_and_the_others_are_measured() -> None:
    result = checked([PlayedGpu(0), PlayedGpu(1, lacks="gpu_memory"), PlayedGpu(2)])
    assert result.errors == ["GPU 1 was not measured: only 2 MB of it are free."]
    memory = [measure.subject for measure in result.measures if measure.probe == "gpu_memory"]
    assert memory == ["GPU 0", "GPU 2"]


# -- disks ----------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that counts as being on a disk, with small files."""
    monkeypatch.setattr(disk, "_FILE_BYTES", 20 << 20)
    monkeypatch.setattr(disk, "_IN_MEMORY", set())
    return tmp_path


def read_once(path: Path) -> tuple[ProbeSubject, ProbeTrial]:
    probe = DiskProbe(path)
    try:
        (trial,) = probe.trial(0.01)
        return probe.subjects[0], trial
    finally:
        probe.close()


def test_a_folder_is_read_and_left_as_it_was(on_disk: Path) -> None:
    subject, trial = read_once(on_disk)
    assert subject.probe == "disk_read" and subject.note == ""
    assert trial.value > 0
    assert list(on_disk.iterdir()) == []


def test_a_file_is_read(on_disk: Path) -> None:
    (on_disk / "data").write_bytes(bytes(8 << 20))
    assert read_once(on_disk / "data")[1].value > 0


def test_a_folder_that_cannot_be_written_has_its_largest_file_read(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Path) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "_nameless", refused)
    with pytest.raises(ProbeError, match="cannot be written, and has no file"):
        DiskProbe(on_disk)
    (on_disk / "shard-0").write_bytes(bytes(8 << 20))
    (on_disk / "small").write_bytes(b"1")
    subject, _ = read_once(on_disk)
    assert subject.note == "the folder cannot be written: shard-0 was read"


def test_a_disk_that_is_almost_full_is_not_written(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_OF_FREE", 1e-9)
    with pytest.raises(ProbeError, match="no file that is large enough"):
        DiskProbe(on_disk)


def test_pipe_is_no_disk_and_not_waited_for(on_disk: Path) -> None:
    os.mkfifo(on_disk / "pipe")
    with pytest.raises(ProbeError, match="neither a file nor a folder"):
        DiskProbe(on_disk / "pipe")


def test_memory_is_no_disk(tmp_path: Path) -> None:
    mounts = (
        write(tmp_path, {"mounts": f"/dev/vda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n"}) / "mounts"
    )
    with pytest.raises(ProbeError, match=r"is in memory \(tmpfs\)"):
        DiskProbe(tmp_path, mounts)
    with pytest.raises(ProbeError, match="cannot be read: No such file"):
        DiskProbe(tmp_path / "missing", mounts)


def test_the_page_cache_is_not_measured(on_disk: Path) -> None:
    """Bytes that are changed only on the way to the disk would not be seen in the cache."""
    file = on_disk / "data"
    file.write_bytes(bytes(8 << 20))
    probe = DiskProbe(file)
    try:
        assert probe._direct or os.uname().sysname != "Linux"
    finally:
        probe.close()


# -- all together ---------------------------------------------------------------------------------


def test_this_machine_is_measured_round_by_round(on_disk: Path) -> None:
    with Prober("node-0", path=on_disk, only=("cpu_matmul", "core_matmul", "disk_read")) as prober:
        for _ in range(2):
            prober.round(0.05)
        result = prober.checked()
    assert result.errors == []
    by_probe: dict[str, list[Measure]] = {}
    for measure in result.measures:
        by_probe.setdefault(measure.probe, []).append(measure)
    every = cores.allowed()
    assert set(by_probe) == {"cpu_matmul", "disk_read"} | ({"core_matmul"} if len(every) > 1 else set())
    assert all(len(measure.values) == 2 and min(measure.values) > 0 for measure in result.measures)
    assert result.state.cores == len(every)
    assert result.host and result.seconds


def test_a_probe_that_fails_is_an_error_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        subjects = (ProbeSubject("host_memory", "memory", "B/s", "x"),)
        weight = 1.0

        def __init__(self, fails: bool) -> None:
            self.fails, self.closed = fails, False

        def trial(self, seconds: float) -> list[ProbeTrial]:
            if self.fails:
                raise RuntimeError("out of memory")
            return [ProbeTrial(1.0)]

        def close(self) -> None:
            self.closed = True

    made = [Broken(True), Broken(False)]
    monkeypatch.setattr(probes, "cpu_probes", lambda *_: iter(made))
    with Prober("node-0", only=("host_memory",)) as prober:
        for _ in range(3):
            prober.round(0.01)
        result = prober.checked()
    assert [measure.values for measure in result.measures] == [[], [1.0, 1.0, 1.0]]
    assert len(result.errors) == 1 and "out of memory" in result.errors[0]
    assert all(one.closed for one in made)


def test_every_probe_has_limits() -> None:
    assert set(ALL) <= set(LIMITS)


def test_nothing_is_asked_of_a_machine_in_use() -> None:
    with Prober("node-0", devices=(), only=()) as prober:
        prober.round(0.01)
        result: Any = prober.checked()
    assert result.measures == [] and result.errors == []
