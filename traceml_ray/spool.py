"""
What an agent could not deliver before its process ended, left in a file for the end of the run.

`<stream>.spool` is a run of frames: uint32 little-endian length, then the bytes of one
`wire.RankBatch`. Standard library only: this is written while a training process exits.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

from traceml_ray.files import read_file

SUFFIX = ".spool"
_MAX_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")


def write_spool(path: Path, frames: Iterable[bytes]) -> None:
    """Write `frames` to `path`, whole or not at all (a temporary file, then a rename). Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            for frame in frames:
                file.write(_LENGTH.pack(len(frame)))
                file.write(frame)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_spool(path: Path, *, max_frame: int = 1 << 20) -> list[bytes]:
    """Return the whole frames of `path`; stops at a cut or absurd frame. Raises OSError."""
    data = read_file(path, _MAX_BYTES)
    frames: list[bytes] = []
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > max_frame or at + length > len(data):
            break
        frames.append(data[at : at + length])
        at += length
    return frames
