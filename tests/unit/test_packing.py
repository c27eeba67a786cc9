"""What is packed into session files holds names of classes and of their attributes: they are of a form."""

import ast
import dataclasses
import inspect
import textwrap
import zlib
from typing import Any

import msgspec
import pytest

from traceml_ray.monitor import live_verdict
from traceml_ray.store import history_reader
from traceml_ray.store.history_reader import Packer


@pytest.mark.parametrize(
    ("packer", "form", "checksum"),
    [
        pytest.param(history_reader._PACKER, history_reader.FORM, (12, 124887087), id="store/history_reader"),
        pytest.param(live_verdict.PACKER, live_verdict.FORM, (6, 4266708025), id="monitor/live_verdict"),
    ],
)
def test_names_in_packed_bytes_change_only_with_the_form(
    packer: Packer, form: int, checksum: tuple[int, int]
) -> None:
    names = {name: attributes(cls) for name, cls in sorted(packer._classes.items())}
    now = form, zlib.crc32(repr(names).encode())
    assert now == checksum, f"raise FORM where names have changed, and write {now} here"


def test_attributes_are_seen_however_a_class_defines_them() -> None:
    class Plain:
        def __init__(self) -> None:
            self.one, self._two = 1, 2
            self.three: int = 3

    class Below(Plain):
        def later(self) -> None:
            self.four = 4

    @dataclasses.dataclass
    class Data:
        five: int

    class Struct(msgspec.Struct):
        six: int

    assert attributes(Data) == ["five"] and attributes(Struct) == ["six"]
    assert attributes(Below) == ["_two", "four", "one", "three"]


def attributes(cls: type[Any]) -> list[str]:
    """Return the names that instances of `cls` are packed with."""
    if fields := getattr(cls, "__struct_fields__", getattr(cls, "_fields", None)):
        return [*fields]
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    sources = [textwrap.dedent(inspect.getsource(base)) for base in cls.__mro__ if base is not object]
    return sorted(set().union(*map(attributes_in, sources)))


def attributes_in(source: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
