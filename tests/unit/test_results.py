"""What a session answers has the shapes that `traceml_ray.store.results` and `summary_shape` say."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec
import pytest
from unit.test_reports import Run

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.reports.answers import Answers
from traceml_ray.reports.summary import runs_of, summarize
from traceml_ray.stages import DATA
from traceml_ray.store import query, results, summary_shape
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import messages as wire


def faults(value: Any, kind: Any, where: str = "") -> Iterator[str]:
    """Say where `value` is not of `kind`: another type, or a dict with other keys."""
    if get_origin(kind) in (Union, types.UnionType):
        if value is not None or type(None) not in get_args(kind):
            yield from faults(value, next(one for one in get_args(kind) if one is not type(None)), where)
    elif is_typeddict(kind):
        hints = get_type_hints(kind)
        wrong = set(value) ^ set(hints) if kind.__total__ else set()
        yield from (f"{where}.{name}: in one only" for name in sorted(wrong))
        for name in hints.keys() & value.keys():
            yield from faults(value[name], hints[name], f"{where}.{name}")
    elif get_origin(kind) in (list, dict):
        items = enumerate(value) if get_origin(kind) is list else value.items()
        for name, item in items:
            yield from faults(item, get_args(kind)[-1], f"{where}[{name}]")
    else:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            yield f"{where}: {error}"


@pytest.fixture(params=[False, True], ids=["healthy", "with everything"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    run = Run(tmp_path / "s", 4, world_size=4, nnodes=2, launcher="torchrun")
    run.steps(60 if request.param else 1, strategy="ddp")
    if request.param:
        run.steps(30, late=2, spans=[wire.SpanSum("mine", DATA, 1, 10, 10, 1, 1, 40)])
        run.raised(3, "ValueError: no", 0.5)
    return run


def test_answers_of_a_live_session_have_their_shapes(run: Run) -> None:
    asked = query.GetStatus(), query.GetVerdict(), query.GetSummary()
    answers = Answers(run.folder, Thresholds()), run.aggregator._answers
    run.aggregator.judge()
    run.aggregator.commit()
    for asked_of in answers:
        reply = query.encode([asked_of.answer(request) for request in asked])
        status, verdict, summary = msgspec.msgpack.decode(reply)["answers"]
        assert list(faults(status, results.Status)) == []
        assert list(faults(verdict, results.LiveVerdict)) == []
        assert list(faults(summary, summary_shape.Summary)) == []


def test_stored_summary_and_runs_have_their_shapes(run: Run) -> None:
    run.finish(1, run.failure(3, 1, 0.5, "ValueError: no"))
    with SessionFile(run.folder / "session.sqlite") as session:
        assert list(faults(summarize(session, Thresholds()), summary_shape.Summary)) == []
        assert list(faults(runs_of(session), list[results.RunInfo])) == []


def test_shapes_are_all_reached_from_what_a_session_returns() -> None:
    modules = results, summary_shape
    named = {name for module in modules for name, value in vars(module).items() if is_typeddict(value)}
    text = "".join(Path(str(module.__file__)).read_text() for module in modules)
    roots = {"LiveVerdict", "Status", "Summary"}
    assert {name for name in named - roots if text.count(name) < 2} == set()


def test_block_of_a_summary_that_this_version_does_not_know_is_passed_on(run: Run) -> None:
    run.finish(0)
    path = run.folder / "summary.json"
    written = {**msgspec.json.decode(path.read_bytes()), "energy": {"joules": [1.5, None]}}
    path.write_bytes(msgspec.json.encode(written))
    answers = Answers(run.folder, Thresholds())
    assert dict(answers._reported(written["run"])) == written
    reply = query.encode([written])
    assert query.ask_one(lambda _: reply, query.GetSummary()) == written
