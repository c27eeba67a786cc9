"""Which errors say that memory ran out, of the host or of a device."""

from __future__ import annotations

import re

_SAID = re.compile(
    r"outofmemoryerror|memoryerror|out of memory|cublas_status_alloc_failed"
    r"|defaultcpuallocator: (can't|not enough)",
    re.IGNORECASE,
)


def is_out_of_memory(text: str) -> bool:
    """Return whether an exception, as `Type: text`, is of memory that ran out."""
    return bool(_SAID.search(text))
