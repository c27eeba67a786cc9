"""
The document of a session: its sections by name. They are built from a summary and the answers that the web
app's first page uses. `reports/files` (the text) and `reports/page` select and order them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS
from traceml_ray.analysis.shapes import ChangedParts, RunTimeline, StepColumns, StepTimes
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.verdict_shapes import TimedEpisode
from traceml_ray.document import drawing
from traceml_ray.document.model import (
    Bars,
    Block,
    Column,
    Facts,
    Heat,
    Line,
    Lines,
    Section,
    StepChart,
    Table,
)
from traceml_ray.document.step_clock import StepClock
from traceml_ray.document.text import LABEL, shortened
from traceml_ray.reports import contents
from traceml_ray.reports.deaths import exit_words, place_words
from traceml_ray.reports.headlines import change, current_episode, named, unsaid
from traceml_ray.reports.kpis import kpis
from traceml_ray.reports.profiles import profile_facts
from traceml_ray.reports.run_facts import alike, deaths_of, moment
from traceml_ray.reports.step_answers import OF_STEPS
from traceml_ray.reports.summary import RunReport
from traceml_ray.signals.views import answers_in, sections_of, signal_numbers
from traceml_ray.stages import STAGES
from traceml_ray.store import query
from traceml_ray.store.bundles import FOLDER as BUNDLES
from traceml_ray.store.bundles import bundle_files, kept_why, names_of
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.results import RunInfo
from traceml_ray.store.session import DATABASE, REPORTS
from traceml_ray.store.step_shapes import DeathInfo
from traceml_ray.store.summary_shape import Summary, SummarySession


class ChartData(NamedTuple):
    """All data of a report: a summary, and the data of its charts; None: not known."""

    summary: Summary
    signals: Mapping[str, Any]
    """The answers of signals, by name."""
    times: StepTimes | None = None
    """Numbers of the run's steps, from `query.GetTimes`."""
    columns: StepColumns | None = None
    """Data of the charts by step, from `query.GetColumns`. The lines of `z` are in order of nodes."""
    change: ChangedParts | None = None
    """Time of each stage before the onset of the verdict and since, from `query.GetChange`."""
    timeline: RunTimeline | None = None
    """When steps were over, from `query.GetTimeline`."""
    deaths: Sequence[DeathInfo] = ()
    environment: Sequence[Mapping[str, Any]] = ()
    """
    Versions and the allocator's configuration. Each entry has `values` by name, and the `ranks` with these
    values.
    """
    settings: Mapping[str, str] = {}
    """Settings of the session that differ from the defaults."""


@dataclass
class _Steps:
    """A step history that has been read completely, as a `history_reader.RunSteps`."""

    history: StepHistory
    ranks: dict[int, RankProcess]
    world: int
    whole: bool = True


def read_chart_data(report: RunReport) -> ChartData:
    """Return all data of a report. Raises `SessionFileError`."""
    summary, facts = report.summary, report.facts
    run = summary.run
    times: Any = None
    columns = changed = timeline = None
    if report.history is not None and report.history.ranks:
        steps = _Steps(report.history, facts.ranks, facts.world_size)
        times, columns = (
            OF_STEPS[type(q)](steps, q, True) for q in (query.GetTimes(run), query.GetColumns(run))
        )
        timeline = cast("RunTimeline", OF_STEPS[query.GetTimeline](steps, query.GetTimeline(run), True))
        asked = change(run, summary.verdict, summary.episodes)
        changed = cast("ChangedParts", OF_STEPS[query.GetChange](steps, asked, True)) if asked else None
    silent = dict.fromkeys(summary.session.silent_ranks, "no report")
    return ChartData(
        summary,
        report.signals,
        times,
        drawing.ordered(columns, silent) if columns and len(columns.first) else None,
        changed,
        timeline,
        deaths_of(facts) if facts.fact("status") not in ("finished", "stopped") else [],
        alike(facts, lambda process: process.environment),
        dict(facts.meta.get("settings") or {}),
    )


def of_summary(summary: Summary) -> ChartData:
    """Return the data of a summary alone, without charts."""
    return ChartData(summary, answers_in(summary))


_MAX_DEATHS, _MAX_STACKS, _MAX_STACK_LINES, _MAX_ALIKE, _MAX_SETTINGS = 8, 4, 100, 4, 60


