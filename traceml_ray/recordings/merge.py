"""
Makes series of recordings: of one run, each process once, on one axis of time where there is one.

Ranks are never aligned by their first sample, since one that starts late would then seem to grow first. The
stamps of the wall clock decide; where clocks of several nodes were not compared, a bound is assumed for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.memory.shapes import NO_STEP, Collective, Series
from traceml_ray.recordings.recording import Ints, Recording

UNCOMPARED_BOUND_NS = 1_000_000_000
"""Error bound that is assumed for clocks of several nodes that were not compared."""


@dataclass
class Merged:
    """The recordings of one run as series."""

    timed: list[Series]
    """On the wall clock."""
    untimed: list[Series]
    """Each on a clock of its own, which says nothing about when others grew."""
    present: set[int]
    world_size: int | None
    run: str | None
    collectives: list[Collective] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def merge(recordings: Sequence[Recording]) -> Merged:
    """
    Return the newest run among `recordings` as series. Those that name no run belong to it; a process without
    a rank is given one that is free.
    """
    notes: list[str] = []
    run, own = _newest_run(recordings, notes)
    _number(own, notes)
    found = [_joined([*same]) for _, same in groupby(sorted(own, key=_key), _key)]
    bound_ns = _assumed_bound(found, notes)
    late = [each for each in found if not each.wall]
    if late and len(found) > 1:
        who = text.ranks({each.rank for each in late if each.rank is not None})
        notes.append(f"The files of {who} have no wall-clock times: whether others grew before is not known.")
    return Merged(
        timed=[_series(each, bound_ns) for each in found if each.wall],
        untimed=[_series(each, 0) for each in late],
        present={each.rank for each in found if each.rank is not None},
        world_size=max((each.world_size for each in found if each.world_size), default=None),
        run=run,
        collectives=[use for each in found for use in each.collectives],
        notes=notes,
    )


def _newest_run(recordings: Sequence[Recording], notes: list[str]) -> tuple[str | None, list[Recording]]:
    """Return the run whose last sample is the newest, and its recordings."""
    last: dict[str, int] = {}
    for each in recordings:
        if each.run is not None:
            last[each.run] = max(last.get(each.run, 0), int(each.t_ns[-1]))
    run = max(last, key=lambda run: (last[run], run), default=None)
    others = sorted(last.keys() - {run})
    if others:
        names = text.listed([text.one_line(name[:60]) for name in others])
        notes.append(
            f"There are several runs: this is about {run}; not about {names}. Give the files of one."
        )
    return run, [each for each in recordings if each.run in (None, run)]


def _number(recordings: Iterable[Recording], notes: list[str]) -> None:
    """Give each process without a rank the lowest that is free, in the order of the files' names."""
    unknown = [each for each in recordings if each.rank is None]
    taken = {each.rank for each in recordings if each.rank is not None}
    free = (rank for rank in range(len(taken) + len(unknown)) if rank not in taken)
    numbers: dict[str, int] = {}
    for each in sorted(unknown, key=lambda each: (str(each.path), each.process)):
        if each.process not in numbers:
            numbers[each.process] = next(free)
        each.rank = numbers[each.process]
    if len(numbers) + len(taken) > 1 and numbers:
        who = text.ranks(numbers.values())
        notes.append(
            f"Some files do not say which rank they are of: {who} are numbered in the order of their names."
        )


def _key(each: Recording) -> tuple[object, ...]:
    return each.rank, each.process, -1 if each.device is None else each.device


def _joined(same: Sequence[Recording]) -> Recording:
    """Return what several files hold of one process and device as one, each moment once."""
    first = same[0]
    if len(same) == 1:
        return first
    t_ns = np.concatenate([each.t_ns for each in same])
    t_ns, at = np.unique(t_ns, return_index=True)
    names = {name: None for each in same for name in each.columns}
    unknown = {id(each): np.full(len(each.t_ns), np.nan) for each in same}
    columns = {
        name: np.concatenate([each.columns.get(name, unknown[id(each)]) for each in same])[at]
        for name in names
    }
    step = np.concatenate([_steps(each) for each in same])[at]
    bounds = [each.bound_ns for each in same if each.bound_ns is not None]
    steps_ns = [each.first_step_ns for each in same if each.first_step_ns is not None]
    return replace(
        first,
        t_ns=t_ns,
        columns=columns,
        step=step,
        world_size=max(each.world_size or 0 for each in same) or None,
        wall=all(each.wall for each in same),
        bound_ns=max(bounds, default=None),
        first_step_ns=min(steps_ns, default=None),
    )


def _steps(each: Recording) -> Ints:
    return np.full(len(each.t_ns), NO_STEP, np.int64) if each.step is None else each.step


def _assumed_bound(found: Sequence[Recording], notes: list[str]) -> int:
    """Return the error bound of clocks that were not compared: none where there is one node."""
    timed = [each for each in found if each.wall]
    nodes = sorted({each.node for each in timed})
    one = len(nodes) < 2 and (nodes != [""] or len({each.process for each in timed}) < 2)
    if one or all(each.bound_ns is not None for each in timed):
        return 0
    bound = text.duration(UNCOMPARED_BOUND_NS / 1e9)
    who = text.listed([name or "nodes that are not known" for name in nodes])
    notes.append(
        f"The clocks of {who} were not compared: they are taken to agree within {bound}, and a rank that "
        "leads by less is not named."
    )
    return UNCOMPARED_BOUND_NS


def _series(each: Recording, bound_ns: int) -> Series:
    assert each.rank is not None
    return Series(
        rank=each.rank,
        node=each.node,
        process=each.process,
        device=each.device,
        t_ns=each.t_ns,
        step=_steps(each),
        columns=each.columns,
        bound_ns=bound_ns if each.bound_ns is None else each.bound_ns,
        first_step_ns=each.first_step_ns,
    )
