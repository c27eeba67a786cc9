"""Summarizes what rank processes have logged (`LoggedValues`), in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from traceml_ray.analysis.window import Float, Int64, no_values
from traceml_ray.signals.logged.records import MAX_NAMES, LoggedValues

MOST, LEAST, BUDGET = 256, 16, 1 << 17
"""
Largest and smallest number of pieces per name of a rank process, and largest number in all. Above it,
neighbouring pieces are joined.
"""
COLUMNS = 120
_SERIES, _FIRST, _LAST, _STEPS, _VALUE, _LOW, _HIGH, _BAD, _BAD_FIRST, _BAD_SINCE = range(10)


def _no_steps() -> Int64:
    return np.empty(0, np.int64)


class NotFinite(msgspec.Struct, frozen=True):
    """A rank that has logged a value that is not finite: NaN or an infinity."""

    rank: int
    """Global rank."""
    first_step: int
    """First step whose value is not finite."""
    since: int | None
    """Step from which on no value is finite. None: the newest value is finite."""


class LoggedNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Values that the ranks of a run have logged under one name, in a summary."""

    name: str
    """Name under which the values were logged."""
    ranks: list[int]
    """Ranks that have logged a value: R numbers, ascending."""
    values: list[float | None]
    """Newest value of each of `ranks`. None: it is not finite."""
    steps: list[int]
    """Step of each of `values`."""
    low: float | None
    """Smallest finite value of the run; None: there is none."""
    high: float | None
    """Largest finite value of the run; None: there is none."""
    not_finite: list[NotFinite]
    """Ranks that have logged a value that is not finite."""