def episode_of(summary: Summary) -> TimedEpisode | None:
    """Return the episode that the verdict is about. In a finished run no episode continues."""
    episode = current_episode(summary.verdict, summary.episodes)
    running = summary.session.status == "running"
    return episode and msgspec.structs.replace(episode, goes_on=episode.goes_on and running)


def _of_signals(place: str) -> Callable[[ChartData], Iterator[Section]]:
    """Return a function that yields the sections of signals at a place of a report."""

    def sections(chart_data: ChartData) -> Iterator[Section]:
        for section in sections_of(chart_data.signals):
            if section.place == place:
                yield Section(section.place, section.blocks, section.title)

    return sections


def _blocks(
    *made: Callable[[Summary], Block], title: str = "", half: bool = False
) -> Callable[[ChartData], Iterator[Section]]:
    """
    Return a function that yields a section with the blocks that the functions `made`
    build from a summary.
    """

    def sections(chart_data: ChartData) -> Iterator[Section]:
        yield Section(blocks=[block(chart_data.summary) for block in made], title=title, half=half)

    return sections


def _findings(chart_data: ChartData) -> Iterator[Section]:
    """Yield the section of the findings besides the verdict."""
    yield Section(blocks=[contents.findings_table(unsaid(chart_data.summary.findings))])


def _ranks(chart_data: ChartData) -> Iterator[Section]:
    """Yield the section of the ranks, with the values of signals for each."""
    yield Section(blocks=[contents.ranks_table(chart_data.summary, sections_of(chart_data.signals))])


def _numbers(chart_data: ChartData) -> Iterator[Section]:
    """Yield the section of the numbers above all charts."""
    if chart_data.times and chart_data.columns:
        yield Section(numbers=kpis(chart_data.times, chart_data.columns, signal_numbers(chart_data.signals)))


def _deaths(chart_data: ChartData) -> Iterator[Section]:
    """Yield the section of the deaths of ranks, the first cause first, with their last printed lines."""
    shown: list[Block] = [_death(death, chart_data.summary) for death in chart_data.deaths[:_MAX_DEATHS]]
    left = len(chart_data.deaths) - len(shown)
    if left:
        shown.append(Facts(("", f"and {text.count(left, 'more rank')} that died after them")))
    yield Section(blocks=shown, title="Ranks that died, the first cause first")


def _death(death: DeathInfo, summary: Summary) -> Lines:
    rank = summary.ranks.get(str(death.rank))
    when = f"{'at' if death.exact else 'about'} {text.dated(moment(death.t_ns))}"
    place = place_words(death.step, death.stage)
    manner = ", ".join(filter(None, (f"{death.how} {when}", place)))
    words = death.traceback or (death.message if "\n" in death.message else "")
    node = f" ({rank.node})" if rank and rank.node else ""
    title = f"rank {death.rank}{node}: {manner}"
    return Lines(title, [("", line) for line in words.splitlines()])


def _stacks(chart_data: ChartData) -> Iterator[Section]:
    """Yield the section of the ranks' stacks in the last hang."""
    last = contents.last_stacks(chart_data.summary.verdicts)[:_MAX_STACKS]
    stacks = [
        Lines(text.ranks(stack.ranks), [("", line) for line in lines[:_MAX_STACK_LINES]])
        for stack in last
        for lines in [stack.text.expandtabs(4).splitlines()]
    ]
    yield Section(blocks=stacks, title="Where the ranks were")


def _by_rank(chart_data: ChartData) -> Iterator[Section]:
    """Yield the section of the heatmap of ranks by step."""
    if (columns := chart_data.columns) is not None:
        rows = drawing.by_node(columns, drawing.suspects(columns, chart_data.summary.verdict))
        label = "Busy time of each rank by step, over the median of the step"
        levels, clock = drawing.worst(columns, rows), StepClock.of(chart_data.timeline)
        heat = Heat(label, columns.first, columns.last, rows, levels, clock)
        yield Section(blocks=[heat], title="Busy time by rank, against the median of the step")


