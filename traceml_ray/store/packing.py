"""Arrays and the objects that hold them as bytes: what a reduction of rows is kept as in the session file."""

from __future__ import annotations

import math
import zlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from traceml_ray.wire.codec import ready

_DTYPES = ("<i8", "<f8", "<f4", "<u4", "|u1", "|b1")
_LISTS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "Counter": Counter}


class Packer:
    """
    Turns objects of `classes` into bytes and back, with all that they hold: arrays, numbers, text, lists,
    dicts and other objects of `classes`. `form` tells what was written by another version. `most` bounds the
    bytes of the arrays together, and of all before compression: nothing is written that cannot be read.
    """

    def __init__(self, form: int, most: int, *classes: type[Any]) -> None:
        self._form = form
        self._most = most
        self._classes = {cls.__name__: cls for cls in classes}

    def pack(self, value: Any) -> bytes:
        """Return `value` as bytes. Raises TypeError for what it does not know, ValueError for too much."""
        body = msgspec.msgpack.encode((self._form, self._plain(value, [self._most])))
        if len(body) > self._most:
            raise ValueError(f"too large to be kept: {len(body)} bytes")
        return zlib.compress(body, 1)

    def unpack(self, data: bytes) -> Any:
        """Return what was packed. Raises ValueError, TypeError, LookupError or msgspec's for what is not."""
        inflate = zlib.decompressobj()
        try:
            body = inflate.decompress(data, self._most)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if inflate.unconsumed_tail:
            raise ValueError("too large")
        form, plain = msgspec.msgpack.decode(body)
        if form != self._form:
            raise ValueError(f"form {form}, not {self._form}")
        return self._whole(plain, [self._most])

    def _plain(self, value: Any, room: list[int]) -> Any:
        kind = type(value).__name__
        if isinstance(value, np.ndarray):
            room[0] -= value.nbytes
            if room[0] < 0:
                raise ValueError("too large to be kept")
            return _from_array(value)
        if isinstance(value, np.generic):
            return value.item()
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if kind in _LISTS:
            return kind, [self._plain(item, room) for item in value]
        if kind in _DICTS:
            return kind, [(self._plain(key, room), self._plain(item, room)) for key, item in value.items()]
        if isinstance(value, deque):
            return kind, value.maxlen, [self._plain(item, room) for item in value]
        if kind not in self._classes:
            raise TypeError(f"cannot keep {kind}")
        if isinstance(value, tuple):  # with names
            return kind, [self._plain(item, room) for item in value]
        if isinstance(value, msgspec.Struct):
            return kind, msgspec.to_builtins(value)
        return kind, {name: self._plain(item, room) for name, item in vars(value).items()}

    def _whole(self, plain: Any, room: list[int]) -> Any:
        if not isinstance(plain, list):
            return plain
        kind, *rest = plain
        if kind in _LISTS:
            return _LISTS[kind](self._whole(item, room) for item in rest[0])
        if kind in _DICTS:
            return _DICTS[kind]({self._whole(key, room): self._whole(item, room) for key, item in rest[0]})
        if kind == "deque":
            return deque((self._whole(item, room) for item in rest[1]), maxlen=rest[0])
        if kind == "array":
            return _to_array(room, *rest)
        which = self._classes[kind]
        if issubclass(which, msgspec.Struct):
            return msgspec.convert(rest[0], ready(which))
        if issubclass(which, tuple):
            return which(*(self._whole(item, room) for item in rest[0]))
        whole = object.__new__(which)
        vars(whole).update((name, self._whole(item, room)) for name, item in rest[0].items())
        return whole


def _from_array(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    dtype = array.dtype.str
    if dtype not in _DTYPES:
        raise TypeError(f"cannot keep an array of {dtype}")
    return "array", dtype, array.shape, array.tobytes()


def _to_array(room: list[int], dtype: str, shape: list[int], values: bytes) -> np.ndarray[Any, Any]:
    if dtype not in _DTYPES or min(shape, default=0) < 0:
        raise ValueError("no array of ours")
    room[0] -= math.prod(shape) * np.dtype(dtype).itemsize
    if room[0] < 0:
        raise ValueError("too large")
    return np.frombuffer(values, dtype).reshape(shape).copy()
