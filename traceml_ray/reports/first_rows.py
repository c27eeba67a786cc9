"""The rows of the first steps of a run, which are in no statistic, from the session file."""

from __future__ import annotations

import numpy as np

from traceml_ray.analysis.first_steps import LEAST_SHARE, FirstSteps, first_steps
from traceml_ray.analysis.window import Int64
from traceml_ray.reports.run_facts import RunFacts
from traceml_ray.reports.whole import Whole
from traceml_ray.stages import FLAG_NO_SPLIT, N_STAGES, SEGMENT_BITS
from traceml_ray.store.session_file import columns_of

_MAX_RANKS = 1024
"""Of larger jobs the first steps are not read."""


def first_steps_of(facts: RunFacts, whole: Whole | None) -> FirstSteps | None:
    """
    Return what the first steps of a run that is over cost; None where that is little, or they are not there
    any more. Raises `SessionFileError`.
    """
    if (
        facts.fact("status") in ("running", None)
        or whole is None
        or whole.stats is None
        or not 0 < len(facts.ranks) <= _MAX_RANKS
    ):
        return None
    lines = [line for line in whole.lines.values() if len(line.first)]
    run_ns = float(np.mean([line.took.sum() for line in lines])) if lines else 0.0
    usual_ns, warmup = 1e6 * float(whole.stats.exposed.sum()), facts.thresholds.warmup_steps
    before = [line.took[line.first < whole.first_step + warmup].sum() for line in lines]
    if not usual_ns or max(before, default=0) < LEAST_SHARE * run_ns:
        return None
    processes = {process.id: rank for rank, process in sorted(facts.ranks.items()) if process.stored}
    d, flags = [], []
    for step in range(whole.first_step, whole.first_step + warmup):
        found = _step(facts, processes, step)
        if found is None:
            break
        d.append(found[0])
        flags.append(found[1])
        if found[0][:, 1:].sum(axis=1).max() < 2 * usual_ns:
            break
    if not d:
        return None
    split = (np.array(flags) & FLAG_NO_SPLIT == 0).all(axis=0)
    return first_steps(np.array(d), split, np.array([*processes.values()]), usual_ns, run_ns)


def _step(facts: RunFacts, processes: dict[int, int], step: int) -> tuple[Int64, Int64] | None:
    """Return a step of all ranks, ns (R, 6), and their flags (R,); None where some rank lacks it."""
    chunks = facts.session.step_chunks(processes.keys(), step)
    d, flags = [], []
    for process in processes:
        if process not in chunks:
            return None
        keys, marks, rows = columns_of(chunks[process])
        own = keys >> SEGMENT_BITS == step
        if not own.any():
            return None
        d.append(rows[own, :N_STAGES].sum(axis=0))
        flags.append(int(np.bitwise_or.reduce(marks[own])))
    return np.array(d), np.array(flags)
