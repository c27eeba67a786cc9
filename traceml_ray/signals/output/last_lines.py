"""Makes lines of what a process writes piece by piece, and keeps the newest, as a person would read them."""

from __future__ import annotations

import re

from traceml_ray.signals.output.records import Output
from traceml_ray.text import Masker, masked

LINE_CHARS = 400
"""Largest number of characters kept of a line: the first ones."""
MOST_BYTES = 6000
"""Largest size of the lines of one stream in one batch, in bytes: the newest that fit."""
_RAW_CHARS = 2000
"""Largest number of characters of a line that are examined."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""How a terminal is told of colours, titles, and where to write."""


class LastLines:
    """
    The newest lines of one stream since they were taken before, `most` of them; for one thread.

    Blank lines are left out, and what a carriage return overwrites: of a progress bar its last state stays.
    """

    def __init__(self, stream: int, most: int, *, by_relay: bool = False) -> None:
        self._stream, self._most, self._by_relay = stream, most, by_relay
        self._ended: list[str] = []
        self._open = ""
        self._inside = False
        self._skipped = 0
        self._shown = ""
        """What was unfinished when it was taken before."""
        self._masker = Masker()

    def feed(self, text: str) -> None:
        """Take what was written next."""
        if self._inside:
            _, newline, text = text.partition("\n")
            self._inside = not newline
            self.skip(len(newline))
        *ended, last = (self._open + text).split("\n")
        ended = [*self._ended, *self._masker.hide_keys(ended)]
        self._skipped += max(0, len(ended) - self._most)
        self._ended = ended[-self._most :]
        kept = last.rstrip("\r").rpartition("\r")[2]
        self._open = kept[:_RAW_CHARS] + "\r" * last.endswith("\r")

    def lose(self) -> None:
        """Take that something is missing here: the line that it was a part of is left out."""
        self._open, self._inside = "", True

    def skip(self, lines: int) -> None:
        """Count lines that were left out before they came here."""
        self._skipped += lines

    @property
    def waiting(self) -> bool:
        """Whether something has not been taken yet."""
        return bool(self._ended) or self._unfinished() != self._shown

    def _unfinished(self) -> str:
        return _shown(self._masker.unfinished(self._open))

    def drain(self, t_ns: int) -> Output | None:
        """Return what is new, read at `t_ns`; None where nothing is."""
        lines, size = list[str](), 0
        for index, line in enumerate(reversed(self._ended)):
            text = _shown(line)
            size += len(text.encode())
            if size > MOST_BYTES:
                self._skipped += len(self._ended) - index
                break
            lines += [text] * bool(text)
        unfinished = self._unfinished()
        skipped, self._ended, self._skipped = self._skipped, [], 0
        if not lines and unfinished == self._shown:
            self._skipped = skipped
            return None
        self._shown = unfinished
        stream, by_relay = self._stream, self._by_relay
        return Output(2 if stream == 2 else 1, t_ns, lines[::-1], unfinished, skipped, by_relay)


def _shown(line: str) -> str:
    """Return a line as a terminal shows it, without what it cannot, and without secrets."""
    text = line.rstrip("\r").rpartition("\r")[2][:_RAW_CHARS]
    text = _ESCAPES.sub("", text).expandtabs(4).rstrip()
    if not text.isprintable():
        text = "".join(c for c in text if c.isprintable())
    text = masked(text)
    return text if len(text) <= LINE_CHARS else text[: LINE_CHARS - 1] + "…"
