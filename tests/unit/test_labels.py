"""Labels of a verdict: one table has them, and code and docs follow from it."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from traceml_ray.analysis.labels import LABELS, Label
from traceml_ray.analysis.rules import Finding
from traceml_ray.analysis.track import Episode
from traceml_ray.analysis.verdict import Verdict

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for place in ("traceml_ray", "launchers", "dash_app") for path in (ROOT / place).rglob("*.py")
]


def test_labels_each_have_a_line() -> None:
    assert get_args(Label) == tuple(LABELS), "`Label` and `LABELS` have the same names in the same order"


@pytest.mark.parametrize("struct", [Finding, Verdict, Episode])
def test_label_is_typed(struct: Any) -> None:
    assert get_type_hints(struct)["label"] == Label


def test_stored_verdict_with_an_unknown_label_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="strangler"):
        msgspec.convert({"label": "strangler"}, Verdict)


def test_labels_are_listed_in_one_place_only() -> None:
    """Code that needs several labels asks the table for their kind, severity or ranks."""
    lines = []
    texts = {path: path.read_text() for path in SOURCES}
    for path in [path for path, text in texts.items() if sum(label in text for label in LABELS) > 1]:
        for node in ast.walk(ast.parse(texts[path])):
            parts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
            words = [part.value for part in parts if isinstance(part, ast.Constant)]
            if len(LABELS.keys() & {word for word in words if isinstance(word, str)}) > 1:
                lines.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    allowed = (
        "traceml_ray/analysis/labels.py",
        "traceml_ray/store/bundles.py",
    )  # reasons of bundles are no labels
    other = [place for place in lines if not place.startswith(allowed)]
    assert other == [], "ask `analysis.labels.LABELS` instead"


def test_page_of_verdicts_has_the_table_of_labels() -> None:
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "docs" / "api_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "docs" / "concepts" / "verdicts.md").read_text()
    lacking = [name for name, label in LABELS.items() if f"| `{name}` | {label.means} |" not in text]
    assert lacking == [] and text == module.with_labels(text), "run `make api`"


def test_method_has_a_rule_for_every_label() -> None:
    text = (ROOT / "docs" / "method.md").read_text()
    lacking = [name for name in LABELS if f"`{name}`" not in text]
    assert lacking == [], "say in docs/method.md (The verdict) which rule gives it"


def test_labels_that_take_effect_at_once_are_those_of_the_method() -> None:
    text = " ".join((ROOT / "docs" / "method.md").read_text().split())
    (sentence,) = re.findall(r"([^.]*) take effect at once", text)
    listed, wanted = (
        set(re.findall(r"`(\w+)`", sentence)),
        {n for n, label in LABELS.items() if label.at_once},
    )
    assert listed == wanted, "correct that sentence of docs/method.md (What is named, and for how long)"
