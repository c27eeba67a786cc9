"""
Compares up to eight runs: a table with a row for each run, and charts with the lines of all runs. Rendered as
text, as data and as sections of a page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.comparison import Word
from traceml_ray.analysis.shapes import RunTimeline, StepColumns
from traceml_ray.analysis.thresholds import COMPARE, CompareLimits
from traceml_ray.document import drawing
from traceml_ray.document.json import indented
from traceml_ray.document.model import Array, Block, Column, Facts, OverlaidLine, Overlay, Section, Table
from traceml_ray.document.step_clock import StepClock
from traceml_ray.document.text import page
from traceml_ray.reports.comparison import (
    TONES,
    Comparison,
    Known,
    ask_side,
    ask_stored,
    compared,
    regressed,
    signed,
)
from traceml_ray.reports.page import page_of_sections
from traceml_ray.settings import Settings
from traceml_ray.signals.logged.judge import LoggedMetric
from traceml_ray.signals.logged.view import GetLogged
from traceml_ray.stages import STAGES
from traceml_ray.store import query, session

SCHEMA = "traceml_ray/runs/1"
NAMES = "ABCDEFGH"
"""Names of the runs, in the order in which they were given. Their number is the largest number of runs."""
X_AXES = "step", "time"
"""X axes of the lines: the steps of each run, or the time since its first step."""
_MOST_CHARTS = 8
"""Largest number of logged numbers that are drawn."""
_T = TypeVar("_T")


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one of several runs; ms, bytes, %. Unknown values are None."""

    name: str
    """Letter of the run. The others are compared with A."""
    session: str | None
    """Name of the session."""
    run: str | None
    """Id of the run."""
    status: str | None
    """Status of the session: running, finished, failed or stopped."""
    world_size: int | None
    """Number of ranks of the job."""
    verdict: str | None
    """Verdict on the run, in one line."""
    steps: int
    """Number of steps that the numbers cover."""
    step_ms: float | None
    """Mean time of a step (ms)."""
    median_ms: float | None
    """Median time of a step (ms)."""
    stages_ms: dict[str, float]
    """Mean exposed time of each stage in a step: stage → ms; empty if not known."""
    steps_per_s: float | None
    """Steps per second."""
    host_bytes: float | None
    """Largest host memory of a rank (bytes)."""
    device_bytes: float | None
    """Largest memory that a rank has allocated on a device (bytes)."""
    word: Word | None = None
    """Whether the run is better or worse than A; None for A itself, and if that cannot be judged."""
    change_pct: float | None = None
    """How much worse the run is than A, in % of a step of A."""


class RunTable(msgspec.Struct, frozen=True, kw_only=True):
    """Several runs, each compared with the first."""

    schema: str = SCHEMA
    """Name and version of this format."""
    runs: list[RunRow]
    """The runs, in the order in which they were given."""
    comparisons: list[Comparison]
    """The comparison of each other run with the first, in their order."""


class OverlaidRun(NamedTuple):
    """All shown data of one of several runs."""

    known: Known
    columns: StepColumns | None
    """Data of the charts by step; None: not known."""
    clock: StepClock | None
    """When the run's steps were over; None: not known."""
    logged: Sequence[LoggedMetric]
    """Numbers that the run's script has logged."""


def stored_runs(
    ask: Callable[[Callable[[bytes], bytes], str | None], _T],
    names: Sequence[str | os.PathLike[str] | None],
    runs: Sequence[str | None],
    settings: Settings,
) -> list[_T]:
    """
    Return what `ask` (`ask_run`, or `comparison.ask_side` for the numbers alone) asks about each run, from
    the files of its session.

    Args:
        ask: asks about one run.
        names: names or paths of the sessions.
        runs: ids or names of the runs; None: the newest run of the session.
        settings: of the sessions.

    Raises:
        SessionError: there are more than eight, or a session is missing.
        SessionFileError: a session file cannot be read.
        QueryError: there is no such run.
    """
    refuse_too_many(len(names))
    return [ask_stored(ask, name, run, settings) for name, run in zip(names, runs, strict=True)]


