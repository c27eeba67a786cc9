"""Detects that a run goes on with another attempt: a restart or a resize, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from traceml_ray import text, wire
from traceml_ray.store.rank_processes import RankProcess


@dataclass
class _Now:
    """The last attempt of a run that has rows."""

    attempt: int
    world_size: int
    last_rows_ns: int


class Restarts:
    """`processes` are those known before, where the aggregator was restarted."""

    def __init__(self, processes: Iterable[RankProcess]) -> None:
        self._runs: dict[str, _Now] = {}
        for process in sorted(processes, key=lambda process: process.last_rows_ns or 0):
            if process.last_rows_ns is not None:
                self.check(process)

    def check(self, process: RankProcess) -> wire.Event | None:
        """
        Check a rank process that has rows; return an event when they are the first of a new attempt.

        `seconds` are between the last report with rows of the attempt before and the first of this
        one, as the aggregator got them: exact to about one interval of reporting.
        """
        identity, at = process.identity, process.last_rows_ns
        if identity is None or at is None:
            return None
        now = self._runs.get(identity.job_id)
        if now is not None and identity.attempt <= now.attempt:
            if identity.attempt == now.attempt:
                now.last_rows_ns, now.world_size = max(at, now.last_rows_ns), identity.world_size
            return None
        self._runs[identity.job_id] = _Now(identity.attempt, identity.world_size, at)
        return None if now is None else _event(now, self._runs[identity.job_id])


def _event(before: _Now, after: _Now) -> wire.Event:
    seconds = (after.last_rows_ns - before.last_rows_ns) / 1e9
    size = text.count(after.world_size, "rank")
    if before.world_size != after.world_size:
        size += f" ({before.world_size} before)"
    return wire.Event(
        "restart",
        after.last_rows_ns,
        message=f"{text.age(seconds)} (to about 1 s) without steps; then attempt {after.attempt} on {size}",
        data={
            "attempt": after.attempt,
            "seconds": seconds,
            "world_size_before": before.world_size,
            "world_size_after": after.world_size,
        },
    )
