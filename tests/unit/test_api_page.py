"""The page of the API is what the sources say, and signatures, settings and docstrings agree."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

pytest.importorskip("ray.train")

import traceml_ray
from traceml_ray.launchers.train_callback import TraceMLTrainCallback
from traceml_ray.settings import _RANGES, OF_LAUNCHERS, SettingError, Settings

DOCS = Path(__file__).parents[2] / "docs"
FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}
OWN = {"self", "runtime_env", "ship"}
TAKE_SETTINGS = {"start": traceml_ray.start, "TraceMLTrainCallback": TraceMLTrainCallback.__init__}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def page(which: str = "page") -> str:
    spec = importlib.util.spec_from_file_location("api_page", DOCS / "api_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(getattr(module, which)())


def test_api_page_is_up_to_date() -> None:
    assert (DOCS / "api.md").read_text() == page(), "run `make api`"
    assert (DOCS / "data.md").read_text() == page("data_page"), "run `make api`"


def test_api_page_is_what_people_call() -> None:
    assert len(re.findall(r"^### ", page(), re.MULTILINE)) < 25
    assert "wire." not in page()


def test_api_page_has_all_public_names() -> None:
    titles = set(re.findall(r"^###+ (\S+)$", page(), re.MULTILINE))
    assert {*traceml_ray.__all__, *traceml_ray._NEEDED} - {"__version__"} <= titles


@pytest.mark.parametrize("function", TAKE_SETTINGS.values(), ids=TAKE_SETTINGS)
def test_keywords_are_the_settings_with_their_types(function: Callable[..., Any]) -> None:
    names = set(inspect.signature(function).parameters) - OWN
    assert names == FIELDS.keys() - OF_LAUNCHERS
    hints = get_type_hints(function)
    for name in names - {"thresholds"}:
        wanted = {*get_args(FIELDS[name].type)} or {FIELDS[name].type}
        assert wanted | {type(None)} <= {*get_args(hints[name])}, name
    assert all(p.default is None for n, p in inspect.signature(function).parameters.items() if n in names)


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - OF_LAUNCHERS))
def test_docstring_gives_the_limits_and_default_of_a_setting(name: str) -> None:
    match = re.search(rf"^ +{name}: (.*?)(?=^ {8}\w+: |^$|\Z)", traceml_ray.start.__doc__ or "", re.M | re.S)
    assert match is not None
    numbers = re.findall(r"(\d+(?:\.\d+)?(?:e\d+)?) ?(\w*)", match[1])
    documented = {float(number) * UNITS.get(unit, 1) for number, unit in numbers}
    default = FIELDS[name].default
    if name in _RANGES:
        assert {*_RANGES[name], default} - {None} <= documented
    elif default is not None and name != "thresholds":
        assert f"Default: {default}" in match[1].replace("`", "")


@pytest.mark.parametrize("call", [traceml_ray.start, TraceMLTrainCallback])
def test_unknown_keyword_error_names_the_known_ones(call: Callable[..., Any]) -> None:
    with pytest.raises(SettingError, match=r"intervall is not a keyword here; these are: .*interval, "):
        call(intervall=1)


def test_unknown_keyword_of_attach_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="ranks"):
        traceml_ray.attach(ranks=1)  # type: ignore[call-arg]
