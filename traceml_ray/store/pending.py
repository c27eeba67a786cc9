"""What has come for the session file and is not written yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from traceml_ray.signals.kinds import KINDS
from traceml_ray.store.nodes import Node
from traceml_ray.store.rank_processes import RankProcess

_APPENDED = (
    *("process_sample", "clock", "span", "event", "verdict", "chunk"),
    *(kind.table for kind in KINDS.values() if kind.keep == "all"),
)
_REPLACED = tuple(kind.table for kind in KINDS.values() if kind.keep != "all")
OF_NODES = {"clock", *(kind.table for kind in KINDS.values() if kind.of == "node")}
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
    replaced: dict[str, dict[int, tuple[Any, ...]]] = field(
        default_factory=lambda: {t: {} for t in _REPLACED}
    )
    """Records of which only some are kept, by table, and by their place there."""
    row_bytes: int = 0
    """Of the rows in `inserts`."""

    @property
    def is_of_ranks(self) -> bool:
        """Whether there is anything but samples and addresses of nodes."""
        inserts = any(rows for table, rows in self.inserts.items() if table not in OF_NODES)
        return bool(inserts or self.processes or self.progressed or any(self.replaced.values()))

    def follow(self, later: Pending) -> None:
        """Add what arrived while the disk refused this."""
        for table, rows in self.inserts.items():
            rows.extend(later.inserts[table])
        self.processes |= later.processes
        self.progressed |= later.progressed
        self.meta |= later.meta
        self.nodes |= later.nodes
        self.relays |= later.relays
        for table, places in self.replaced.items():
            places |= later.replaced[table]
        self.row_bytes += later.row_bytes


def row_bytes(chunk: tuple[Any, ...]) -> int:
    """Return the bytes of the rows in an entry of table `chunk`."""
    _, _, _, keys, flags, rows, host_rows, leads = chunk
    size = len(keys) + len(flags) + len(rows)
    return size + len(host_rows) + len(leads or b"") if host_rows else size
