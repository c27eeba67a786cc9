"""The sizes of batches step by step, from the session file."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np

from traceml_ray.analysis.window import Int64
from traceml_ray.signals.throughput.records import MAX_SIZES, StepSizes
from traceml_ray.store.reader import Reader
from traceml_ray.store.schema import legible
from traceml_ray.wire.codec import ready

_SIZES = ", ".join(StepSizes.__struct_fields__)


class WorkReader(Reader):
    """Reads the sizes of batches of some steps."""

    def step_sizes(self, processes: Collection[int], steps: Int64) -> dict[int, list[StepSizes]]:
        """
        Return what is stored of the sizes of batches of some rank processes in `steps` (S,), ascending, by
        rank process.
        """
        query = (
            f"SELECT process, {_SIZES} FROM step_sizes "
            "WHERE last_step >= ?1 AND last_step < ?2 AND first_step <= ?3 ORDER BY id"
        )
        pieces: dict[int, list[StepSizes]] = {}
        with legible(self.path):
            for part in np.split(steps, np.flatnonzero(np.diff(steps) > MAX_SIZES) + 1):
                first, last = (int(part[0]), int(part[-1])) if len(part) else (0, -1)
                for process, *values in self._iterate(query, first, last + MAX_SIZES, last):
                    if process in processes:
                        piece = msgspec.convert(values, ready(StepSizes))
                        pieces.setdefault(int(process), []).append(piece)
        return pieces
