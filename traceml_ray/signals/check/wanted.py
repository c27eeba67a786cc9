"""
How much of the CPU time that the ranks of a node want they get, as the kernel counts it: it costs the ranks
nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from traceml_ray.signals.check.cores import allowed
from traceml_ray.signals.check.kernel import BUSY, STEAL, core_ticks, thread_ns

_MOST_THREADS = 3_000
"""
Largest number of threads of all ranks of a node that are read. 11 readings of each take half a second of CPU
time, of the two that the check has.
"""
_LEAST = 0.01
"""Share of a trial that the threads of a rank must be ready to run, or the rank has no value."""


class CoreTimes(NamedTuple):
    """Time of some cores together since the machine was started, in s."""

    busy: float
    stolen: float
    """Time that the hypervisor gave to other machines."""


@dataclass
class CpuCounters:
    """Counters of one moment."""

    ranks: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """By rank: thread → how long it ran, and how long it waited for a core while it was ready to run (ns)."""
    cores: CoreTimes | None = None
    """None: not known."""
    complete: bool = True
    """Whether all threads of the ranks were read. There may be too many."""


class CpuDemand(NamedTuple):
    """What two readings say together."""

    got: dict[int, float]
    """By rank: share (0..1) of the time in which its threads were ready to run in which they ran."""
    unstolen: float | None
    """Share (0..1) of the time in which the cores had work that the hypervisor left them."""
    others_s: float | None
    """CPU time of processes that belong to no rank, in s. None: not known."""


class RankThreads:
    """
    Reads the counters of the ranks of a node, their children included (they load data).

    Args:
        pids: process of each rank.
        root: the folder that contains `proc`.
    """

    def __init__(self, pids: dict[int, int], root: Path = Path("/")) -> None:
        self._pids, self._root, self._proc = pids, root, root / "proc"
        self._families: dict[int, list[int]] = {}
        self.cores = cores_of(pids.values())
        """The cores that the ranks may use."""

    def look_for_children(self) -> None:
        """Find the children of the ranks."""
        children: dict[int, list[int]] = {}
        for folder in self._proc.iterdir():
            if folder.name.isdigit():
                try:
                    parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
                except (OSError, ValueError, IndexError):
                    continue  # it has ended
                children.setdefault(parent, []).append(int(folder.name))
        for rank, pid in self._pids.items():
            family, new = [pid], [pid]
            while new:
                new = [child for parent in new for child in children.get(parent, ())]
                family += new
            self._families[rank] = family

    def read(self) -> CpuCounters:
        """Read the counters."""
        reading = CpuCounters(cores=core_times(self.cores, self._root))
        for rank, pid in self._pids.items():
            threads: dict[int, tuple[int, int]] = {}
            for process in self._families.get(rank, [pid]):
                reading.complete &= self._add(process, threads)
            reading.ranks[rank] = threads
        return reading

    def _add(self, process: int, threads: dict[int, tuple[int, int]]) -> bool:
        """Add the threads of a process. Return False if it has too many."""
        try:
            folders = [*(self._proc / str(process) / "task").iterdir()]
        except OSError:
            return True  # it has ended
        left = _MOST_THREADS // len(self._pids) - len(threads)
        for folder in folders[:left]:
            with contextlib.suppress(OSError, ValueError):  # it has ended, or this kernel does not count
                threads[int(folder.name)] = thread_ns(folder)
        return len(folders) <= left


def core_times(cores: Iterable[int], root: Path = Path("/")) -> CoreTimes | None:
    """Return the time of some cores together so far. None: not known."""
    ticks, in_s = core_ticks(cores, root), os.sysconf("SC_CLK_TCK")
    if ticks is None:
        return None
    return CoreTimes(sum(ticks[column] for column in BUSY) / in_s, ticks[STEAL] / in_s)


def cores_of(pids: Iterable[int]) -> list[int]:
    """Return the cores that any of some processes may use. Those of this process if none can be read."""
    cores = set[int]()
    for pid in pids:
        try:
            cores |= os.sched_getaffinity(pid)
        except OSError:
            continue
    return sorted(cores) or allowed()


def between(before: CpuCounters, after: CpuCounters, seconds: float) -> CpuDemand:
    """Return what happened between two readings that are `seconds` apart."""
    got, of_ranks = dict[int, float](), 0
    for rank, threads in after.ranks.items():
        known = before.ranks.get(rank, {})
        ran, waited = _sum(
            (ran - known[thread][0], waited - known[thread][1])
            for thread, (ran, waited) in threads.items()
            if thread in known  # a thread that is new may have begun long before it was seen
        )
        of_ranks += ran
        if ran > 0 and ran + waited >= _LEAST * seconds * 1e9:
            got[rank] = ran / (ran + waited)
    if before.cores is None or after.cores is None:
        return CpuDemand(got, None, None)
    busy, stolen = after.cores.busy - before.cores.busy, after.cores.stolen - before.cores.stolen
    unstolen = busy / (busy + stolen) if busy > 0 and stolen >= 0 else None
    others_s = max(0.0, busy - of_ranks / 1e9) if before.complete and after.complete else None
    return CpuDemand(got, unstolen, others_s)


def _sum(pairs: Iterable[tuple[int, int]]) -> Sequence[int]:
    ran = waited = 0
    for one, other in pairs:
        ran, waited = ran + max(0, one), waited + max(0, other)
    return ran, waited
