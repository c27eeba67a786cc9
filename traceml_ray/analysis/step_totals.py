"""
The time that each rank spent in steps so far, from the reduced steps: in its steps, waiting for data, and
waiting for other ranks beyond what the exchange itself takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_stats import StepSums
from traceml_ray.analysis.window import Float, Int64
from traceml_ray.stages import BACKWARD, DATA, SEGMENT_BITS, SYNC_WAIT

RECENT = 64
"""
Number of newest steps that have a column each in `StepTotals.columns`. Older columns have two, four, … steps.
"""

_MOST_NS = 1 << 62


class StepTotals(NamedTuple):
    """Time in the steps of an attempt so far, for R ranks and C columns of steps."""

    ranks: Int64
    """(R,), ascending."""
    steps: Int64
    """(R,), number of steps that `took_ns` covers."""
    took_ns: Int64
    """(R,), time of all rows after the first one of each rank."""
    data_ns: Int64
    """(R,), the part of it that the rank waited for data."""
    waited_ns: Int64
    """
    (R,), the part of it that the rank waited for other ranks, without the time that the exchange itself takes
    (its exposed time).
    """
    columns: Int64
    """(C, 3): first and last step of each column, and the time of its rows on all ranks together, in ns."""


def step_totals(history: StepHistory) -> StepTotals:
    """
    Return the time of all reduced steps of a history.

    Steps whose device clock was not read, and steps that are excluded from statistics, are divided as the
    others are.
    """
    count = len(history.ranks)
    d_ms, data_ms, waited_ms, unread_ms, steps = (np.zeros(count) for _ in range(5))
    columns = [_aside_columns(history)]
    for store in history.stores() if count else ():
        sums, unread = store.d[:, : store.end].sum(axis=2, dtype=float), store.unread()[..., 1]
        d_ms += sums.sum(axis=1)
        data_ms += store.d[:, : store.end, DATA].sum(axis=1, dtype=float)
        waited_ms += _waited(store, sums)
        unread_ms += unread.sum(axis=1, dtype=float)
        steps += (store.count[:, : store.end] + store.unread()[..., 0]).sum(axis=1, dtype=float)
        took = (sums + unread).sum(axis=0)
        columns.append(np.stack([store.first[: store.end], store.last[: store.end], _ns(took)], axis=1))
    aside_ms, aside_steps = _aside(history)
    took_ms = d_ms + unread_ms + aside_ms
    scale = np.where(d_ms > 0, took_ms / np.where(d_ms > 0, d_ms, 1), 0)
    took_ns = _ns(took_ms)
    data_ns = np.minimum(_ns(data_ms * scale), took_ns)
    waited_ns = np.minimum(_ns(waited_ms * scale), took_ns - data_ns)
    return StepTotals(
        np.array(history.ranks, np.int64),
        _whole(steps + aside_steps),
        took_ns,
        data_ns,
        waited_ns,
        _grouped(np.concatenate(columns)),
    )


def _waited(store: StepSums, sums: Float) -> Float:
    """Return the time in ms that each rank waited beyond the exchange (R,)."""
    end = store.end
    chained = store.chained[:end] / np.maximum(store.steps[:end], 1)
    waits = (sums - store.busy[:, :end]) * chained
    split = store.d[:, :end, SYNC_WAIT].any(axis=0)
    exposed = store.exposed[:end]
    exchange = exposed[:, SYNC_WAIT] + np.where(split, 0, exposed[:, BACKWARD])
    there = store.count[:, :end] > 0
    waited: Float = np.maximum(waits.sum(axis=1) - (there * exchange).sum(axis=1), 0)
    return waited


def _aside(history: StepHistory) -> tuple[Float, Float]:
    """Return time in ms and number of the steps that are excluded from statistics, besides the first (R,)."""
    ms, steps = np.zeros(len(history.ranks)), np.zeros(len(history.ranks))
    for row, rank in enumerate(history.ranks):
        aside = history.table.aside.get(rank)
        if aside is not None:
            ms[row] = sum(entry.ns for entry in aside.entries) / 1e6
            steps[row] = sum(entry.steps for entry in aside.entries)
    return ms, steps


def _aside_columns(history: StepHistory) -> Int64:
    """Return the excluded steps as columns, and the first steps with a time of 0."""
    table = history.table
    lead = (table.lead[table.lead >= 0] >> SEGMENT_BITS).tolist()
    entries = [entry for aside in table.aside.values() for entry in aside.entries]
    rows = [(step, step, 0) for step in sorted(set(lead))[:1]]
    rows += [(entry.first, entry.last, min(max(0, entry.ns), _MOST_NS)) for entry in entries]
    return np.array(rows, np.int64).reshape(-1, 3)


def _grouped(columns: Int64) -> Int64:
    """Return columns in order of their steps: the newest one by one, older ones added up."""
    columns = columns[np.lexsort((columns[:, 0], columns[:, 1]))]
    if not len(columns):
        return columns
    newest = int(columns[-1, 1])
    level = np.floor(np.log2(np.maximum((newest - columns[:, 1]) / RECENT, 0) + 1)).astype(np.int64)
    block = (newest - columns[:, 1]) >> level
    starts = np.flatnonzero((np.diff(level, prepend=-1) != 0) | (np.diff(block, prepend=-1) != 0))
    first = np.minimum.reduceat(columns[:, 0], starts)
    last = np.maximum.reduceat(columns[:, 1], starts)
    took = np.add.reduceat(columns[:, 2].astype(float), starts)  # as integers they could overflow
    return np.stack([first, last, np.minimum(took, _MOST_NS).astype(np.int64)], axis=1)


def _ns(ms: Float) -> Int64:
    return np.rint(np.clip(ms, 0, 2.0**42) * 1e6).astype(np.int64)


def _whole(values: Float) -> Int64:
    return np.rint(values).astype(np.int64)
