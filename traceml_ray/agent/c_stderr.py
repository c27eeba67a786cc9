"""Keeps a line of a C library out of stderr, where that library has no switch for it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_UNBUFFERED = 2
"""`_IONBF` of the GNU C library."""


@contextlib.contextmanager
def without_line(part: bytes) -> Iterator[None]:
    """
    Keep lines with `part` in them out of what C code prints to `stderr` in this block; what else it prints is
    printed at the end of the block. Where that cannot be done, nothing is kept out.

    Only C's variable `stderr` is another one meanwhile, which the GNU C library allows. File descriptor 2 is
    left as it is: Python, children of this process and handlers of signals write there as always.
    """
    try:
        variable = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stderr")
        fd, file = _memory_file()
    except (AttributeError, OSError, ValueError):
        yield
        return
    original, variable.value = variable.value, file
    try:
        yield
    finally:
        variable.value = original
        printed = os.pread(fd, os.fstat(fd).st_size, 0)
        if kept := b"".join(line for line in printed.splitlines(keepends=True) if part not in line):
            with contextlib.suppress(OSError):
                os.write(2, kept)


def _memory_file() -> tuple[int, int]:
    """
    Return the descriptor of a file in memory, and a C `FILE *` that writes to it. It is never closed: another
    thread may have taken it for `stderr` just before the end of the block. Raises OSError.
    """
    fd = os.memfd_create("traceml-stderr", os.MFD_CLOEXEC)
    library = ctypes.CDLL(None, use_errno=True)
    library.fdopen.restype = ctypes.c_void_p
    file = library.fdopen(fd, b"w")
    if not file:
        os.close(fd)
        raise OSError(ctypes.get_errno(), "fdopen")
    library.setvbuf(ctypes.c_void_p(file), None, _UNBUFFERED, ctypes.c_size_t(0))
    return fd, int(file)
