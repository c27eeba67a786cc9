"""
The last lines of a rank process: built from pieces as they are written, as a person would read them. Lines
read by its agent and by its relay are joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from traceml_ray.signals.output.records import Output
from traceml_ray.text import Masker, masked

LINE_CHARS = 400
"""Largest number of characters kept of a line. The first characters are kept."""
MOST_BYTES = 6000
"""Largest size of the lines of one stream in one batch, in bytes. The newest lines that fit are kept."""
_RAW_CHARS = 2000
"""Largest number of characters of a line that are examined."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Escape sequences that tell a terminal about colours, titles, and the cursor position."""


class LastLines:
    """
    The newest lines of one stream since the last `drain`, at most `most`. For use by one thread.

    Blank lines are left out, and so is text that a carriage return overwrites: only the last state of a
    progress bar is kept.
    """

    def __init__(self, stream: int, most: int, *, by_relay: bool = False) -> None:
        self._stream, self._most, self._by_relay = stream, most, by_relay
        self._ended: list[str] = []
        self._open = ""
        self._inside = False
        self._skipped = 0
        self._shown = ""
        """The unfinished line at the last `drain`."""
        self._masker = Masker()

    def feed(self, text: str) -> None:
        """Add text that was written."""
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
        """Record that text is missing here. The line that it belongs to is left out."""
        self._open, self._inside = "", True

    def skip(self, lines: int) -> None:
        """Count lines that were dropped before they arrived here."""
        self._skipped += lines

    @property
    def waiting(self) -> bool:
        """Return whether there is something to drain."""
        return bool(self._ended) or self._unfinished() != self._shown

    def _unfinished(self) -> str:
        return _shown(self._masker.unfinished(self._open))

    def drain(self, t_ns: int) -> Output | None:
        """Return what is new, read at `t_ns`. None if nothing is new."""
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
    """Return a line as a terminal shows it, without unprintable characters and without secrets."""
    text = line.rstrip("\r").rpartition("\r")[2][:_RAW_CHARS]
    text = _ESCAPES.sub("", text).expandtabs(4).rstrip()
    if not text.isprintable():
        text = "".join(c for c in text if c.isprintable())
    text = masked(text)
    return text if len(text) <= LINE_CHARS else text[: LINE_CHARS - 1] + "…"


_STREAMS = {1: "stdout", 2: "stderr"}


class OutputLine(msgspec.Struct, frozen=True):
    """A line that a rank printed."""

    stream: str
    """stdout or stderr."""
    t_ns: int
    """
    Time at which the line was read, at most half a second after it was printed (ns,
    aggregator's clock).
    """
    text: str
    """Text of the line without control sequences of terminals. Apparent secrets are replaced by `***`."""
    unfinished: bool
    """Whether the line has no end yet, like a progress bar or a prompt."""
    skipped: int
    """Number of lines dropped before it, because too many came at once."""


class LastOutput(msgspec.Struct, frozen=True):
    """The last lines that a rank printed."""

    rank: int
    """Global rank."""
    lines: list[OutputLine]
    """In order of time."""
    missing: str | None
    """Why there are no lines, or none of a stream, if that is known."""


def last_lines(outputs: Iterable[Output], most: int) -> list[OutputLine]:
    """
    Return the last lines of a rank process, `most` of each stream, in order of time. `outputs` are in order
    of arrival.
    """
    streams: dict[tuple[int, bool], list[OutputLine]] = {}
    for output in outputs:
        lines = streams.setdefault((output.stream, output.by_relay), [])
        if lines and lines[-1].unfinished:
            lines.pop()
        name = _STREAMS[output.stream]
        lines += [
            OutputLine(name, output.t_ns, text, False, 0 if number else output.skipped)
            for number, text in enumerate(output.lines)
        ]
        lines += [OutputLine(name, output.t_ns, output.unfinished, True, 0)] if output.unfinished else []
    every = list[OutputLine]()
    for stream in _STREAMS:
        lines = joined(streams.get((stream, True), []), streams.get((stream, False), []))
        every += lines[-most:] if most else []
    return sorted(every, key=lambda line: line.t_ns)


def joined(in_file: list[OutputLine], seen: list[OutputLine]) -> list[OutputLine]:
    """
    Return the lines of one stream, joined from the relay's lines (`in_file`) and the agent's lines from
    Python (`seen`).

    The file also has what C code wrote, but not what was still in the stream's buffer.
    """
    if not in_file or not seen:
        return in_file or seen
    if in_file[-1].unfinished and seen[-1].unfinished:
        seen = seen[:-1]
    known = {line.text for line in in_file}
    last = max((index for index, line in enumerate(seen) if line.text in known), default=None)
    if last is None:
        return sorted([*in_file, *seen], key=lambda line: line.t_ns)
    return in_file + seen[last + 1 :]
