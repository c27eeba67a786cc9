"""Samples of memory: what a played allocator, driver and kernel say, and null where they do not."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest
from fake_memory import GIB, FakeCuda
from played_nvml import NO_PERMISSION, NOT_SUPPORTED, UNKNOWN_MEMORY, Card, play
from sessions import Rank, Relay, aggregation

from traceml_ray.signals.memory import samplers
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.memory.samplers import (
    OF_NVML,
    OF_TORCH,
    USS_S,
    DeviceMemory,
    DriverMemory,
    MemorySampler,
)
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session_file import SessionFile

MIB = 1 << 20
ME = os.getpid()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes is waited for, however busy the machine is."""
    monkeypatch.setattr(samplers, "WAIT_S", 20.0)


def sampler(cuda: FakeCuda, host_pids: bool = True, **more: Any) -> MemorySampler:
    return MemorySampler(DeviceMemory(DriverMemory(), cuda.devices, lambda: cuda, host_pids), **more)


def one(samples: list[MemorySample]) -> MemorySample:
    (sample,) = samples
    return sample


def test_process_without_cuda_has_host_memory_and_nothing_of_a_device() -> None:
    cuda = FakeCuda()
    cuda.initialized = False
    memory = sampler(cuda)
    sample = one(memory.sample(7, 3))
    assert (sample.t_ns, sample.step, sample.device) == (7, 3, None)
    assert {getattr(sample, name) for name in (*OF_TORCH, *OF_NVML)} == {None}
    assert sample.rss_bytes and sample.uss_bytes and sample.rss_bytes >= sample.uss_bytes > MIB
    assert sample.limit_bytes and sample.limit_used_bytes and sample.limit_bytes > sample.limit_used_bytes
    assert set(memory.sources) == {"rss_bytes", "uss_bytes", "limit_bytes", "limit_used_bytes"}
    assert not memory.missing


def test_sample_of_a_device_has_what_allocator_and_driver_say(monkeypatch: pytest.MonkeyPatch) -> None:
    play(
        monkeypatch,
        Card(uuid="GPU-uuid-0", memory=(9 * GIB, 80 * GIB), processes=[(ME + 1, GIB), (ME, 4 * GIB)]),
    )
    cuda = FakeCuda()
    allocator = cuda.allocators[0]
    allocator.allocate(3 * GIB)
    allocator.free(GIB)
    allocator.inactive, allocator.retries, allocator.ooms = 5 * MIB, 2, 1
    memory = sampler(cuda)
    sample = one(memory.sample(1, 9))
    assert sample.device == 0
    assert (sample.allocated_bytes, sample.reserved_bytes, sample.peak_bytes) == (2 * GIB, 3 * GIB, 3 * GIB)
    assert (sample.active_bytes, sample.inactive_split_bytes) == (2 * GIB, 5 * MIB)
    assert (sample.retries, sample.ooms) == (2, 1)
    assert (sample.process_bytes, sample.device_used_bytes) == (4 * GIB, 9 * GIB)
    assert sample.device_total_bytes == 80 * GIB and sample.rss_bytes
    assert {memory.sources[name] for name in OF_TORCH} == {"torch"}
    assert {memory.sources[name] for name in OF_NVML} == {"nvml"}
    assert not memory.missing


def test_peaks_are_those_since_the_sample_before_and_none_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Card(uuid="GPU-uuid-0"))
    cuda = FakeCuda()
    allocator, memory = cuda.allocators[0], sampler(cuda)

    def peak() -> int | None:
        return one(memory.sample(1, 1)).peak_bytes

    allocator.allocate(100)
    allocator.free(40)
    assert peak() == 100  # of the first: until then
    assert peak() == 60  # nothing came since
    allocator.free(10)
    assert peak() == 60  # what there was at the sample before
    allocator.allocate(70)
    allocator.free(50)
    assert peak() == 120 and allocator.peak == 120
    allocator.allocate(20)
    assert peak() is None  # below an older peak, which stays the script's
    allocator.allocate(30)
    assert peak() == 120
    allocator.free(100)
    allocator.reset_peak()
    allocator.allocate(5)
    assert peak() is None  # the script has reset it


def test_each_device_with_a_context_is_sampled_and_no_other_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = [Card(uuid=f"GPU-uuid-{n}", processes=[(ME, (n + 1) * GIB)]) for n in range(3)]
    play(monkeypatch, *cards)
    cuda = FakeCuda(3)
    cuda.active = [True, False, True]
    cuda.allocators[2].allocate(GIB)
    samples = sampler(cuda).sample(1, 1)
    # Also the one of which torch has nothing: a context in the wrong place shows as that.
    assert [(sample.device, sample.reserved_bytes, sample.process_bytes) for sample in samples] == [
        (0, 0, GIB),
        (2, GIB, 3 * GIB),
    ]


