"""Answers and summaries as JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def as_json(value: Any) -> str:
    """Return structs, dicts, lists and plain values as indented JSON. Raises ValueError for NaN."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True), indent=2, allow_nan=False) + "\n"
