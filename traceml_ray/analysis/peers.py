"""The rank that stands for the others: whom a suspect is compared with."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from traceml_ray.analysis.window import Window
from traceml_ray.stages import STAGES, SYNC_WAIT


def median_rank(window: Window, but: Collection[int], stage: str | None) -> int | None:
    """
    Return the rank not in `but` whose time in `stage` (None: in all stages but waiting) is the median over
    `window`; of an even number, the lower one. None if there is none.
    """
    others = np.flatnonzero(~np.isin(window.ranks, list(but)))
    if not len(others) or not len(window.keys):
        return None
    stages = [STAGES.index(stage)] if stage is not None else [n for n in range(len(STAGES)) if n != SYNC_WAIT]
    spent = window.d[:, others][:, :, stages].sum(axis=(0, 2))
    middle = others[np.argsort(spent, kind="stable")[(len(others) - 1) // 2]]
    return int(window.ranks[middle])
