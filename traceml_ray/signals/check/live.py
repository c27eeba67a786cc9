"""
Judges the checks of the nodes of live runs, so that the verdict of a running job says what they say. The
newest checks of each process are kept encoded, which needs a tenth of the memory.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from traceml_ray.signals.check.judge import CheckResult
from traceml_ray.signals.check.records import CHECKS, DURING, Checked
from traceml_ray.signals.check.view import GetCheck, age, of_ranks
from traceml_ray.signals.live import LiveSignal, Ranks
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.results import EventRow
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire.codec import ready

MAX_BYTES = 32 << 20
"""Largest size of the checks that are kept. Beyond it, those that arrived first are forgotten."""
SETTLED_S, LATEST_S = 2.0, 60.0
"""
Checks are judged once none has arrived for so long (those of all nodes arrive together), or so long after the
first one.
"""


_Key = tuple[int, bool]
"""A process, and whether the check was made during training."""


class _Judged(NamedTuple):
    """What the last result of a run was made of."""

    arrived: int
    """Number of checks that had arrived."""
    ranks: Mapping[int, RankProcess]
    labels: Mapping[int, str]


class LiveCheck(LiveSignal):
    """
    See `LiveSignal`. It judges only what has changed: new checks, or other processes of the ranks.

    Args:
        lock: the writer's lock.
        clock: monotonic seconds.
    """

    name = "check"
    question = GetCheck
    kind = CHECKS

    def __init__(self, lock: threading.Lock, clock: Callable[[], float] = time.monotonic) -> None:
        self._writers, self._clock = lock, clock
        self._kept: dict[_Key, bytes] = {}
        self._ages: dict[_Key, tuple[int, int]] = {}
        self._bytes, self._arrived = 0, 0
        self._waiting: tuple[float, float] | None = None
        """When the first and the last check have arrived that are not judged yet."""
        self._judged: dict[str, _Judged] = {}
        self._results: dict[str, CheckResult] = {}

    def add(self, process: int, record: Checked) -> None:
        """Add a check. Of each process the newest is kept, and the newest that was made during training."""
        key = process, record.kind == DURING
        if age(record) < self._ages.get(key, age(record)):
            return
        self._forget(key)
        self._kept[key], self._ages[key] = msgspec.msgpack.encode(record), age(record)
        self._bytes += len(self._kept[key])
        while self._bytes > MAX_BYTES:
            self._forget(next(iter(self._kept)))
        self._arrived += 1
        now = self._clock()
        self._waiting = self._waiting[0] if self._waiting else now, now

    @property
    def nbytes(self) -> int:
        """Return the size of the checks that are kept, in bytes."""
        return self._bytes

    def resume(
        self, run: str, file: SessionFile, processes: Collection[int], events: Sequence[EventRow]
    ) -> None:
        """Load the stored checks of a run."""
        for process, records in file.records_of(CHECKS, processes).items():
            for record in records:
                self.add(process, record)
        self._waiting = None  # no more of them follow

    def judge(self, runs: Mapping[str, Ranks]) -> Collection[str]:
        """Judge the runs whose checks or ranks have changed, once no more checks arrive."""
        for run in self._judged.keys() - runs.keys():
            del self._judged[run]
            self._results.pop(run, None)
        with self._writers:
            first_s, last_s = self._waiting or (-math.inf, -math.inf)
            if not self._kept or self._clock() < min(last_s + SETTLED_S, first_s + LATEST_S):
                return ()
            self._waiting, arrived = None, self._arrived
        return [run for run, ranks in runs.items() if self._is_new(run, ranks, arrived)]

    def latest(self, run: str) -> CheckResult | None:
        """Return the last result for a run. None: nothing was checked, or it is not judged yet."""
        return self._results.get(run)

    def _is_new(self, run: str, ranks: Ranks, arrived: int) -> bool:
        """Judge a run if its checks or ranks have changed. Return whether it was judged."""
        before = self._judged.get(run)
        if before is not None and before.arrived == arrived and before.ranks is ranks.current:
            return False
        processes = [process.id for process in ranks.current.values()]
        labels = {process: ranks.labels[process] for process in processes if process in ranks.labels}
        self._judged[run] = _Judged(arrived, ranks.current, labels)
        if before is not None and before.arrived == arrived and before.labels == labels:
            return False
        with self._writers:
            kept = [(process, data) for (process, _), data in self._kept.items() if process in labels]
        checks: dict[int, list[Checked]] = {}
        for process, data in kept:
            checks.setdefault(process, []).append(msgspec.msgpack.decode(data, type=ready(Checked)))
        if not checks:
            self._results.pop(run, None)
            return False
        self._results[run] = of_ranks(checks, ranks.current, labels)
        return True

    def _forget(self, key: _Key) -> None:
        self._bytes -= len(self._kept.pop(key, b""))
        self._ages.pop(key, None)