def _by_step(chart_data: ChartData) -> Iterator[Section]:
    """Yield the sections of the charts by step."""
    if (columns := chart_data.columns) is None:
        return
    episode = episode_of(chart_data.summary)
    first, last, onset = columns.first, columns.last, episode.from_step if episode else None
    clock = StepClock.of(chart_data.timeline)
    stages = [
        Line(name, columns.exposed[:, index], drawing.STAGES[name]) for index, name in enumerate(STAGES)
    ]
    label = "Exposed time of each stage by step, stacked, in ms"
    stacked = StepChart(label, first, last, stages, stacked=True, onset=onset, clock=clock)
    yield Section(
        blocks=[stacked], title="Where a step's time goes (exposed: what the job waited for)", half=True
    )
    worst, median = (
        Line("worst", columns.worst_ms, drawing.ORANGE),
        Line("median", columns.median_ms, drawing.BLUE),
    )
    label = "Busy time of the median and the worst rank by step, in ms"
    band = "p10–p90", columns.p10_ms, columns.p90_ms
    timeline = StepChart(label, first, last, [worst, median], band=band, onset=onset, clock=clock)
    yield Section(blocks=[timeline], title="Step timeline (busy: without waiting)", half=True)


def _steps(chart_data: ChartData) -> Iterator[Section]:
    """Yield the section of the step time, with the facts of signals about steps."""
    beside = [block for section in _of_signals("steps")(chart_data) for block in section.blocks]
    yield Section(blocks=[contents.steps_facts(chart_data.summary), *beside], title="Steps")


def _change(chart_data: ChartData) -> Iterator[Section]:
    """
    Yield the section of the change of each stage since the onset. Yields nothing if one of the two times is
    not known.
    """
    change = chart_data.change
    if change is None or (before := change.before.stages) is None:
        return
    if (since := change.since.stages) is None:
        return
    columns = [
        Column("stage", str),
        Column("before", lambda stage: before[stage], "ms"),
        Column("since", lambda stage: since[stage], "ms"),
    ]
    label = "Exposed time of a step by stage, before the onset and since"
    steps = f"{text.count(change.before.steps, 'step')} before, {change.since.steps:,} since"
    bars = Bars(label, drawing.waterfall(before, since), Table(label, columns, STAGES, steps))
    yield Section(blocks=[bars], title="A step before the onset, and since", half=True)


def _environment(chart_data: ChartData) -> Iterator[Section]:
    """Yield the section of versions and settings of the run."""
    session = chart_data.summary.session
    run = Facts(
        ("Command", session.command or ""),
        ("Launcher", session.launcher or ""),
        ("Began", text.dated(session.started_at) if session.started_at else ""),
        ("Ended", text.dated(session.ended_at) if session.ended_at else ""),
    )
    yield Section(blocks=[run], title="How it was run", half=True)
    names = [Column("setting", lambda item: item[0]), Column("value", lambda item: item[1])]
    settings = [*chart_data.settings.items()][:_MAX_SETTINGS]
    yield Section(blocks=[Table("Settings that differ from the defaults", names, settings)], half=True)
    columns = [Column("name", lambda item: item[0]), names[1]]
    columns.append(Column("ranks", lambda item: text.ranks(item[2])))
    rows = [
        (name, value, same["ranks"])
        for same in chart_data.environment[:_MAX_ALIKE]
        for name, value in same["values"].items()
    ]
    yield Section(blocks=[Table("Environment", columns, rows)], half=True)


def more(folder: Path) -> Section:
    """Return the section that lists the bundles, and says how to open the web app and the other files."""
    here, (count, newest) = shlex.quote(str(folder)), bundles_in(folder)
    kept = "The bundle of its incident"
    if count > 1:
        kept = f"The newest of its {count:,} bundles of incidents"
    commands = {
        "Each step, rank and node in the web app, on the machine that has the session:": ["dashboard {}"],
        "This page again, or all its data:": ["report {} --html", "report {} --json"],
    }
    blocks = [Lines(f"{kept}, in {folder}:", [("", name) for name in newest])] if newest else []
    blocks += [
        Lines(title, [("", f"traceml-ray {line.format(here)}") for line in lines])
        for title, lines in commands.items()
    ]
    return Section(blocks=blocks, title="To see more")


