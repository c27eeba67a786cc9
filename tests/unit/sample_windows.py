"""Windows for the tests of the analysis: from a few rows in ms, and the recorded ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.busy import busy_ns, frontiers
from traceml_ray.analysis.evidence import comparable
from traceml_ray.analysis.history import Replay, RunJudge
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import with_saving
from traceml_ray.analysis.verdict import DEFAULTS, Verdict, judge_window
from traceml_ray.analysis.window import RankRows, Window
from traceml_ray.stages import FLAG_EXCLUDED, N_STAGES, SEGMENT_BITS

_DATA = Path(__file__).parent.parent / "data" / "windows"
RECORDED = dict(np.load(_DATA / "recorded.npz"))
EXPECTED = json.loads((_DATA / "expected.json").read_text())["expected"]


def processes(
    d: np.ndarray, first_step: int = 0, flags: int | np.ndarray = 0, exchanges: int = 1
) -> list[RankRows]:
    """Rows int64 ns (K, R, 6) as one rank process per rank, two ranks a node; each step has so many rows."""
    rows, ranks, _ = d.shape
    marks = np.broadcast_to(np.asarray(flags, dtype=np.uint8), (rows, ranks))
    numbers = np.arange(rows, dtype=np.int64)
    keys = first_step + numbers // exchanges << SEGMENT_BITS | numbers % exchanges
    return [RankRows(r, f"node-{r // 2}", keys, marks[:, r].copy(), d[:, r]) for r in range(ranks)]


def window(d: np.ndarray, first_step: int = 0, flags: int | np.ndarray = 0, exchanges: int = 1) -> Window:
    return align(processes(d, first_step, flags, exchanges), d.shape[1])


def align(ranks: Sequence[RankRows], expected: int, missing: Sequence[int] = ()) -> Window:
    """
    Return the keys that all ranks but the `missing` have, as `RowTable.window` does: without first rows, and
    of a repeated key the first row. It shares no code with that.
    """
    live = sorted(
        (rank_rows for rank_rows in ranks if rank_rows.rank not in missing),
        key=lambda rank_rows: rank_rows.rank,
    )
    counting = [rank_rows.select(rank_rows.flags & FLAG_EXCLUDED == 0) for rank_rows in live]
    distinct = [rank_rows.select(np.unique(rank_rows.keys, return_index=True)[1]) for rank_rows in counting]
    none = np.empty(0, np.int64)
    keys = functools.reduce(np.intersect1d, [rank_rows.keys for rank_rows in distinct]) if distinct else none
    seen = np.unique(np.concatenate([none, *(rank_rows.keys for rank_rows in distinct)]))
    aside = np.concatenate(
        [none, *(rank_rows.keys[rank_rows.flags & FLAG_EXCLUDED != 0] for rank_rows in live)]
    )
    common = [rank_rows.select(np.isin(rank_rows.keys, keys)) for rank_rows in distinct]
    inside = seen[(seen >= keys[0]) & (seen <= keys[-1])] if len(keys) else seen
    d = np.array([rank_rows.rows for rank_rows in common], np.int64).reshape(len(live), len(keys), N_STAGES)
    return Window(
        keys=keys,
        ranks=np.array([rank_rows.rank for rank_rows in live], np.int64),
        nodes=tuple(rank_rows.node for rank_rows in live),
        d=d.transpose(1, 0, 2),
        flags=np.array([rank_rows.flags for rank_rows in common], np.uint8).reshape(len(live), len(keys)).T,
        expected=expected,
        missing=tuple(sorted(missing)),
        lacking=np.setdiff1d(inside, [*keys, *aside]),
        groups=tuple(rank_rows.group for rank_rows in live),
        strategies=frozenset(rank_rows.strategy for rank_rows in live if rank_rows.strategy),
        roles=tuple(rank_rows.role for rank_rows in live),
    )


def of_ms(rows: Sequence[Sequence[float]], steps: int = 1) -> np.ndarray:
    """The same rows, one per rank in ms, for a number of steps: int64 ns (K, R, 6)."""
    return np.tile(np.rint(np.array(rows) * 1e6).astype(np.int64), (steps, 1, 1))


def synced(local: np.ndarray, exchange: np.ndarray) -> np.ndarray:
    """Local stages (K, R, 5) and an exchange (K,) as rows of ranks that leave each sync together."""
    busy = local.sum(axis=2)
    wait = busy.max(axis=1, keepdims=True) - busy + exchange[:, None]
    return np.concatenate([local, wait[..., None]], axis=2)


class Exact(NamedTuple):
    """Statistics of all steps of a window, from all of its rows at once; ms."""

    steps: int
    rows: int
    median: float
    p95: float
    busy: np.ndarray
    busy_p95: float
    stages: np.ndarray
    exposed: np.ndarray


def exact(window: Window) -> Exact:
    """What a step history has to say of the steps of `window`, which has no absurd rows."""
    rows = comparable(window)
    busy = window.by_step(busy_ns(rows)) / 1e6
    slowest = max(frontiers(window, rows), key=lambda piece: piece.total_ns)
    exposed = window.by_step(slowest.exposed) / 1e6
    return Exact(
        len(exposed),
        len(window.keys),
        *np.percentile(exposed.sum(axis=1), [50, 95]),
        np.median(busy, axis=0),
        float(np.percentile(busy, 95)),
        np.median(window.by_step(rows.d), axis=0) / 1e6,
        exposed.mean(axis=0),
    )


def held_bytes(thing: object) -> int:
    """How many bytes the arrays take that an object holds, and all that it holds."""
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    held = thing if isinstance(thing, (list, tuple)) else getattr(thing, "__dict__", {}).values()
    return sum(held_bytes(item) for item in held)


def judge(
    rows: Window,
    thresholds: Thresholds = DEFAULTS,
    *,
    whole_run: bool = False,
    baseline: Baseline | None = None,
) -> Verdict:
    """Return the verdict over one window, with what fixing it saves."""
    return with_saving(judge_window(rows, thresholds, whole_run=whole_run, baseline=baseline).verdict)


def judge_run(
    ranks: Sequence[RankRows],
    expected: int,
    missing: Sequence[int] = (),
    thresholds: Thresholds = DEFAULTS,
    baseline: Baseline | None = None,
) -> RunJudge:
    """Judge a run of these rows as it is judged from a file."""
    rows = align(ranks, expected, missing)
    replay = Replay(len(rows.starts), thresholds, baseline)
    replay.add(rows)
    return replay.done()
