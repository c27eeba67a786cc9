"""The cores that this process may use: their groups, and how long its threads wait for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from traceml_ray.signals.check.kernel import thread_ns

MOST_GROUPS = 8
"""Largest number of groups that the cores are divided into, if caches or NUMA nodes do not divide them."""
_MOST_CACHES = 16
_TASKS = Path("/proc/self/task")


def allowed() -> list[int]:
    """Return the cores that this process may use: affinity and cpuset."""
    return sorted(os.sched_getaffinity(0))


def cpu_name(root: Path = Path("/")) -> str:
    """Return the model of the CPU; "" if it is not known."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return " ".join(value.split())
    return ""


def numbers(listed: str) -> list[int]:
    """Return the numbers of a list such as "0-3,8". Raises ValueError."""
    parts = [part.partition("-") for part in listed.strip().split(",") if part]
    return [number for first, _, last in parts for number in range(int(first), int(last or first) + 1)]


def numa_nodes(cores: Sequence[int], root: Path = Path("/")) -> list[list[int]]:
    """Return the cores by NUMA node. One group if the kernel does not say."""
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
    return _divided(cores, nodes)


def groups(cores: Sequence[int], root: Path = Path("/")) -> list[list[int]]:
    """
    Return the cores in groups that should be alike: those that share a last-level cache, or a NUMA node if
    there are too many caches. If all cores are one group, it is divided into at most MOST_GROUPS equal ones.
    """
    cpus = root / "sys/devices/system/cpu"
    shared = [cpus / f"cpu{core}/cache/index3/shared_cpu_list" for core in cores]
    by_cache = _divided(cores, shared)
    if 1 < len(by_cache) <= _MOST_CACHES:
        return by_cache
    by_node = numa_nodes(cores, root)
    if len(by_node) > 1:
        return by_node
    physical = _divided(cores, [cpus / f"cpu{core}/topology/thread_siblings_list" for core in cores])
    return _equal_parts(physical)


def _divided(cores: Sequence[int], lists: Iterable[Path]) -> list[list[int]]:
    """Return the cores, divided as files say that list some of them. One group if they say nothing."""
    divided: dict[int, list[int]] = {}
    left = set(cores)
    for file in lists:
        with contextlib.suppress(OSError, ValueError):
            some = sorted(left.intersection(numbers(file.read_text())))
            if some:
                divided[some[0]] = some
                left.difference_update(some)
    if left:
        divided[min(left)] = sorted(left)
    return [divided[first] for first in sorted(divided)]


def _equal_parts(physical: Sequence[list[int]]) -> list[list[int]]:
    """Return as many groups of equally many physical cores as possible, at most MOST_GROUPS."""
    count = max(parts for parts in range(1, MOST_GROUPS + 1) if len(physical) % parts == 0)
    size = len(physical) // count
    parts = [physical[start : start + size] for start in range(0, len(physical), size)]
    return [sorted(core for one in part for core in one) for part in parts]


@contextlib.contextmanager
def running_on(cores: Sequence[int]) -> Iterator[None]:
    """Have all threads of this process run on `cores`, and afterwards where they could before."""
    before = {thread: _affinity(thread) for thread in _threads()}
    _set_affinity(before, cores)
    try:
        yield
    finally:
        usual = next((one for one in before.values() if one), set(cores))
        for thread in _threads():  # also those that were started meanwhile
            _set_affinity([thread], before.get(thread) or usual)


def spread(cores: Sequence[int], work: Callable[[], object]) -> None:
    """
    Do some work, and move the threads that did it to a core each. They may have been together on one core
    before; if other processes keep the cores busy, the kernel leaves them there for long.
    """
    before = _scheduled(0)
    work()
    ran = {thread: ns - before.get(thread, 0) for thread, ns in _scheduled(0).items()}
    workers = sorted(ran, key=lambda thread: -ran[thread])[: len(cores)]
    for core, thread in zip(cores, workers, strict=False):
        _set_affinity([thread], [core])
    _set_affinity(workers, cores)


def _affinity(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except OSError:
        return set()


def _set_affinity(threads: Iterable[int], cores: Iterable[int]) -> None:
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores)


def _threads() -> list[int]:
    return [int(thread.name) for thread in _TASKS.iterdir()]


class Waits:
    """How long the threads of this process waited for a core, although they were ready to run."""

    def __init__(self) -> None:
        self._before = self._waited()

    def restart(self) -> None:
        """Begin to count."""
        self._before = self._waited()

    def longest_ns(self) -> int | None:
        """Return the longest wait of a thread since then, in ns. None if the kernel does not say."""
        now = self._waited()
        if now is None or self._before is None:
            return None
        return max((ns - self._before.get(thread, 0) for thread, ns in now.items()), default=0)

    @staticmethod
    def _waited() -> dict[int, int] | None:
        return _scheduled(1) or None


def _scheduled(column: int) -> dict[int, int]:
    """
    Return for how long each thread of this process ran (`column` 0) or waited for a core (1), in ns. Empty if
    the kernel does not say.
    """
    times = {}
    try:
        for thread in _TASKS.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                times[int(thread.name)] = thread_ns(thread)[column]
    except (OSError, ValueError):
        return {}
    return times
