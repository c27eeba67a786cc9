"""The rows of all ranks aligned on common steps: the input of every judgement."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from traceml_ray.stages import INFERRED, LEAD_BYTES, LEAD_UNKNOWN, SEGMENT_BITS

Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]
Float = npt.NDArray[np.float64]
Group = tuple[int, int]
"""Ranks that exchange gradients with each other, as (lowest rank, number of ranks)."""
MAX_MISSING = 64
"""Largest number of missing ranks that are listed. The total follows from the size of the job."""


@dataclass(frozen=True)
class RankRows:
    """
    Rows that one rank reported: `keys` int64 (n,), `flags` uint8 (n,), `rows` int64 ns (n, 6).

    `group` (the ranks it exchanges gradients with) and `strategy` (how the job is parallel) are None if not
    known.
    """

    rank: int
    node: str
    keys: Int64
    flags: UInt8
    rows: Int64
    group: Group | None = None
    strategy: str | None = None
    process_id: int = 0
    """Id of the rank process."""
    role: str | None = None
    """Work of the rank if not all ranks do the same, see `roles`. None: not known."""

    def select(self, which: slice | Bool | Int64) -> RankRows:
        """Return the rows selected by `which`."""
        return replace(self, keys=self.keys[which], flags=self.flags[which], rows=self.rows[which])


@dataclass(frozen=True)
class Window:
    """
    The steps that every live rank reported, in order. A step has a row for each of its exchanges.

    `keys` (K,), `ranks` (R,) ascending, `nodes` one label per rank, `d` int64 ns (K, R, 6), `flags` uint8 (K,
    R). `expected` is the world size. `missing` has the ranks that do not report (if there are very many, the
    lowest). `lacking` (G,) has the keys inside the window's range that some live rank lacks, except keys for
    which a rank has a row that no statistic covers. `groups` has one entry per rank, see `RankRows`;
    `strategies` has all strategies that occur.
    """

    keys: Int64
    ranks: Int64
    nodes: tuple[str, ...]
    d: Int64
    flags: UInt8
    expected: int
    missing: tuple[int, ...] = ()
    lacking: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    groups: tuple[Group | None, ...] = ()
    strategies: frozenset[str] = frozenset()
    host: Int64 | None = None
    """Rows of the hosts, in ns (K, R, 6), if `d` holds times of device events. None otherwise."""
    leads: UInt8 | None = None
    """
    How far each host was ahead of its device (K, R, 3): bit s of `late`, `full` and `sure` is for stage s,
    see `Hosts`.
    """
    roles: tuple[str | None, ...] = ()
    """Role of each rank, in order of `ranks`; empty if not known."""
    arrived: Int64 | None = None
    """
    For one role of several: time that each replica took to the exchange of each role, in ns (K, R, roles),
    see `roles`.
    """
    held: Int64 | None = None
    """
    For one role of several: by how much longer than the other replicas each replica waited for roles on the
    way to the exchange of each role, in ns (K, R, roles).
    """

    @property
    def coverage(self) -> float:
        """Share of the expected ranks that report, 0..1."""
        return min(1.0, len(self.ranks) / max(self.expected, 1))

    @cached_property
    def starts(self) -> Int64:
        """Indices (S,) of the rows that begin a step."""
        return starts_of(self.keys)

    @property
    def steps(self) -> Int64:
        """Step numbers (S,)."""
        return self.keys[self.starts] >> SEGMENT_BITS

    def by_step(self, values: Int64) -> Int64:
        """Return `values` (K, …) summed over the rows of each step (S, …)."""
        return values if len(self.starts) == len(values) else np.add.reduceat(values, self.starts, axis=0)

    def last(self, steps: int) -> Window:
        """Return the window of the newest `steps` steps, or all of it if it has fewer."""
        starts = self.starts
        return self.select(slice(starts[-steps], None)) if 0 < steps < len(starts) else self

    def without_open_step(self) -> Window:
        """
        Return the window without its last step, if that step has fewer rows than another one. The ranks may
        be in the middle of it.
        """
        starts = self.starts
        if len(starts) in (0, len(self.keys)):
            return self
        counts = np.diff(starts, append=len(self.keys))
        return self.select(slice(0, starts[-1])) if counts[-1] < counts.max() else self

    def since(self, step: int) -> Window:
        """Return the window from `step` on."""
        return self.select(slice(int(np.searchsorted(self.keys, step << SEGMENT_BITS)), None))

    def in_all(self, rows: Bool) -> Bool:
        """Return the steps (S,), or (S, R), all of whose rows are set in `rows` (K,), or (K, R)."""
        if len(self.starts) == len(rows):
            return rows
        complete: Bool = np.logical_and.reduceat(rows, self.starts, axis=0)
        return complete

    @property
    def gaps(self) -> int:
        """Number of steps inside the window's range for which some live rank lacks a row."""
        return len(np.unique(self.lacking >> SEGMENT_BITS))

    @property
    def whole_steps(self) -> int:
        """Number of steps that have all rows from every rank."""
        return int(np.isin(self.steps, self.lacking >> SEGMENT_BITS, invert=True).sum())

    @property
    def first_step(self) -> int | None:
        return int(self.keys[0]) >> SEGMENT_BITS if len(self.keys) else None

    @property
    def last_step(self) -> int | None:
        return int(self.keys[-1]) >> SEGMENT_BITS if len(self.keys) else None

    @property
    def waits_inside(self) -> bool:
        """
        Whether ranks wait for each other inside forward and backward (FSDP), not only at the end of a step.

        A row has the sum of these waits, so it is not known whether one rank's lateness hides behind
        another's.
        """
        return any("fsdp" in strategy for strategy in self.strategies)

    @property
    def inferred(self) -> tuple[str, ...]:
        """Functions in which ranks appear to exchange gradients, see `INFERRED`."""
        parts = {part for strategy in self.strategies for part in strategy.split("+")}
        return tuple(sorted(part.removesuffix(INFERRED) for part in parts if part.endswith(INFERRED)))

    def select(self, which: slice | Bool) -> Window:
        """Return the window of the keys selected by `which`."""
        keys = self.keys[which]
        lacking = self.lacking
        if len(self.keys):
            low, high = (keys[0], keys[-1]) if len(keys) else (0, 0)
            lacking = lacking[np.searchsorted(lacking, low) : np.searchsorted(lacking, high)]
        return replace(
            self,
            keys=keys,
            d=self.d[which],
            flags=self.flags[which],
            lacking=lacking,
            host=None if self.host is None else self.host[which],
            leads=None if self.leads is None else self.leads[which],
            arrived=None if self.arrived is None else self.arrived[which],
            held=None if self.held is None else self.held[which],
        )

    def copied(self) -> Window:
        """Return a copy that does not keep the memory of a larger window alive."""
        return replace(
            self,
            d=self.d.copy(order="K"),
            flags=self.flags.copy(order="K"),
            host=None if self.host is None else self.host.copy(order="K"),
            leads=None if self.leads is None else self.leads.copy(order="K"),
        )

    def by_group(self) -> list[Window]:
        """
        Return the window of every group of ranks that exchange gradients, in order of their lowest rank.

        Ranks of unknown group, and missing ranks of a group without a live rank, form one group; so do the
        ranks whose group is only themselves. A missing rank is counted in the group that reports a larger
        size, and listed there if it clearly belongs to it.
        """
        groups = set(self.groups)
        known = sorted(group for group in groups if group is not None)
        sizes = [size for _, size in known]
        if max(sizes, default=self.expected) >= self.expected or (max(sizes) == 1 and None not in groups):
            return [self]
        places_of: dict[Group | None, list[int]] = {group: [] for group in groups}
        for place, group in enumerate(self.groups):
            places_of[group].append(place)
        unknown = places_of.pop(None, [])
        rest = max(self.expected - sum(sizes), len(unknown))
        windows, left = [], list(self.missing)
        all_listed = len(left) >= self.expected - len(self.ranks)
        for (first, size), (following, _) in zip(known, [*known[1:], (1 << 62, 0)], strict=True):
            places = places_of[first, size]
            end = first + size
            compact = int(self.ranks[places[-1]]) < end <= following
            gone = [rank for rank in left if (first <= rank < end if compact else all_listed)]
            gone = gone if len(gone) == size - len(places) else []
            left = [rank for rank in left if rank not in gone] if gone else left
            windows.append(self._of(places, size, gone))
        if rest > 0:
            clear = all_listed and len(left) == rest - len(unknown)
            windows.append(self._of(unknown, rest, left if clear else []))
        return windows

    def group_of(self, rank: int) -> Window:
        """Return the window of the group that contains `rank`, one of `ranks`."""
        return next(group for group in self.by_group() if rank in group.ranks)

    def _of(self, places: list[int], expected: int, missing: Sequence[int]) -> Window:
        """Return the window of the ranks at `places` only, in the same memory layout."""
        host, leads = self.host, self.leads
        return replace(
            self,
            ranks=self.ranks[places],
            nodes=tuple(self.nodes[place] for place in places),
            d=self.d.transpose(1, 0, 2)[places].transpose(1, 0, 2),
            flags=self.flags.T[places].T,
            expected=expected,
            missing=tuple(missing),
            groups=tuple(self.groups[place] for place in places),
            roles=tuple(self.roles[place] for place in places) if self.roles else (),
            host=None if host is None else host.transpose(1, 0, 2)[places].transpose(1, 0, 2),
            leads=None if leads is None else leads.transpose(1, 0, 2)[places].transpose(1, 0, 2),
        )


