"""Writes a file of Chrome's Trace Event Format, gzip, event by event: what Perfetto opens."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from typing import Any, BinaryIO

import msgspec

from traceml_ray.traces.trace import as_text

_LEVEL = 4
_AT_ONCE = 1000
Event = dict[str, Any]


def write_events(file: BinaryIO, header: Event, events: Iterable[Event]) -> None:
    """Write `events` after what stands in `header`. Raises OSError, and what making `events` raises."""
    with gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
        packed.write(msgspec.json.encode(header)[:-1] + b',"traceEvents":[\n')
        pieces, before = list[bytes](), b""
        for event in events:
            pieces.append(_encoded(event))
            if len(pieces) == _AT_ONCE:
                packed.write(before + b",\n".join(pieces))
                pieces, before = [], b",\n"
        packed.write((before if pieces else b"") + b",\n".join(pieces) + b"\n]}\n")


def _encoded(event: Event) -> bytes:
    try:
        return msgspec.json.encode(event)
    except (ValueError, RecursionError):  # half a character, or nested as no trace of torch is
        named = {key: as_text(event.get(key)) for key in ("name", "cat")}
        return json.dumps({**event, **named, "args": {}}).encode()
