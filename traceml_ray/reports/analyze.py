"""
Memory of ranks, analysed after the run from files of any number of recorders: `traceml_ray.analyze`.

Also renders the result as plain text: `traceml-ray analyze`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from traceml_ray import text
from traceml_ray.document.json import indented
from traceml_ray.document.model import Column, Facts, Table
from traceml_ray.document.text import page
from traceml_ray.identity import rank_filter
from traceml_ray.importers.gather import FileRead, Gathered, gather
from traceml_ray.importers.stormlog import EARLIEST_WALL_NS
from traceml_ray.reports.run_facts import moment
from traceml_ray.signals.memory.judge import judge_recordings
from traceml_ray.signals.memory.recordings import merge
from traceml_ray.signals.memory.sentences import where
from traceml_ray.signals.memory.shapes import (
    Attribution,
    FirstCause,
    Memory,
    MemoryFinding,
    RankMemory,
    Sensitivity,
    Severity,
)
from traceml_ray.signals.memory.view import BUNDLE

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""Severities, the mildest first."""


class AnalyzedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was read."""

    path: str
    """Path of the file."""
    format: str
    """Format of the file in words: "traceml-ray session", "Stormlog events", …"""
    ranks: list[int]
    """Ranks whose samples it holds."""
    samples: int
    """Number of memory samples in it."""
    notes: list[str]
    """Notes about the file, each a sentence."""


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was not used."""

    path: str
    """Path of the file."""
    reason: str
    """Why it was not used."""

    def __str__(self) -> str:
        """Return path and reason, as "rank3.json: it is not valid JSON: …"."""
        return f"{self.path}: {self.reason}"


class AnalyzeError(ValueError):
    """An argument is wrong, or there is nothing to analyze. The message says what."""

    def __init__(self, message: str, refused: Sequence[Refused] = ()) -> None:
        super().__init__(message)
        self.refused = [*refused]


class Analysis(Memory, frozen=True, kw_only=True):
    """The memory of a run, from files. Unknown values are None."""

    run: str | None = None
    """Run that the analysis covers; None: the files name none."""
    world_size: int | None = None
    """Number of ranks of the run; None: not known."""
    sources: list[AnalyzedFile] = []
    """The files that were read."""
    refused: list[Refused] = []
    """The files that were not used."""
    notes: list[str] = []
    """Notes for the reader: clocks that were not compared, ranks that were numbered here, other runs."""


def analyze(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    ranks: str = "all",
    sensitivity: Sensitivity = "medium",
) -> Analysis:
    """
    Return which rank's memory grew first, memory that the allocator does not see, and the remaining headroom,
    from files.

    Reads sessions and bundles of traceml-ray, exports of Stormlog (events of schema 2 to 4 as JSON, JSONL or
    CSV, `telemetry_timeline.json`), and folders of these; each rank may have its own files. All files must
    belong to one job; if there are several runs, the newest is analyzed. A file that cannot be used is listed
    in `refused`, and the others are analyzed without it.

    Args:
        paths: files and folders, one or several.
        ranks: ranks to analyze: `all`, `0,2`, `0,4-7`; other ranks are ignored.
        sensitivity: how weak the evidence may be that hidden memory belongs to a collective: low, medium or
            high.

    Raises:
        AnalyzeError: no file can be used, no selected rank is in the files, or an argument is wrong.
        ValueError: `ranks` cannot be read.
    """
    chosen = rank_filter(ranks)
    if sensitivity not in get_args(Sensitivity):
        raise AnalyzeError(f"sensitivity {sensitivity!r}: choose low, medium or high")
    given = [paths] if isinstance(paths, (str, os.PathLike)) else [*paths]
    gathered = gather(map(Path, given))
    recordings = [recording for source in gathered.files for recording in source.contents.recordings]
    refused = [Refused(path=str(path), reason=why) for path, why in gathered.refused.items()]
    if not recordings:
        raise AnalyzeError(_nothing(given, refused), refused)
    merged = merge(recordings)
    if not any(rank in chosen for rank in merged.present):
        raise AnalyzeError(f"ranks {ranks!r}: the files have {text.ranks(merged.present)} only")
    return Analysis(
        **msgspec.structs.asdict(judge_recordings(merged, chosen, sensitivity)),
        run=merged.run,
        world_size=merged.world_size,
        sources=[_source(source) for source in gathered.files],
        refused=refused,
        notes=merged.notes + _passed_over(gathered),
    )


def reaches(analysis: Analysis, severity: Severity) -> bool:
    """Return whether any finding has this severity or a higher one."""
    return any(
        SEVERITIES.index(finding.severity) >= SEVERITIES.index(severity) for finding in analysis.findings
    )


