"""What steps were trained on, from the session file."""

from __future__ import annotations

import msgspec

from traceml_ray import wire
from traceml_ray.analysis.work import WorkHistory
from traceml_ray.store.reader import Reader
from traceml_ray.store.schema import legible

_COLUMNS = ", ".join(wire.StepWork.__struct_fields__)


class WorkReader(Reader):
    """Reads what all rank processes of a session have said of their work."""

    def add_work(self, work: WorkHistory, since: int = 0) -> int:
        """Add what came after cursor `since`; return the new one."""
        query = f"SELECT id, process, {_COLUMNS} FROM step_work WHERE id > ? ORDER BY id"
        with legible(self.path):
            for row in self._iterate(query, since):
                since, process, *values = row
                work.add(int(process), msgspec.structs.asdict(msgspec.convert(values, wire.StepWork)))
        return since
