"""Settings from another process, from the environment, and from keywords, whatever they are."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from fuzzing import bounded, fuzz, json_values, mutated
from hypothesis import example, given
from hypothesis import strategies as st

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.settings import SettingError, Settings

FIELDS = [field.name for field in msgspec.structs.fields(Settings)]
LIMITS = [field.name for field in msgspec.structs.fields(Thresholds)]
NAMES = [f"TRACEML_{name.upper()}" for name in FIELDS] + [
    f"TRACEML_THRESHOLD_{name.upper()}" for name in LIMITS
]
ODD = [
    "",
    " ",
    "nan",
    "inf",
    "-1",
    "1e999",
    "9" * 5000,
    "0x10",
    "true",
    "1_000",
    "\0",
    "é",
    "\ud800",
    "[]",
    "None",
]
texts = st.sampled_from(ODD) | st.text(max_size=30) | st.integers().map(str) | st.floats().map(str)


def from_json(data: bytes) -> None:
    with bounded(mib=16):
        try:
            assert isinstance(Settings.from_json(data), Settings)
        except SettingError as error:
            assert str(error).startswith("settings cannot be read")


@fuzz()
@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 200_000)
@example(b'{"x":' * 200_000)
@example(b'{"session": "\\ud800"}')
@example(b'{"interval": 1e999}')
def test_json_of_any_kind(data: bytes) -> None:
    from_json(data)


@fuzz()
@given(mutated(Settings(session="s").to_json(), [b"[" * 50_000, b"1e999", b"null", b"\\ud800", b"9" * 5000]))
def test_good_json_with_bytes_changed(data: bytes) -> None:
    from_json(data)


@fuzz()
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), json_values, max_size=6))
def test_json_with_fields_of_any_kind(said: dict[str, Any]) -> None:
    from_json(json.dumps(said).encode())


@fuzz(4)
@given(
    st.dictionaries(
        st.sampled_from(NAMES) | st.text(max_size=8).map("TRACEML_THRESHOLD_".__add__), texts, max_size=3
    )
)
def test_an_environment_of_any_kind(environ: dict[str, str]) -> None:
    """Either every value is in its range, or one line says which variable is wrong."""
    with bounded(mib=16):
        try:
            loaded = Settings.load(environ)
        except SettingError as error:
            assert any(name in str(error) for name in environ)
            return
    assert Settings.from_json(loaded.to_json()) == loaded
    assert 0.05 <= loaded.interval <= 60 and 0 <= loaded.thresholds.min_excess <= 1


@fuzz()
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3))
def test_keywords_of_any_kind(keywords: dict[str, Any]) -> None:
    thresholds = keywords.pop("thresholds", None)
    if not isinstance(thresholds, dict):
        thresholds = None
    with bounded(mib=16):
        try:
            Settings.load({}, thresholds=thresholds, **keywords)
        except SettingError:
            pass
