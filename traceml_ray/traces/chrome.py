"""
Reads Chrome's Trace Event Format, plain or gzip, event by event. Memory use does not grow with the file.

Both forms are supported: an object with `traceEvents`, and a bare array. The other fields that torch writes
are in `header`.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from traceml_ray.files import open_file
from traceml_ray.text import count, size

MAX_BYTES = 4 << 30
"""Largest size of an unpacked trace, in bytes."""
MAX_EVENTS = 3_000_000
_MAX_VALUE = 2 << 20
"""Largest number of characters in one event, and in all fields other than the events."""
_CHUNK = 1 << 18
_GZIP = b"\x1f\x8b"
# torch writes names of operations without escaping control characters
_DECODER = json.JSONDecoder(strict=False)
_BETWEEN = re.compile(r"[\s,]*")
_SHOWN = 100
_ADVICE = "record fewer steps, or without stacks"


class TraceError(ValueError):
    """The file is not a trace, is damaged, or has more than the allowed size or number of events."""


class ChromeTrace:
    """
    The events of one file, in its order. They can be iterated more than once. Raises TraceError, with the
    path.

    Args:
        path: a regular file.
        window: only events that begin in this time, ns on the wall clock. Used if the trace has wall-clock
            times.
        max_bytes, max_events: a larger trace is refused.
    """

    def __init__(
        self,
        path: Path,
        window: tuple[int, int] | None = None,
        max_bytes: int = MAX_BYTES,
        max_events: int = MAX_EVENTS,
    ) -> None:
        self.path, self._window = path, window
        self.header: dict[str, Any] = {}
        """
        Fields other than the events. After the first event: those before the events. At the
        end: all of them.
        """
        self._max_bytes, self._max_events = max_bytes, max_events

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        """Yield the events, each a JSON object."""
        try:
            with open_file(self.path) as file:
                yield from self._events(_Text(_unpacked(file), self._max_bytes))
        except TraceError as error:
            raise TraceError(f"{self.path}: {error}") from None
        except EOFError:
            raise TraceError(f"{self.path}: it is cut off, its end is missing") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{self.path}: it is damaged: {error}") from None
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}") from None

    def _events(self, text: _Text) -> Iterator[dict[str, Any]]:
        self.header = {}
        if text.skip("["):
            yield from self._listed(text, whole=False)
            return
        if not text.skip("{"):
            raise TraceError("it is not a trace: it begins with neither { nor [")
        size_of_header, has_events = 0, False
        while not text.skip("}"):
            key, length = text.value()
            if not isinstance(key, str) or not text.skip(":"):
                raise TraceError(f"it is damaged: a name is missing at character {text.position:,}")
            if key == "traceEvents" and text.skip("["):
                has_events = True
                yield from self._listed(text, whole=True)
                continue
            self.header[key], more = text.value()
            size_of_header += length + more
            if size_of_header > _MAX_VALUE:
                raise TraceError("it is not a trace of torch: it has too much besides its events")
        text.at_end()  # gzip verifies its checksum there
        if not has_events:
            raise TraceError("it is not a trace: it has no traceEvents")

    def _listed(self, text: _Text, whole: bool) -> Iterator[dict[str, Any]]:
        """Yield the events of an array. Unless it must be `whole`, its end may be missing."""
        number = 0
        while not text.skip("]"):
            if not whole and text.at_end():
                return
            event, _ = text.value()
            if not isinstance(event, dict):
                raise TraceError(f"it is not a trace: {str(event)[:_SHOWN]!r} is not an event")
            number += 1
            if number > self._max_events:
                raise TraceError(f"it has more than {count(self._max_events, 'event')}: {_ADVICE}")
            if self._window is None or self._is_inside(event, *self._window):
                yield event

    def _is_inside(self, event: dict[str, Any], begin_ns: int, end_ns: int) -> bool:
        """Return whether an event is inside the requested time, or has no time."""
        at_us, base_ns = event.get("ts"), self.header.get("baseTimeNanoseconds")
        if event.get("ph") == "M" or not isinstance(at_us, int | float) or not isinstance(base_ns, int):
            return True
        return begin_ns <= base_ns + at_us * 1000 < end_ns


class _Text:
    """Reads the characters of a file. Holds only those of the current value."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, max_bytes: int) -> None:
        self._file, self._left, self._max_bytes = file, max_bytes, max_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._buffer, self._at, self._before = "", 0, 0
        self._over = False

    @property
    def position(self) -> int:
        """Number of characters read so far."""
        return self._before + self._at

    def skip(self, expected: str) -> bool:
        """Skip white space and commas, and `expected` if it is next. Returns whether it was."""
        matches = self._next() == expected
        self._at += matches
        return matches

    def at_end(self) -> bool:
        """Return whether all characters have been read."""
        return self._next() == ""

    def _next(self) -> str:
        while True:
            match = _BETWEEN.match(self._buffer, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def value(self) -> tuple[Any, int]:
        """Return the next JSON value and its length in characters."""
        if self.at_end():
            raise TraceError("it is cut off, its end is missing")
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                self._longer(error.msg)
                continue
            except (RecursionError, ValueError) as error:  # ValueError: an integer with thousands of digits
                raise TraceError(self._damage(str(error))) from None
            if end == len(self._buffer) and self._more():  # a number may continue
                continue
            length, self._at = end - self._at, end
            return value, length

    def _longer(self, reason: str) -> None:
        """Read more characters, because the current value is incomplete."""
        if len(self._buffer) - self._at > _MAX_VALUE:
            raise TraceError(self._damage(reason))
        if not self._more():
            raise TraceError(f"it is cut off, or damaged: {reason} at character {self.position:,}")

    def _damage(self, reason: str) -> str:
        return f"it is damaged at character {self.position:,}: {reason[:_SHOWN]}"

    def _more(self) -> bool:
        """Read more characters. Returns False at the end of the file."""
        if self._over:
            return False
        data = self._file.read(min(max(_CHUNK, len(self._buffer) - self._at), self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise TraceError(f"it has more than {size(self._max_bytes)}: {_ADVICE}")
        self._over = not data
        self._before += self._at
        self._buffer, self._at = self._buffer[self._at :] + self._decode(data, self._over), 0
        return True


def _unpacked(file: BinaryIO) -> BinaryIO | gzip.GzipFile:
    """Return a reader of the file that unpacks it if it is gzip."""
    packed = file.read(len(_GZIP)) == _GZIP
    file.seek(0, io.SEEK_SET)
    return gzip.GzipFile(fileobj=file) if packed else file
