"""What a person reads first of a run, on all faces: the most severe of what was found."""

from __future__ import annotations

import csv
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from measured_layers import LATE, measured
from played import QUIET, Played
from plotly.io.json import to_json_plotly
from sessions import MS

from traceml_ray import text
from traceml_ray.analysis.episodes import Brief
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.dash_app.shell import _cost
from traceml_ray.exports.files import export
from traceml_ray.exports.tables import Chosen
from traceml_ray.launchers.monitor import _report
from traceml_ray.reports.headlines import conclude
from traceml_ray.signals.experts.records import RouterTokens
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.layers.judge import LayerFinding, Layers
from traceml_ray.signals.memory.shapes import Memory, MemoryFinding
from traceml_ray.signals.views import findings_of
from traceml_ray.sinks.prometheus import Metrics
from traceml_ray.stages import FORWARD, N_STAGES, POST_SYNC, SYNC_WAIT
from traceml_ray.store import query
from traceml_ray.store.results import LiveVerdict, live_verdict
from traceml_ray.store.session import SessionFolder
from traceml_ray.terminal.panel import line, panel
from traceml_ray.terminal.snapshot import Choice, take_snapshot
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import StoredSource

HEALTHY = Verdict(label="healthy", why="No rank is late.", next="Nothing to do.")
NAMED = Verdict(label="straggler", ranks=(5,), rank=5, stage="data", why="It is.", next="Look.")
DEAD = msgspec.structs.replace(NAMED, label="rank_lost")


def of_memory(severity: Any) -> Memory:
    about = {"from_ns": 0, "to_ns": 1, "evidence": {}, "confidence": "high", "device": None}
    finding = MemoryFinding(
        kind="creep", rank=2, node="n", severity=severity, next=["Mend."], why="It grows.", **about
    )  # type: ignore[arg-type]
    return Memory(findings=[finding])


LAYERS = Layers(
    findings=[LayerFinding(1, "n", "head", "Linear", "forward", 2.0, 4.0, 2.0, "it takes longer")]
)


@pytest.mark.parametrize(
    ("given", "memory", "layers", "first"),
    [
        (HEALTHY, None, None, "healthy"),
        (HEALTHY, of_memory("info"), None, "healthy"),
        (HEALTHY, of_memory("warning"), None, "memory creep: rank 2 (n)"),
        (HEALTHY, None, LAYERS, "slow layer: head on rank 1 (n)"),
        (HEALTHY, of_memory("warning"), LAYERS, "memory creep: rank 2 (n)"),
        (NAMED, of_memory("warning"), LAYERS, "straggler: rank 5 in data"),
        (NAMED, of_memory("critical"), LAYERS, "memory creep: rank 2 (n)"),
        (DEAD, of_memory("critical"), LAYERS, "rank lost: rank 5 in data"),
    ],
)
def test_the_most_severe_is_first(given: Any, memory: Any, layers: Any, first: str) -> None:
    answers = {"memory": memory or Memory(), "layers": layers or Layers()}
    assert conclude(given, findings_of(given, None, answers)).headline == first


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
    _, newest = poll.make(lambda: take_snapshot(poll, poll.newest, Choice("nodes")))
    lines = [line.plain for line in panel(newest, Choice(), 100, 40)]
    assert any(f"Verdict  ◆ {headline}" in one for one in lines)
    assert any("Steps    ✓ healthy" in one for one in lines)
    assert f"◆ {headline}  ✓ healthy" in line(newest, "12:00:00")


def test_cost_is_of_whom_it_names() -> None:
    """The cost of a straggler is not read as that of the memory creep in the headline."""
    about: Any = {"rank_hours_per_hour": 0.0, "confidence": "high", "chronic": False}
    late = live_verdict(msgspec.structs.replace(NAMED, cost_pct=33.0, **about), [], Brief())
    healthy = msgspec.structs.replace(late, label="healthy", cost_pct=None)

    def shown(steps: LiveVerdict, memory: Memory | None) -> list[Any]:
        first = conclude(steps, findings_of(steps, None, {"memory": memory or Memory()}))
        header = {"verdict": steps, "first": first, "incident": None, "state": "live"}
        return [element.children for element in _cost({**header, "session": {"gpus": 0}})]

    of_cost = ["33 %", "of the time", "confidence high"]
    assert shown(late, None) == of_cost
    assert shown(late, of_memory("critical")) == ["straggler: rank 5 in data:", *of_cost]
    assert shown(healthy, of_memory("critical")) == []


FIGURE = re.compile(r"([\d.,]+ %) of (?:the|each) (?:run|time|step)\b")


