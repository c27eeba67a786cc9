"""Reads the rows and spans of one step from a session file, wherever in it they are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from traceml_ray.stages import SEGMENT_BITS
from traceml_ray.store.reader import Reader

_PROBED = 64
_WIDER, _TIMES = 4, 4
"""Factor and number of times by which the search is widened for ranks whose batches came early or late."""
_LONGEST = 4096
"""Steps that one sum of a span may be of: a batch holds those of a second."""
Chunk = tuple[bytes, ...]


class StepReader(Reader):
    """Chunks are in order of arrival, nearly that of their steps: the middle one tells which half to take."""

    def step_chunks(self, processes: Collection[int], step: int) -> dict[int, list[Chunk]]:
        """Return the chunks that hold rows of `step`, by rank process; a process without any is left out."""
        chunks_of_process: dict[int, list[Chunk]] = {}
        if not processes:
            return chunks_of_process
        middle, reach = self._place(processes, step), _WIDER * len(processes) + _PROBED
        query = (
            "SELECT process, keys, flags, rows, host_rows, leads FROM chunk "
            "WHERE id BETWEEN ? AND ? AND process BETWEEN ? AND ? ORDER BY id"
        )
        for _ in range(_TIMES):
            chunks_of_process = {}
            around = middle - reach, middle + reach, min(processes), max(processes)
            for process, *chunk in self._iterate(query, *around):
                first, last = _ends(chunk[0])
                if process in processes and first <= step <= last:
                    chunks_of_process.setdefault(process, []).append(tuple(chunk))
            if len(chunks_of_process) == len(processes):
                break
            reach *= _WIDER
        return chunks_of_process

    def first_step(self, processes: Collection[int]) -> int | None:
        """Return the first step whose rows are in the file one by one; None without any."""
        if not processes:
            return None
        rows = self._probed(self._place(processes, -1))
        return next((_ends(keys)[0] for _, process, keys in rows if process in processes), None)

    def step_spans(self, processes: Collection[int], step: int) -> list[dict[str, Any]]:
        """Return the sums of spans that `step` is in, of some rank processes."""
        spans = self._dicts(
            "SELECT process, name, stage, count, total_ns, first_step, last_step FROM span "
            "WHERE last_step >= ?1 AND last_step < ?1 + ?2 AND first_step <= ?1 ORDER BY total_ns DESC",
            *(step, _LONGEST),
        )
        return [span for span in spans if span["process"] in processes]

    def _place(self, processes: Collection[int], step: int) -> int:
        """Return the id of about the first chunk that has `step`, or a later one."""
        low, high = 0, self._top("chunk")
        while low < high:
            middle = (low + high) // 2
            if self._is_before(middle, processes, step):
                low = middle + 1
            else:
                high = middle
        return low

    def _is_before(self, chunk_id: int, processes: Collection[int], step: int) -> bool:
        """Return whether what is at an id came before `step` did; an earlier run has lower processes."""
        rows = self._probed(chunk_id)
        own_keys = next((keys for _, process, keys in rows if process in processes), None)
        if own_keys is not None:
            return _ends(own_keys)[1] < step
        return bool(rows) and rows[0][1] < min(processes)

    def _probed(self, chunk_id: int) -> list[tuple[Any, ...]]:
        return self._all(
            "SELECT id, process, keys FROM chunk WHERE id >= ? ORDER BY id LIMIT ?", chunk_id, _PROBED
        )


def _ends(keys: bytes) -> tuple[int, int]:
    """Return the first and the last step of a chunk."""
    both = np.frombuffer(keys, "<i8")[[0, -1]] >> SEGMENT_BITS
    return int(both[0]), int(both[1])
