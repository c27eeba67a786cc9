"""The single rows of steps, in parts. Python makes tables from them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from struct import unpack_from
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from traceml_ray.stages import N_STAGES, SEGMENT_BITS

if TYPE_CHECKING:
    from traceml_ray.store.session_file import SessionFile

Array = np.ndarray[Any, np.dtype[Any]]
_SCANNED = 1 << 15
"""
Largest number of batches that one answer reads. A writer may have to wait for this read if the file has no
WAL.
"""
MOST = 200_000
"""Approximate number of rows of one answer, unless fewer are asked for."""


class StepRows(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A part of the rows of steps, in order of arrival: n rows of the current process of each rank."""

    rank: Array
    """Global rank of each row: (n,) int64."""
    step: Array
    """Number of the step of each row: (n,) int64."""
    segment: Array
    """Number of the exchange of gradients inside the step, from 0 on: (n,) int64."""
    flags: Array
    """Why a row is incomplete, as bits of `traceml_ray.stages.FLAG_*`: (n,) uint8."""
    stages_ns: Array
    """Time in each stage, in the order of `traceml_ray.stages.STAGES`: (n, 6) int64 ns."""
    host_ns: Array | None
    """
    Time in each stage on the host's clock: (n, 6) float64 ns, NaN: not known; None: no row has a device
    clock.
    """
    cursor: int
    """Cursor to ask for the next part."""
    end: bool
    """Whether this is the last part."""
    folded: int
    """Number of older rows of these ranks that are kept as sums only."""


def read_step_rows(
    file: SessionFile,
    since: int = 0,
    first: int = 0,
    last: int | None = None,
    ranks: Iterable[int] | None = None,
    most: int = MOST,
) -> StepRows:
    """
    Return the rows of steps `first` to `last` of some ranks after cursor `since`: about `most` rows, or those
    of `_SCANNED` batches. Raises `SessionFileError`.
    """
    processes, chosen = file.ranks(), None if ranks is None else {*ranks}
    wanted = {process.id: rank for rank, process in processes.items() if chosen is None or rank in chosen}
    top = file.last_chunk()
    until = min(top, since + _SCANNED)
    chunks: list[tuple[int, tuple[bytes, ...]]] = []
    count, cursor = 0, until
    for chunk_id, process, *columns in file.chunks_after(since, until):
        if process not in wanted or not _overlaps(columns[0], first, last):
            continue
        chunks.append((wanted[process], tuple(columns)))
        count += len(columns[0]) // 8
        if count >= most:
            cursor = chunk_id
            break
    folded_rows = file.folded_counts()
    return StepRows(
        **_columns(chunks, first, last),
        cursor=cursor,
        end=cursor >= top,
        folded=sum(folded_rows.get(process, 0) for process in wanted),
    )


def _overlaps(keys: bytes, first: int, last: int | None) -> bool:
    """Return whether a batch has any of the requested steps."""
    (begin,), (end,) = unpack_from("<q", keys), unpack_from("<q", keys, len(keys) - 8)
    return (end >> SEGMENT_BITS) >= first and (last is None or (begin >> SEGMENT_BITS) <= last)


def _columns(chunks: list[tuple[int, tuple[bytes, ...]]], first: int, last: int | None) -> dict[str, Any]:
    lengths = [len(chunk[0]) // 8 for _, chunk in chunks]
    keys, flags, stages = (b"".join(chunk[part] for _, chunk in chunks) for part in range(3))
    key = np.frombuffer(keys, "<i8")
    step = key >> SEGMENT_BITS
    inside = step >= first if last is None else (step >= first) & (step <= last)
    host = [chunk[3] for _, chunk in chunks]
    return {
        "rank": np.repeat(np.array([rank for rank, _ in chunks], "<i8"), lengths)[inside],
        "step": step[inside],
        "segment": (key & (1 << SEGMENT_BITS) - 1)[inside],
        "flags": np.frombuffer(flags, np.uint8)[inside],
        "stages_ns": np.frombuffer(stages, "<i8").reshape(-1, N_STAGES)[inside],
        "host_ns": _host_ns(host, lengths)[inside] if any(host) else None,
    }


def _host_ns(host: list[bytes], lengths: list[int]) -> Array:
    """
    Return the times on the host's clock of batches, whose row counts are `lengths`: (n,
    6); NaN: not known.
    """
    host_ns = np.full((sum(lengths), N_STAGES), np.nan)
    for rows, end, n in zip(host, accumulate(lengths), lengths, strict=True):
        if rows:
            host_ns[end - n : end] = np.frombuffer(rows, "<i8").reshape(-1, N_STAGES)
    return host_ns