def faces(source: Any) -> dict[str, str]:
    """What a person, or a program, reads of a session on pages, in the terminal and in `/metrics`."""
    pages = SessionPages(source)
    pages.poll()
    poll = SessionPoll(source)
    poll.poll()
    _, newest = poll.make(lambda: take_snapshot(poll, poll.newest, Choice()))
    shown = {
        path: to_json_plotly(Refresher(pages).refresh(path, "", {})).replace("\\u002f", "/")
        for path in ("/", "/events", "/rank/5")
    }
    lines = " ".join(one.plain.strip("│ ") for one in panel(newest, Choice(), 200, 60))
    shown["top"] = lines[lines.index("VERDICT") : lines.index("NODE SUMMARY")]
    return {**shown, "metrics": Metrics(pages).exposition()[0].decode()}


def one_cost(verdict: Any, shown: dict[str, str], about: str) -> None:
    """Whether `verdict` has one cost, in its own fields and sentence and on all faces."""
    cost = text.percent(verdict.cost_pct)
    assert (verdict.label, verdict.rank, verdict.about) == ("straggler", 5, about)
    assert text.percent(verdict.gain_pct) == cost
    assert set(FIGURE.findall(verdict.why)) == {cost}
    (suspect,) = (one for one in verdict.suspects if one.rank == 5 and one.stage == "data")
    assert text.percent(suspect.cost_pct) == cost
    assert suspect.gain_ms == pytest.approx(verdict.cost_pct / 100 * verdict.mean_step_ms, rel=1e-3)
    assert text.percent(sum(one.cost_pct for one in verdict.episodes)) == cost
    assert verdict.cost_s == pytest.approx(sum(one.cost_s for one in verdict.episodes), rel=1e-3)
    for place in ("/", "top"):
        assert {*FIGURE.findall(shown[place])} <= {cost}, place
        assert cost in shown[place], place
    events, rank = (shown[path].replace("\\u00a0", " ") for path in ("/events", "/rank/5"))
    assert cost in events and f"a step ({cost})." in rank
    for name in ("verdict_cost", "finding_cost"):
        (ratio,) = re.findall(rf"^traceml_{name}_ratio{{.*}} (.*)$", shown["metrics"], re.MULTILINE)
        assert float(ratio) == pytest.approx(verdict.cost_pct / 100, rel=1e-3), name


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Rank 5 is late from step 40 to the end; its cost over the run is not that of a window."""
    played = Played(tmp_path_factory.mktemp("out") / "demo", onset=40, jitter_ms=1.0)
    played.memory_s = 5
    for _ in range(60):
        played.play(5)
    return played


def test_cost_is_the_same_on_all_faces_live_and_stored(late: Played) -> None:
    now = late.aggregator._judge.answer()
    assert now is not None
    one_cost(now, faces(late.source), "now")
    late.end()
    source = StoredSource(late.folder)
    pages = SessionPages(source)
    pages.poll()
    whole = pages.newest.verdict if pages.newest else None
    assert whole is not None
    one_cost(whole, faces(source), "run")
    cost = text.percent(whole.cost_pct)
    assert cost != text.percent(now.cost_pct), "of the run, not of the time since it began"
    assert whole.cost_pct == pytest.approx(100 * whole.cost_s / whole.elapsed_s, rel=1e-3)
    report = " ".join((late.folder / "report.txt").read_text().split())
    page = re.sub(r"<[^>]*>", "", (late.folder / "report.html").read_text())
    for shown in (report, page):
        assert {*FIGURE.findall(shown)} == {cost}
    summary = json.loads((late.folder / "summary.json").read_bytes())
    assert summary["conclusion"]["why"] == summary["verdict"]["why"] == whole.why


def test_what_is_watched_is_healthy_on_no_face(tmp_path: Path) -> None:
    """It is late for long enough, but has not cost enough yet."""
    played = Played(tmp_path / "demo", late_ms=1.5, jitter_ms=0.05)
    played.memory_s = 5
    labels = []
    while "watching" not in labels:
        played.play(5)
        verdict = played.aggregator._judge.answer()
        assert verdict is not None
        labels.append(verdict.label)
    assert verdict.rank == 5 and verdict.cost_pct == pytest.approx(100 * 1.5 / 21.6, rel=0.1)
    shown = faces(played.source)
    assert "tone-notice" in shown["/"] and "tone-good" not in shown["/"]
    assert "△ watching: rank 5 (host-1) in data" in shown["top"] and "s of the 0.05 s" in shown["top"]
    assert 'traceml_verdict_info{label="watching"' in shown["metrics"]
    assert "Nothing to do" not in shown["top"] and "No rank delays" not in shown["top"]
    conclusion = conclude(verdict, findings_of(verdict, None, {}))
    assert (conclusion.tone, conclusion.label, conclusion.rank) == ("notice", "watching", 5)
    growing = findings_of(verdict, None, {"memory": of_memory("warning")})
    assert conclude(verdict, growing).subject == "memory"
    assert [one.label for one in growing] == ["watching", "memory_creep"], "the verdict's are first"
    brief = played.aggregator._judge.brief["job"]
    assert (brief["label"], brief["rank"]) == ("watching", None), "the log of rank 0 names no rank"


class SavesAndLate(Played):
    """Rank 0 saves a checkpoint of 600 ms every 10 steps; rank 1 is late by 12 ms in each forward."""

    def rows(self, n: int) -> np.ndarray:
        local = np.array(QUIET) * 3 + self._rng.uniform(0, 0.3, (self.world, n, N_STAGES))
        local[0, np.arange(self.step, self.step + n) % 10 == 0, POST_SYNC] += 600
        local[1, :, FORWARD] += 12
        busy = local[:, :, :SYNC_WAIT].sum(axis=2)
        local[:, :, SYNC_WAIT] = busy.max(axis=0) - busy + QUIET[SYNC_WAIT]
        rows: np.ndarray = (local * MS).astype("<i8")
        return rows


def test_what_costs_less_is_beside_the_headline_on_all_faces(tmp_path: Path) -> None:
    played = SavesAndLate(tmp_path / "demo", 4, per_node=2, late=None)
    for _ in range(40):
        played.play(8)
    verdict = played.aggregator._judge.answer()
    assert verdict is not None and (verdict.rank, verdict.stage) == (0, "post_sync")
    (other,) = verdict.also
    assert (other.rank, other.stage) == (1, "forward")
    assert verdict.cost_pct > 40 > 12 > other.cost_pct > 4
    shown = faces(played.source)
    line = f"straggler: rank 1 (host-0) in forward, {text.percent(other.cost_pct)} of the time"
    assert line in shown["/"] and line in shown["top"]
    ratios = re.findall(r'^traceml_finding_cost_ratio{.*rank="(.)".*} (.*)$', shown["metrics"], re.MULTILINE)
    assert {rank: round(float(ratio), 4) for rank, ratio in ratios} == {
        str(one.rank): round(one.cost_pct / 100, 4) for one in (verdict, other)
    }


class ManyFaults(Played):
    """Rank LATE is late in forward, rank 5 leaks, and a router prefers one of its experts."""

    def of_rank(self, rank: int) -> dict[str, Any]:
        return {"experts": [RouterTokens(0, "moe", [70 * (self.step + 1), 10, 10, 10])]}


KINDS = ["straggler", "memory_creep", "slow_layer", "uneven_experts"]


def test_all_findings_are_on_all_faces_in_one_order(tmp_path: Path) -> None:
    played = ManyFaults(tmp_path / "demo", late=LATE, stage=FORWARD, onset=0)
    played.leaks = {5: 256 << 20}
    for _ in range(90):
        played.play(5)
    measured(played)
    live = query.ask_one(played.source.reply, query.Findings())
    assert [one.label for one in live if one.severity != "info"] == KINDS
    assert {one.signal for one in live} == {"steps", "memory", "layers", "experts"}
    same_findings(live, faces(played.source))
    layer = next(one for one in live if one.label == "slow_layer")
    assert layer.explains == live[0].key and live[0].cost is not None
    played.end()
    stored = query.ask_one(StoredSource(played.folder).reply, query.Findings())
    assert [one.label for one in stored if one.severity != "info"] == KINDS
    summary = json.loads((played.folder / "summary.json").read_bytes())
    assert summary["findings"] == json.loads(msgspec.json.encode(stored))
    assert stored[0].cost == pytest.approx(summary["verdict"]["cost_pct"] / 100, rel=1e-3)
    shown = faces(StoredSource(played.folder))
    shown["report.txt"] = " ".join((played.folder / "report.txt").read_text().split())
    shown["report.html"] = html.unescape(re.sub(r"<[^>]*>", "", (played.folder / "report.html").read_text()))
    same_findings(stored, shown)
    _, files = tmp_path / "out", export(played.folder, "csv", tmp_path / "out", Chosen())
    (table,) = (file for file in files if file.stem == "findings")
    rows = list(csv.DictReader(table.open()))
    assert [row["key"] for row in rows] == [one.key for one in stored]
    assert float(rows[0]["cost"]) == stored[0].cost and json.loads(rows[1]["ranks"]) == [5]


def same_findings(findings: Sequence[Finding], shown: dict[str, str]) -> None:
    """Whether each face shows all findings but those that are only information, in the same order."""
    lines = [one for one in findings if one.severity != "info"]
    for place in shown.keys() - {"/events", "/rank/5", "metrics"}:
        after_first = shown[place][
            shown[place].lower().index(lines[1].headline) :
        ]  # the most severe is read first
        positions = [after_first.lower().index(one.headline) for one in lines[2:]]
        assert positions == sorted(positions), place
        assert lines[0].headline in shown[place] and text.percent(100 * lines[0].cost) in shown[place], place
    series = re.findall(r'^traceml_finding{label="(.*?)",.*} 1.0$', shown["metrics"], re.MULTILINE)
    assert series == [one.label for one in findings]
