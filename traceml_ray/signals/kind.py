"""A kind of record: what travels, is stored and is exported of a signal is one struct."""

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
    """How a field lies in its column of the session file, where that is not the value itself."""

    put: Callable[[Any], Any]
    """Returns what is written of a value that is not None."""
    get: Callable[[Any], Any]
    """Returns the value again. Raises ValueError where it cannot."""


LINES = Form(lambda lines: "\n".join(lines) or None, lambda stored: stored.split("\n"))
"""Of lines of text: one text, null where there are none."""
_FLAG = Form(int, bool)


@dataclass(frozen=True)
class Kind(Generic[R]):
    """
    What one process, or one node, sends of a signal. Fields may be added at the end of `record`: an older
    reader ignores them, an older file lacks them. Anything else is another kind.
    """

    name: str
    """On the wire."""
    record: type[R]
    """Times are int64 ns, None is "not known"."""
    lost: str
    """What records are called where it is counted how many were lost."""
    table: str
    """Of the session file."""
    exported: str
    """Name of its file in an export."""
    scope: Literal["process", "node"] = "process"
    keep: Literal["all"] | int = "all"
    """`all`: every record, in order of arrival; a number: so many of each process, see `slot`."""
    slot: Callable[[R], int] = field(default=lambda _: 0)
    """Where only some are kept: the place of a record, whose older one it replaces."""
    node_time: str | None = None
    """The field with a time of the node's clock that is set to the aggregator's when the record arrives."""
    bundle: Bundled = "newest"
    """
    What is in the bundle of an incident: `all`, the `newest` of all processes together, the last `seconds` by
    `t_ns`, or what is of its `steps` by `last_step`.
    """
    index: str = ""
    """Columns of an index of the table."""
    of_rows: bool = False
    """A record is of no use once the rows of its steps have been folded away, and goes with them."""
    forms: Mapping[str, Form] = field(default_factory=dict)
    """By field. Others that have parts are JSON."""
    check: Callable[[R], None] = field(default=lambda _: None)
    """Raises ValueError for a record whose fields do not fit together."""
    amount: Callable[[R], int] = field(default=lambda _: 1)
    """How many of `lost` a record is."""

    @property
    def owner(self) -> str:
        """The column that says whose a record is: the number of a rank process, or the id of a node."""
        return "process" if self.scope == "process" else "node_id"

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The columns of its table after that of the owner."""
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
        """Return a record as it came. Raises `WireError`."""
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
        """Return the number of a record's row in a table that keeps only some of each process."""
        assert self.keep != "all"
        return process * self.keep + self.slot(record) % self.keep

    def of_row(self, values: Sequence[Any]) -> R:
        """
        Return the record of such a row, without its owner; a field that is null in an older file has its
        default. Raises as `msgspec.convert`, and ValueError.
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
        """The fields that cannot be None, with what they are where nothing is said."""
        fields = enumerate(msgspec.structs.fields(self.record))
        return [
            (place, one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory())
            for place, one in fields
            if not one.required and one.default is not None
        ]


def _form_of(kind: Any) -> Form | None:
    """Return how a field of a type is stored; None: as it is."""
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
