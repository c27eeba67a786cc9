"""Lists of answers that are also tables: ranks, nodes, events, findings."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

from traceml_ray.interactive import frames
from traceml_ray.interactive.frames import TIMES, Array
from traceml_ray.interactive.html import page_of_table

T = TypeVar("T")


class RowList(list[T]):
    """
    A list of structs of one type that is also a table.

    `rows.stored` is the field `stored` of all structs as a numpy array: int64, float64 or bool. A number
    field with unknown values is float64 with NaN; text and lists are objects.
    """

    def __init__(self, items: Iterable[T], kind: Any) -> None:
        super().__init__(items)
        self._kind = kind

    def __getattr__(self, name: str) -> Array:
        kinds = _kinds(self.__dict__["_kind"]) if "_kind" in self.__dict__ else {}
        if name not in kinds:
            raise AttributeError(f"rows have no field {name!r}; fields: {', '.join(kinds) or 'none'}")
        return frames.array(self._values(name), kinds[name])

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_kinds(self._kind)})

    def to_pandas(self) -> Any:
        """
        Return a DataFrame with a row for each struct, and a typed column for each field.

        A moment (`from_ns`) is a column of datetime64[ns, UTC] (`from_time`). Whole numbers are int64, or
        Int64 if some are not known. Unknown values are NaN, NaT or NA, never 0. Raises ImportError if pandas
        is not installed.
        """
        columns = {name: (self._values(name), kind) for name, kind in self._shown().items()}
        return frames.frame(columns)

    def _shown(self) -> dict[str, type]:
        """
        Return the fields that are columns: name → type. Of a moment that exists twice,
        the one in ns is used.
        """
        kinds = _kinds(self._kind)
        twice = {TIMES[name] for name in kinds if name in TIMES} & kinds.keys()
        return {name: kind for name, kind in kinds.items() if name not in twice}

    def _values(self, name: str) -> list[Any]:
        return [getattr(item, name) for item in self]

    def _repr_html_(self) -> str:
        """Return the first rows as an HTML table for a notebook."""
        return page_of_table({name: self._values(name) for name in self._shown()}, len(self))


@cache
def _kinds(kind: Any) -> dict[str, type]:
    hints = typing.get_type_hints(kind)
    return {name: frames.kind_of(annotation) for name, annotation in hints.items()}
