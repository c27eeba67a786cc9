"""
Rows of ranks that have a device clock, with their host's part beside them in one array.

A wide row is WIDTH int64: the row, the same row on the CPU's clock, and its leads as one number, -1 where the
rank process has no device clock. Where no rank has one, rows stay as narrow as they come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traceml_ray.analysis.window import Bool, Int64, UInt8
from traceml_ray.stages import FLAG_DEVICE_CLOCK, LEAD_BYTES, LEAD_UNKNOWN, N_STAGES

WIDTH = 2 * N_STAGES + 1
_SHIFTS = 8 * np.arange(LEAD_BYTES)
_UNKNOWN = int((LEAD_UNKNOWN << _SHIFTS).sum())
Chunk = tuple[bytes, bytes, bytes]
"""Rows, host rows and leads as on the wire."""


def is_wide(rows: Int64) -> bool:
    """Whether `rows` (…, 6 or WIDTH) have a host's part."""
    return bool(rows.shape[-1] > N_STAGES)


def from_wire(chunks: Sequence[Chunk]) -> Int64:
    """Return the rows (n, 6) of some chunks, wide (n, WIDTH) if there are host rows in one."""
    rows = _stages([rows for rows, _, _ in chunks])
    if not any(host for _, host, _ in chunks):
        return rows
    leads = np.concatenate([_leads(*chunk) for chunk in chunks])
    return np.hstack([rows, _stages([host or rows for rows, host, _ in chunks]), leads[:, None]])


def widen(rows: Int64) -> Int64:
    """Return wide rows (…, WIDTH) of those (…, 6) of ranks without a device clock."""
    return np.concatenate([rows, rows, np.full((*rows.shape[:-1], 1), -1)], axis=-1)


def without_device(rows: Int64, flags: UInt8) -> Bool:
    """Return which wide rows (…, WIDTH) the rank's device clock has no times for."""
    missing: Bool = (flags & FLAG_DEVICE_CLOCK == 0) & (rows[..., -1] >= 0)
    return missing


def host_part(rows: Int64, flags: UInt8) -> tuple[Int64 | None, UInt8 | None]:
    """
    Return the host rows (…, 6) and leads (…, 3; LEAD_UNKNOWN where not known) of `rows` (…, 6 or WIDTH).

    Both are None where rows on a device's clock have no host row, or there are none.
    """
    if not is_wide(rows):
        return None, None
    packed = rows[..., -1]
    known = packed[flags & FLAG_DEVICE_CLOCK != 0]
    if not len(known) or known.min() < 0:
        return None, None
    return rows[..., N_STAGES:-1].copy(), (packed[..., None] >> _SHIFTS).astype(np.uint8)


def _stages(parts: Sequence[bytes]) -> Int64:
    return np.frombuffer(b"".join(parts), "<i8").reshape(-1, N_STAGES)


def _leads(rows: bytes, host: bytes, leads: bytes) -> Int64:
    """Return the leads of a chunk as one number each (n,)."""
    if leads:
        three = np.frombuffer(leads, np.uint8).reshape(-1, LEAD_BYTES).astype(np.int64)
        packed: Int64 = (three << _SHIFTS).sum(axis=1)
        return packed
    return np.full(len(rows) // (8 * N_STAGES), _UNKNOWN if host else -1)
