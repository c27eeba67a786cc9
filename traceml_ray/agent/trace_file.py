"""The trace of a rank as a file of its own process: compressed, then read piece by piece."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from traceml_ray.text import size as size_text

MAX_TRACE_BYTES = 1 << 29
"""As torch writes it; a step of a large model has some tens of MB."""
_CHUNK = 1 << 20
_LEVEL = 5


class TraceTooLargeError(ValueError):
    """A trace that is not kept."""


class TraceFile:
    """
    A file without a name. Raises OSError, `TraceTooLargeError`, and what `write` does.

    Args:
        write: writes the trace to a path.
        folder: where it may be meanwhile; None: where temporary files are.
        max_bytes: how large it may be.
    """

    def __init__(
        self, write: Callable[[Path], object], folder: str | None = None, max_bytes: int = MAX_TRACE_BYTES
    ) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - kept open
        try:
            with tempfile.TemporaryDirectory(prefix="traceml-trace-", dir=folder) as here:
                path = Path(here) / "trace.json"
                write(path)
                self._take(path, max_bytes)
        except BaseException:
            self._file.close()
            raise
        self.size = os.fstat(self._file.fileno()).st_size

    def _take(self, path: Path, max_bytes: int) -> None:
        made = path.stat().st_size
        if made > max_bytes:
            raise TraceTooLargeError(
                f"its trace has {size_text(made)}, more than the {size_text(max_bytes)} that are kept: ask "
                "for fewer steps, or without stacks"
            )
        with path.open("rb") as plain, gzip.GzipFile("", "wb", _LEVEL, self._file, mtime=0) as packed:
            shutil.copyfileobj(plain, packed, _CHUNK)
        self._file.flush()

    def read(self, offset: int, n: int) -> bytes:
        """Return at most `n` bytes from `offset` on."""
        return os.pread(self._file.fileno(), n, offset)

    def close(self) -> None:
        """Let go of it."""
        self._file.close()
