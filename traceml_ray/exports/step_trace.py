"""
The steps of a run as a trace for Perfetto: a process per rank, a track per stage.

Rows are durations on the clock of each rank. They are placed on one axis by what all ranks have in common:
they leave the exchange of a step together. So the offset between two ranks' clocks is known at every step,
and clocks of nodes are not compared. If ranks have no step in common, each rank is placed by the arrival time
of its last rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from traceml_ray import __version__, text
from traceml_ray.analysis.row_table import begins
from traceml_ray.analysis.window import Int64, RankRows
from traceml_ray.exports.tables import Chosen
from traceml_ray.stages import N_STAGES, SEGMENT_BITS, STAGES
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile
from traceml_ray.traces.trace import Event, write_events

_CHUNKS = 4096
"""Number of batches that are read at a time."""
_MOST_EDGES = 1 << 18
"""Largest number of ends of steps that are kept to compare ranks, over all ranks together."""
_SMOOTHED = 21
"""Length of the running median over ends of steps. A rank may leave an exchange late from time to time."""


@dataclass
class _Line:
    """The rows of a rank, one after the other, starting at 0."""

    rank: int
    node: str
    length_ns: int = 0
    edges: dict[int, int] = field(default_factory=dict)
    """End of each step in ns, by step number."""
    first: int | None = None
    steps: Int64 = field(default_factory=lambda: np.zeros(1, np.int64))
    offsets: Int64 = field(default_factory=lambda: np.zeros(1, np.int64))
    """Offsets at `steps`, in ns, that move its times onto the axis of all ranks."""
    alone: bool = False
    """Whether there is no step to compare this rank by."""


def write_step_trace(session: SessionFile, path: Path, chosen: Chosen) -> bool:
    """
    Write the steps of the run that `session` reads. Returns whether there are any. Raises `SessionFileError`,
    OSError.
    """
    lines = _Lines(session, chosen)
    for chunk, share in _slices(session):
        lines.add(chunk)
        text.advance("reading steps", share / 2)
    if not lines.align(session.ranks()):
        return False
    header = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceml_ray": {"version": __version__, "run": session.run_id(), "notes": lines.notes()},
    }
    events = _events(lines, session)
    with path.open("wb") as file:
        write_events(file, header, events)
    return True


def _slices(session: SessionFile) -> Iterator[tuple[list[RankRows], float]]:
    """Yield the rows of the run slice by slice, with the share of all rows that was read."""
    cursor, top = 0, max(1, session.last_chunk())
    while True:
        chunk, after = session.rows(since=cursor, most=_CHUNKS)
        if after == cursor:
            return
        cursor = after
        yield chunk, cursor / top


class _Lines:
    """The lines of the chosen ranks, by rank."""

    def __init__(self, session: SessionFile, chosen: Chosen) -> None:
        self.chosen = chosen
        self.by_rank: dict[int, _Line] = {}
        self._every, self._edges, self.start_ns = 1, 0, 0

    def add(self, chunk: list[RankRows]) -> None:
        """Add the next rows of some ranks, and record when steps were over."""
        for rank_rows in chunk:
            if rank_rows.rank not in self.chosen.ranks:
                continue
            line = self.by_rank.setdefault(rank_rows.rank, _Line(rank_rows.rank, rank_rows.node))
            steps = rank_rows.keys >> SEGMENT_BITS
            ends = line.length_ns + np.cumsum(rank_rows.rows[:, :N_STAGES].sum(axis=1))
            line.first = int(steps[0]) if line.first is None else line.first
            line.length_ns = int(ends[-1])
            kept = np.flatnonzero(steps % self._every == 0)
            before = len(line.edges)
            line.edges.update(zip(steps[kept].tolist(), ends[kept].tolist(), strict=True))
            self._edges += len(line.edges) - before
        while self._edges > _MOST_EDGES and self._every < 1 << 40:
            self._thin()

    def _thin(self) -> None:
        self._every *= 2
        for line in self.by_rank.values():
            line.edges = {step: end for step, end in line.edges.items() if step % self._every == 0}
        self._edges = sum(len(line.edges) for line in self.by_rank.values())

    def align(self, ranks: dict[int, RankProcess]) -> bool:
        """Compute the offset of each rank on one axis; return False if there are no rows."""
        if not self.by_rank:
            return False
        longest = max(self.by_rank.values(), key=lambda line: (len(line.edges), -line.rank))
        for line in self.by_rank.values():
            self._compare(line, longest, ranks)
        self.start_ns = min(int(line.offsets[0]) for line in self.by_rank.values())
        return True

    def _compare(self, line: _Line, reference: _Line, ranks: dict[int, RankProcess]) -> None:
        common = np.array(sorted(line.edges.keys() & reference.edges.keys()), np.int64)
        if len(common):
            apart = np.array([reference.edges[step] - line.edges[step] for step in common.tolist()])
            line.steps, line.offsets = common, _smoothed(apart)
            return
        came = [ranks[compared.rank].last_rows_ns or 0 for compared in (line, reference)]
        line.alone = True
        line.offsets = np.array([came[0] - came[1] + reference.length_ns - line.length_ns])

    def notes(self) -> list[str]:
        """Return sentences about the time axis."""
        notes = ["Ranks are placed so that they leave each exchange together; clocks are not compared."]
        alone = [line.rank for line in self.by_rank.values() if line.alone]
        if alone:
            notes.append(f"Ranks {alone} share no step with others: placed by the arrival of their rows.")
        return notes


def _smoothed(values: Int64) -> Int64:
    """Return the running median of values (n,)."""
    half = min(_SMOOTHED // 2, (len(values) - 1) // 2)
    around = np.pad(values, half, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(around, 2 * half + 1)
    smoothed: Int64 = np.rint(np.median(windows, axis=1)).astype(np.int64)
    return smoothed


def _events(lines: _Lines, session: SessionFile) -> Iterator[Event]:
    for line in sorted(lines.by_rank.values(), key=lambda line: line.rank):
        yield from _names(line)
    length = dict.fromkeys(lines.by_rank, 0)
    before = dict.fromkeys(lines.by_rank, -(1 << 62))
    for chunk, share in _slices(session):
        for rank_rows in chunk:
            if rank_rows.rank in lines.by_rank:
                yield from _slices_of(lines, rank_rows, length, before)
        text.advance("writing the trace", (1 + share) / 2)


def _slices_of(
    lines: _Lines, rank_rows: RankRows, length: dict[int, int], before: dict[int, int]
) -> Iterator[Event]:
    """
    Yield the stages of some rows. `length` and `before`: where the rank's earlier rows, and
    slices, ended.
    """
    line, rows = lines.by_rank[rank_rows.rank], rank_rows.rows[:, :N_STAGES]
    steps = rank_rows.keys >> SEGMENT_BITS
    starts = length[rank_rows.rank] + np.cumsum(rows.sum(axis=1)) - rows.sum(axis=1)
    length[rank_rows.rank] += int(rows.sum())
    moved = np.interp(steps, line.steps, line.offsets - line.offsets[0]).astype(np.int64) + line.offsets[0]
    edges = (starts + moved - lines.start_ns)[:, None] + begins(rows)
    ends = edges + rows
    for row in np.flatnonzero((steps >= lines.chosen.first) & (steps <= lines.chosen.last)).tolist():
        step = int(steps[row])
        for stage, name in enumerate(STAGES):
            begin = max(int(edges[row, stage]), before[rank_rows.rank])
            end = int(ends[row, stage])
            if end > begin:
                before[rank_rows.rank] = end
                yield _slice(rank_rows.rank, stage, name, begin, end, step)


def _slice(rank: int, stage: int, name: str, begin_ns: int, end_ns: int, step: int) -> Event:
    times = {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
    lane = {"pid": rank + 1, "tid": _track(rank, stage)}
    return {"ph": "X", "cat": "stage", "name": name, **lane, **times, "args": {"step": step}}


def _track(rank: int, stage: int) -> int:
    """Return the number of a track. Numbers are unique over all processes."""
    return (rank + 1) * 10 + stage


def _names(line: _Line) -> Iterator[Event]:
    """Yield the names of a rank and its tracks, and their order."""

    def named(key: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": key, "pid": line.rank + 1, "tid": tid, "ts": 0, "args": args}

    yield named("process_name", 0, name=f"rank {line.rank} ({line.node})")
    yield named("process_sort_index", 0, sort_index=line.rank)
    for stage, name in enumerate(STAGES):
        yield named("thread_name", _track(line.rank, stage), name=name)
        yield named("thread_sort_index", _track(line.rank, stage), sort_index=stage)
