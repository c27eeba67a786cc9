"""The rows of steps that `steps()` returns, as arrays and as a pandas table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traceml_ray import text
from traceml_ray.identity import rank_filter
from traceml_ray.interactive import frames
from traceml_ray.interactive.frames import Array
from traceml_ray.interactive.html import page_of_table
from traceml_ray.stages import FLAG_EXCLUDED, STAGES
from traceml_ray.store.step_rows import StepRows

MOST_ROWS = 1_000_000
"""Largest number of rows that `steps` returns by default: 70 MB, and three times that while they are read."""
_STAGES = tuple(f"{stage}_ns" for stage in STAGES)
_HOST = tuple(f"host_{stage}_ns" for stage in STAGES)
_SHOWN = 20


@dataclass(frozen=True, eq=False, repr=False)
class StepTable:
    """
    Rows of steps: one for each step, segment and rank, sorted in this order; n rows. Times are int64 ns.

    Columns are arrays by name: `rank`, `step`, `segment`, `flags`, `excluded` and, for each stage, `data_ns`
    and so on. `total_ns` is the sum of the stages. If rows are on a device's clock, `host_data_ns` and so on
    are the same times on the host's clock: float64, NaN in rows without a host row.
    """

    rank: Array
    """Global rank of each row: (n,) int64."""
    step: Array
    """Number of the step of each row: (n,) int64."""
    segment: Array
    """Number of the exchange of gradients inside the step, from 0 on: (n,) int64."""
    flags: Array
    """Why a row is incomplete, as bits of `traceml_ray.stages.FLAG_*`: (n,) uint8."""
    stages_ns: Array
    """Time in each stage, in the order of `traceml_ray.stages.STAGES`: (n, 6) int64 ns."""
    host_ns: Array | None
    """
    Time in each stage on the host's clock: (n, 6) float64 ns, NaN: not known; None: no rank has a device
    clock.
    """
    folded: int
    """Number of older rows of these ranks that are kept as sums only. This table lacks them."""

    def __getattr__(self, name: str) -> Array:
        column = self._column(name)
        if column is None:
            raise AttributeError(f"steps have no column {name!r}; columns: {', '.join(self.columns)}")
        return column

    def _column(self, name: str) -> Array | None:
        if name in _STAGES:
            return self.stages_ns[:, _STAGES.index(name)]
        if name in _HOST and self.host_ns is not None:
            return self.host_ns[:, _HOST.index(name)]
        return None

    @property
    def columns(self) -> list[str]:
        """Column names of `to_pandas`."""
        host = _HOST if self.host_ns is not None else ()
        return ["step", "rank", "segment", "flags", "excluded", *_STAGES, "total_ns", *host]

    @property
    def excluded(self) -> Array:
        """Rows that no statistic covers, such as the first step of a process: (n,) bool."""
        excluded: Array = (self.flags & FLAG_EXCLUDED) != 0
        return excluded

    @property
    def total_ns(self) -> Array:
        """Time of the whole row, including waiting: (n,) int64 ns."""
        total: Array = self.stages_ns.sum(axis=1)
        return total

    def __len__(self) -> int:
        return len(self.step)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.columns})

    def __repr__(self) -> str:
        folded = f", {self.folded:,} older ones are kept as sums only" if self.folded else ""
        return f"<Steps: {self._size()}{folded}; try .to_pandas(), .rank, .data_ns>"

    def _size(self) -> str:
        if not len(self):
            return "no row"
        ranks = text.count(len(np.unique(self.rank)), "rank")
        return f"{text.count(len(self), 'row')}, steps {self.step.min():,}–{self.step.max():,} of {ranks}"

    def to_pandas(self) -> Any:
        """
        Return a DataFrame, one row for each step, rank and segment. Times stay int64 ns (`_ns`); those on the
        host's clock are float64, NaN where not known. Raises ImportError where pandas is not installed.
        """
        made = frames.pandas().DataFrame({name: getattr(self, name) for name in self.columns})
        made.attrs["folded"] = self.folded
        return made

    def _repr_html_(self) -> str:
        """Return the first rows as an HTML table for a notebook, times in ms."""
        shown = {name: getattr(self, name)[:_SHOWN] for name in ("step", "rank", "segment")}
        times = {
            f"{name.removesuffix('_ns')} ms": getattr(self, name)[:_SHOWN] / 1e6
            for name in (*_STAGES, "total_ns")
        }
        return page_of_table({**shown, **times}, len(self), self._size())


def joined(parts: Sequence[StepRows]) -> StepTable:
    """Return the parts of an answer as one table, sorted by step, then segment, then rank."""
    keys = [np.concatenate([getattr(part, name) for part in parts]) for name in ("rank", "segment", "step")]
    order = np.lexsort(keys)
    rank, segment, step = (key[order] for key in keys)
    del keys
    return StepTable(  # one column after the other: beside the parts there is one copy of all, and of one
        rank=rank,
        step=step,
        segment=segment,
        flags=np.concatenate([part.flags for part in parts])[order],
        stages_ns=np.concatenate([part.stages_ns for part in parts])[order],
        host_ns=_host_ns(parts, order),
        folded=parts[-1].folded,
    )


def _host_ns(parts: Sequence[StepRows], order: Array) -> Array | None:
    """Return the times on the host's clock in the given order, NaN: not known; None if no part has any."""
    if all(part.host_ns is None for part in parts):
        return None
    host_ns = [np.full(p.stages_ns.shape, np.nan) if p.host_ns is None else p.host_ns for p in parts]
    times: Array = np.concatenate(host_ns)[order]
    return times


def chosen_ranks(ranks: str | int | Iterable[int] | None, known: Iterable[int]) -> tuple[int, ...] | None:
    """Return the selected ranks; None: all. Raises ValueError for ranks that are not in `known`."""
    if ranks is None:
        return None
    known_ranks = sorted(known)
    if isinstance(ranks, str):
        wanted = rank_filter(ranks)
        chosen = [rank for rank in known_ranks if rank in wanted]
    else:
        asked = {ranks} if isinstance(ranks, int) else {*ranks}
        chosen = [rank for rank in known_ranks if rank in asked]
        if missing := sorted(asked - {*chosen}):
            raise ValueError(f"there is no {text.ranks(missing)}: ranks are {text.ranges(known_ranks)}")
    if not chosen and known_ranks:
        raise ValueError(f"ranks={ranks!r} are none of this run: ranks are {text.ranges(known_ranks)}")
    return tuple(chosen)


def at_most(parts: Iterable[StepRows], most: int, ranks: int, name: str) -> Iterator[StepRows]:
    """
    Yield the parts of an answer. Raises ValueError, which names the filters, if they have more than `most`
    rows.
    """
    rows = 0
    for part in parts:
        rows += len(part.step)
        if rows > most:
            fit = max(1, most // max(1, ranks))
            raise ValueError(
                f"session {name!r}: these steps have more than most={most:,} rows: choose steps with first= "
                f"and last= (about {fit:,} steps of {text.count(ranks, 'rank')} fit) or ranks with ranks=, "
                "go through them in parts with iter_steps(), or raise most="
            )
        yield part
