"""Answers and summaries as JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def as_json(value: Any) -> str:
    """Return structs, dicts, lists and plain values as indented JSON. Raises ValueError for NaN."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True), indent=2, allow_nan=False) + "\n"


def indented(value: Any) -> str:
    """Return structs and plain values as indented JSON with a line break at the end. NaN becomes null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
