"""
The newest rows of all ranks of a job, one line per rank and one column per key.

A row is put into its cell once, when it arrives. Rows that are excluded from statistics are only counted,
with their time, in bounded memory.

If a rank has a device clock, rows are wide: WIDTH int64 with the row, the same row on the CPU's clock, and
its leads packed into one number (-1 if the rank process has no device clock). Otherwise they stay narrow.

`begins` computes when the stages of a row happen: one after the other, in the order of `STAGES`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traceml_ray.analysis.window import Bool, Group, Int64, UInt8, Window
from traceml_ray.stages import (
    FLAG_DEVICE_CLOCK,
    FLAG_EXCLUDED,
    LEAD_BYTES,
    LEAD_UNKNOWN,
    N_STAGES,
    SEGMENT_BITS,
)

WIDTH = 2 * N_STAGES + 1
_SHIFTS = 8 * np.arange(LEAD_BYTES)
_UNKNOWN = int((LEAD_UNKNOWN << _SHIFTS).sum())
Chunk = tuple[bytes, bytes, bytes]
"""Rows, host rows and leads as on the wire."""


def has_host_columns(rows: Int64) -> bool:
    """Whether `rows` (…, 6 or WIDTH) include the host's part."""
    return bool(rows.shape[-1] > N_STAGES)


def from_wire(chunks: Sequence[Chunk]) -> Int64:
    """Return the rows (n, 6) of some chunks. If one of the chunks has host rows, they are wide (n, WIDTH)."""
    rows = _stages([rows for rows, _, _ in chunks])
    if not any(host for _, host, _ in chunks):
        return rows
    leads = np.concatenate([_leads(*chunk) for chunk in chunks])
    return np.hstack([rows, _stages([host or rows for rows, host, _ in chunks]), leads[:, None]])


def with_host_columns(rows: Int64) -> Int64:
    """Return wide rows (…, WIDTH) made from rows (…, 6) of ranks without a device clock."""
    return np.concatenate([rows, rows, np.full((*rows.shape[:-1], 1), -1)], axis=-1)


def without_device(rows: Int64, flags: UInt8) -> Bool:
    """Return which wide rows (…, WIDTH) have no times from the device clock."""
    missing: Bool = (flags & FLAG_DEVICE_CLOCK == 0) & (rows[..., -1] >= 0)
    return missing


def host_part(rows: Int64, flags: UInt8) -> tuple[Int64 | None, UInt8 | None]:
    """
    Return the host rows (…, 6) and leads (…, 3; LEAD_UNKNOWN if not known) of `rows` (…, 6 or WIDTH).

    Both are None if no rows are on a device's clock, or if those rows have no host row.
    """
    if not has_host_columns(rows):
        return None, None
    packed = rows[..., -1]
    known = packed[flags & FLAG_DEVICE_CLOCK != 0]
    if not len(known) or known.min() < 0:
        return None, None
    return rows[..., N_STAGES:-1].copy(), (packed[..., None] >> _SHIFTS).astype(np.uint8)


def _stages(parts: Sequence[bytes]) -> Int64:
    return np.frombuffer(b"".join(parts), "<i8").reshape(-1, N_STAGES)


