"""
Encodes messages between processes: msgpack of array-like structs, with a tag and a version.

Only bytes cross a process boundary, and nothing is unpickled. `decode` checks the size before it builds
anything. It raises only `WireError`, with a short reason that the receiver counts.

When msgspec first decodes to a class, it stores an empty description on the class and runs Python code to
fill it. If another thread decodes to the class meanwhile, it uses the empty description, and the process ends
with a segmentation fault (msgspec 0.22 and before). So values are decoded to `ready(type)`.
"""

from __future__ import annotations

import functools
import threading
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

_T = TypeVar("_T")
_describing = threading.RLock()
_described: set[object] = set()


def ready(kind: type[_T]) -> type[_T]:
    """Return `kind` after making msgspec's description of it complete. Immediate after the first call."""
    if kind not in _described:
        with _describing:
            msgspec.msgpack.Decoder(kind)
            _described.add(kind)
    return kind


VERSION = 3
MAX_MESSAGE_BYTES = 1 << 20
MAX_ITEMS = 1024
"""Largest number of entries in any list or map of a message."""
FEW = msgspec.Meta(max_length=MAX_ITEMS)

# Decoded values fit the int64 columns of the session file, and an index refers to an existing element.
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
"""An id, for example of a rank process or a profile. It is also used as a file name."""
Value = str | Int64 | float | None


class WireError(ValueError):
    """A message that is not accepted. `reason` is a short name under which it is counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


class Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of every part of a message. Trailing fields that a newer version adds are ignored."""


class Message(Part, frozen=True):
    """Base of messages. A message has a `tag`."""

    v: Count

    def check(self) -> None:
        """Raise `WireError` if fields that are valid by themselves contradict each other."""


class _Header(Part, frozen=True):
    tag: str
    v: int


UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError)
_M = TypeVar("_M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(ready(_Header))
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Message) -> bytes:
    """Return `message` as msgpack bytes."""
    return _encoder.encode(message)


def encode_part(part: Part) -> msgspec.Raw:
    """Return a part of a message, encoded as inside a message."""
    return msgspec.Raw(_encoder.encode(part))


def size_of(part: Part) -> int:
    """Return the encoded size of a part of a message, in bytes."""
    return len(_encoder.encode(part))


def checked_size(message: type[Message], field: str, value: Any) -> int:
    """
    Return the encoded size of `value` as a field of a `message`, in bytes.

    Raises WireError (`malformed`) if the receiver would refuse the message because of it.
    """
    try:
        data = _encoder.encode(value)
        _field_decoder(message, field).decode(data)
    except (*UNREADABLE, TypeError) as error:
        raise WireError("malformed", f"{field}: {error}") from None
    return len(data)


@functools.cache
def _field_decoder(message: type[Message], field: str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(ready(get_type_hints(message, include_extras=True)[field]))


def decode(data: bytes, kind: type[_M], *, max_bytes: int = MAX_MESSAGE_BYTES) -> _M:
    """
    Return `data` as a message of type `kind`, or raise `WireError`.

    Reasons: `too_large`, `garbage`, `wrong_version`, `wrong_kind`, `malformed`, `bad_columns`.
    """
    if type(data) is not bytes:
        raise WireError("garbage", f"{type(data).__name__} where bytes were due")
    if len(data) > max_bytes:
        raise WireError("too_large", f"{len(data)} bytes, limit {max_bytes}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(ready(kind))
    try:
        message: _M = decoder.decode(data)
    except UNREADABLE as error:
        raise _reason(data, kind, error) from None
    if message.v != VERSION:
        raise _wrong_version(message.v)
    message.check()
    return message


def tag_of(data: bytes) -> str:
    """Return the message's tag. "" if there is none."""
    try:
        return _header.decode(data).tag
    except UNREADABLE:
        return ""


def _reason(data: bytes, kind: type[Message], error: BaseException) -> WireError:
    """Return why `data` cannot be decoded, from its header if it has one."""
    try:
        header = _header.decode(data)
    except UNREADABLE as unreadable:
        return WireError("garbage", str(unreadable))
    if header.v != VERSION:
        return _wrong_version(header.v)
    if header.tag != kind.__struct_config__.tag:
        return WireError("wrong_kind", f"{header.tag[:40]!r} where {kind.__name__} was due")
    return WireError("malformed", str(error))


def _wrong_version(version: int) -> WireError:
    return WireError("wrong_version", f"message has {version}, this is {VERSION}")
