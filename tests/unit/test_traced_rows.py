"""Rows worked out from a trace alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recorded import WALL_NS, operation, written

from traceml_ray.store.profiles import ProfileStep
from traceml_ray.traces.trace import read_trace
from traceml_ray.traces.traced_rows import TracedRow, traced_rows

MS = 1_000_000
STEPS = [
    ProfileStep(number, WALL_NS + number * 100 * MS, WALL_NS + (number + 1) * 100 * MS, None)
    for number in (5, 6)
]


def at_ms(name: str, begin: float, length: float, **more: Any) -> dict[str, Any]:
    return operation(name, begin * 1000, length * 1000, **more)


def step(begin: float, *more: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a step of 100 ms: what torch gives names to."""
    engine = "autograd::engine::evaluate_function: "
    parts = [
        at_ms("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 5, cat="user_annotation"),
        at_ms("DistributedDataParallel.forward", 8, 22, cat="user_annotation"),
        at_ms("aten::mean", 31, 1),
        at_ms(f"{engine}MeanBackward0", 35, 15),
        at_ms(f"{engine}torch::autograd::AccumulateGrad", 50, 10),
        at_ms("gloo:all_reduce", 40, 30, cat="user_annotation", tid=9),
        at_ms("Optimizer.step#SGD.step", 75, 5, cat="user_annotation"),
        *more,
    ]
    return [part | {"ts": part["ts"] + 1000 * begin} for part in parts]


def rows(tmp_path: Path, events: list[dict[str, Any]]) -> list[TracedRow]:
    return traced_rows(read_trace(written(tmp_path / "t.json", events)), STEPS)


def test_stages_are_cut_where_torch_names_their_beginnings(tmp_path: Path) -> None:
    (traced_row,) = rows(tmp_path, step(500) + step(600))
    assert (traced_row.step, traced_row.begin_ns) == (6, WALL_NS + 570 * MS)
    assert [ns / MS for ns in traced_row.stages_ns] == [30, 5, 3, 27, 25, 10]


def test_exchange_that_ends_after_the_optimizer_began_is_not_waited_for(tmp_path: Path) -> None:
    later = at_ms("gloo:all_reduce", 72, 20, cat="user_annotation", tid=9)
    (traced_row,) = rows(tmp_path, step(500, later) + step(600, later))
    assert [ns / MS for ns in traced_row.stages_ns] == [30, 5, 3, 27, 25, 10]


def test_row_without_a_forward_or_loader_has_no_such_stage(tmp_path: Path) -> None:
    events = [
        event for event in step(500) + step(600) if not event["name"].startswith(("Distributed", "enumerate"))
    ]
    (traced_row,) = rows(tmp_path, events)
    assert [ns / MS for ns in traced_row.stages_ns] == [65, 0, 0, 0, 25, 10]
    events = [event for event in step(500) + step(600) if not event["name"].startswith("Distributed")]
    (traced_row,) = rows(tmp_path, events)
    assert [ns / MS for ns in traced_row.stages_ns] == [30, 5, 0, 30, 25, 10]


def test_accumulated_backwards_are_one_row(tmp_path: Path) -> None:
    def half(begin: float) -> list[dict[str, Any]]:
        kept = [event for event in step(0) if not event["name"].startswith(("Optimizer", "gloo"))]
        return [event | {"ts": event["ts"] / 2 + 1000 * begin, "dur": event["dur"] / 2} for event in kept]

    ends = [at_ms("Optimizer.step#SGD.step", t_ms, 5, cat="user_annotation") for t_ms in (590, 690)]
    (traced_row,) = rows(tmp_path, half(500) + half(540) + half(600) + half(640) + ends)
    assert sum(traced_row.stages_ns) == 100 * MS and traced_row.stages_ns[4] == pytest.approx(25 * MS)


def test_step_without_a_backward_has_no_row(tmp_path: Path) -> None:
    assert rows(tmp_path, [at_ms("aten::mm", 510, 5), *step(600)]) == []
