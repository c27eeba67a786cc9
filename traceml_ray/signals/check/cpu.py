"""Probes of the CPU: matrix multiplication on all cores and on groups of them, and memory of the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from traceml_ray import text
from traceml_ray.signals.check import cores as machine
from traceml_ray.signals.check.probe import Probe, ProbeError, ProbeSubject, ProbeTrial
from traceml_ray.signals.check.state import CpuTime

_SIDE, _MOST_SIDE = 512, 4096
_CACHES = 4
"""How many times larger than the last-level caches the copied memory is."""
_LEAST_BYTES, _MOST_BYTES = 64 << 20, 1 << 30
_OF_FREE = 0.1
"""Largest share of the free memory that is used."""


class CpuProbe:
    """
    A piece of work, done again and again on some cores.

    What other processes took of the cores is not counted: the work is divided by the time in which its
    threads could run. A CPU quota is not another process: what it withholds makes the work slower.

    Args:
        subject: what is measured.
        cores: where it runs.
        work: makes the work and returns its size, in the subject's unit times s, and the function that does
            it once. It runs on these cores.
        cpu_time: what a CPU quota withholds.
        weight: its share of the time of a round.
    """

    def __init__(
        self,
        subject: ProbeSubject,
        cores: Sequence[int],
        work: Callable[[int], tuple[float, Callable[[], object]]],
        cpu_time: CpuTime,
        weight: float = 1.0,
    ) -> None:
        self.weight = weight
        self.subjects: Sequence[ProbeSubject] = [subject]
        self._cores, self._cpu_time, self._waits = cores, cpu_time, machine.Waits()
        with machine.running_on(cores), _threads(len(cores)):
            self._amount, self._work = work(len(cores))
            self._work()  # touches its memory, and starts its threads

    def trial(self, seconds: float) -> list[ProbeTrial]:
        """Measure for about `seconds`."""
        spent = lost = done = 0
        known = True
        with machine.running_on(self._cores), _threads(len(self._cores)):
            machine.spread(self._cores, self._work)
            withheld = self._cpu_time.withheld_ns()
            end = time.perf_counter_ns() + int(seconds * 1e9)
            while time.perf_counter_ns() < end or not done:
                self._waits.restart()
                began = time.perf_counter_ns()
                self._work()
                took = time.perf_counter_ns() - began
                waited = self._waits.longest_ns()
                known, spent, done = known and waited is not None, spent + took, done + 1
                lost += min(waited or 0, took)
        lost = max(0, lost - max(0, (self._cpu_time.withheld_ns() or 0) - (withheld or 0)))
        lost = min(lost, spent - 1)
        return [ProbeTrial(done * self._amount / (spent - lost) * 1e9, lost / spent if known else None)]

    def close(self) -> None:
        """Release the memory."""
        self._work = lambda: None


class _threads:  # noqa: N801
    """Have torch compute with so many threads, and afterwards with as many as before."""

    def __init__(self, count: int) -> None:
        import torch

        self._torch, self._count = torch, count

    def __enter__(self) -> None:
        self._before = self._torch.get_num_threads()
        self._torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        self._torch.set_num_threads(self._before)


def _multiplication(threads: int) -> tuple[float, Callable[[], object]]:
    import torch

    side = min(_MOST_SIDE, round(_SIDE * threads**0.5 / 64) * 64)
    left, right, result = (torch.full((side, side), 0.5) for _ in range(3))
    return 2.0 * side**3, lambda: torch.mm(left, right, out=result)


def _copy(size: int) -> tuple[float, Callable[[], object]]:
    import torch

    source, target = (torch.ones(size // 4) for _ in range(2))
    return 2.0 * size, lambda: target.copy_(source)  # it is read and written


def cpu_probes(root: Path, only: Any, cpu_time: CpuTime, errors: list[str]) -> Iterator[Probe]:
    """Yield the probes of the CPU. What cannot be measured is added to `errors`."""
    every, name = machine.allowed(), machine.cpu_name(root)

    def like(cores: Sequence[int]) -> str:
        return f"{name or 'CPU'}, {text.count(len(cores), 'core')}"

    if "cpu_matmul" in only:
        whole = ProbeSubject("cpu_matmul", "CPU", "FLOP/s", like(every))
        yield CpuProbe(whole, every, _multiplication, cpu_time, 2.0)
    parts = machine.groups(every, root)
    if "core_matmul" in only and len(parts) > 1:
        for cores in parts:
            subject = ProbeSubject("core_matmul", _cores(cores), "FLOP/s", like(cores))
            yield CpuProbe(subject, cores, _multiplication, cpu_time, 2.0 / len(parts))
    if "host_memory" in only:
        nodes = machine.numa_nodes(every, root)
        for number, cores in enumerate(nodes):
            where = f"memory of NUMA node {number}" if len(nodes) > 1 else "memory"
            try:
                size = _memory_bytes(root, cores)
            except ProbeError as error:
                errors.append(str(error))
                return
            subject = ProbeSubject("host_memory", where, "B/s", like(cores))
            yield CpuProbe(subject, cores, lambda _, size=size: _copy(size), cpu_time)  # type: ignore[misc]


def _cores(cores: Sequence[int]) -> str:
    return f"{'core' if len(cores) == 1 else 'cores'} {text.ranges(cores)}"


def _memory_bytes(root: Path, cores: Sequence[int]) -> int:
    """Return how many bytes to copy so that caches do not matter. Raises ProbeError."""
    size = max(_LEAST_BYTES, min(_MOST_BYTES, _CACHES * _cache_bytes(root, cores)))
    free = _free_bytes()
    if 2 * size > _OF_FREE * free:
        raise ProbeError(
            f"The memory of the host was not measured: that takes {text.size(2 * size)}, and only "
            f"{text.size(free)} are free."
        )
    return size


def _cache_bytes(root: Path, cores: Sequence[int]) -> int:
    """Return the size of the last-level caches of some cores; 0 if it is not known."""
    sizes: dict[str, int] = {}
    for core in cores:
        cache = root / f"sys/devices/system/cpu/cpu{core}/cache/index3"
        try:
            size = (cache / "size").read_text().strip()
            units = {"K": 1 << 10, "M": 1 << 20}
            sizes[(cache / "shared_cpu_list").read_text()] = int(size[:-1]) * units[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return sum(sizes.values())


def _free_bytes() -> int:
    """Return how much memory this process may still use: of the machine, and of its container."""
    free = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return max(0, free)
