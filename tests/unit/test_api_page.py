"""The page of the API is what the sources say, and it has all that is public."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import traceml_ray

DOCS = Path(__file__).parents[2] / "docs"


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


def test_every_field_on_the_page_of_data_has_a_meaning() -> None:
    shape, lacking = "", []
    for line in page("data_page").splitlines():
        if line.startswith("#"):
            shape = line.lstrip("# ")
        elif line.startswith("| ") and not line.split(" | ")[-1].strip("| "):
            lacking.append(f"{shape}: {line}")
    assert lacking == [], "say below these fields what they mean, then run `make api`"


def test_api_page_has_all_public_names() -> None:
    titles = set(re.findall(r"^##+ (\S+)$", page(), re.MULTILINE))
    assert {*traceml_ray.__all__, *traceml_ray._NEEDED} - {"__version__"} <= titles


def test_unknown_keyword_of_attach_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="ranks"):
        traceml_ray.attach(ranks=1)  # type: ignore[call-arg]