def refuse_too_many(count: int) -> None:
    """Raise `SessionError` if there are too many runs to distinguish."""
    if count > len(NAMES):
        more = count - len(NAMES)
        raise session.SessionError(
            f"{count} sessions: at most {len(NAMES)} are compared at once. Leave out {more}, or compare them "
            "in groups that all begin with the same session"
        )


def ask_run(send: Callable[[bytes], bytes], run: str | None = None) -> OverlaidRun:
    """Return the answers that `send` gives about one session. Raises like `query.ask`."""
    known = ask_side(send, run)  # it has read all steps
    columns = query.ask_one(send, query.GetColumns(run, whole=True))
    timeline: RunTimeline | None = query.ask_one(send, query.GetTimeline(run))
    logged = query.ask_one(send, GetLogged(run))
    return OverlaidRun(known, columns if len(columns.last) else None, StepClock.of(timeline), logged)


def table_of(sides: Sequence[Known], limits: CompareLimits = COMPARE) -> RunTable:
    """Return the numbers of the runs, and how each differs from the first."""
    first, *others = sides
    comparisons = [compared(first, other, limits) for other in others]
    return RunTable(
        runs=[
            _row(name, side, comparison)
            for name, side, comparison in zip(NAMES, sides, [None, *comparisons], strict=False)
        ],
        comparisons=comparisons,
    )


def _row(name: str, known: Known, comparison: Comparison | None) -> RunRow:
    side, times = known.side, known.times
    has_steps = bool(times.steps)
    return RunRow(
        name=name,
        session=side.session,
        run=side.run,
        status=side.status,
        world_size=side.world_size,
        verdict=side.verdict,
        steps=times.steps,
        step_ms=sum(times.stages.values()) if has_steps and times.stages else None,
        median_ms=times.median_ms if has_steps else None,
        stages_ms=dict(times.stages or {}) if has_steps else {},
        steps_per_s=times.steps_per_s if has_steps else None,
        host_bytes=_largest(known, "host memory"),
        device_bytes=_largest(known, "device memory, allocated"),
        word=comparison.word if comparison else None,
        change_pct=comparison.change_pct if comparison else None,
    )


def _largest(known: Known, what: str) -> float | None:
    """Return the largest sample of all ranks and devices; None if there is none."""
    return max(
        (float(series.samples.max()) for series in known.memory[what] if len(series.samples)), default=None
    )


def to_json(table: RunTable) -> str:
    """Return the table as indented JSON with a line break at the end."""
    return indented(table)


def render(table: RunTable) -> str:
    """Return the runs as text: a list of the runs, and a table."""
    return page([*_about(table), runs_table(table, named=False), stages_table(table), *_notes(table)])


def _about(table: RunTable) -> list[Block]:
    return [Facts(*((row.name, _titled(row)) for row in table.runs))]


def _titled(row: RunRow) -> str:
    ranks = text.count(row.world_size, "rank") if row.world_size else "no rank"
    return " · ".join(
        filter(None, (row.session, row.status, ranks, text.count(row.steps, "step"), row.verdict))
    )


def _notes(table: RunTable) -> list[Block]:
    return [Facts.listed("Against A", headlines(table))]


def headlines(table: RunTable) -> list[str]:
    """Return the difference of each other run from A, each in a sentence."""
    named = zip(NAMES[1:], table.comparisons, strict=False)
    return [f"{name}: {_headline(name, comparison)}" for name, comparison in named]


def _headline(name: str, comparison: Comparison) -> str:
    """Return the headline of a comparison with the name of the run. With two runs it is B."""
    headline = comparison.headline
    return re.sub(r"\bB\b", name, headline) if comparison.word is None else headline


_STEP = [
    Column("step", lambda row: row.step_ms, "ms"),
    Column("median", lambda row: row.median_ms, "ms"),
    Column("against A", lambda row: _change(row), "figures", tone=lambda row: TONES.get(row.word or "", "")),
    Column("steps/s", lambda row: row.steps_per_s, "number"),
    Column("host memory", lambda row: row.host_bytes, "known size"),
    Column("device memory", lambda row: row.device_bytes, "known size"),
]
_WHICH = [
    Column("", lambda row: row.name, "name"),
    Column("session", lambda row: row.session, "name"),
    Column("verdict", lambda row: row.verdict, "words"),
]


