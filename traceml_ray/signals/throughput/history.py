"""What the steps of rank processes were trained on, in bounded memory; made of `StepWork`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from traceml_ray.analysis.window import Float, Int64
from traceml_ray.signals.throughput.records import StepWork

MOST = 256
"""Pieces of a rank process: of more, neighbours are added up."""
_PROCESS, _FIRST, _LAST, _STEPS, _SAMPLES, _TOKENS = range(6)
AMOUNTS = ("samples", "tokens")
FACTS = ("flops", "job_flops", "flops_step", "dtype", "device", "device_id", "peak_tflops", "total_steps")


class PerStep(NamedTuple):
    """What each of some rank processes (R,) was trained on in a step, mean; NaN is not known."""

    samples: Float
    tokens: Float


class WorkHistory:
    """Of all rank processes of a session."""

    def __init__(self) -> None:
        self.facts: dict[int, dict[str, Any]] = {}
        """What each has said of its work last, by its id and by field."""
        self._table: Float = np.empty((0, 6))
        self._arrived: list[tuple[float, ...]] = []

    def add(self, process: int, work: StepWork) -> None:
        """Add what a rank process has said."""
        known = {name: value for name in FACTS if (value := getattr(work, name)) is not None}
        self.facts[process] = {**self.facts.get(process, {}), **known}
        if work.steps:
            amounts = (np.nan if value is None else float(value) for value in (work.samples, work.tokens))
            self._arrived.append((process, work.first_step, work.last_step, work.steps, *amounts))

    def per_step(self, processes: Sequence[int], first: int, last: int) -> PerStep:
        """
        Return the means of the steps `first` to `last` of rank processes; of one that has said nothing of
        these yet, of its newest before.
        """
        table, ids = self._rows(), np.asarray(processes, dtype=float)
        inside = np.minimum(table[:, _LAST], last) - np.maximum(table[:, _FIRST], first) + 1
        share = np.clip(inside / (table[:, _LAST] - table[:, _FIRST] + 1), 0, None)
        order = np.argsort(ids)
        positions = np.searchsorted(ids[order], table[:, _PROCESS])
        used = np.flatnonzero((share > 0) & (np.append(ids[order], -1)[positions] == table[:, _PROCESS]))
        sums = np.zeros((len(ids), 3))
        np.add.at(sums, order[positions[used]], table[used, _STEPS:] * share[used, None])
        for place in np.flatnonzero(sums[:, 0] == 0):
            process_rows = table[(table[:, _PROCESS] == ids[place]) & (table[:, _FIRST] <= first)]
            sums[place] = process_rows[-1, _STEPS:] if len(process_rows) else np.nan
        return PerStep(sums[:, 1] / sums[:, 0], sums[:, 2] / sums[:, 0])

    def at(self, processes: Sequence[int], steps: Int64) -> PerStep:
        """
        Return what all of these rank processes together were trained on in each of `steps` (K,), which
        ascend; NaN where one of them has said nothing.
        """
        table = self._rows()
        table = table[np.isin(table[:, _PROCESS], processes)]
        lasts = [process_rows[-1, _LAST] for process_rows in _by_process(table)]
        if len(lasts) < len(processes) or not len(lasts):
            return PerStep(np.full(len(steps), np.nan), np.full(len(steps), np.nan))
        where = np.minimum(steps, min(lasts))  # what is newest has not been said by all
        per_step = table[:, _SAMPLES:] / table[:, _STEPS, None]
        known = ~np.isnan(per_step)
        values = np.concatenate([np.where(known, per_step, 0), known], axis=1)
        total: Float = np.zeros((len(steps), 4))
        for column, side, sign in ((_FIRST, "right", 1), (_LAST, "left", -1)):
            order = np.argsort(table[:, column], kind="stable")
            sums = np.concatenate([np.zeros((1, 4)), np.cumsum(values[order], axis=0)])
            total += sign * sums[np.searchsorted(table[order, column], where, side)]  # type: ignore[call-overload]
        complete = np.rint(total[:, 2:]) == len(processes)
        return PerStep(*np.where(complete, total[:, :2], np.nan).T)

    def _rows(self) -> Float:
        """Return all pieces, by rank process and step."""
        if self._arrived:
            table = np.concatenate([self._table, np.array(self._arrived)])
            self._arrived = []
            table = table[np.lexsort((table[:, _FIRST], table[:, _PROCESS]))]
            if len(table) > MOST * len(np.unique(table[:, _PROCESS])):
                table = np.concatenate([_halved(process_rows) for process_rows in _by_process(table)])
            self._table = table
        return self._table


def _by_process(table: Float) -> Iterable[Float]:
    return np.split(table, np.flatnonzero(np.diff(table[:, _PROCESS])) + 1) if len(table) else ()


def _halved(process_rows: Float) -> Float:
    """Return the pieces of a rank process, each two neighbours as one; the newest stay."""
    if len(process_rows) < 4:
        return process_rows
    old = process_rows[: len(process_rows) // 4 * 2]
    one, other = old[::2], old[1::2]
    both = one + other
    both[:, [_PROCESS, _FIRST]], both[:, _LAST] = one[:, [_PROCESS, _FIRST]], other[:, _LAST]
    return np.concatenate([both, process_rows[len(old) :]])
