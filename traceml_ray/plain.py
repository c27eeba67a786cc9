"""Answers as plain values: what JSON, and whatever reads it, can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec


def to_builtins(answer: Any) -> Any:
    """
    Return any answer of traceml-ray in plain dicts, lists, numbers and strings, as `json.dumps` takes them.

    It takes what a method of `Session`, `analyze`, `compare` or `profile` returns, and whatever is in that.
    Objects become dicts of their fields, arrays lists, and keys that are numbers text. NaN, which JSON has
    not, becomes None: both mean that it is not known.

    Raises TypeError for what is no answer.
    """
    return _plain(msgspec.to_builtins(answer, str_keys=True, enc_hook=_of_array))


def _of_array(value: Any) -> Any:
    import numpy as np

    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no answer of traceml-ray")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