def no_values() -> Float:
    """Return an empty array, the default of a field whose values are not known."""
    return np.empty(0)


def starts_of(keys: Int64) -> Int64:
    """Return the indices (S,) in sorted `keys` at which a step begins."""
    steps = keys >> SEGMENT_BITS
    return np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1))


def joined(pieces: Sequence[Window]) -> Window:
    """Return consecutive pieces of a run as one window, with the ranks of the last piece."""
    hosts = [piece.d if piece.host is None else piece.host for piece in pieces]
    leads = [_no_leads(piece.flags) if piece.leads is None else piece.leads for piece in pieces]
    known = any(piece.host is not None for piece in pieces)  # of one without, the rows are the host's
    return replace(
        pieces[-1],
        keys=np.concatenate([piece.keys for piece in pieces]),
        d=np.concatenate([piece.d for piece in pieces]),
        flags=np.concatenate([piece.flags for piece in pieces]),
        lacking=np.concatenate([piece.lacking for piece in pieces]),
        host=np.concatenate(hosts) if known else None,
        leads=np.concatenate(leads) if known else None,
    )


def _no_leads(flags: UInt8) -> UInt8:
    """Return leads (K, R, 3) that mean "not known", for rows (K, R)."""
    return np.full((*flags.shape, LEAD_BYTES), LEAD_UNKNOWN, np.uint8)


def missing_of(world: int, live: Iterable[int], most: int = MAX_MISSING) -> list[int]:
    """Return the ranks of a job of size `world` that are not `live`, at most the lowest `most`."""
    known = frozenset(live)
    return list(itertools.islice((rank for rank in range(world) if rank not in known), most))
