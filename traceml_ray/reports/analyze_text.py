"""Renders what files say about memory as plain text: `traceml-ray analyze`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from traceml_ray import text
from traceml_ray.analysis.memory.sentences import where
from traceml_ray.analysis.memory.shapes import Attribution, Finding, FirstCause, RankMemory
from traceml_ray.recordings.sessions import BUNDLE
from traceml_ray.recordings.stormlog import EARLIEST_WALL_NS
from traceml_ray.reports.analyze import SEVERITIES, Analysis, Source
from traceml_ray.reports.layout import Columns, facts, page, table
from traceml_ray.reports.run_facts import moment

_MOST = 20
_BUNDLES = 2
"""Whose reason comes before all else."""
_MOST_RANKS = 32
_PATH = 56


def render_analysis(found: Analysis) -> str:
    """Return what was found as text: the first cause, the findings, the ranks, and the files it is from."""
    return page(
        [
            facts(*(("Bundle", kept) for kept in _kept(found))) + _first(found),
            _findings(found.findings),
            _next(found.findings),
            _ranks(found.ranks),
            _collectives(found),
            _notes(
                [
                    *found.notes,
                    *(
                        f"{_path(each.path)}: {note}"
                        for each in found.sources
                        for note in each.notes
                        if note not in _kept(found)
                    ),
                ]
            ),
            _sources(found.sources),
            _refused(found),
        ]
    )


def _kept(found: Analysis) -> list[str]:
    """Return when and why the first bundles among the files were kept: who died, of what."""
    bundles = [note for each in found.sources if each.format == BUNDLE for note in each.notes]
    return bundles[:_BUNDLES]


def _first(found: Analysis) -> list[str]:
    """Return who grew first, why that is said, and who is missing."""
    cause, onset = found.first_cause, found.collective_onset
    world = f" of {found.world_size:,}" if found.world_size else ""
    missing = f"no samples of {text.ranks(found.missing_ranks)}{world}" if found.missing_ranks else ""
    if cause is not None:
        shown = facts(("First", _cause(cause)), ("Why", cause.why), ("Next", " ".join(cause.next)))
    elif onset is not None:
        what = f"{text.ranks(onset.ranks)} grew at once, at {_date(onset.at_ns)}: no rank is the cause"
        shown = facts(("First", what), ("Why", onset.why))
    else:
        worst = found.findings[0].why if found.findings else ""
        shown = facts(("First", _nobody(found)), ("Worst", worst))
    return shown + facts(("Missing", missing))


def _nobody(found: Analysis) -> str:
    """Return why no rank is named."""
    if not found.incidents:
        return "no rank grew above its own level"
    ranks = {each.rank for each in found.ranks}
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


def _findings(findings: Sequence[Finding]) -> list[str]:
    columns: Columns = {
        "severity": lambda one: one.severity,
        "finding": lambda one: text.words(one.kind),
        "who": _who,
        "from": lambda one: _moment(one.from_ns),
        "what": lambda one: f"{one.why} Confidence {one.confidence}.",
    }
    lines = table("Findings, the most severe first (UTC)", columns, findings[:_MOST])
    return lines + _more(len(findings) - _MOST, "finding")


def _next(findings: Sequence[Finding]) -> list[str]:
    """Return what to do, once for each kind of finding."""
    kinds: dict[str, str] = {}
    for finding in findings:
        kinds.setdefault(text.words(finding.kind), " ".join(finding.next))
    columns: Columns = {"finding": lambda one: one[0], "what to do": lambda one: one[1]}
    return table("Next", columns, kinds.items())


def _ranks(ranks: Sequence[RankMemory]) -> list[str]:
    """Return a line for each rank and device; of many, those with the most severe findings."""
    worst = sorted(ranks, key=lambda one: -SEVERITIES.index(one.severity) if one.severity else 1)
    kept = {id(one) for one in worst[:_MOST_RANKS]}
    columns: dict[str, Callable[[RankMemory], str]] = {
        ">rank": lambda one: str(one.rank),
        "node": lambda one: one.node,
        ">device": lambda one: "host" if one.device is None else str(one.device),
        ">samples": lambda one: text.plain(one.samples),
        ">allocated": lambda one: _growth(one.allocated_growth_bytes),
        ">reserved": lambda one: _growth(one.reserved_growth_bytes),
        ">RSS": lambda one: _growth(one.rss_growth_bytes),
        ">gap": lambda one: text.size(one.gap_bytes),
        ">used": _used,
        "full in": _forecast,
        "anomaly": lambda one: text.words(one.anomaly or ""),
    }
    shown = [one for one in ranks if id(one) in kept]
    known = {name: cell for name, cell in columns.items() if any(cell(one) != text.NA for one in shown)}
    lines = table(
        "Ranks (growth of allocated, reserved and RSS; gap: outside of the allocator)",
        known,
        shown,
    )
    return lines + _more(len(ranks) - _MOST_RANKS, "rank")


def _growth(value: int | None) -> str:
    return "+" * (value is not None and value > 0) + text.size(value)


def _used(one: RankMemory) -> str:
    return text.share(one.used_bytes / one.total_bytes) if one.used_bytes and one.total_bytes else text.NA


def _forecast(one: RankMemory) -> str:
    steps = None if one.forecast_steps is None else text.count(one.forecast_steps, "step")
    seconds = None if one.forecast_s is None else text.duration(one.forecast_s)
    return ", ".join(filter(None, (steps, seconds)))


def _collectives(found: Analysis) -> list[str]:
    columns: Columns = {
        "class": lambda one: text.words(one.kind),
        "who": _who,
        "finding": lambda one: text.words(one.finding),
        ">size": lambda one: "" if one.bytes is None else text.size(one.bytes),
        "why": lambda one: one.why,
    }
    lines = table("Hidden memory and collectives", columns, found.collectives[:_MOST])
    return lines + _more(len(found.collectives) - _MOST, "line")


def _notes(notes: Sequence[str]) -> list[str]:
    return facts(*zip(["Notes", *[""] * len(notes)], notes[:_MOST], strict=False))


def _sources(sources: Sequence[Source]) -> list[str]:
    columns: Columns = {
        "file": lambda one: _path(one.path),
        "format": lambda one: one.format,
        "ranks": lambda one: text.ranges(one.ranks),
        ">samples": lambda one: text.plain(one.samples),
    }
    return table("Read", columns, sources[:_MOST]) + _more(len(sources) - _MOST, "file")


def _refused(found: Analysis) -> list[str]:
    columns: Columns = {"file": lambda one: _path(one.path), "why": lambda one: one.reason}
    return table("Not used", columns, found.refused[:_MOST]) + _more(len(found.refused) - _MOST, "file")


def _path(path: str) -> str:
    """Return the end of a long path, which tells it from others."""
    return path if len(path) <= _PATH else f"…{path[-(_PATH - 1) :]}"


def _more(count: int, noun: str) -> list[str]:
    return [f"  and {text.count(count, noun)} more"] if count > 0 else []


def _who(one: Finding | Attribution) -> str:
    return f"rank {one.rank}" + ("" if one.device is None else f", device {one.device}")


def _date(t_ns: int) -> str:
    """Return a moment with its date, as far as it has one."""
    when = moment(t_ns)
    return _moment(t_ns) if t_ns < EARLIEST_WALL_NS or when is None else f"{text.date(when)} UTC"


def _moment(t_ns: int) -> str:
    """Return a moment as a person reads it; of a file without wall-clock times, by its own clock."""
    own = f"{text.plain(round(t_ns / 1e9))} s (its own clock)"
    return own if t_ns < EARLIEST_WALL_NS else text.clock(moment(t_ns))
