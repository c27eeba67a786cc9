"""The memory of ranks after the fact: `traceml_ray.analyze`, over files of any number of recorders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from traceml_ray import text
from traceml_ray.analysis.memory.judge import judge, order_of
from traceml_ray.analysis.memory.shapes import Collective, Memory, Sensitivity, Series, Severity
from traceml_ray.identity import RankFilter, rank_filter
from traceml_ray.recordings.gather import FileRead, Gathered, gather
from traceml_ray.recordings.merge import Merged, merge

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The mildest first."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was read."""

    path: str
    format: str
    """As a person reads it: "traceml-ray session", "Stormlog events", …"""
    ranks: list[int]
    samples: int
    notes: list[str]
    """What to know of it, each a sentence."""


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was not used."""

    path: str
    reason: str

    def __str__(self) -> str:
        """Return both, as "rank3.json: it is no JSON: …"."""
        return f"{self.path}: {self.reason}"


class AnalyzeError(ValueError):
    """Nothing can be said: an argument is wrong, or there is nothing to read; the message says which."""

    def __init__(self, message: str, refused: Sequence[Refused] = ()) -> None:
        super().__init__(message)
        self.refused = [*refused]


class Analysis(Memory, frozen=True, kw_only=True):
    """What files say about the memory of a run; what is not known is None."""

    run: str | None = None
    """The run that it is about; None where the files name none."""
    world_size: int | None = None
    sources: list[Source] = []
    refused: list[Refused] = []
    notes: list[str] = []
    """What a reader has to know: clocks that were not compared, ranks that were numbered here, other runs."""


def analyze(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    ranks: str = "all",
    sensitivity: Sensitivity = "medium",
) -> Analysis:
    """
    Say which rank's memory grew first, what the allocator does not see, and what is left, from files.

    Reads sessions and bundles of traceml-ray, exports of Stormlog (events of schema 2 to 4 as JSON, JSONL or
    CSV, `telemetry_timeline.json`), and folders of these; each rank may have files of its own. All files are
    of one job; of several runs the newest is analyzed. A file that cannot be used is in `refused`, and the
    others are analyzed without it.

    Args:
        paths: files and folders, one or several.
        ranks: what it is about: `all`, `0,2`, `0,4-7`; other ranks are not looked at.
        sensitivity: how weak evidence may be that hidden memory is a collective's: low, medium or high.

    Raises:
        AnalyzeError: none of the files can be used, none of the ranks is in them, or an argument is wrong.
        RankFilterError: `ranks` cannot be read.
    """
    chosen = rank_filter(ranks)
    if sensitivity not in get_args(Sensitivity):
        raise AnalyzeError(f"sensitivity {sensitivity!r}: it is low, medium or high")
    given = [paths] if isinstance(paths, (str, os.PathLike)) else [*paths]
    found = gather(map(Path, given))
    recordings = [each for source in found.files for each in source.contents.recordings]
    refused = [Refused(path=str(path), reason=why) for path, why in found.refused.items()]
    if not recordings:
        raise AnalyzeError(_nothing(given, refused), refused)
    merged = merge(recordings)
    if not any(rank in chosen for rank in merged.present):
        raise AnalyzeError(f"ranks {ranks!r}: the files have {text.ranks(merged.present)} only")
    return Analysis(
        **msgspec.structs.asdict(judged(merged, chosen, sensitivity)),
        run=merged.run,
        world_size=merged.world_size,
        sources=[_source(source) for source in found.files],
        refused=refused,
        notes=merged.notes + _passed_over(found),
    )


def reaches(found: Analysis, severity: Severity) -> bool:
    """Return whether any finding is that severe, or more."""
    return any(SEVERITIES.index(each.severity) >= SEVERITIES.index(severity) for each in found.findings)


def to_json(found: Analysis) -> str:
    """Return it as indented JSON with a line break at the end."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


def _nothing(given: Sequence[object], refused: Sequence[Refused]) -> str:
    """Return why there is nothing to analyze."""
    if not refused:
        return f"there are no samples of memory in {text.listed([*map(str, given)]) or 'no file at all'}"
    more = f" (and {len(refused) - 1:,} more files that cannot be used)" if len(refused) > 1 else ""
    return f"{refused[0]}{more}"


def _passed_over(found: Gathered) -> list[str]:
    """Return a note on files that are not about memory."""
    names = text.listed([path.name for path in found.passed_over])
    return [f"Passed over, as there are no samples of memory in them: {names}."] if names else []


def _source(source: FileRead) -> Source:
    own = source.contents
    return Source(
        path=str(source.path),
        format=own.format,
        ranks=sorted({each.rank for each in own.recordings if each.rank is not None}),
        samples=sum(len(each.t_ns) for each in own.recordings),
        notes=own.notes,
    )


def judged(merged: Merged, chosen: RankFilter, sensitivity: Sensitivity = "medium") -> Memory:
    """
    Return what is to be said of the ranks chosen. Those without wall-clock times are judged one by one: none
    of them is named before others.
    """
    expected = {rank for rank in range(merged.world_size or 0) if rank in chosen}
    timed = [each for each in merged.timed if each.rank in chosen]
    alone: dict[int, list[Series]] = {}
    for each in merged.untimed:
        if each.rank in chosen:
            alone.setdefault(each.rank, []).append(each)
    clocks = [timed, *alone.values()]
    count = len(expected | {rank for rank in merged.present if rank in chosen})
    parts = [judge(own, _used_by(own, merged), count, sensitivity) for own in clocks if own]
    return msgspec.structs.replace(_together(parts), missing_ranks=sorted(expected - merged.present))


def _used_by(series: Sequence[Series], merged: Merged) -> list[Collective]:
    """Return the collectives of the ranks of some series: those of others may be on another clock."""
    ranks = {each.rank for each in series}
    return [use for use in merged.collectives if use.rank in ranks]


def _together(parts: Sequence[Memory]) -> Memory:
    """Return what was found on clocks of their own as one."""
    grew = [part for part in parts if part.first_cause or part.collective_onset]
    only = grew[0] if len(grew) == 1 else Memory()
    return Memory(
        first_cause=only.first_cause,
        collective_onset=only.collective_onset,
        findings=sorted(
            (each for part in parts for each in part.findings),
            key=order_of,
        ),
        collectives=[each for part in parts for each in part.collectives],
        incidents=sorted((each for part in parts for each in part.incidents), key=lambda each: each.at_ns),
        ranks=sorted(
            (each for part in parts for each in part.ranks),
            key=lambda each: (each.rank, -1 if each.device is None else each.device),
        ),
    )
