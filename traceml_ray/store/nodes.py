"""What is known of one node of the cluster, and the labels of nodes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from traceml_ray.store.rank_processes import RankProcess


@dataclass
class Node:
    """A machine for as long as it is in the cluster: one that comes back is another node."""

    node_id: str
    hostname: str
    address: str
    last_seen_ns: int | None = None
    """When the node's relay last reported, in ns."""
    lost_ns: int | None = None
    """When the node was found to have left the cluster, in ns; None: it is there."""
    clock_offset_ns: int | None = None
    """Offset to add to times of the node's clock to get the aggregator's, in ns; None: not known."""
    clock_bound_ns: int | None = None
    """Largest error of that offset, in ns."""
    errors: dict[str, int] = field(default_factory=dict)
    """Errors that the node's relay swallowed, by place."""

    @property
    def correction_ns(self) -> int:
        """What to add to a time of its clock: the offset, or 0 where the two are not known to differ."""
        if self.clock_offset_ns is None or abs(self.clock_offset_ns) <= (self.clock_bound_ns or 0):
            return 0
        return self.clock_offset_ns

    def to_row(self) -> tuple[Any, ...]:
        """Return this as a row of `COLUMNS`."""
        return *_plain(self), json.dumps(self.errors) if self.errors else "{}"

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Node:
        """Return the node of a row of `COLUMNS`."""
        node = cls(*row)
        node.errors = json.loads(row[-1])
        return node


COLUMNS = tuple(column.name for column in fields(Node))
_plain = attrgetter(*COLUMNS[:-1])


def node_key(process: RankProcess) -> str:
    """Return what tells the rank process's node from others: its id, its hostname while that is not known."""
    assert process.identity is not None
    return process.identity.node_id or process.identity.hostname


def label_nodes(nodes: Iterable[Node], processes: Iterable[RankProcess]) -> dict[str, str]:
    """
    Return the label of each node (by `node_key`): its hostname, with the address where two nodes have
    the same one, and the beginning of its id where that does not tell them apart.

    Where ranks reported, the hostname is theirs.
    """
    nodes = list(nodes)
    hostnames = {node.node_id: node.hostname for node in nodes}
    hostnames.update(
        {node_key(process): process.identity.hostname for process in processes if process.identity}
    )
    addresses = {node.node_id: node.address for node in nodes}
    places = {key: (name, addresses.get(key, "address unknown")) for key, name in hostnames.items()}
    same_name, same_place = Counter(hostnames.values()), Counter(places.values())
    labels = {}
    for key, (name, address) in places.items():
        labels[key] = name
        if same_place[name, address] > 1:
            node, dot, launch = key.partition(".")  # see `ActorConfig.launch`
            labels[key] = f"{name} ({address}, {node[:8]}{dot}{launch})"
        elif same_name[name] > 1:
            labels[key] = f"{name} ({address})"
    return labels


def process_labels(nodes: Iterable[Node], processes: Iterable[RankProcess]) -> dict[int, str]:
    """Return the label of the node of each rank process (by id), see `label_nodes`."""
    processes = list(processes)
    labels = label_nodes(nodes, processes)
    return {process.id: labels[node_key(process)] for process in processes if process.identity}