def to_json(entries: Analysis) -> str:
    """Return the analysis as indented JSON with a line break at the end."""
    return indented(entries)


def _nothing(given: Sequence[object], refused: Sequence[Refused]) -> str:
    """Return why there is nothing to analyze."""
    if not refused:
        return f"no memory samples in {text.listed([*map(str, given)]) or 'no file at all'}"
    more = f" (and {len(refused) - 1:,} more files that cannot be used)" if len(refused) > 1 else ""
    return f"{refused[0]}{more}"


def _passed_over(gathered: Gathered) -> list[str]:
    """Return a note on files that have no memory data."""
    names = text.listed([path.name for path in gathered.passed_over])
    return [f"Skipped, because they have no memory samples: {names}."] if names else []


def _source(source: FileRead) -> AnalyzedFile:
    contents = source.contents
    return AnalyzedFile(
        path=str(source.path),
        format=contents.format,
        ranks=sorted({recording.rank for recording in contents.recordings if recording.rank is not None}),
        samples=sum(len(recording.t_ns) for recording in contents.recordings),
        notes=contents.notes,
    )


_MOST = 20
_BUNDLES = 2
"""Number of bundles whose reason is printed before everything else."""
_MOST_RANKS = 32
_PATH = 56


def render_analysis(analysis: Analysis) -> str:
    """Return the analysis as text: the first cause, the findings, the ranks, and the source files."""
    return page(
        [
            Facts(*(("Bundle", kept) for kept in _kept(analysis)), *_first(analysis)),
            _findings(analysis.findings),
            _next(analysis.findings),
            _ranks(analysis.ranks),
            _collectives(analysis),
            Facts.listed(
                "Notes",
                [
                    *analysis.notes,
                    *(
                        f"{_path(source.path)}: {note}"
                        for source in analysis.sources
                        for note in source.notes
                        if note not in _kept(analysis)
                    ),
                ],
            ),
            _sources(analysis.sources),
            _refused(analysis),
        ]
    )


def _kept(analysis: Analysis) -> list[str]:
    """Return when and why the first bundles among the files were kept: which rank died, and of what."""
    bundles = [note for source in analysis.sources if source.format == BUNDLE for note in source.notes]
    return bundles[:_BUNDLES]


def _first(analysis: Analysis) -> Sequence[tuple[str, str]]:
    """Return the rank that grew first, the reason for naming it, and the missing ranks."""
    cause, onset = analysis.first_cause, analysis.collective_onset
    world = f" of {analysis.world_size:,}" if analysis.world_size else ""
    missing = f"no samples of {text.ranks(analysis.missing_ranks)}{world}" if analysis.missing_ranks else ""
    if cause is not None:
        shown = [("First", _cause(cause)), ("Why", cause.why), ("Next", " ".join(cause.next))]
    elif onset is not None:
        what = f"{text.ranks(onset.ranks)} grew at once, at {_date(onset.at_ns)}: no rank is the cause"
        shown = [("First", what), ("Why", onset.why)]
    else:
        worst = analysis.findings[0].why if analysis.findings else ""
        shown = [("First", _nobody(analysis)), ("Worst", worst)]
    return [*shown, ("Missing", missing)]


def _nobody(analysis: Analysis) -> str:
    """Return why no rank is named."""
    if not analysis.incidents:
        return "no rank grew above its own level"
    ranks = {row.rank for row in analysis.ranks}
    if len(ranks) == 1:
        return f"{text.ranks(ranks)} grew; there is no other rank to compare it with"
    return "which rank grew first is not known"


def _cause(cause: FirstCause) -> str:
    size, when = text.size(cause.delta_bytes), _date(cause.at_ns)
    sentence = f"{where(cause.rank, cause.node, cause.device)}: {size} from {when}"
    if cause.lead_ns is None:
        return f"{sentence}, and no other rank; confidence {cause.confidence}"
    lead = text.duration(cause.lead_ns / 1e9)
    bound = f" (± {text.duration(cause.lead_bound_ns / 1e9)})" if cause.lead_bound_ns is not None else ""
    return f"{sentence}, {lead}{bound} before the next rank; confidence {cause.confidence}"


def _findings(findings: Sequence[MemoryFinding]) -> Table:
    columns = [
        Column("severity", lambda one: one.severity),
        Column("finding", lambda one: text.words(one.kind)),
        Column("who", _who),
        Column("from", lambda one: _moment(one.from_ns)),
        Column("what", lambda one: f"{one.why} Confidence {one.confidence}."),
    ]
    return _some(f"Findings, the most severe first ({text.zone()})", columns, findings, "finding")


