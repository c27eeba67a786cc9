"""Gives ranks to processes of Ray that have none: those of one run are numbered as they arrive."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from traceml_ray.identity import RankIdentity
from traceml_ray.store.nodes import node_key
from traceml_ray.store.runs import by_run
from traceml_ray.store.streams import NUMBERED, Stream, generations

SOURCE = NUMBERED


class Groups:
    """
    One group for each run; `streams` are those that have been numbered before (the aggregator was
    restarted). Nodes are numbered as they appear, too, and the ranks on a node. Where all of a group have
    ended, who comes next begins another, from rank 0.
    """

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._groups: dict[str, _Group] = {}
        for run, known in by_run(streams).items():
            for stream in generations(known)[-1]:
                if stream.identity is not None and stream.identity.source == SOURCE:
                    self._groups.setdefault(run, _Group()).add(stream, stream.identity)

    def number(self, stream: Stream, identity: RankIdentity) -> RankIdentity:
        """
        Return `identity` with the rank of this process: the one it has, else that of an actor of the same
        name that has ended, else the next. `identity.node_id` is known where it can be.
        """
        group, before = self._groups.get(identity.job_id), stream.identity
        known = before is not None and (before.source, before.job_id) == (SOURCE, identity.job_id)
        if group is None or (group.over and not known):
            group = self._groups[identity.job_id] = _Group()
        return group.number(stream, identity)

    def grown(self) -> Iterable[tuple[Stream, RankIdentity]]:
        """Yield the streams whose identity is out of date since their group has grown, with the new one."""
        for group in self._groups.values():
            yield from group.grown()


class _Group:
    def __init__(self) -> None:
        self._size = 0
        self._streams: list[Stream] = []
        self._actors: dict[str, Stream] = {}
        self._nodes: dict[str, tuple[int, int]] = {}
        """By node: its number, and how many ranks have been there."""
        self._changed = False

    @property
    def over(self) -> bool:
        """Whether all have ended."""
        return all(stream.ended for stream in self._streams)

    def add(self, stream: Stream, identity: RankIdentity) -> None:
        """Take in a stream that is numbered; `identity` is, or will be, that of the stream."""
        self._size = max(self._size, identity.global_rank + 1)
        node, ranks = self._nodes.get(identity.node_id or identity.hostname, (identity.node_rank, 0))
        self._nodes[identity.node_id or identity.hostname] = node, max(ranks, identity.local_rank + 1)
        self._streams.append(stream)
        if identity.name:
            self._actors[identity.name] = stream
        self._changed = True

    def number(self, stream: Stream, identity: RankIdentity) -> RankIdentity:
        before = stream.identity
        if before is not None and (before.source, before.job_id) == (SOURCE, identity.job_id):
            return self._sized(identity, before.global_rank, before.node_rank, before.local_rank)
        key = identity.node_id or identity.hostname
        node, local = self._nodes.get(key, (len(self._nodes), 0))
        rank = self._size
        old = self._actors.get(identity.name)
        if old is not None and old.ended and old.identity is not None:
            rank = old.identity.global_rank
            local = old.identity.local_rank if node_key(old) == key else local
        self.add(stream, self._sized(identity, rank, node, local))
        return self._sized(identity, rank, node, local)

    def grown(self) -> Iterable[tuple[Stream, RankIdentity]]:
        if not self._changed:
            return
        self._changed = False
        for stream in self._streams:
            now = stream.identity
            if now is not None and now.source == SOURCE:
                sized = self._sized(now, now.global_rank, now.node_rank, now.local_rank)
                if sized != now:
                    yield stream, sized

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
