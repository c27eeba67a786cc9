"""What steps were trained on, from the session file."""

from __future__ import annotations

from typing import Any

import msgspec

from traceml_ray import wire
from traceml_ray.store.reader import Reader
from traceml_ray.store.schema import legible
from traceml_ray.typed import ready

_COLUMNS = ", ".join(wire.StepWork.__struct_fields__)


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