def _leads(rows: bytes, host: bytes, leads: bytes) -> Int64:
    """Return the leads of a chunk, each as one number (n,)."""
    if leads:
        three = np.frombuffer(leads, np.uint8).reshape(-1, LEAD_BYTES).astype(np.int64)
        packed: Int64 = (three << _SHIFTS).sum(axis=1)
        return packed
    return np.full(len(rows) // (8 * N_STAGES), _UNKNOWN if host else -1)


MOST = 64
"""Largest number of entries per rank. Beyond it, several steps share an entry."""
_FIRST = attrgetter("first")


class Aside(NamedTuple):
    """Consecutive steps that are excluded from statistics."""

    first: int
    last: int
    steps: int
    """Number of excluded steps. It is the whole range, unless the rank has very many."""
    ns: int
    """Time that they took together, in ns."""


class SetAside:
    """The steps of one rank that are excluded from statistics, ascending."""

    def __init__(self) -> None:
        self.entries: list[Aside] = []

    def add(self, step: int, ns: int) -> None:
        """Add a row that took `ns`. The rows of one step are one entry."""
        index = bisect_right(self.entries, step, key=_FIRST)
        before = self.entries[index - 1] if index else None
        if before is not None and step <= before.last:
            self.entries[index - 1] = before._replace(ns=before.ns + ns)
            return
        self.entries.insert(index, Aside(step, step, 1, ns))
        if len(self.entries) > MOST:
            self._join_nearest()

    def count(self, other: set[int]) -> int:
        """Return the number of these steps that are not in `other`."""
        both = sum(any(entry.first <= step <= entry.last for entry in self.entries) for step in other)
        return sum(entry.steps for entry in self.entries) - both

    def _join_nearest(self) -> None:
        """Join the two entries with the fewest steps between them; of several such pairs, the oldest."""
        entries = self.entries
        index = min(range(len(entries) - 1), key=lambda i: entries[i + 1].first - entries[i].last)
        one, two = entries[index], entries[index + 1]
        entries[index : index + 2] = [Aside(one.first, two.last, one.steps + two.steps, one.ns + two.ns)]


CELLS = 1 << 18
_LEAST, _MOST = 192, 8192
_OFF_STEPS = 256
Places = slice | npt.NDArray[np.intp]


class RankMeta(NamedTuple):
    """A rank's node as it is displayed, the group it exchanges gradients with, its strategy, and its role."""

    node: str
    group: Group | None = None
    strategy: str | None = None
    role: str | None = None


class RowTable:
    """
    A table with a line for each rank and a column for each key. It has room for `cells` rows: at least 192 of
    each rank, and at most `most`.

    A cell is written once and never replaced. When there is no more room, the oldest columns are forgotten.
    Cells are wide (see the module) from the first wide row on.
    """

    def __init__(self, cells: int = CELLS, most: int = _MOST) -> None:
        self._cells_most, self._columns_most = cells, most
        self.ranks: Int64 = np.empty(0, np.int64)
        """Ranks (R,), ascending: one line each."""
        self.first: Int64 = np.empty(0, np.int64)
        self.last: Int64 = np.empty(0, np.int64)
        """
        Last key of each rank (R,) that counts; `first` is the first one that counts. -1
        if there is none.
        """
        self.lead: Int64 = np.empty(0, np.int64)
        self.lead_ns: Int64 = np.empty(0, np.int64)
        """
        Time of each rank's very first row, whose key is `lead` and which does not count, in ns. -1 if there
        is none.
        """
        self.aside: dict[int, SetAside] = {}
        """Further excluded rows, by rank."""
        self.device: Int64 = np.empty(0, np.int64)
        """Newest key of each rank (R,) whose row is on the device's clock. -1 if there is none."""
        self.forgotten = -1
        """Largest key that has been forgotten. -1 if none has."""
        self._end = 0
        self._keys: Int64 = np.empty(0, np.int64)
        self._d: Int64 = np.empty((0, 0, N_STAGES), np.int64)
        self._make(0, 0)

    @property
    def keys(self) -> Int64:
        """Keys (n,) in the table, ascending."""
        return self._keys[: self._end]

    @property
    def size(self) -> int:
        """Number of columns that the table should have room for."""
        return max(_LEAST, min(self._columns_most, self._cells_most // max(1, len(self.ranks))))

    def places(self, ranks: Sequence[int] | Int64) -> npt.NDArray[np.intp]:
        """Return the lines of `ranks`, which must be in the table."""
        lines: npt.NDArray[np.intp] = np.searchsorted(self.ranks, ranks)
        return lines

    def add_ranks(self, ranks: Sequence[int]) -> None:
        """Add a line for each of `ranks` that has none."""
        all_ranks = np.union1d(self.ranks, np.asarray(ranks, np.int64))
        if len(all_ranks) == len(self.ranks):
            return
        lines = np.searchsorted(all_ranks, self.ranks)
        self.ranks = all_ranks
        for name in ("first", "last", "lead", "lead_ns", "device"):
            before = getattr(self, name)
            setattr(self, name, np.full(len(all_ranks), -1, np.int64))
            getattr(self, name)[lines] = before
        self._resize(max(self.size, self._end), lines)

    def put(self, places: npt.NDArray[np.intp], keys: Int64, flags: UInt8, rows: Int64) -> int:
        """
        Store rows of some ranks that have the same `keys` (k,): `flags` (m, k), `rows` ns (m, k, 6) or wide.

        Return the number of new rows. If a key is repeated, its first row stays. Forgotten keys are left out.
        """
        if has_host_columns(rows) and not has_host_columns(self._d):
            self._d = with_host_columns(self._d)
        elif has_host_columns(self._d) and not has_host_columns(rows):
            rows = with_host_columns(rows)
        if len(keys) > 1 and not (np.diff(keys) > 0).all():
            keys, first = np.unique(keys, return_index=True)
            flags, rows = flags[:, first], rows[:, first]
        if len(keys) and keys[0] <= self.forgotten:
            late = int(np.searchsorted(keys, self.forgotten, "right"))
            keys, flags, rows = keys[late:], flags[:, late:], rows[:, late:]
        if not len(keys):
            return 0
        columns = self._columns(keys)
        usable = flags & FLAG_EXCLUDED == 0
        aside = ~usable
        if has_host_columns(rows):
            usable &= ~self._off_clock(places, keys, flags, rows)
        where = _cross(places, columns)
        there = self._seen[where]
        if (aside := aside & ~there).any():
            self._note_aside(places, keys, aside, rows)
        new = int(there.size - there.sum())
        if new < there.size:
            flags = np.where(there, self._flags[where], flags)
            usable = np.where(there, self._usable[where], usable)
            rows = np.where(there[..., None], self._d[where], rows)
        self._d[where], self._flags[where], self._usable[where] = rows, flags, usable
        self._seen[where] = True
        self._note_ends(places, keys, usable)
        return new

    def _note_ends(self, places: npt.NDArray[np.intp], keys: Int64, usable: Bool) -> None:
        have_usable = usable.any(axis=1)
        places, usable = places[have_usable], usable[have_usable]
        first = keys[usable.argmax(axis=1)]
        last = keys[len(keys) - 1 - usable[:, ::-1].argmax(axis=1)]
        known = self.first[places]
        self.first[places] = np.where(known < 0, first, np.minimum(known, first))
        self.last[places] = np.maximum(self.last[places], last)

    def _note_aside(self, places: npt.NDArray[np.intp], keys: Int64, aside: Bool, rows: Int64) -> None:
        """Record excluded rows (m, k) that are new: the first one of a rank, and the others."""
        for line, column in np.argwhere(aside):
            place, key = places[line], int(keys[column])
            took = int(rows[line, column, :N_STAGES].sum())
            lead = int(self.lead[place])
            if lead < 0 or key < lead:
                self.lead[place], key = key, lead
                self.lead_ns[place], took = took, int(self.lead_ns[place])
            if key >= 0:
                self.aside.setdefault(int(self.ranks[place]), SetAside()).add(key >> SEGMENT_BITS, took)

    def _off_clock(self, places: npt.NDArray[np.intp], keys: Int64, flags: UInt8, rows: Int64) -> Bool:
        """
        Return which rows (m, k) have no device times although the rank's device clock is running: it had
        times at most `_OFF_STEPS` before. These rows cannot be compared, and do not count.
        """
        newest = np.where(flags & FLAG_DEVICE_CLOCK != 0, keys, -1)
        newest[:, 0] = np.maximum(newest[:, 0], self.device[places])
        newest = np.maximum.accumulate(newest, axis=1)
        self.device[places] = newest[:, -1]
        near: Bool = (newest >= 0) & ((keys >> SEGMENT_BITS) - (newest >> SEGMENT_BITS) <= _OFF_STEPS)
        return near & without_device(rows, flags)

    def unseen(self, places: npt.NDArray[np.intp], keys: Int64) -> Int64:
        """Return those of `keys` that at least one of the ranks has no row for."""
        keys = np.unique(keys)
        gone = keys <= self.forgotten
        columns = np.minimum(np.searchsorted(self.keys, keys), max(0, self._end - 1))
        in_table = self.keys[columns] == keys if self._end else np.zeros(len(keys), np.bool_)
        seen = in_table & self._seen[places][:, columns].all(axis=0) if self._end else in_table
        seen |= gone & (keys <= self.last[places].min())
        left: Int64 = keys[~seen]
        return left

    def rows_of_a_step(self, end: int) -> int:
        """Return how many rows a step has, on average and rounded up, in the newest columns before `end`."""
        steps = self._keys[max(0, end - _LEAST) : end] >> SEGMENT_BITS
        return -(-len(steps) // (int(np.count_nonzero(np.diff(steps))) + 1))

    def before(self, end: int, columns: int) -> int:
        """Return the first of the last `columns` columns before `end` that have a row that counts."""
        if has_host_columns(self._d):
            counts = np.flatnonzero(self._usable[:, :end].any(axis=0))
            return int(counts[-columns]) if len(counts) >= columns else 0
        return max(0, end - columns)

    def between(self, after: int, to: int) -> slice:
        """Return the columns of the keys after `after`, up to and including `to`."""
        first, last = np.searchsorted(self.keys, (after, to), "right").tolist()
        return slice(first, last)

    def cells(self, columns: slice) -> tuple[Int64, UInt8, Bool]:
        """Return `d` (R, n, 6), `flags` (R, n), and where a row counts (R, n). All are views."""
        d = self._d[:, columns, :N_STAGES]
        return d, self._flags[:, columns], self._usable[:, columns]

    def unread(self, columns: slice) -> Bool:
        """Return where (R, n) a row does not count because its device clock was not read."""
        unread: Bool = (
            self._seen[:, columns] & ~self._usable[:, columns] & ~self._flagged(slice(None), columns)
        )
        return unread

    def _flagged(self, lines: Any, columns: slice) -> Bool:
        """Return where (R, n) a row is excluded from statistics."""
        flagged: Bool = self._seen[lines, columns] & (self._flags[lines, columns] & FLAG_EXCLUDED != 0)
        return flagged

    def line(self, rank: int, last: int) -> tuple[Int64, UInt8, Int64]:
        """Return the newest `last` rows of a rank: keys (n,), flags (n,), rows (n, 6) or wide."""
        line = int(np.searchsorted(self.ranks, rank))
        if line == len(self.ranks) or self.ranks[line] != rank:
            return _NO_KEYS, np.empty(0, np.uint8), np.empty((0, N_STAGES), np.int64)
        mine = np.flatnonzero(self._seen[line, : self._end])[-last:]
        return self._keys[mine], self._flags[line, mine], self._d[line, mine]

    def window(
        self,
        columns: slice,
        ranks: Sequence[int],
        who: Sequence[RankMeta],
        expected: int,
        missing: Sequence[int] = (),
    ) -> Window:
        """
        Return the keys in some columns that all of `ranks` (ascending) have rows for. `who` describes the
        ranks.
        """
        places = self.places(ranks)
        lines: Any = slice(None) if len(places) == len(self.ranks) else places
        usable: Bool = self._usable[lines, columns]
        seen = np.asarray(usable.any(axis=0))
        common = usable.all(axis=0) & seen
        keys = self._keys[columns]
        lacks = seen & ~common
        if lacks.any():  # a row in no statistic is there all the same
            lacks &= ~self._flagged(lines, columns).any(axis=0)
        complete = np.flatnonzero(common)
        inside = slice(int(complete[0]), int(complete[-1]) + 1) if len(complete) else slice(0, 0)
        cut = slice(columns.start + inside.start, columns.start + inside.stop)
        d, flags = self._d[lines, cut], self._flags[lines, cut]
        if not common[inside].all():
            d, flags = d[:, common[inside]], flags[:, common[inside]]
        host, leads = host_part(d, flags)
        d = d[..., :N_STAGES]
        nodes, groups, strategies, roles = zip(*who, strict=True) if who else ((), (), (), ())
        return Window(
            keys=keys[common],
            ranks=np.asarray(ranks, np.int64),
            nodes=nodes,
            d=(d.copy() if d.base is not None else d).transpose(1, 0, 2),
            flags=(flags.copy() if flags.base is not None else flags).T,
            expected=expected,
            missing=tuple(sorted(missing)),
            lacking=keys[inside][lacks[inside]] if len(complete) else keys[lacks],
            groups=groups,
            strategies=frozenset(filter(None, strategies)),
            roles=roles,
            host=None if host is None else host.transpose(1, 0, 2),
            leads=None if leads is None else leads.transpose(1, 0, 2),
        )

    def forget(self, done: int) -> None:
        """If more than three quarters of the table are used, forget the oldest keys, up to `done` at most."""
        size = self.size
        if self._end <= size * 3 // 4 and self._keys.size <= 2 * size:
            return
        self._drop(min(max(0, self._end - size // 2), int(np.searchsorted(self.keys, done, "right"))))
        if self._keys.size > 2 * size >= 2 * self._end:
            self._resize(size, np.arange(len(self.ranks)))

    def forget_all(self, done: int) -> None:
        """Forget the keys up to `done`, and release the memory that the others do not need."""
        self._drop(int(np.searchsorted(self.keys, done, "right")))
        self._resize(self._end, np.arange(len(self.ranks)))

    def _drop(self, columns: int) -> None:
        if not columns:
            return
        self.forgotten = int(self._keys[columns - 1])
        keep = self._end - columns
        self._keys[:keep] = self._keys[columns : self._end].copy()
        for cells in self._cells():
            cells[:, :keep] = cells[:, columns : self._end].copy()
        self._seen[:, keep : self._end] = self._usable[:, keep : self._end] = False
        self._end = keep

    def _columns(self, keys: Int64) -> Places:
        """Return the columns of `keys`; add those that are new."""
        columns = np.searchsorted(self.keys, keys)
        if columns[-1] == self._end or (self._keys[columns] != keys).any():
            new = np.setdiff1d(keys, self.keys[columns[0] :], assume_unique=True)
            self._insert(new, int(np.searchsorted(self.keys, new[0])))
            columns = np.searchsorted(self.keys, keys)
        return (
            slice(int(columns[0]), int(columns[-1]) + 1)
            if columns[-1] - columns[0] == len(columns) - 1
            else columns
        )

    def _insert(self, keys: Int64, first: int) -> None:
        """Add columns for new `keys`. Those from `first` on move."""
        moved, end = self._keys[first : self._end].copy(), self._end + len(keys)
        before = [cells[:, first : self._end].copy() for cells in self._cells()]
        if end > self._keys.size:
            self._resize(max(min(self.size, _MOST), 2 * end), np.arange(len(self.ranks)))
        self._keys[first:end] = np.sort(np.concatenate([moved, keys]))
        self._end = end
        columns = np.searchsorted(self.keys, moved)
        for cells, old in zip(self._cells(), before, strict=True):
            if len(moved):
                cells[:, first:end] = 0
                cells[:, columns] = old

    def _cells(self) -> tuple[npt.NDArray[np.generic], ...]:
        return self._d, self._flags, self._usable, self._seen

    def _make(self, ranks: int, columns: int) -> None:
        self._d = np.zeros((ranks, columns, self._d.shape[2]), np.int64)
        self._flags: UInt8 = np.zeros((ranks, columns), np.uint8)
        self._usable: Bool = np.zeros((ranks, columns), np.bool_)
        """Where a row counts. The first row of a process does not."""
        self._seen: Bool = np.zeros((ranks, columns), np.bool_)

    def _resize(self, columns: int, lines: npt.NDArray[np.intp]) -> None:
        """Make room for `columns` columns. The existing lines move to `lines`."""
        before, keys = self._cells(), self.keys
        self._make(len(self.ranks), columns)
        self._keys = np.zeros(columns, np.int64)
        self._keys[: self._end] = keys
        for new, old in zip(self._cells(), before, strict=True):
            new[lines, : self._end] = old[:, : self._end]


_NO_KEYS: Int64 = np.empty(0, np.int64)


def _cross(places: npt.NDArray[np.intp], columns: Places) -> Any:
    """Return the index of the cells where lines and columns cross. For adjacent lines it selects a view."""
    if (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1), columns
    return places if isinstance(columns, slice) else places[:, None], columns


def begins(stages: npt.NDArray[Any], follows: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[Any]:
    """
    Return when each stage begins, relative to the beginning of its row, [n, STAGES].

    Args:
        stages: time of each stage, [n, STAGES].
        follows: whether a row continues the previous one; it is then counted from the beginning of that row,
            [n].
    """
    ends = np.cumsum(stages, axis=1)
    for row in [] if follows is None else np.flatnonzero(follows).tolist():
        ends[row] += ends[row - 1, -1]
    starts: npt.NDArray[Any] = ends - stages
    return starts
