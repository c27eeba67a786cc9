"""The chained frontier: which stage the elapsed time went to, summed exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traceml_ray.analysis.window import Bool, Int64


@dataclass(frozen=True)
class Frontier:
    """
    The slowest path through a window, in int64 ns.

    `exposed` (K, 6) is how far each stage of each step moved the frontier, `slack` (K, R, 6) how
    far each rank's own clock is behind the frontier's end, `leaders` (K, R, 6) where that
    is 0. `total_ns` is the elapsed time of the window, exactly the sum of `exposed`.
    """

    exposed: Int64
    leaders: Bool
    slack: Int64
    total_ns: int


def chain(d: Int64, behind: Int64 | None = None) -> Frontier:
    """
    Return the frontier over the columns of `d`, int64 ns (K, R, 6), with K ≥ 1 and R ≥ 1.

    C[r, j] = Σ_{i≤j} d[r, i], F[j] = max_r C[r, j], exposed[j] = F[j] − F[j−1]. The columns of all
    steps form one chain, because ranks leave a sync at slightly different moments: starting
    each step from zero would overstate the elapsed time.

    `behind` (R,) is the slack in which an earlier piece of the same run ended
    (`slack[-1, :, -1]`); with it, pieces reduced one by one give what the whole would give.

    Accounting: StageFrontier, arXiv 2606.06751; the chaining is ours.
    """
    steps, ranks, stages = d.shape
    clock = np.cumsum(d.transpose(1, 0, 2).reshape(ranks, steps * stages), axis=1)
    if behind is not None:
        clock -= behind[:, None]
    front = clock.max(axis=0)
    np.subtract(front, clock, out=clock)
    slack = clock.reshape(ranks, steps, stages).transpose(1, 0, 2)
    exposed = np.diff(front, prepend=0).reshape(steps, stages)
    return Frontier(exposed=exposed, leaders=slack == 0, slack=slack, total_ns=int(front[-1]))
