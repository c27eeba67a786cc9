"""Gives ranks to processes of Ray that have none: those of one run are numbered as they arrive."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from traceml_ray.identity import RankIdentity
from traceml_ray.store.nodes import node_key
from traceml_ray.store.rank_processes import NUMBERED, RankProcess, generations
from traceml_ray.store.runs import by_run

SOURCE = NUMBERED


class Groups:
    """
    One group for each run; `processes` are those that have been numbered before (the aggregator was
    restarted). Nodes are numbered as they appear, too, and the ranks on a node. Where all of a group have
    ended, who comes next begins another, from rank 0.
    """

    def __init__(self, processes: Iterable[RankProcess]) -> None:
        self._groups: dict[str, _Group] = {}
        for run, known in by_run(processes).items():
            for process in generations(known)[-1]:
                if process.identity is not None and process.identity.source == SOURCE:
                    self._groups.setdefault(run, _Group()).add(process, process.identity)

    def number(self, process: RankProcess, identity: RankIdentity) -> RankIdentity:
        """
        Return `identity` with the rank of this process: the one it has, else that of an actor of the same
        name that has ended, else the next. `identity.node_id` is known where it can be.
        """
        group, before = self._groups.get(identity.job_id), process.identity
        known = before is not None and (before.source, before.job_id) == (SOURCE, identity.job_id)
        if group is None or (group.over and not known):
            group = self._groups[identity.job_id] = _Group()
        return group.number(process, identity)

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

    def number(self, process: RankProcess, identity: RankIdentity) -> RankIdentity:
        before = process.identity
        if before is not None and (before.source, before.job_id) == (SOURCE, identity.job_id):
            return self._sized(identity, before.global_rank, before.node_rank, before.local_rank)
        key = identity.node_id or identity.hostname
        node, local = self._nodes.get(key, (len(self._nodes), 0))
        rank = self._size
        old = self._actors.get(identity.name)
        if old is not None and old.ended and old.identity is not None:
            rank = old.identity.global_rank
            local = old.identity.local_rank if node_key(old) == key else local
        self.add(process, self._sized(identity, rank, node, local))
        return self._sized(identity, rank, node, local)

    def grown(self) -> Iterable[tuple[RankProcess, RankIdentity]]:
        if not self._changed:
            return
        self._changed = False
        for process in self._processes:
            now = process.identity
            if now is not None and now.source == SOURCE:
                sized = self._sized(now, now.global_rank, now.node_rank, now.local_rank)
                if sized != now:
                    yield process, sized

    def _sized(self, identity: RankIdentity, rank: int, node: int, local: int) -> RankIdentity:
        """Return `identity` with these ranks, and the sizes that the group has now."""
        _, here = self._nodes.get(identity.node_id or identity.hostname, (node, 0))
        return msgspec.structs.replace(
            identity,
            global_rank=rank,
            node_rank=node,
            local_rank=local,
            world_size=max(self._size, rank + 1),
            local_world_size=max(here, local + 1),
            nnodes=max(len(self._nodes), node + 1),
        )
