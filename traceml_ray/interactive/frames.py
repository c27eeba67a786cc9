"""Columns of values as typed arrays and as pandas tables."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
TIMES = {
    "t_ns": "time",
    "from_ns": "from_time",
    "to_ns": "to_time",
    "last_seen_ns": "last_seen",
    "lost_ns": "lost_at",
    "began_ns": "began_at",
}
"""Fields that are moments, ns since the epoch, and their columns in a table."""


def kind_of(annotation: Any) -> type:
    """Return the type of a column for values of type `annotation`: int, float, bool, str, else object."""
    while get_origin(annotation) is typing.Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return type(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = {kind_of(part) for part in get_args(annotation) if part is not type(None)}
        return kinds.pop() if len(kinds) == 1 else object
    return annotation if annotation in (int, float, bool, str) else object


def array(values: Sequence[Any], kind: type) -> Array:
    """
    Return a column as an array: int64, float64 or bool. A number column with unknown values is float64 with
    NaN; other columns are objects.
    """
    if kind in (int, float, bool):
        if any(value is None for value in values):
            return np.array([np.nan if value is None else float(value) for value in values])
        return np.array(values, {int: np.int64, float: np.float64, bool: np.bool_}[kind])
    column = np.empty(len(values), object)
    column[:] = values
    return column


def pandas() -> Any:
    """Return the pandas module. Raises ImportError with the package to install."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"to_pandas() needs pandas: pip install pandas ({error})") from error
    return pandas


def frame(columns: Mapping[str, tuple[Sequence[Any], type]]) -> Any:
    """Return a DataFrame of columns: name → (values, kind). A moment is datetime64[ns, UTC]."""
    pd = pandas()
    made: dict[str, Any] = {}
    for name, (values, kind) in columns.items():
        if name in TIMES:
            moments = [None if value is None else int(value) for value in values]
            whole = pd.array(moments, dtype="Int64").to_numpy("int64", na_value=np.iinfo(np.int64).min)
            made[TIMES[name]] = pd.Series(whole.view("datetime64[ns]")).dt.tz_localize("UTC")
        else:
            made[name] = _series(pd, values, kind)
    return pd.DataFrame(made)


def _series(pd: Any, values: Sequence[Any], kind: type) -> Any:
    some = any(value is None for value in values)
    if kind is float:
        return pd.Series(array(values, float))
    if kind in (int, bool, str):
        names = {int: "Int64" if some else "int64", bool: "boolean" if some else "bool", str: "string"}
        return pd.Series(pd.array(list(values), dtype=names[kind]))
    return pd.Series(array(values, object), dtype=object)