SECTIONS: Mapping[str, Callable[[ChartData], Iterator[Section]]] = {
    "verdict": _blocks(contents.verdict_facts),
    "operation": _blocks(profile_facts),
    "also": _blocks(contents.findings_facts),
    "findings": _findings,
    "numbers": _numbers,
    "deaths": _deaths,
    "output": _of_signals("failure"),
    "stacks": _stacks,
    "by rank": _by_rank,
    "by step": _by_step,
    "model": _of_signals("model"),
    "steps": _steps,
    "stages": _blocks(
        lambda summary: contents.stages_table(summary.stages), title="Stages of a step", half=True
    ),
    "spans": _blocks(lambda summary: contents.spans_table(summary.spans, summary.steps.median_ms), half=True),
    "tables": _of_signals("tables"),
    "change": _change,
    "suspects": _blocks(contents.suspects_table),
    "nodes": _blocks(contents.nodes_table),
    "roles": _blocks(contents.roles_table),
    "ranks": _ranks,
    "of ranks": _of_signals("ranks"),
    "history": _blocks(contents.history_table),
    "events": _blocks(lambda summary: contents.events_table(summary.events)),
    "runs": _blocks(lambda summary: contents.runs_table(summary.runs, summary.run)),
    "environment": _environment,
    "monitor": _blocks(
        lambda summary: contents.ledger_facts(summary.ledger),
        lambda summary: contents.overhead_facts(summary.overhead),
        title="Monitor",
        half=True,
    ),
}
"""Functions that yield the sections of each name."""


_MAX_BUNDLES = 3
_SHELL = 128
"""A shell adds this to the number of a signal to form the exit code."""


def title(summary: Summary, folder: Path) -> list[str]:
    """
    Return the first lines of a report: the session, the failed rank and the reason if the run has failed, and
    the size of the run.
    """
    name = f"traceml-ray · session {summary.session.id}"
    verdict, kept = summary.verdict, kept_why(folder)
    # Who and why comes before anything else where a run has failed, or this was kept of it.
    first = f"bundle of {kept}" if kept else ""
    if LABELS[verdict.label].kind == "failure":
        first = f"{named(verdict)}: {verdict.exit_reason or verdict.why}"
    about = [first, " · ".join(about_session(summary))]
    return [
        *(name, "=" * len(name)),
        *(shortened(line) for line in about if line),
        *(shortened(line) for line in run_of(summary.runs, summary.run)),
    ]


def about_session(summary: Summary) -> list[str]:
    """Return how a session ended, how it was started, and its size."""
    session = summary.session
    ranks, nodes = session.world_size, session.nnodes
    size = f"{text.count(ranks, 'rank')} on {text.count(nodes, 'node')}" if ranks and nodes else None
    if size and session.silent_ranks:
        size += f" (no report from {text.ranks(session.silent_ranks)})"
    status = session.status
    if status == "failed" and session.exit_code is not None:
        status += f" (exit code {session.exit_code})"
    if status == "stopped" and session.exit_code:
        code = session.exit_code
        status += f" by {exit_words(code if code < 0 else _SHELL - code)}"
    about = [status, session.launcher, size, session.strategy, _duration(session)]
    return [fact for fact in about if fact]


def run_of(runs: Sequence[RunInfo], chosen: str | None) -> list[str]:
    """
    Return the name of the run that the report covers, if there are several runs or the
    run has its own name.
    """
    for number, run in enumerate(runs):
        if run.id == chosen and (len(runs) > 1 or run.name != run.id):
            position = f" ({number + 1} of {len(runs)})" if len(runs) > 1 else ""
            return [f"run {run.name}{position}: {run.status}"]
    return []


def files(folder: Path) -> list[str]:
    """Return the paths of the files of the session, or of the bundle, in `folder`."""
    # Not through rich: a path is copied, so it is never wrapped.
    here = bundle_files(folder) or [DATABASE, *REPORTS]
    lines = [f"{'Files':{LABEL}}{folder}", f"{'':{LABEL}}{' · '.join(here)}"]
    count, newest = bundles_in(folder)
    if count > len(newest):
        lines.append(f"{'':{LABEL}}{count} bundles of incidents, the newest are:")
    return lines + [f"{'':{LABEL}}{name}" for name in newest]


def bundles_in(folder: Path) -> tuple[int, list[str]]:
    """Return the number of bundles of a session, and the newest ones, as paths relative to its folder."""
    bundles = names_of(folder)
    return len(bundles), [f"{BUNDLES}/{name}" for name in bundles[-_MAX_BUNDLES:]]


def _duration(session: SummarySession) -> str | None:
    if session.started_at is None or session.ended_at is None:
        return None
    began, ended = map(datetime.fromisoformat, (session.started_at, session.ended_at))
    return text.duration(round((ended - began).total_seconds()))
