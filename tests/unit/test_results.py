"""What a session answers are structs, and `summary.json` is one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from unit.test_reports import Run

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.live_session import Session
from traceml_ray.reports.answers import Answers
from traceml_ray.stages import DATA
from traceml_ray.store import query, results, summary_shape
from traceml_ray.store.summary_shape import to_builtins
from traceml_ray.wire import messages as wire

ANSWERED = [
    *("nodes", "ranks", "runs", "summary", "verdict", "memory", "findings", "throughput"),
    *("output", "compare", "bundles", "dump", "profile", "profiles", "layers", "status"),
]


@pytest.fixture(params=[False, True], ids=["healthy", "with everything"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    run = Run(tmp_path / "s", 4, world_size=4, nnodes=2, launcher="torchrun")
    run.steps(60 if request.param else 1, strategy="ddp")
    if request.param:
        run.steps(30, late=2, spans=[wire.SpanSum("mine", DATA, 1, 10, 10, 1, 1, 40)])
        run.raised(3, "ValueError: no", 0.5)
    return run


def test_answers_are_of_their_types_live_as_from_the_file(run: Run) -> None:
    run.aggregator.judge()
    run.aggregator.commit()
    kinds = {
        query.GetStatus(): results.Status,
        query.GetVerdict(): results.LiveVerdict,
        query.GetLedger(): results.WholeLedger,
        query.GetSummary(): summary_shape.Summary,
    }
    for answers in (Answers(run.folder, Thresholds()), run.aggregator._answers):
        for request, kind in kinds.items():
            answer = answers.answer(request)
            assert type(answer) is kind
            assert query.ask_one(lambda _, a=answer: query.encode([a]), request) == answer


def _in_order(written: str) -> Any:
    return json.loads(written, object_pairs_hook=list)


def test_summary_json_is_the_struct_field_by_field_in_its_order(run: Run) -> None:
    run.finish(1, run.failure(3, 1, 0.5, "ValueError: no"))
    written = (run.folder / "summary.json").read_text()
    summary = summary_shape.summary_of(json.loads(written))
    assert _in_order(json.dumps(summary_shape.plain(summary))) == _in_order(written)
    assert to_builtins(summary) == json.loads(written)


def _leaves(kind: Any) -> Iterator[Any]:
    """The types that a type is made of: of `list[A] | None` A and None."""
    if not (parts := get_args(kind)):
        yield kind
    for part in parts:
        yield from _leaves(part)


@pytest.mark.parametrize("name", ANSWERED)
def test_what_a_session_returns_is_a_struct(name: str) -> None:
    kinds = {*_leaves(get_type_hints(getattr(Session, name))["return"])} - {type(None)}
    assert kinds and all(issubclass(kind, msgspec.Struct) for kind in kinds)


def test_block_of_a_summary_that_this_version_does_not_know_is_passed_on(run: Run) -> None:
    run.finish(0)
    path = run.folder / "summary.json"
    written = {**msgspec.json.decode(path.read_bytes()), "energy": {"joules": [1.5, None]}}
    path.write_bytes(msgspec.json.encode(written))
    answers = Answers(run.folder, Thresholds())
    assert to_builtins(answers._reported(written["run"])) == written
    reply = query.encode([written])
    assert to_builtins(query.ask_one(lambda _: reply, query.GetSummary())) == written
