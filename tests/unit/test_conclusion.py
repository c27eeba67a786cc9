"""What a person reads first of a run, on all faces: the most severe of what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from played import Played
from plotly.io.json import to_json_plotly

from traceml_ray.analysis.layer_times import LayerFinding, Layers
from traceml_ray.analysis.memory.shapes import Finding, Memory
from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.dash_app.shell import _cost
from traceml_ray.launchers.monitor import _report
from traceml_ray.reports.conclusion import conclude
from traceml_ray.session import SessionFolder
from traceml_ray.terminal.panel import line, panel
from traceml_ray.terminal.snapshot import Choice, take
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import StoredSource

HEALTHY = {"label": "healthy", "why": "No rank is late.", "next": "Nothing to do."}
LATE = {"label": "straggler", "ranks": [5], "rank": 5, "stage": "data", "why": "It is.", "next": "Look."}
DEAD = {**LATE, "label": "rank_lost"}


def verdict(given: dict[str, Any]) -> dict[str, Any]:
    return {**dict.fromkeys(("rank", "node", "stage", "span")), "ranks": [], "stages": [], **given}


def of_memory(severity: Any) -> Memory:
    about = {"from_ns": 0, "to_ns": 1, "evidence": {}, "confidence": "high", "device": None}
    found = Finding(
        kind="creep", rank=2, node="n", severity=severity, next=["Mend."], why="It grows.", **about
    )  # type: ignore[arg-type]
    return Memory(findings=[found])


LAYERS = Layers(
    findings=[LayerFinding(1, "n", "head", "Linear", "forward", 2.0, 4.0, 2.0, "it takes longer")]
)


@pytest.mark.parametrize(
    ("steps", "memory", "layers", "first"),
    [
        (HEALTHY, None, None, "healthy"),
        (HEALTHY, of_memory("info"), None, "healthy"),
        (HEALTHY, of_memory("warning"), None, "memory creep: rank 2 (n)"),
        (HEALTHY, None, LAYERS, "slow layer: head on rank 1 (n)"),
        (HEALTHY, of_memory("warning"), LAYERS, "memory creep: rank 2 (n)"),
        (LATE, of_memory("warning"), LAYERS, "straggler: rank 5 in data"),
        (LATE, of_memory("critical"), LAYERS, "memory creep: rank 2 (n)"),
        (DEAD, of_memory("critical"), LAYERS, "rank lost: rank 5 in data"),
    ],
)
def test_the_most_severe_is_first(steps: Any, memory: Any, layers: Any, first: str) -> None:
    assert conclude(verdict(steps), memory, layers).headline == first


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody is late; rank 5 keeps so much that its device is full in minutes."""
    played = Played(tmp_path_factory.mktemp("out") / "demo", late=None)
    played.leaks = {5: 256 << 20}
    for _ in range(90):
        played.play(5)
    played.end()
    return played.folder


def test_a_run_that_leaks_does_not_end_as_healthy(leaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((leaking / "summary.json").read_bytes())
    first = summary["conclusion"]
    assert summary["verdict"]["label"] == "healthy"
    assert (first["subject"], first["tone"], first["rank"]) == ("memory", "critical", 5)
    _report(SessionFolder(leaking))
    last = capsys.readouterr().err.splitlines()
    assert last[0] == f"traceml-ray: {first['label']}: {first['why']}" and "of memory" in last[0]
    assert last[1] == f"traceml-ray: next: {first['next']}" and last[2].startswith(
        "traceml-ray: steps: healthy"
    )
    report = (leaking / "report.txt").read_text()
    assert f"Verdict    {first['headline']}" in report and "Nothing to do" not in report
    page = (leaking / "report.html").read_text()
    assert f"<title>◆ {first['headline']}" in page and "Nothing to do" not in page


def test_pages_and_terminal_begin_with_the_same(leaking: Path) -> None:
    headline = json.loads((leaking / "summary.json").read_bytes())["conclusion"]["headline"]
    pages = SessionPages(StoredSource(leaking))
    pages.poll()
    shown = to_json_plotly(Refresher(pages).refresh("/", "", {})).replace("\\u002f", "/")
    assert headline[1:] in shown and "tone-critical" in shown and "Nothing to do" not in shown
    assert f"\\u25c6 {headline}" in shown, "the title of the browser's tab"
    poll = SessionPoll(StoredSource(leaking))
    poll.poll()
    _, of = poll.made(lambda: take(poll, poll.newest, Choice("nodes")))
    lines = [line.plain for line in panel(of, Choice(), 100, 40)]
    assert any(f"Verdict  ◆ {headline}" in one for one in lines)
    assert any("Steps    ✓ healthy" in one for one in lines)
    assert f"◆ {headline}  ✓ healthy" in line(of, "12:00:00")


def test_cost_is_of_whom_it_names() -> None:
    """The cost of a straggler is not read as that of the memory creep in the headline."""
    late = {**verdict(LATE), "headline": "straggler: rank 5 in data", "lost_text": "", "cost_pct": 33.0}
    late |= {"rank_hours_per_hour": 0.0, "confidence": "high", "pattern": "", "chronic": False}
    healthy = {**late, "label": "healthy", "cost_pct": None}

    def shown(steps: dict[str, Any], memory: Memory | None) -> list[Any]:
        header = {"verdict": steps, "first": conclude(steps, memory, None), "incident": None}
        return [element.children for element in _cost({**header, "session": {"gpus": 0}})]

    of_cost = ["33 %", "of each step", "confidence high"]
    assert shown(late, None) == of_cost
    assert shown(late, of_memory("critical")) == ["straggler: rank 5 in data:", *of_cost]
    assert shown(healthy, of_memory("critical")) == []
