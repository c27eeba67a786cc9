"""
Recorded memory from any source. A `Recording` holds the samples of one rank process and device from one file.

This module also says how a file is refused, and merges recordings into series of one run: each process once,
on one time axis if there is one.

Ranks are never aligned by their first sample, because a rank that starts late would then seem to grow first.
Wall-clock timestamps are used. If the clocks of several nodes were not compared, an error bound is assumed
for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from traceml_ray import text
from traceml_ray.analysis.node_clock import UNCOMPARED_BOUND_NS
from traceml_ray.signals.memory.shapes import NO_STEP, Collective, Series

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_FILE_BYTES = 4 << 30
"""Largest size of a file of samples, in bytes. A larger file is refused before it is read."""


class RefusedFileError(ValueError):
    """A file that cannot be used. The message says what is wrong with it, without the file's name."""


class NoSamplesError(RefusedFileError):
    """A complete file without memory samples. In a folder it is skipped."""


@dataclass
class Recording:
    """
    Samples of one rank process on one device, from one file, in order of time.

    Values that the file does not state are None.
    """

    process: str
    """Identifies the process, also across files."""
    node: str
    """Label of the node. "" if it is not known."""
    device: int | None
    """None: the host."""
    t_ns: Ints
    """[n] on the wall clock of its node. If `wall` is False: since an unknown moment."""
    columns: dict[str, Floats]
    """[n] by field of `MemorySample`. NaN is not known."""
    step: Ints | None = None
    """[n]; -1 is not known."""
    rank: int | None = None
    world_size: int | None = None
    run: str | None = None
    """Id of the job."""
    wall: bool = True
    bound_ns: int | None = None
    """Error bound of its node's clock. None: the clock was not compared with others."""
    first_step_ns: int | None = None
    collectives: list[Collective] = field(default_factory=list)
    """
    Collectives that the process was in. For a process with several devices, only one of its recordings has
    them.
    """
    path: Path = Path()
    """The file, or the first of several."""


@dataclass
class FileContents:
    """The contents of one file, or of one folder whose files belong together."""

    format: str
    """Format as displayed: `traceml-ray session`, `Stormlog events`, …"""
    recordings: list[Recording]
    notes: list[str] = field(default_factory=list)
    """Notes for the reader, each a sentence without the file's name."""


def column(values: Iterable[float | None]) -> Floats:
    """Return values as floats; None becomes NaN."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


_Number = TypeVar("_Number", np.float64, np.int64)


@dataclass
class MergedRecordings:
    """The recordings of one run as series."""

    timed: list[Series]
    """Series on the wall clock."""
    untimed: list[Series]
    """Series on clocks of their own. They do not show when others grew."""
    present: set[int]
    world_size: int | None
    run: str | None
    collectives: list[Collective] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def merge(recordings: Sequence[Recording]) -> MergedRecordings:
    """
    Return the newest run among `recordings` as series. Recordings without a run belong to it. A process
    without a rank gets an unused rank.
    """
    notes: list[str] = []
    run, of_run = _newest_run(recordings, notes)
    _number(of_run, notes)
    joined = [_joined([*same]) for _, same in groupby(sorted(of_run, key=_key), _key)]
    bound_ns = _assumed_bound(joined, notes)
    late = [recording for recording in joined if not recording.wall]
    if late and len(joined) > 1:
        who = text.ranks({recording.rank for recording in late if recording.rank is not None})
        notes.append(f"The files of {who} have no wall-clock times: whether others grew before is not known.")
    return MergedRecordings(
        timed=[_series(recording, bound_ns) for recording in joined if recording.wall],
        untimed=[_series(recording, 0) for recording in late],
        present={recording.rank for recording in joined if recording.rank is not None},
        world_size=max((recording.world_size for recording in joined if recording.world_size), default=None),
        run=run,
        collectives=[_of_rank(use, recording.rank) for recording in joined for use in recording.collectives],
        notes=notes,
    )


def _of_rank(use: Collective, rank: int | None) -> Collective:
    """Return a collective with the rank of its process, which some files do not state."""
    return use if rank is None or use.rank == rank else replace(use, rank=rank)


def _newest_run(recordings: Sequence[Recording], notes: list[str]) -> tuple[str | None, list[Recording]]:
    """Return the run whose last sample is the newest, and its recordings."""
    last: dict[str, int] = {}
    for recording in recordings:
        if recording.run is not None:
            last[recording.run] = max(last.get(recording.run, 0), int(recording.t_ns[-1]))
    run = max(last, key=lambda run: (last[run], run), default=None)
    others = sorted(last.keys() - {run})
    if others:
        names = text.listed([text.one_line(name[:60]) for name in others])
        notes.append(
            f"There are several runs: this is about {run}; not about {names}. Give the files of one."
        )
    return run, [recording for recording in recordings if recording.run in (None, run)]


def _number(recordings: Iterable[Recording], notes: list[str]) -> None:
    """Give each process without a rank the lowest unused rank, in the order of the files' names."""
    unknown = [recording for recording in recordings if recording.rank is None]
    taken = {recording.rank for recording in recordings if recording.rank is not None}
    free = (rank for rank in range(len(taken) + len(unknown)) if rank not in taken)
    numbers: dict[str, int] = {}
    for recording in sorted(unknown, key=lambda recording: (str(recording.path), recording.process)):
        if recording.process not in numbers:
            numbers[recording.process] = next(free)
        recording.rank = numbers[recording.process]
    if len(numbers) + len(taken) > 1 and numbers:
        who = text.ranks(numbers.values())
        notes.append(f"Some files do not name their rank: {who} are numbered in the order of their names.")


