"""Settings from the environment, and from keywords, whatever they are."""

from __future__ import annotations

from typing import Any

import msgspec
from fuzzing import bounded, fuzz, json_values
from hypothesis import given
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


@fuzz(4)
@given(
    st.dictionaries(
        st.sampled_from(NAMES) | st.text(max_size=8).map("TRACEML_THRESHOLD_".__add__), texts, max_size=3
    )
)
def test_settings_from_any_environment_are_in_range_or_refused(environ: dict[str, str]) -> None:
    """Either every value is in its range, or one line says which variable is wrong."""
    with bounded(mib=16):
        try:
            loaded = Settings.load(environ)
        except SettingError as error:
            assert any(name in str(error) for name in environ)
            return
    assert 0.05 <= loaded.interval <= 60 and 0 <= loaded.thresholds.min_excess <= 1


@fuzz()
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3))
def test_settings_from_any_keywords_are_loaded_or_refused(keywords: dict[str, Any]) -> None:
    thresholds = keywords.pop("thresholds", None)
    if not isinstance(thresholds, dict):
        thresholds = None
    with bounded(mib=16):
        try:
            Settings.load({}, thresholds=thresholds, **keywords)
        except SettingError:
            pass