class LoggedMetric(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Values that the ranks of a run have logged under one name."""

    name: str
    """Name under which the values were logged."""
    ranks: list[int] = []
    """Ranks that have logged a value: R numbers, ascending."""
    values: Float = msgspec.field(default_factory=no_values)
    """(R,), newest value of each of `ranks`, finite or not."""
    steps: Int64 = msgspec.field(default_factory=_no_steps)
    """(R,), step of each of `values`."""
    low: float | None = None
    """Smallest finite value of the run; None: there is none."""
    high: float | None = None
    """Largest finite value of the run; None: there is none."""
    not_finite: list[NotFinite] = []
    """Ranks that have logged a value that is not finite."""
    first: Int64 = msgspec.field(default_factory=_no_steps)
    """(C,), first step of each column. Empty if it is not known."""
    last: Int64 = msgspec.field(default_factory=_no_steps)
    """(C,), last step of each column."""
    line: Float = msgspec.field(default_factory=no_values)
    """(C,), mean over the ranks of the last finite value of each column. NaN: none was logged."""
    lowest: Float = msgspec.field(default_factory=no_values)
    """(C,), smallest finite value of each column."""
    highest: Float = msgspec.field(default_factory=no_values)
    """(C,), largest finite value of each column."""

    @property
    def value(self) -> float:
        """Mean of the newest values of the ranks. Not finite if one of them is not."""
        with np.errstate(invalid="ignore"):
            return float(self.values.mean()) if len(self.values) else float("nan")


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)


class LoggedHistory:
    """Values logged by all rank processes of a session."""

    def __init__(self) -> None:
        self._series: dict[tuple[int, str], int] = {}
        """(rank process, name) → number of the series, in the order in which they were first logged."""
        self._table: Float = np.empty((0, 10))
        self._arrived: list[tuple[float, ...]] = []

    def add(self, process: int, record: LoggedValues) -> None:
        """Add a record of a rank process, with values of one name."""
        series = self._series.setdefault((process, record.name), len(self._series))
        numbers = (record.last, *map(_number, (record.low, record.high)), record.not_finite)
        bad = map(_number, (record.first_not_finite, record.not_finite_since))
        self._arrived.append((series, record.first_step, record.last_step, record.steps, *numbers, *bad))

    def metrics(self, ranks: Mapping[int, Sequence[int]]) -> list[LoggedMetric]:
        """
        Return what some ranks have logged, including values logged before a restart.

        Args:
            ranks: rank → its rank processes, the oldest first. A later process replaces what an earlier one
                has logged for the same steps.
        """
        rank_of = {process: (rank, index) for rank, ids in ranks.items() for index, process in enumerate(ids)}
        by_name: dict[str, list[tuple[int, int, int]]] = {}
        for (process, name), series in self._series.items():
            if process in rank_of:
                by_name.setdefault(name, []).append((*rank_of[process], series))
        table = self._rows()
        bounds = np.searchsorted(table[:, _SERIES], np.arange(len(self._series) + 1))
        pieces = [table[begin:end] for begin, end in itertools.pairwise(bounds)]
        return [_metric(name, by_name[name], pieces) for name in [*by_name][:MAX_NAMES]]

    def _rows(self) -> Float:
        """Return all pieces, sorted by series and step."""
        if self._arrived:
            table = np.concatenate([self._table, np.array(self._arrived)])
            self._arrived = []
            table = table[np.lexsort((table[:, _LAST], table[:, _SERIES]))]
            most = max(LEAST, min(MOST, BUDGET // len(self._series)))
            while (
                len(table) > most * len(self._series)
                or np.bincount(table[:, _SERIES].astype(int)).max() > most
            ):
                cuts = np.flatnonzero(np.diff(table[:, _SERIES])) + 1
                table = np.concatenate([joined(s) if len(s) > most else s for s in np.split(table, cuts)])
            self._table = table
        return self._table


def joined(rows: Float) -> Float:
    """Return the pieces of a series, with neighbouring pieces of the older half joined in pairs."""
    if len(rows) < 4:
        return rows
    old = rows[: len(rows) // 4 * 2]
    one, other = old[::2], old[1::2]
    both = other.copy()
    both[:, _FIRST] = one[:, _FIRST]
    both[:, [_STEPS, _BAD]] += one[:, [_STEPS, _BAD]]
    both[:, _LOW] = np.fmin(one[:, _LOW], other[:, _LOW])
    both[:, _HIGH] = np.fmax(one[:, _HIGH], other[:, _HIGH])
    both[:, _BAD_FIRST] = np.fmin(one[:, _BAD_FIRST], other[:, _BAD_FIRST])
    goes_on = (other[:, _BAD] == other[:, _STEPS]) & ~np.isnan(one[:, _BAD_SINCE])
    both[:, _BAD_SINCE] = np.where(goes_on, one[:, _BAD_SINCE], other[:, _BAD_SINCE])
    return np.concatenate([both, rows[len(old) :]])


def _metric(name: str, series: Sequence[tuple[int, int, int]], pieces: Sequence[Float]) -> LoggedMetric:
    by_rank: dict[int, list[Float]] = {}
    for rank, _, number in sorted(series):
        rows = pieces[number]
        before = by_rank.setdefault(rank, [])
        by_rank[rank] = [*(older[older[:, _LAST] < rows[0, _FIRST]] for older in before), rows]
    ranks = sorted(by_rank)
    tables = [np.concatenate(by_rank[rank]) for rank in ranks]
    every = np.concatenate(tables)
    owner = np.repeat(np.arange(len(ranks)), [len(rows) for rows in tables])
    newest = [rows[-1] for rows in tables]
    first, last, line, lowest, highest = _columns(every, owner)
    low, high = _extreme(every[:, _LOW], np.fmin), _extreme(every[:, _HIGH], np.fmax)
    return LoggedMetric(
        name=name,
        ranks=ranks,
        values=np.array([row[_VALUE] for row in newest]),
        steps=np.array([row[_LAST] for row in newest], dtype=np.int64),
        low=low,
        high=high,
        not_finite=[
            _not_finite(rank, rows) for rank, rows in zip(ranks, tables, strict=True) if rows[:, _BAD].any()
        ],
        first=first,
        last=last,
        line=line,
        lowest=lowest,
        highest=highest,
    )


def _extreme(values: Float, ufunc: np.ufunc) -> float | None:
    extreme = float(ufunc.reduce(values))
    return None if np.isnan(extreme) else extreme


def _not_finite(rank: int, rows: Float) -> NotFinite:
    since = rows[-1, _BAD_SINCE]
    for before, after in zip(rows[-2::-1], rows[:0:-1], strict=True):
        if np.isnan(since) or after[_BAD] < after[_STEPS] or np.isnan(before[_BAD_SINCE]):
            break
        since = before[_BAD_SINCE]
    return NotFinite(rank, int(np.nanmin(rows[:, _BAD_FIRST])), None if np.isnan(since) else int(since))


def _columns(rows: Float, owner: Int64) -> tuple[Int64, Int64, Float, Float, Float]:
    """
    Return the columns' first steps, last steps, and the mean, smallest and largest finite value in each
    column.
    """
    begin, end = int(rows[:, _FIRST].min()), int(rows[:, _LAST].max())
    count = min(COLUMNS, end - begin + 1)
    edges = begin + np.arange(count + 1) * (end - begin + 1) // count
    column = np.searchsorted(edges, rows[:, _LAST], "right") - 1
    lowest, highest = np.full(count, np.nan), np.full(count, np.nan)
    np.fmin.at(lowest, column, rows[:, _LOW])
    np.fmax.at(highest, column, rows[:, _HIGH])
    finite = np.flatnonzero(np.isfinite(rows[:, _VALUE]))
    place = owner[finite] * count + column[finite]  # rows of a rank are in order of steps: the last one wins
    latest = finite[np.flatnonzero(np.diff(place, append=-1))]
    known = np.bincount(column[latest], minlength=count)
    sums = np.bincount(column[latest], rows[latest, _VALUE], count)
    line = np.where(known > 0, sums / np.maximum(known, 1), np.nan)
    return edges[:-1], edges[1:] - 1, line, lowest, highest
