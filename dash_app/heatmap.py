"""
What a browser lacks of the rank × time heatmap: all of it once, then only the columns that are new.

The matrix is uint8; a column is one step, or some steps, of all ranks. A browser names the state that it has
(a checksum); the server keeps the few newest states, and sends the columns that differ, or all if it does
not have that state. Not `Patch` or `extendData`: old columns change, too, and browsers group rows by node.
"""

from __future__ import annotations

import threading
import zlib
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_KEPT = 8


class _State(NamedTuple):
    rows: tuple[str, ...]
    """Ranks, their nodes and the stage: with others it is another picture."""
    first: list[int]
    z: np.ndarray[Any, np.dtype[np.uint8]]


class HeatmapDeltas:
    """Keeps the newest states of the heatmaps that were sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: OrderedDict[int, _State] = OrderedDict()

    def delta(self, heat: Mapping[str, Any], base: int | None) -> dict[str, Any] | None:
        """
        Return what a browser that has `base` needs to draw `heat`; None where it has it already.

        `columns` says for each column which column of `base` it is, or -1: then it is the next one
        in `z`, R bytes each, base64. Without `base` in the answer all columns are new, and it has the rows.
        """
        z = np.ascontiguousarray(heat["z"], dtype=np.uint8)
        about = {name: heat[name] for name in ("ranks", "nodes", "stage", "by")}
        rows = tuple(map(str, about.values()))
        name = zlib.crc32(repr((rows, heat["first"], heat["last"])).encode(), zlib.crc32(z.data))
        with self._lock:
            before = self._states.get(base) if base is not None else None
            self._states[name] = _State(rows, list(heat["first"]), z)
            self._states.move_to_end(name)
            while len(self._states) > _KEPT:
                self._states.popitem(last=False)
        if name == base:
            return None
        delta = {"id": name, "first": heat["first"], "last": heat["last"]}
        if before is None or before.rows != rows:
            return {**delta, **about, "columns": [-1] * z.shape[1], "z": _packed(z)}
        columns = _same(before, heat["first"], z)
        return {**delta, "base": base, "columns": columns.tolist(), "z": _packed(z[:, columns < 0])}


def _same(before: _State, first: list[int], z: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return for each column of `z` which one of `before` is the same, or -1."""
    at = {step: i for i, step in enumerate(before.first)}
    columns = np.array([at.get(step, -1) for step in first], dtype=np.int64)
    known = np.flatnonzero(columns >= 0)
    changed = (z[:, known] != before.z[:, columns[known]]).any(axis=0)
    columns[known[changed]] = -1
    return columns


def _packed(z: np.ndarray[Any, Any]) -> str:
    return b64encode(np.ascontiguousarray(z.T).tobytes()).decode()
