"""
Types that values are decoded to, each described by one thread at a time.

The first time that msgspec decodes to a class it keeps a description on the class, at first an empty one, and
runs Python code to fill it. Another thread that decodes to the class meanwhile takes the empty one, and the
process ends by a segmentation fault (msgspec 0.22 and before). So values are decoded to `ready(type)`.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

_T = TypeVar("_T")
_describing = threading.RLock()
_described: set[object] = set()


def ready(kind: type[_T]) -> type[_T]:
    """Return `kind`, of which msgspec has a whole description from here on; after the first time at once."""
    if kind not in _described:
        with _describing:
            msgspec.msgpack.Decoder(kind)
            _described.add(kind)
    return kind
