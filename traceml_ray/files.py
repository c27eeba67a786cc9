"""
Reads files that other users may have created: a FIFO does not block, a huge file is not read whole. Also
writes, names and removes files. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

MAX_PART = 4 << 20
"""Largest number of bytes of a file in one answer."""


def stamp(t_ns: int) -> str:
    """Return the beginning of a file name for time `t_ns`: UTC, to the second."""
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(t_ns // 1_000_000_000))


def free_name(name: str, taken: Collection[str]) -> str:
    """Return `name`, with a number appended if it is in `taken`."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def remove(paths: Iterable[Path]) -> None:
    """Remove the existing files of `paths`, as far as possible."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def write_file(path: Path, data: bytes) -> None:
    """
    Write a file for this user alone, completely or not at all (through a temporary name).
    Raises OSError.
    """
    write_files({path: data})


def write_files(files: Mapping[Path, bytes], inside: AbstractContextManager[None] | None = None) -> None:
    """Write files as `write_file` does. They get their final names `inside` that context. Raises OSError."""
    temporary = {
        path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp"): path for path in files
    }
    try:
        for name, path in temporary.items():
            with _named(path):
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(files[path])
        with inside or contextlib.nullcontext():
            for name, path in temporary.items():
                name.replace(path)
    finally:
        remove(temporary)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make errors in the block name the file that was asked for, not its temporary name."""
    try:
        yield
    except OSError as error:
        if error.filename is None or Path(error.filename).parent == path.parent:
            error.filename, error.filename2 = str(path), None
        raise


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """
    Yield a temporary name to write to. When the file is complete it is renamed to `path`; otherwise there is
    no file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _named(path):
            yield temporary
            temporary.replace(path)
    finally:
        remove([temporary])


def open_file(path: Path) -> BinaryIO:
    """
    Open a regular file for reading. Other kinds of files are refused, so the call does not block. Raises
    OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_part(path: Path, offset: int, n: int) -> bytes:
    """Return at most `n` bytes (and `MAX_PART`) of a regular file, from `offset` on. Raises OSError."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(min(offset, size))  # what is far beyond the end cannot be sought
        return file.read(max(0, min(n, MAX_PART)))


def read_file(path: Path, most: int) -> bytes:
    """Return the contents of a regular file of at most `most` bytes. Raises OSError."""
    with open_file(path) as file:
        there = os.fstat(file.fileno()).st_size
        if there > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
        return file.read(there)
