"""
Gives ranks to processes of Ray that have none: those of one run are numbered as they arrive.

Detects that a run goes on with another attempt: a restart or a resize, and what it cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from traceml_ray import text
from traceml_ray.identity import RankIdentity
from traceml_ray.store.nodes import node_key
from traceml_ray.store.rank_processes import NUMBERED, RankProcess, generations
from traceml_ray.store.runs import by_run
from traceml_ray.wire import messages as wire


class Groups:
    """
    One group for each run; `processes` are those numbered before the aggregator was restarted. Nodes, and the
    ranks of a node, are numbered in the order of their arrival, too. Once all processes of a group have
    ended, the next one begins another group, from rank 0.
    """

    def __init__(self, processes: Iterable[RankProcess]) -> None:
        self._groups: dict[str, _Group] = {}
        for run, known in by_run(processes).items():
            for process in generations(known)[-1]:
                if process.identity is not None and process.identity.source == NUMBERED:
                    self._groups.setdefault(run, _Group()).add(process, process.identity)

    def number(self, process: RankProcess, identity: RankIdentity) -> RankIdentity:
        """
        Return `identity` with the rank of this process: the one it has, else that of an actor of the same
        name that has ended, else the next. `identity.node_id` is known where it can be.
        """
        group, before = self._groups.get(identity.job_id), process.identity
        if before is not None and (before.source, before.job_id) != (NUMBERED, identity.job_id):
            before = None
        if group is None or (group.over and before is None):
            group = self._groups[identity.job_id] = _Group()
        return group.add_next(process, identity) if before is None else group.numbered(identity, before)

    def grown(self) -> Iterable[tuple[RankProcess, RankIdentity]]:
        """Yield the rank processes whose identity is out of date since their group grew, and the new one."""
        for group in self._groups.values():
            yield from group.grown()


class _Group:
    def __init__(self) -> None:
        self._size = 0
        self._processes: list[RankProcess] = []
        self._actors: dict[str, RankProcess] = {}
        self._nodes: dict[str, tuple[int, int]] = {}
        """Number of each node, and how many ranks it has had."""
        self._changed = False

    @property
    def over(self) -> bool:
        """Whether all have ended."""
        return all(process.ended for process in self._processes)

    def add(self, process: RankProcess, identity: RankIdentity) -> None:
        """Take in a rank process that is numbered; `identity` is, or will be, that of the rank process."""
        self._size = max(self._size, identity.global_rank + 1)
        node, ranks = self._nodes.get(identity.node_id or identity.hostname, (identity.node_rank, 0))
        self._nodes[identity.node_id or identity.hostname] = node, max(ranks, identity.local_rank + 1)
        self._processes.append(process)
        if identity.name:
            self._actors[identity.name] = process
        self._changed = True

    def add_next(self, process: RankProcess, identity: RankIdentity) -> RankIdentity:
        """Take in a rank process that has no number yet; return its identity."""
        key = identity.node_id or identity.hostname
        node, local = self._nodes.get(key, (len(self._nodes), 0))
        rank = self._size
        old = self._actors.get(identity.name)
        if old is not None and old.ended and old.identity is not None:
            rank = old.identity.global_rank
            local = old.identity.local_rank if node_key(old) == key else local
        numbers = msgspec.structs.replace(identity, global_rank=rank, node_rank=node, local_rank=local)
        self.add(process, numbers)
        return self.numbered(identity, numbers)

    def grown(self) -> Iterable[tuple[RankProcess, RankIdentity]]:
        if not self._changed:
            return
        self._changed = False
        for process in self._processes:
            before = process.identity
            if before is not None and before.source == NUMBERED:
                now = self.numbered(before, before)
                if now != before:
                    yield process, now

    def numbered(self, identity: RankIdentity, numbers: RankIdentity) -> RankIdentity:
        """Return `identity` with the ranks of `numbers`, and the sizes that the group has now."""
        _, here = self._nodes.get(identity.node_id or identity.hostname, (0, 0))
        return msgspec.structs.replace(
            identity,
            global_rank=numbers.global_rank,
            node_rank=numbers.node_rank,
            local_rank=numbers.local_rank,
            world_size=max(self._size, numbers.global_rank + 1),
            local_world_size=max(here, numbers.local_rank + 1),
            nnodes=max(len(self._nodes), numbers.node_rank + 1),
        )


@dataclass
class _Now:
    """The last attempt of a run that has rows."""

    attempt: int
    world_size: int
    last_rows_ns: int


class AttemptTracker:
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
        identity, last_rows_ns = process.identity, process.last_rows_ns
        if identity is None or last_rows_ns is None:
            return None
        now = self._runs.get(identity.job_id)
        if now is not None and identity.attempt <= now.attempt:
            if identity.attempt == now.attempt:
                now.last_rows_ns, now.world_size = max(last_rows_ns, now.last_rows_ns), identity.world_size
            return None
        self._runs[identity.job_id] = _Now(identity.attempt, identity.world_size, last_rows_ns)
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