def _next(findings: Sequence[MemoryFinding]) -> Table:
    """Return the table of next steps, one row for each kind of finding."""
    kinds: dict[str, str] = {}
    for finding in findings:
        kinds.setdefault(text.words(finding.kind), " ".join(finding.next))
    columns = [Column("finding", lambda one: one[0]), Column("what to do", lambda one: one[1])]
    return Table("Next", columns, [*kinds.items()])


def _ranks(ranks: Sequence[RankMemory]) -> Table:
    """
    Return the table with a row for each rank and device. If there are many, only those with the most severe
    findings.
    """
    worst = sorted(ranks, key=lambda one: -SEVERITIES.index(one.severity) if one.severity else 1)
    kept = {id(one) for one in worst[:_MOST_RANKS]}
    columns = [
        Column("rank", lambda one: str(one.rank), "figures"),
        Column("node", lambda one: one.node),
        Column("device", lambda one: "host" if one.device is None else str(one.device), "figures"),
        Column("samples", lambda one: one.samples, "plain"),
        Column("allocated", lambda one: _growth(one.allocated_growth_bytes), "figures"),
        Column("reserved", lambda one: _growth(one.reserved_growth_bytes), "figures"),
        Column("RSS", lambda one: _growth(one.rss_growth_bytes), "figures"),
        Column("gap", lambda one: one.gap_bytes, "size"),
        Column("used", _used, "figures"),
        Column("full in", _forecast),
        Column("anomaly", lambda one: text.words(one.anomaly or "")),
    ]
    shown = [one for one in ranks if id(one) in kept]
    measured = [column for column in columns if any(column.cell(one) != text.NA for one in shown)]
    title = "Ranks (growth of allocated, reserved and RSS; gap: outside of the allocator)"
    return Table(title, measured, shown, _more(len(ranks) - _MOST_RANKS, "rank"))


def _growth(value: int | None) -> str:
    return "+" * (value is not None and value > 0) + text.size(value)


def _used(one: RankMemory) -> str:
    return text.share(one.used_bytes / one.total_bytes) if one.used_bytes and one.total_bytes else text.NA


def _forecast(one: RankMemory) -> str:
    steps = None if one.forecast_steps is None else text.count(one.forecast_steps, "step")
    seconds = None if one.forecast_s is None else text.duration(one.forecast_s)
    return ", ".join(filter(None, (steps, seconds)))


def _collectives(analysis: Analysis) -> Table:
    columns = [
        Column("class", lambda one: text.words(one.kind)),
        Column("who", _who),
        Column("finding", lambda one: text.words(one.finding)),
        Column("size", lambda one: one.bytes, "known size"),
        Column("why", lambda one: one.why),
    ]
    return _some("Hidden memory and collectives", columns, analysis.collectives, "line")


def _sources(sources: Sequence[AnalyzedFile]) -> Table:
    columns = [
        Column("file", lambda one: _path(one.path)),
        Column("format", lambda one: one.format),
        Column("ranks", lambda one: one.ranks, "ranks"),
        Column("samples", lambda one: one.samples, "plain"),
    ]
    return _some("Read", columns, sources, "file")


def _refused(analysis: Analysis) -> Table:
    columns = [Column("file", lambda one: _path(one.path)), Column("why", lambda one: one.reason)]
    return _some("Not used", columns, analysis.refused, "file")


def _path(path: str) -> str:
    """Return the end of a long path, which distinguishes it from others."""
    return path if len(path) <= _PATH else f"…{path[-(_PATH - 1) :]}"


def _some(title: str, columns: Sequence[Column], items: Sequence[Any], noun: str) -> Table:
    """Return a table of the first of many items, and the number of the others."""
    return Table(title, columns, items[:_MOST], _more(len(items) - _MOST, noun))


def _more(count: int, noun: str) -> str:
    return f"and {text.count(count, noun)} more" if count > 0 else ""


def _who(one: MemoryFinding | Attribution) -> str:
    return f"rank {one.rank}" + ("" if one.device is None else f", device {one.device}")


def _date(t_ns: int) -> str:
    """Return a moment with its date, if its time is wall-clock time."""
    when = moment(t_ns)
    return _moment(t_ns) if t_ns < EARLIEST_WALL_NS or when is None else text.dated(when)


def _moment(t_ns: int) -> str:
    """Return a moment for people. For a file without wall-clock times, use the file's own clock."""
    by_own_clock = f"{text.plain(round(t_ns / 1e9))} s (its own clock)"
    return by_own_clock if t_ns < EARLIEST_WALL_NS else text.clock(moment(t_ns))
