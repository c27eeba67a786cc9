"""The sizes of batches step by step, until they are sent."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from sys import byteorder

from traceml_ray.signals.throughput.records import MAX_SIZES, StepSizes

ROOM = 4 * MAX_SIZES
"""Steps that are kept: beyond it the oldest is dropped, and counted."""
_UNKNOWN = -1
_LARGEST = (1 << 63) - 1


class SizeLog:
    """Of one process, in bounded memory; under the lock of the log of marks."""

    __slots__ = ("_entries", "lost")

    def __init__(self) -> None:
        self._entries: deque[tuple[int, int, int]] = deque(maxlen=ROOM)
        """Step, samples, tokens; -1 is not known."""
        self.lost = 0
        """Steps whose sizes were dropped, as nothing was sent for so long."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, step: int, samples: int | None, tokens: int | None) -> None:
        """Note the sizes of a step, which comes after the others."""
        self.lost += len(self._entries) == ROOM
        self._entries.append((step, _known(samples), _known(tokens)))

    def drain(self) -> list[tuple[int, int, int]]:
        """Return all that is kept, the oldest first, and keep nothing."""
        entries = [*self._entries]
        self._entries.clear()
        return entries


def packed(entries: list[tuple[int, int, int]]) -> list[StepSizes]:
    """Return what `SizeLog.drain` returned as it is sent; steps without a batch are not known."""
    pieces: list[list[tuple[int, int, int]]] = []
    for entry in entries:
        if not pieces or not 0 < entry[0] - pieces[-1][0][0] < MAX_SIZES:
            pieces.append([])
        pieces[-1].append(entry)
    return [_piece(piece) for piece in pieces]


def _piece(entries: list[tuple[int, int, int]]) -> StepSizes:
    first, last = entries[0][0], entries[-1][0]
    steps = last - first + 1
    values = array("q", [_UNKNOWN]) * (2 * steps)
    for step, samples, tokens in entries:
        values[step - first], values[steps + step - first] = samples, tokens
    if byteorder == "big":
        values.byteswap()
    return StepSizes(first, last, zlib.compress(values.tobytes(), 1))


def _known(size: int | None) -> int:
    return size if size is not None and 0 <= size <= _LARGEST else _UNKNOWN
