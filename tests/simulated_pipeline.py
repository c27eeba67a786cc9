"""
Rows of ranks that train a pipeline with data-parallel replicas of each stage, without processes.

Each rank runs its micro-batches in the order of its schedule, waits for what it receives, and exchanges
gradients with its replicas at the end of its last backward. All of this is max-plus, computed for many
windows of one job at once: arrays of shape (seeds,), ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traceml_ray.analysis.window import Window
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_NO_PEERS,
    FORWARD,
    N_STAGES,
    POST_SYNC,
    SEGMENT_BITS,
    SYNC_WAIT,
)

WARM = 5
Op = tuple[int, int]
"""FORWARD or BACKWARD, and the number of the micro-batch."""


@dataclass(frozen=True)
class Pipeline:
    """`work[s]` is what a forward of stage s takes for one micro-batch, ms; a backward takes twice that."""

    work: tuple[float, ...] = (2.0, 2.0)
    replicas: int = 2
    micro: int = 4
    schedule: str = "GPipe"
    data_ms: float = 1.0
    post_ms: float = 2.0
    exchange_ms: float = 3.0
    send_ms: float = 0.1
    least_ms: float = 0.01
    """What a wait takes where there is nothing to wait for."""
    noise: float = 0.05
    unmarked: bool = False
    """What ranks wait for other stages is not seen: it is in what comes next."""

    @property
    def ranks(self) -> int:
        return len(self.work) * self.replicas

    @property
    def step_ms(self) -> float:
        """About how long a step takes."""
        slots = self.micro + len(self.work) - 1
        return self.data_ms + self.post_ms + self.exchange_ms + 3 * max(self.work) * slots

    def order(self, stage: int) -> list[Op]:
        """Return what a stage runs in a step."""
        ahead = self.micro if self.schedule == "GPipe" else min(self.micro, len(self.work) - stage)
        ops: list[Op] = [(FORWARD, m) for m in range(ahead)]
        for m in range(self.micro):
            ops += [(BACKWARD, m)] + [(FORWARD, m + ahead)] * (m + ahead < self.micro)
        return ops


@dataclass(frozen=True)
class Slow:
    """A rank (stage × replicas + replica) that takes `ms` longer in a stage of the row, in each step."""

    rank: int
    stage: int
    ms: float


def windows(job: Pipeline, slow: Slow | None, seeds: int, steps: int = 50, seed: int = 0) -> list[Window]:
    """Return windows of a job, the same for every fault but for what that changes."""
    rng = np.random.default_rng(seed)
    now = np.zeros((job.ranks, seeds))
    rows = []
    for _ in range(WARM + steps):
        taken = np.zeros((job.ranks, 2, N_STAGES, seeds))
        noise = np.maximum(0.2, 1 + job.noise * rng.standard_normal((job.ranks, 2 + 2 * job.micro, seeds)))
        for replica in range(job.replicas):
            _step(job, slow, replica, now, taken, noise)
        for stage in range(len(job.work)):
            own = slice(stage * job.replicas, (stage + 1) * job.replicas)
            leave = now[own].max(axis=0) + job.exchange_ms
            taken[own, 1, SYNC_WAIT] = leave - now[own]
            now[own] = leave
        rows.append(taken)
    d = np.rint(np.array(rows[WARM:]) * 1e6).astype(np.int64)  # (steps, ranks, 2, 6, seeds)
    return [_window(job, d[..., at]) for at in range(seeds)]


def _step(
    job: Pipeline, slow: Slow | None, replica: int, now: np.ndarray, taken: np.ndarray, noise: np.ndarray
) -> None:
    """Run a step of one replica of the pipeline up to its exchanges."""
    depth, done = len(job.work), dict[tuple[int, int, int], np.ndarray]()
    left = {stage: job.order(stage) for stage in range(depth)}

    def work(stage: int, of: int, ms: np.ndarray) -> None:
        rank = stage * job.replicas + replica
        if slow is not None and (slow.rank, slow.stage) == (rank, of):
            ms = ms + slow.ms / (job.micro if of in (FORWARD, BACKWARD) else 1)
        taken[rank, 0, of] += ms
        now[rank] += ms

    for stage in range(depth):
        rank = stage * job.replicas + replica
        work(stage, POST_SYNC, job.post_ms * noise[rank, 0])
        work(stage, DATA, job.data_ms * noise[rank, 1])
    while any(left.values()):
        for stage in range(depth):
            rank = stage * job.replicas + replica
            while left[stage]:
                kind, micro = left[stage][0]
                source = stage - 1 if kind == FORWARD else stage + 1
                if 0 <= source < depth:
                    if (source, kind, micro) not in done:
                        break
                    wait = np.maximum(job.least_ms, done[source, kind, micro] + job.send_ms - now[rank])
                    taken[rank, 0, kind if job.unmarked else SYNC_WAIT] += wait
                    now[rank] += wait
                times = noise[rank, 2 + micro + job.micro * (kind == BACKWARD)]
                work(stage, kind, job.work[stage] * (1 + (kind == BACKWARD)) * times)
                done[stage, kind, micro] = now[rank].copy()
                del left[stage][0]


def _window(job: Pipeline, d: np.ndarray) -> Window:
    steps = np.arange(1, len(d) + 1, dtype=np.int64) << SEGMENT_BITS
    keys = np.stack([steps, steps + 1], axis=1).reshape(-1)
    flags = np.zeros((len(d), 2, job.ranks), np.uint8)
    flags[:, 0] = FLAG_NO_PEERS
    stages = [rank // job.replicas for rank in range(job.ranks)]
    return Window(
        keys=keys,
        ranks=np.arange(job.ranks),
        nodes=tuple(f"node-{rank % job.replicas}" for rank in range(job.ranks)),
        d=d.transpose(0, 2, 1, 3).reshape(-1, job.ranks, N_STAGES),
        flags=flags.reshape(-1, job.ranks),
        expected=job.ranks,
        groups=tuple((stage * job.replicas, job.replicas) for stage in stages),
        strategies=frozenset({"ddp+pp"}),
        roles=tuple(f"pp={stage}" for stage in stages),
    )


def elapsed_ms(window: Window) -> float:
    """Return how long a window took."""
    return float(window.d.sum(axis=(0, 2)).max()) / 1e6