def runs_table(table: RunTable, *, named: bool = True) -> Table:
    """Return the numbers of the runs, one row for each. `named`: with its session and its verdict."""
    columns = [*(_WHICH if named else _WHICH[:1]), *_STEP]
    note = "Against A: in % of a step of A. Memory: the largest sample of a rank."
    return Table("Runs", columns, table.runs, note)


def stages_table(table: RunTable) -> Table:
    """Return the exposed time of a step by stage, a row for each run."""
    columns = [_WHICH[0], *(Column(stage, _stage(stage), "known ms") for stage in STAGES)]
    return Table("Exposed time of a step", columns, table.runs)


def _change(row: RunRow) -> str:
    if row.change_pct is None:
        return ""
    return f"{signed(row.change_pct)} % {row.word if row.word in TONES else ''}".strip()


def _stage(stage: str) -> Callable[[RunRow], float | None]:
    return lambda row: row.stages_ms.get(stage)


def as_page(runs: Sequence[OverlaidRun], table: RunTable) -> bytes:
    """Return the runs as one self-contained page."""
    names = ", ".join(str(row.session) for row in table.runs)
    heading = f"{text.count(len(table.runs), 'session')} compared"
    return page_of_sections(f"{names} · compared", heading, sections(runs, table))


def sections(runs: Sequence[OverlaidRun], table: RunTable) -> list[Section]:
    """Return the tables of the runs, and their lines in common charts, as sections of a page."""
    drawn = charts(runs)
    return [
        Section(blocks=_notes(table), title="Compared with A"),
        Section(blocks=[runs_table(table)]),
        *(Section(blocks=[chart], title=chart.label, half=index > 0) for index, chart in enumerate(drawn)),
        Section(blocks=[stages_table(table)]),
    ]


def charts(runs: Sequence[OverlaidRun]) -> list[Overlay]:
    """Return charts of all runs: the time of a step, and the numbers that their scripts have logged."""
    drawn = [column_chart(runs, "Step time", "ms", "step_ms")]
    names = dict.fromkeys(metric.name for run in runs for metric in run.logged if len(metric.line))
    for name in [*names][:_MOST_CHARTS]:
        metrics = [next((one for one in run.logged if one.name == name), None) for run in runs]
        drawn.append(
            Overlay(name, "", _lines(runs, [(one.last, one.line) if one else None for one in metrics]))
        )
    return [chart for chart in drawn if any(chart.lines.values())]


def column_chart(runs: Sequence[OverlaidRun], label: str, unit: str, column: str) -> Overlay:
    """Return a chart of a field of `StepColumns` for all runs."""
    values = [(run.columns.last, getattr(run.columns, column)) if run.columns else None for run in runs]
    return Overlay(label, unit, _lines(runs, values), from_zero=True)


def _lines(
    runs: Sequence[OverlaidRun], values: Sequence[tuple[Array, Array] | None]
) -> Mapping[str, Sequence[OverlaidLine]]:
    """Return a line for each run that has values (steps, values), over each of `X_AXES`."""
    lines: dict[str, list[OverlaidLine]] = {axis: [] for axis in X_AXES}
    for name, run, both, style in zip(NAMES, runs, values, drawing.RUN_STYLES, strict=False):
        if both is None:
            continue
        known = np.isfinite(both[1])
        steps, shown = both[0][known], both[1][known]
        title = f"{name}: {run.known.side.session}"
        lines["step"].append(OverlaidLine(title, steps, shown, *style))
        if run.clock is not None:
            seconds = run.clock.seconds(steps)
            timed = np.isfinite(seconds)
            lines["time"].append(OverlaidLine(title, seconds[timed], shown[timed], *style))
    return {axis: [line for line in drawn if len(line.x)] for axis, drawn in lines.items()}


def any_worse(table: RunTable, percent: float) -> bool | None:
    """
    Return whether one of the runs is worse than the first by `percent` of a step or more; None if one of them
    cannot be judged.
    """
    if any(regressed(comparison, percent) for comparison in table.comparisons):
        return True
    return None if any(comparison.word is None for comparison in table.comparisons) else False
