"""A kind of record. One struct defines what a signal sends, stores and exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import msgspec.inspect

from traceml_ray.wire.codec import UNREADABLE, Part, WireError, ready

R = TypeVar("R", bound=Part)
Bundled = Literal["all", "newest", "seconds", "steps", "nothing"]
_PLAIN = (
    msgspec.inspect.IntType,
    msgspec.inspect.FloatType,
    msgspec.inspect.StrType,
    msgspec.inspect.BytesType,
    msgspec.inspect.LiteralType,
    msgspec.inspect.NoneType,
)


class Form(NamedTuple):
    """How a field is stored in its column of the session file, if not as the value itself."""

    put: Callable[[Any], Any]
    """Converts a value that is not None to its stored form."""
    get: Callable[[Any], Any]
    """Converts the stored form back. Raises ValueError if it cannot."""


LINES = Form(lambda lines: "\n".join(lines) or None, lambda stored: stored.split("\n"))
"""Stores lines of text as one text; null if there are no lines."""
_FLAG = Form(int, bool)


@dataclass(frozen=True)
class Kind(Generic[R]):
    """
    What one process, or one node, sends for a signal.

    Fields may be added at the end of `record`: older readers ignore them, older files lack them. Any other
    change needs a new kind.
    """

    name: str
    """Name of the kind in messages."""
    record: type[R]
    """Struct of the records. Times are int64 ns; None is "not known"."""
    lost: str
    """Name of the records where lost records are counted."""
    table: str
    """Table of the session file."""
    exported: str
    """Name of the file in an export."""
    scope: Literal["process", "node"] = "process"
    keep: Literal["all"] | int = "all"
    """
    `all`: keep every record, in order of arrival. A number: keep that many records per
    process, see `slot`.
    """
    slot: Callable[[R], int] = field(default=lambda _: 0)
    """If only some records are kept: the slot of a record. It replaces the older record in that slot."""
    node_times: tuple[str, ...] = ()
    """
    Fields with times of the node's clock. They are converted to the aggregator's clock when the
    record arrives.
    """
    bundle: Bundled = "newest"
    """
    Which records the bundle of an incident contains: `all`, the `newest` over all processes, those of the
    last `seconds` by `t_ns`, or those of its `steps` by `last_step`.
    """
    index: str = ""
    """Columns of an index of the table."""
    of_rows: bool = False
    """Whether a record is useless, and deleted, once the rows of its steps have been compacted."""
    forms: Mapping[str, Form] = field(default_factory=dict)
    """Stored form by field. Other fields with parts are stored as JSON."""
    check: Callable[[R], None] = field(default=lambda _: None)
    """Raises ValueError for a record whose fields contradict each other."""
    amount: Callable[[R], int] = field(default=lambda _: 1)
    """Number of `lost` items that a record counts as."""

    @property
    def owner(self) -> str:
        """Column that identifies the owner of a record: the number of a rank process, or the id of a node."""
        return "process" if self.scope == "process" else "node_id"

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Columns of the table after the owner's column."""
        return self.record.__struct_fields__

    @cached_property
    def _forms(self) -> list[tuple[int, Form]]:
        forms = []
        for place, one in enumerate(msgspec.structs.fields(self.record)):
            form = self.forms.get(one.name) or _form_of(one.type)
            forms += [] if form is None else [(place, form)]
        return forms

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[R]:
        return msgspec.msgpack.Decoder(ready(self.record))

    def decode(self, raw: msgspec.Raw | bytes) -> R:
        """Decode a record as received. Raises `WireError`."""
        try:
            record = self._decoder.decode(raw)
            self.check(record)
        except UNREADABLE as error:
            raise WireError("malformed", f"{self.name}: {error}"[:300]) from None
        return record

    def row(self, owner: int | str, record: R) -> tuple[Any, ...]:
        """Return a record as a row of its table."""
        values: Sequence[Any] = msgspec.structs.astuple(record)
        if self._forms:
            values = [*values]
            for place, form in self._forms:
                if values[place] is not None:
                    values[place] = form.put(values[place])
        return (owner, *values)

    def place(self, process: int, record: R) -> int:
        """Return the row number of a record, in a table that keeps only some records of each process."""
        assert self.keep != "all"
        return process * self.keep + self.slot(record) % self.keep

    def of_row(self, values: Sequence[Any]) -> R:
        """
        Return the record of a row, given without its owner. A field that is null in an older file gets its
        default. Raises what `msgspec.convert` raises, and ValueError.
        """
        stored = [*values]
        for place, form in self._forms:
            if stored[place] is not None:
                stored[place] = form.get(stored[place])
        for place, default in self._defaults:
            if stored[place] is None:
                stored[place] = default
        return msgspec.convert(stored, ready(self.record))

    @cached_property
    def _defaults(self) -> list[tuple[int, Any]]:
        """Fields that cannot be None, as (index, default)."""
        fields = enumerate(msgspec.structs.fields(self.record))
        return [
            (place, one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory())
            for place, one in fields
            if not one.required and one.default is not None
        ]


def _form_of(kind: Any) -> Form | None:
    """Return the stored form of a field's type. None: it is stored as it is."""
    info = msgspec.inspect.type_info(kind)
    parts = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    if any(isinstance(part, msgspec.inspect.BoolType) for part in parts):
        return _FLAG
    if all(isinstance(part, _PLAIN) for part in parts):
        return None
    return Form(
        lambda value: msgspec.json.encode(value).decode(),
        lambda stored: msgspec.json.decode(stored, type=ready(kind)),
    )
