"""
The traces to read, and what is known about the rank of each; the rows of the steps that were recorded, as
intervals on the clock of their node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from traceml_ray.analysis.row_table import begins
from traceml_ray.identity import rank_in_name
from traceml_ray.stages import STAGES
from traceml_ray.store.profiles import MANIFEST, ProfileStep, RankProfile, StoredProfile, read_profile
from traceml_ray.traces.chrome import ChromeTrace, TraceError
from traceml_ray.traces.trace import Header, read_header

SUFFIXES = (".json", ".json.gz")
_MOST_FILES = 4096


@dataclass(frozen=True)
class Source:
    """The trace of one rank. None is not known."""

    path: Path
    rank: int | None = None
    node_id: str | None = None
    """Ray's id of the node."""
    node: str | None = None
    """Label of the node, `node-1`, or the name of its host."""
    clock_offset_ns: int | None = None
    """Offset to add to its times to get the clock of all traces, in ns."""
    clock_bound_ns: int | None = None
    """Largest error of that offset, in ns."""
    steps: tuple[ProfileStep, ...] = ()
    """The recorded steps, by its node's clock."""
    window: tuple[int, int] | None = None
    """Time by its node's clock, in ns, outside of which events are ignored; None: no limit."""

    @property
    def label(self) -> str:
        """`node-1 / rank 5`, or the file's name."""
        if self.rank is None:
            return self.path.name
        return f"{self.node} / rank {self.rank}" if self.node else f"rank {self.rank}"


def sources_of_profile(stored: StoredProfile) -> list[Source]:
    """Return the traces of a profile, in order of ranks."""
    ranks = sorted(stored.profile.captured, key=lambda rank: rank.rank)
    return [_source_of_rank(stored, rank) for rank in ranks]


def _source_of_rank(stored: StoredProfile, rank: RankProfile) -> Source:
    return Source(
        path=stored.trace(rank),
        rank=rank.rank,
        node_id=rank.node_id,
        node=rank.node or rank.hostname,
        clock_offset_ns=rank.clock_offset_ns,
        clock_bound_ns=rank.clock_bound_ns,
        steps=tuple(rank.steps),
        window=_window(rank),
    )


def _window(rank: RankProfile) -> tuple[int, int] | None:
    if not (rank.serves and rank.steps):
        return None
    return min(step.begin_ns for step in rank.steps), max(step.end_ns for step in rank.steps)


def sources_of_files(paths: Sequence[Path]) -> list[Source]:
    """
    Return traces that somebody has taken, in order of ranks, those in folders too. Who is who is taken from
    what a trace says of itself, else from its name; a folder that is a profile has it in its manifest. Raises
    TraceError, also where two say they are one rank.
    """
    sources: list[Source] = []
    for path in _files(paths):
        sources += _sources_of_folder(path) if path.is_dir() else [_source_of_file(path)]
    if not sources:
        given = ", ".join(map(str, paths))
        raise TraceError(
            f"no trace in {given}: their names end in .json or .json.gz; folders inside are not read"
        )
    taken: dict[int, Path] = {}
    for source in sources:
        if source.rank is not None and (other := taken.setdefault(source.rank, source.path)) != source.path:
            raise TraceError(
                f"{other} and {source.path} are both of rank {source.rank}: merge one of each rank, of the "
                "same time"
            )
    return sorted(sources, key=lambda source: (source.rank is None, source.rank or 0))


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    seen = set[Path]()
    for given in paths:
        inside = given.is_dir() and not (given / MANIFEST).is_file()
        for path in sorted(p for p in given.iterdir() if p.name.endswith(SUFFIXES)) if inside else [given]:
            if (real := path.resolve()) not in seen:
                seen.add(real)
                yield path
            if len(seen) > _MOST_FILES:
                raise TraceError(f"{given}: there are more than {_MOST_FILES:,} files")


def _sources_of_folder(path: Path) -> list[Source]:
    try:
        return sources_of_profile(StoredProfile(path, read_profile(path)))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path / MANIFEST}: {error}") from None


def _source_of_file(path: Path) -> Source:
    header = first_header(path)
    rank = rank_in_name(path.name) if header.rank is None else header.rank
    return Source(path, rank, node=path.name if rank is None else header.hostname)


def first_header(path: Path) -> Header:
    """Return the header of a trace, without reading its events. Raises TraceError."""
    stream = ChromeTrace(path)
    events = iter(stream)
    with closing(events):
        next(events, None)
    return read_header(stream.header)


class Interval(NamedTuple):
    """A stage of a step, or the whole row; ns since the epoch."""

    step: int
    stage: str
    """Name of the stage; "" for the whole row."""
    begin_ns: int
    end_ns: int


def intervals(steps: Iterable[ProfileStep]) -> list[Interval]:
    """
    Return the rows that are known, each followed by its stages, in order of time. A row ends with the step's
    last backward, so the first begins before what was recorded.
    """
    result: list[Interval] = []
    before_ns = -(1 << 62)
    for step in sorted(steps, key=lambda row: row.begin_ns):
        if step.sync_exit_ns is None or step.stages_ns is None:
            continue
        lengths = np.array([step.stages_ns], np.int64)
        begin_ns = step.sync_exit_ns - int(lengths.sum())
        edges = [begin_ns + int(begin) for begin in begins(lengths)[0]] + [step.sync_exit_ns]
        edges = [max(edge, before_ns) for edge in edges]  # rows are rounded, and do not overlap
        result.append(Interval(step.step, "", edges[0], edges[-1]))
        result += [
            Interval(step.step, stage, edges[index], edges[index + 1])
            for index, stage in enumerate(STAGES)
            if edges[index + 1] > edges[index]
        ]
        before_ns = max(before_ns, step.sync_exit_ns)
    return result


def step_at(steps: Iterable[ProfileStep], t_ns: int) -> int | None:
    """Return the number of the step at a time; None outside of all recorded steps."""
    return next((step.step for step in steps if step.begin_ns <= t_ns < step.end_ns), None)
