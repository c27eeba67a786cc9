"""What has come for the session file and is not written yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from traceml_ray.store.nodes import Node
from traceml_ray.store.rank_processes import RankProcess

_APPENDED = (
    *("process_sample", "memory_sample", "node_sample", "clock", "span", "output", "event", "verdict"),
    *("chunk", "step_work", "step_sizes"),
)
OF_NODES = {"node_sample", "clock"}
"""What of these comes after the end of the session is left out."""


@dataclass
class Pending:
    """What the next transaction will write."""

    inserts: dict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: {t: [] for t in _APPENDED})
    processes: dict[int, RankProcess] = field(default_factory=dict)
    progressed: dict[int, RankProcess] = field(default_factory=dict)
    meta: set[str] = field(default_factory=set)
    nodes: dict[str, Node] = field(default_factory=dict)
    relays: dict[str, int] = field(default_factory=dict)
    shardings: dict[int, str] = field(default_factory=dict)
    layers: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """By the place of a window in its table."""
    row_bytes: int = 0
    """Of the rows in `inserts`."""

    @property
    def is_of_ranks(self) -> bool:
        """Whether there is anything but samples and addresses of nodes."""
        inserts = any(rows for table, rows in self.inserts.items() if table not in OF_NODES)
        return bool(inserts or self.processes or self.progressed or self.shardings or self.layers)

    def follow(self, later: Pending) -> None:
        """Add what arrived while the disk refused this."""
        for table, rows in self.inserts.items():
            rows.extend(later.inserts[table])
        self.processes |= later.processes
        self.progressed |= later.progressed
        self.meta |= later.meta
        self.nodes |= later.nodes
        self.relays |= later.relays
        self.shardings |= later.shardings
        self.layers |= later.layers
        self.row_bytes += later.row_bytes


def row_bytes(chunk: tuple[Any, ...]) -> int:
    """Return the bytes of the rows in an entry of table `chunk`."""
    _, _, _, keys, flags, rows, host_rows, leads = chunk
    own = len(keys) + len(flags) + len(rows)
    return own + len(host_rows) + len(leads or b"") if host_rows else own
