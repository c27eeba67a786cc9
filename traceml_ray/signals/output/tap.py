"""
Records what the training process writes to stdout and stderr in Python, for its last lines.

The streams keep their identity: the same objects, with the same descriptor, buffer and `isatty`. Only their
attribute `write` is replaced. The replacement calls the original with the caller's text and then records that
text. So every user of the stream (a logging handler, tqdm, print) is seen, from the first line on, even if
the text was still in a buffer when the process was killed. A pipe in place of the descriptor would also see
what C code writes, but it changes `isatty` and buffering, and a full pipe blocks. If a stream is written to a
file of its own, the relay reads that file instead (`monitor.output_files`).

A write costs 0.3 µs more; a printed line has two writes (`benchmarks/overhead.py --only output`). There is no
lock and no I/O. What is recorded is bounded: if too much arrives at once, only the newest is kept.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from traceml_ray.errors import Errors, error_text
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.output.last_lines import LINE_CHARS, LastLines
from traceml_ray.signals.output.records import Output

_PIECES = 512
"""Largest number of pieces of one stream that are kept between two reads."""
_PIECE_CHARS = 8000
_STREAMS = {1: "stdout", 2: "stderr"}


class OutputTap(Collector):
    """
    The streams of one process.

    Args:
        most: number of lines of each stream that are kept. 0: the streams are not changed.
        errors: counts errors of the tap.
        missing: receives each stream that cannot be recorded, with the reason.
    """

    def __init__(self, most: int, errors: Errors, missing: dict[str, str]) -> None:
        self._most, self._errors, self._missing = most, errors, missing
        self._tapped: list[_Tapped] = []

    @classmethod
    def of_rank(cls, rank: Rank) -> OutputTap:
        """Make the tap of a rank."""
        return cls(rank.settings.output_lines, rank.errors, rank.missing)

    def collect(self, final: bool) -> list[Output]:
        """Return what is new."""
        return self.drain(time.time_ns())

    def install(self) -> None:
        """Record what is written from now on."""
        for number, name in _STREAMS.items() if self._most else ():
            stream = getattr(sys, name)
            if stream is None or any(tapped_stream.stream is stream for tapped_stream in self._tapped):
                continue  # closed, or both are the same stream
            try:
                self._tapped.append(_Tapped(stream, number, self._most, self._errors))
            except Exception as error:
                self._errors.note("output", error, name)
                self._missing[f"last lines of {name}"] = error_text(error)[:200]

    def drain(self, t_ns: int) -> list[Output]:
        """Return what is new, read at `t_ns`. Only one thread may call this."""
        outputs = [tapped.drain(t_ns) for tapped in self._tapped]
        return [output for output in outputs if output is not None]

    def remove(self) -> None:
        """Restore the streams."""
        tapped, self._tapped = self._tapped, []
        for tapped_stream in tapped:
            tapped_stream.remove()


class _Tapped:
    """One stream. Raises the error that prevents replacing its `write`."""

    def __init__(self, stream: Any, number: int, most: int, errors: Errors) -> None:
        self.stream = stream
        self._pieces = _Pieces(maxlen=_PIECES)
        self._gaps = self._left_out = 0
        self._lines = LastLines(number, most)
        self._own = vars(stream).get("write")
        self._write = _seen(stream.write, self._pieces, errors)
        stream.write = self._write

    def drain(self, t_ns: int) -> Output | None:
        """Return what is new."""
        pieces, gaps, left_out = [], self._pieces.gaps, self._pieces.left_out
        self._lines.skip(left_out - self._left_out)
        if gaps != self._gaps:
            self._lines.lose()
        self._gaps, self._left_out = gaps, left_out
        for _ in range(_PIECES):  # bounded, so that a faster writer does not keep the agent here
            try:
                pieces.append(self._pieces.popleft())
            except IndexError:
                break
        self._lines.feed("".join(pieces))
        return self._lines.drain(t_ns)

    def remove(self) -> None:
        """Restore `write`, unless other code has replaced it since."""
        if vars(self.stream).get("write") is self._write:
            if self._own is None:
                del self.stream.write
            else:
                self.stream.write = self._own


class _Pieces(deque[str]):
    """
    The text written to a stream since the last read. If there is too much, only the newest is kept; the rest
    is counted.
    """

    gaps = 0
    """Number of times that text was dropped. `left_out` counts the line ends in it."""
    left_out = 0

    def lose_oldest(self) -> None:
        """Make room for one piece."""
        with contextlib.suppress(IndexError):  # all have just been read
            self.left_out += self.popleft().count("\n")
            self.gaps += 1

    def end_of(self, text: Any) -> str:
        """
        Return the last lines of a long text, or the beginning of a single long line. Dropped lines are
        counted.
        """
        if not isinstance(text, str):
            return ""
        whole: str = str.__str__(text)
        if len(whole) <= _PIECE_CHARS:
            return whole
        _, newline, end = whole[-_PIECE_CHARS:].partition("\n")
        kept = newline + end if newline else whole[: 2 * LINE_CHARS]
        self.left_out += whole.count("\n") - kept.count("\n")
        return kept


def _seen(write: Callable[..., Any], pieces: _Pieces, errors: Errors) -> Callable[[str], Any]:
    """Return a replacement of `write` that records each text in `pieces` after writing it."""
    note = pieces.append

    def seen(*args: Any, **named: Any) -> Any:  # a script's own stream may take its text by keyword
        written = write(*args, **named)
        try:
            text = args[0] if args else next(iter(named.values()))
            if type(text) is not str or len(text) > _PIECE_CHARS:
                text = pieces.end_of(text)
            if len(pieces) == _PIECES:
                pieces.lose_oldest()
            note(text)
        except Exception as error:
            errors.swallow("output", error)
        return written

    return seen