def _key(recording: Recording) -> tuple[object, ...]:
    return recording.rank, recording.process, -1 if recording.device is None else recording.device


def _joined(same: Sequence[Recording]) -> Recording:
    """Return the recordings of one process and device from several files as one, each sample once."""
    first, *others = sorted(same, key=lambda recording: -len(recording.t_ns))
    for other in others:
        first = _with(first, other)
    return first


def _with(one: Recording, other: Recording) -> Recording:
    """
    Return a recording with the additional samples of another.

    A sample that is in both may differ in time by some ns: files cut from one recording are converted to one
    clock with what each file knows about the clocks.
    """
    new = _apart(other.t_ns, one.t_ns) > (np.median(np.diff(one.t_ns)) / 2 if len(one.t_ns) > 1 else 0)
    order = np.argsort(np.concatenate([one.t_ns, other.t_ns[new]]), kind="stable")

    def both(of_one: npt.NDArray[_Number], of_other: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        return np.concatenate([of_one, of_other[new]])[order]

    names = [*one.columns, *(name for name in other.columns if name not in one.columns)]
    columns = {name: both(_column(one, name), _column(other, name)) for name in names}
    bounds = [recording.bound_ns for recording in (one, other) if recording.bound_ns is not None]
    first_steps = [
        recording.first_step_ns for recording in (one, other) if recording.first_step_ns is not None
    ]
    return replace(
        one,
        t_ns=both(one.t_ns, other.t_ns),
        step=both(_steps(one), _steps(other)),
        columns=columns,
        world_size=max(one.world_size or 0, other.world_size or 0) or None,
        wall=one.wall and other.wall,
        bound_ns=max(bounds, default=None),
        first_step_ns=min(first_steps, default=None),
        collectives=one.collectives or other.collectives,
    )


def _apart(times: Ints, from_times: Ints) -> Ints:
    """Return the distance of each time to the nearest of the other times. Both are in order."""
    after_index = np.searchsorted(from_times, times)
    before = from_times[np.maximum(after_index - 1, 0)]
    after = from_times[np.minimum(after_index, len(from_times) - 1)]
    nearest: Ints = np.minimum(np.abs(times - before), np.abs(after - times))
    return nearest


def _column(recording: Recording, name: str) -> Floats:
    values = recording.columns.get(name)
    return np.full(len(recording.t_ns), np.nan) if values is None else values


def _steps(recording: Recording) -> Ints:
    return np.full(len(recording.t_ns), NO_STEP, np.int64) if recording.step is None else recording.step


def _assumed_bound(recordings: Sequence[Recording], notes: list[str]) -> int:
    """Return the error bound of clocks that were not compared. 0 if there is only one node."""
    timed = [recording for recording in recordings if recording.wall]
    nodes = sorted({recording.node for recording in timed})
    one = len(nodes) < 2 and (nodes != [""] or len({recording.process for recording in timed}) < 2)
    if one or all(recording.bound_ns is not None for recording in timed):
        return 0
    bound = text.duration(UNCOMPARED_BOUND_NS / 1e9)
    who = text.listed([name or "nodes that are not known" for name in nodes])
    notes.append(
        f"The clocks of {who} were not compared: they are taken to agree within {bound}, and a rank that "
        "leads by less is not named."
    )
    return UNCOMPARED_BOUND_NS


def _series(recording: Recording, bound_ns: int) -> Series:
    assert recording.rank is not None
    return Series(
        rank=recording.rank,
        node=recording.node,
        process=recording.process,
        device=recording.device,
        t_ns=recording.t_ns,
        step=_steps(recording),
        columns=recording.columns,
        bound_ns=bound_ns if recording.bound_ns is None else recording.bound_ns,
        first_step_ns=recording.first_step_ns,
    )
