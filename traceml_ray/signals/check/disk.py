"""
Probe of a disk: reads a file past the page cache.

In a folder that can be written, the probe writes a file, which takes little of the free space. The file has
no name, so it is gone at the end, also if the process is killed. In a folder that cannot be written, its
largest file is read.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from traceml_ray import text
from traceml_ray.signals.check.probe import ProbeError, ProbeSubject, ProbeTrial

_BLOCK = 1 << 20
_FILE_BYTES, _LEAST_BYTES = 256 << 20, 16 << 20
_OF_FREE = 0.02
"""Largest share of the free space that is written."""
_WRITE_S = 10.0
"""Longest time that the file is written for, in s. It is smaller on a slow disk."""
_MOST_FILES = 2_000
"""Number of files that are looked at in a folder that cannot be written."""
_ALIGNED = 4096
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "rootfs"}


class DiskProbe:
    """
    Reads the disk of a file or folder.

    Raises ProbeError if it cannot be read past the page cache, or there is nothing to read.
    """

    weight = 2.0

    def __init__(self, path: Path, mounts: Path = Path("/proc/mounts")) -> None:
        note = ""
        self._file, self._direct, self._place = -1, False, 0
        try:
            kind = _file_system(path.resolve(strict=True), mounts)
            if kind in _IN_MEMORY:
                raise ProbeError(f"{path} is in memory ({kind}), so no disk was measured.")
            if path.is_dir():
                self._file, note = _written(path)
                if self._file < 0:
                    name = _largest(path)
                    note = f"{note}: {name.name} was read"
                    self._file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            elif path.is_file():
                self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            else:  # a pipe would be waited for
                raise ProbeError(f"{path} is neither a file nor a folder.")
            self._size = os.fstat(self._file).st_size // _ALIGNED * _ALIGNED
            if self._size < _LEAST_BYTES // 4:
                raise ProbeError(f"{path} is too small to measure a disk ({text.size(self._size)}).")
            self._direct = self._bypasses_cache()
        except ProbeError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ProbeError(f"{path} cannot be read: {error.strerror or error}.") from None
        self._buffer = mmap.mmap(-1, _BLOCK)  # aligned, as O_DIRECT requires
        self.subjects: Sequence[ProbeSubject] = [
            ProbeSubject("disk_read", str(path)[:256], "B/s", str(path)[:256], None, note[:256])
        ]

    def trial(self, seconds: float) -> list[ProbeTrial]:
        """Read for about `seconds`. Raises ProbeError."""
        if not self._direct:
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        read, began = 0, time.perf_counter()
        left = self._size  # without O_DIRECT a second pass would come from the page cache
        try:
            while (time.perf_counter() - began < seconds or not read) and (self._direct or left > 0):
                if self._place + _BLOCK > self._size:
                    self._place = 0
                count = os.preadv(self._file, [self._buffer], self._place)
                if count <= 0:
                    raise ProbeError("The file became shorter while it was read.")
                self._place += count // _ALIGNED * _ALIGNED
                read, left = read + count, left - count
        except OSError as error:
            raise ProbeError(f"Reading from disk failed: {error.strerror or error}.") from None
        return [ProbeTrial(read / max(time.perf_counter() - began, 1e-9))]

    def close(self) -> None:
        """Close the file. A file that was written is gone then."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _bypasses_cache(self) -> bool:
        """Return whether the file could be set to bypass the page cache."""
        import fcntl

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
            with mmap.mmap(-1, _ALIGNED) as buffer:
                os.preadv(self._file, [buffer], 0)
            return True
        except OSError:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
            return False


def _written(folder: Path) -> tuple[int, str]:
    """
    Write a file without a name, and return its descriptor. −1 and the reason if the folder cannot be written,
    or has too little free space.
    """
    space = os.statvfs(folder)
    size = min(_FILE_BYTES, int(_OF_FREE * space.f_bavail * space.f_frsize) // _BLOCK * _BLOCK)
    if size < _LEAST_BYTES:
        return -1, "the disk is almost full"
    try:
        file = _nameless(folder)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT, errno.ENOSPC):
            return -1, "the folder cannot be written"
        raise
    block, end = os.urandom(_BLOCK), time.monotonic() + _WRITE_S  # a disk may store zeros without room
    try:
        for written in range(0, size, _BLOCK):
            os.write(file, block)
            if written % (32 * _BLOCK) == 0:
                os.fdatasync(file)
            if time.monotonic() > end:
                break
        os.fdatasync(file)
    except OSError as error:
        os.close(file)
        return -1, f"the folder cannot be written ({error.strerror})"
    return file, ""


def _nameless(folder: Path) -> int:
    """Open a new file without a name. Raises OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    name = folder / f".traceml-check-{os.getpid()}"  # a file system without O_TMPFILE
    file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    name.unlink()
    return file


def _largest(folder: Path) -> Path:
    """Return the largest of the first files of a folder. Raises ProbeError."""
    sizes = [(size, path) for size, path in _files(folder)]
    if not sizes or max(sizes)[0] < _LEAST_BYTES // 4:
        raise ProbeError(f"{folder} cannot be written, and has no file that is large enough to read.")
    return max(sizes)[1]


def _files(folder: Path) -> Iterator[tuple[int, Path]]:
    looked = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent) / name
            with contextlib.suppress(OSError):
                if not path.is_symlink() and path.is_file() and os.access(path, os.R_OK):
                    yield path.stat().st_size, path
            looked += 1
            if looked >= _MOST_FILES:
                return


def _file_system(path: Path, mounts: Path) -> str:
    """Return the type of the file system that a path is on; "" if it is not known."""
    longest, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            fields = line.split()
            if len(fields) < 3:
                continue
            place = Path(fields[1].replace("\\040", " "))
            if path.is_relative_to(place) and len(place.parts) >= longest:
                longest, kind = len(place.parts), fields[2]
    return kind