@pytest.mark.parametrize(
    ("host_pids", "processes", "expected"),
    [
        (True, [(ME, 4 * GIB)], 4 * GIB),
        (True, [(ME + 1, 4 * GIB)], None),
        (False, [(ME + 1, 4 * GIB)], 4 * GIB),  # alone there, and it has a context
        (False, [(ME, 4 * GIB), (ME + 1, 5 * GIB)], None),  # the same number may be another process
        (False, [(ME + 1, GIB)], None),  # torch alone has reserved more
        (True, [(ME, UNKNOWN_MEMORY)], None),
        (True, [], None),
    ],
)
def test_own_memory_on_the_device_is_known_where_pids_are(
    host_pids: bool, processes: list[tuple[int, int]], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, Card(uuid="GPU-uuid-0", processes=processes))
    cuda = FakeCuda()
    cuda.allocators[0].allocate(3 * GIB)
    memory = sampler(cuda, host_pids)
    assert one(memory.sample(1, 1)).process_bytes == expected
    assert ("memory: process_bytes" in memory.missing) == (expected is None)
    assert ("process_bytes" in memory.sources) == (expected is not None)


def test_what_nvml_lacks_is_null_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [
        Card(uuid="GPU-uuid-0", codes={"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}, processes=[(ME, GIB)]),
        Card(uuid="MIG-uuid-1", processes=[(ME, GIB)]),
        Card(uuid="GPU-uuid-2", codes={"nvmlDeviceGetComputeRunningProcesses_v3": NO_PERMISSION}),
    ]
    play(monkeypatch, *cards)
    memory = sampler(FakeCuda(4))
    samples = memory.sample(1, 1)
    assert [sample.device_used_bytes for sample in samples] == [None, 10, 10, None]
    assert [sample.process_bytes for sample in samples] == [GIB, GIB, None, None]
    assert all(sample.allocated_bytes == 0 for sample in samples)
    assert set(memory.missing) == {
        "memory: device_used_bytes",
        "memory: process_bytes",
        "memory: nvml",  # of the fourth, which NVML does not know
    }


def test_machine_without_nvml_has_the_allocator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", refuse)
    memory = sampler(FakeCuda())
    sample = one(memory.sample(1, 1))
    assert (sample.allocated_bytes, sample.device_used_bytes, sample.process_bytes) == (0, None, None)
    assert "LibraryNotFound" in memory.missing["memory: nvml"]


def test_driver_that_hangs_holds_nothing_up_and_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "WAIT_S", 0.01)
    go, begun, asked = threading.Event(), threading.Event(), []

    class Hanging:
        def nvmlInit(self) -> None:  # noqa: N802
            asked.append(1)
            begun.set()
            go.wait(240)
            raise RuntimeError("at last")

    cuda = FakeCuda()
    driver = DriverMemory(Hanging())
    memory = MemorySampler(DeviceMemory(driver, cuda.devices, lambda: cuda, True))
    for _ in range(3):
        assert one(memory.sample(1, 1)).allocated_bytes == 0
        assert "has not answered" in memory.missing["memory: nvml"]
    assert begun.wait(240) and asked == [1]
    go.set()
    monkeypatch.setattr(samplers, "WAIT_S", 240.0)
    with driver._changed:
        assert driver._changed.wait_for(driver._idle, 240)
    memory.sample(1, 1)
    assert asked == [1, 1]


def test_other_allocators_and_rocm_are_not_asked() -> None:
    cuda = FakeCuda()
    cuda.backend = "cudaMallocAsync"  # asks the driver, which may be in the way of a graph's capture
    memory = sampler(cuda)
    sample = one(memory.sample(1, 1))
    assert (sample.device, sample.allocated_bytes, sample.inactive_split_bytes) == (0, None, None)
    assert "cudaMallocAsync" in memory.missing["memory: torch's allocator"]
    cuda.version.hip = "6.2"
    assert one(memory.sample(1, 1)).device is None
    assert "ROCm" in memory.missing["memory: device"]


class Machine:
    """`/proc` and `/sys` of a machine with 64 GB, of which 16 are in use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 64000000 kB\nMemFree: 100 kB\nMemAvailable: 48000000 kB\n")
        self.write("proc/self/statm", "1000 250 60 1 0 400 0\n")
        self.write("proc/self/smaps_rollup", "head\nPss: 9 kB\nPrivate_Clean: 1 kB\nPrivate_Dirty: 2 kB\n")
        self.cgroup("0::/")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cgroup(self, text: str) -> None:
        self.write("proc/self/cgroup", text + "\n")

    def group(self, path: str, limit: int | str, current: int, cache: tuple[int, int] = (0, 0)) -> None:
        folder = f"sys/fs/cgroup/{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{current}\n")
        stat = f"anon 5\nfile 99\nshmem 7\ninactive_file {cache[0]}\nactive_file {cache[1]}\n"
        self.write(f"{folder}/memory.stat", stat)

    def limits(self) -> tuple[int | None, int | None, str]:
        memory = MemorySampler(DeviceMemory(torch=lambda: None), self.root)
        sample = one(memory.sample(1, 1))
        assert sample.rss_bytes == 250 * os.sysconf("SC_PAGE_SIZE") and sample.uss_bytes == 3072
        return sample.limit_bytes, sample.limit_used_bytes, memory.sources["limit_bytes"]


def test_limit_is_the_tightest_of_those_above_and_reclaimable_cache_is_not_used(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.limits() == (65_536_000_000, 16_384_000_000, "kernel")
    machine.cgroup("0::/pod/rank")
    machine.group("pod/rank", "max", 3 << 30)
    machine.group("pod", 8 << 30, 6 << 30, (GIB, 2 * GIB))
    assert machine.limits() == (8 << 30, 3 << 30, "cgroup")
    machine.group("pod/rank", 4 << 30, 3 << 30, (0, GIB))
    assert machine.limits() == (4 << 30, 2 << 30, "cgroup")
    machine.group("pod/rank", 1 << 62, 3 << 30)
    machine.group("pod", 1 << 62, 6 << 30)
    assert machine.limits()[0] == 65_536_000_000  # a limit above what there is


def test_limits_of_the_older_cgroups_are_read_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.cgroup("9:cpu,cpuacct:/a\n4:memory:/a/b\n0::/")
    folder = "sys/fs/cgroup/memory/a"
    machine.write(f"{folder}/memory.limit_in_bytes", f"{2 << 30}\n")
    machine.write(f"{folder}/memory.usage_in_bytes", f"{GIB}\n")
    machine.write(
        f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {MIB}\ntotal_active_file 0\n"
    )
    machine.write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.limits() == (2 << 30, GIB - MIB, "cgroup")


def test_what_the_kernel_does_not_say_is_null_with_its_reason(tmp_path: Path) -> None:
    Machine(tmp_path)
    (tmp_path / "proc/self/smaps_rollup").unlink()
    (tmp_path / "proc/meminfo").write_text("nonsense\n")
    memory = MemorySampler(DeviceMemory(torch=lambda: None), tmp_path)
    sample = one(memory.sample(1, None))
    assert sample.rss_bytes
    assert (sample.uss_bytes, sample.limit_bytes, sample.limit_used_bytes) == (None, None, None)
    assert {"memory: uss_bytes", "memory: limit_bytes"} == set(memory.missing)
    assert set(memory.sources) == {"rss_bytes"}


def test_uss_is_counted_every_half_minute_and_less_often_where_that_takes_long(tmp_path: Path) -> None:
    machine, now = Machine(tmp_path), [0.0]
    memory = MemorySampler(DeviceMemory(torch=lambda: None), machine.root, lambda: now[0])

    def counted(seconds: int) -> int:
        counted_samples = 0
        for _ in range(seconds):
            counted_samples += one(memory.sample(1, 1)).uss_bytes is not None
            now[0] += 1
        return counted_samples

    assert counted(round(3 * USS_S)) == 3
    slow = memory._host.uss

    def uss() -> int:
        now[0] += 0.25
        return slow()

    memory._host.uss = uss  # type: ignore[method-assign]
    assert counted(1000) == 4  # one of them still at its time


# -- in the session file -------------------------------------------------------------------------


def stored(folder: Path, *batches: list[MemorySample]) -> SessionFile:
    """Return the file after rank 0 has sent these, and rank 1 a sample of its own."""
    aggregator, relay, ranks = aggregation(folder), Relay(), [Rank(0), Rank(1)]
    for samples in batches:
        other = [MemorySample(5, None, None, rss_bytes=1)]
        sources = {"rss_bytes": "kernel"}
        parts = ranks[0].batch(1, memory=samples, memory_from=sources), ranks[1].batch(1, memory=other)
        aggregator.ingest(relay.message(*parts))
        aggregator.commit()
    aggregator.close()
    return SessionFile(folder / "session.sqlite")


def test_of_too_many_samples_those_of_the_same_moments_are_read(tmp_path: Path) -> None:
    ticks = [MemorySample(n * 500_000_000, n, gpu, n) for n in range(60) for gpu in (0, 1)]
    with stored(tmp_path, ticks) as file:
        for most, moments in ((121, range(60)), (61, range(0, 60, 2)), (41, range(0, 60, 3))):
            series, _ = file.memory_samples([1], most=most)
            assert [samples.step.tolist() for samples in series] == [[*moments]] * 2


def test_samples_come_back_by_process_and_device_in_order_of_time(tmp_path: Path) -> None:
    one = [MemorySample(30, 3, device, 10 + device, 1 << 60, ooms=0) for device in (1, 0)]
    two = [MemorySample(20, None, 0, 7, uss_bytes=9), MemorySample(40, 4, 1, 11)]
    with stored(tmp_path, one, two) as file:
        (first, second, other), cursor = file.memory_samples()
        assert [(samples.process, samples.device) for samples in (first, second, other)] == [
            (1, 0),
            (1, 1),
            (2, None),
        ]
        assert (first.t_ns.tolist(), first.step.tolist()) == ([20, 30], [-1, 3])
        assert (second.t_ns.tolist(), second.step.tolist()) == ([30, 40], [3, 4])
        assert set(first.columns) == {"allocated_bytes", "reserved_bytes", "ooms", "uss_bytes"}
        assert first.columns["allocated_bytes"].tolist() == [7, 10]
        assert np.array_equal(first.columns["uss_bytes"], [9, np.nan], equal_nan=True)
        assert np.array_equal(
            first.columns["ooms"], [np.nan, 0], equal_nan=True
        )  # 0 is known, and none is not
        assert set(other.columns) == {"rss_bytes"} and other.t_ns.tolist() == [5, 5]
        assert file.memory_samples(since=cursor) == ([], cursor)
        assert [samples.process for samples in file.memory_samples([2])[0]] == [2]
        assert [samples.t_ns.tolist() for samples in file.memory_samples(since=cursor - 3)[0]] == [
            [20],
            [40],
            [5],
        ]
        (few,) = [samples for samples in file.memory_samples([1], fields=["ooms"])[0] if samples.device == 0]
        assert set(few.columns) == {"ooms"}
        assert [process.memory_from for process in file.processes()] == [{"rss_bytes": "kernel"}, {}]


def test_samples_for_a_page_are_the_newest_or_evenly_of_a_time_and_of_every_device(tmp_path: Path) -> None:
    sent = [[MemorySample(t, t, device, t) for device in (0, 1)] for t in range(20)]
    with stored(tmp_path, *sent) as file:
        newest = file.memory_rows([1], 4)
        assert [(process, samples.t_ns, samples.device) for process, samples in newest] == [
            (1, 18, 0), (1, 18, 1), (1, 19, 0), (1, 19, 1),
        ]  # fmt: skip
        evenly = [(samples.t_ns, samples.device) for _, samples in file.memory_rows([1], 6, (5, 15))]
        assert evenly == [(t, device) for t in (7, 11, 15) for device in (0, 1)]
        assert file.memory_rows([9], 4) == []


def test_batch_that_comes_twice_leaves_one_sample(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0)
    batch = rank.batch(1, memory=[MemorySample(1, 1, None)])
    for _ in range(3):
        aggregator.ingest(relay.message(batch))
    aggregator.commit()
    aggregator.close()
    with SessionFile(tmp_path / "session.sqlite") as file:
        assert [len(samples.t_ns) for samples in file.memory_samples()[0]] == [1]


@pytest.mark.parametrize("value", [1.5, "12", b"12", -2, "x" * 100, float("inf")])
@pytest.mark.parametrize("column", ["process", "t_ns", "device", "step", "rss_bytes"])
def test_values_that_nobody_sampled_are_refused(tmp_path: Path, column: str, value: Any) -> None:
    with stored(tmp_path, [MemorySample(1, 1, None, rss_bytes=5)]):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "session.sqlite")) as changed, changed:
        changed.execute(f"UPDATE memory_sample SET {column} = ? WHERE id = 1", (value,))
    with SessionFile(tmp_path / "session.sqlite") as file:
        if (column, value) in [("t_ns", -2), ("process", -2), ("process", "12")]:  # any time; SQLite's own 12
            file.memory_samples()
            return
        with pytest.raises(SessionFileError, match="damaged"):
            file.memory_samples()
