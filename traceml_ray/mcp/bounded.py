"""Answers as text of bounded size: long lists are cut, and what was left out is counted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from traceml_ray.store.summary_shape import to_builtins

LIMIT = 30_000
"""Largest size of a result, in characters. Clients warn about results of more than about 10,000 tokens."""
_TEXT, _LEAST_TEXT = 4_000, 250
"""Largest number of characters of a text inside an answer, at first and at last."""
_LEAST = 2
"""Smallest number of entries to which a list is cut."""
_MAP = 40
"""Number of entries that a map keeps at least: samples of a node are a map, too."""


class Row(dict[str, Any]):
    """Fields that belong together. None of them is left out."""


def as_text(answer: Any, most: int) -> str:
    """
    Return an answer as JSON of at most `LIMIT` characters.

    Lists and maps keep their first `most` entries, and fewer where that is too much. The last entry then says
    how many are left out. Fields of a struct or `Row` are never left out.
    """
    result = ""
    for items, chars in _sizes(most):
        result = json.dumps(to_builtins(shortened(answer, items, chars)), ensure_ascii=False)
        if len(result) <= LIMIT:
            return result
    return cut_text(result)


def _sizes(most: int) -> Iterator[tuple[int, int]]:
    """Yield limits of lists and of texts, from the largest to the smallest."""
    items, chars = most, _TEXT
    while items > _LEAST or chars > _LEAST_TEXT:
        yield items, chars
        items, chars = max(_LEAST, items * 2 // 3), max(_LEAST_TEXT, chars // 2)
    yield items, chars


def shortened(value: Any, items: int, chars: int) -> Any:
    """
    Return an answer with at most `items` entries in each list, and in each map of more than a few entries,
    and at most `chars` characters in each text. A struct becomes a dict of all of its fields.
    """
    if isinstance(value, msgspec.Struct):
        value = Row(msgspec.structs.asdict(value))
    if isinstance(value, Mapping):
        most = len(value) if isinstance(value, Row) else max(items, _MAP)
        kept = {
            str(name): shortened(entry, items, chars) for name, entry in itertools.islice(value.items(), most)
        }
        return kept | ({"…": _left(len(value) - most)} if len(value) > most else {})
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        shown = [shortened(entry, items, chars) for entry in value[:items]]
        return [*shown, _left(len(value) - items)] if len(value) > items else shown
    if isinstance(value, str) and len(value) > chars:
        return f"{value[:chars]} … {len(value) - chars:,} more characters"
    return value


def _left(count: int) -> str:
    return f"… {count:,} more"


def cut_text(text: str, limit: int = LIMIT) -> str:
    """Return a text of at most about `limit` characters, cut at the end of a line if it has lines."""
    if len(text) <= limit:
        return text
    kept = text[: text.rfind("\n", limit // 2, limit) + 1 or limit]
    return f"{kept}… {len(text) - len(kept):,} more characters"
