"""What steps were trained on, from the session file."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np

from traceml_ray import wire
from traceml_ray.analysis.window import Int64
from traceml_ray.codec import ready
from traceml_ray.store.reader import Reader
from traceml_ray.store.schema import legible

_COLUMNS = ", ".join(wire.StepWork.__struct_fields__)
_SIZES = ", ".join(wire.StepSizes.__struct_fields__)


class WorkReader(Reader):
    """Reads what all rank processes of a session have said of their work."""

    def work(self, since: int = 0) -> tuple[list[tuple[int, dict[str, Any]]], int]:
        """Return what came after cursor `since`, by id of the rank process and field, and the new cursor."""
        query = f"SELECT id, process, {_COLUMNS} FROM step_work WHERE id > ? ORDER BY id"
        rows = []
        with legible(self.path):
            for row in self._iterate(query, since):
                since, process, *values = row
                work = msgspec.structs.asdict(msgspec.convert(values, ready(wire.StepWork)))
                rows.append((int(process), work))
        return rows, since

    def step_sizes(self, processes: Collection[int], steps: Int64) -> dict[int, list[wire.StepSizes]]:
        """
        Return what is stored of the sizes of batches of some rank processes in `steps` (S,), ascending, by
        rank process.
        """
        query = (
            f"SELECT process, {_SIZES} FROM step_sizes "
            "WHERE last_step >= ?1 AND last_step < ?2 AND first_step <= ?3 ORDER BY id"
        )
        pieces: dict[int, list[wire.StepSizes]] = {}
        with legible(self.path):
            for part in np.split(steps, np.flatnonzero(np.diff(steps) > wire.MAX_SIZES) + 1):
                first, last = (int(part[0]), int(part[-1])) if len(part) else (0, -1)
                for process, *values in self._iterate(query, first, last + wire.MAX_SIZES, last):
                    if process in processes:
                        piece = msgspec.convert(values, ready(wire.StepSizes))
                        pieces.setdefault(int(process), []).append(piece)
        return pieces
