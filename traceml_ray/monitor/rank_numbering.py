"""Gives ranks to processes of Ray that have none: those of one run are numbered as they arrive."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from traceml_ray.identity import RankIdentity
from traceml_ray.store.nodes import node_key
from traceml_ray.store.rank_processes import NUMBERED, RankProcess, generations
from traceml_ray.store.runs import by_run


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
        """By node: its number, and how many ranks have been there."""
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
