"""
Files with batches that were not confirmed as stored when a rank's process, or a relay, ended. They are read
at the end of the run.

`<process id>.spool` is a sequence of frames: uint32 little-endian length, then the bytes of one
`wire.RankBatch`. Only the standard library is used, because a training process writes this while it exits.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

from traceml_ray.files import read_file, write_file

SUFFIX = ".spool"
_MAX_BYTES, _MAX_FRAME_BYTES = 1 << 30, 1 << 20
_LENGTH = struct.Struct("<I")


def write_spool(path: Path, frames: Iterable[bytes]) -> None:
    """Write `frames` to `path`, completely or not at all. Raises OSError."""
    write_file(path, b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames))


def add_to_spool(path: Path, frames: Iterable[bytes]) -> None:
    """Append `frames` to `path`. A reader stops at an incomplete last frame. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames))


def read_spool(path: Path) -> list[bytes]:
    """Return the complete frames of `path`. Stops at an incomplete or invalid frame. Raises OSError."""
    data = read_file(path, _MAX_BYTES)
    frames: list[bytes] = []
    position = 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if length > _MAX_FRAME_BYTES or position + length > len(data):
            break
        frames.append(data[position : position + length])
        position += length
    return frames
