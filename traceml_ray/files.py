"""
Reads files that others may have put there (a FIFO does not hang, a huge one is not taken in), and removes
some. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path


def remove(paths: Iterable[Path]) -> None:
    """Remove what is there of `paths`, as far as that can be."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def read_file(path: Path, most: int) -> bytes:
    """Return what is in a regular file of at most `most` bytes. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
        return file.read(found.st_size)
