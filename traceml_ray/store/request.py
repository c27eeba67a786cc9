"""What every question to a session, and every command, is."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

A = TypeVar("A", covariant=True)


class Request(
    msgspec.Struct, Generic[A], frozen=True, tag_field="what", tag=True, forbid_unknown_fields=True
):
    """A question, answered with an `A`."""
