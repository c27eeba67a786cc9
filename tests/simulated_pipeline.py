"""
Simulated rows of ranks that train a pipeline with data-parallel replicas of each stage.

Each rank runs its micro-batches in the order of its schedule, waits for what it receives, and exchanges
gradients with its replicas at the end of its last backward. All of this is max-plus algebra, computed for
many windows of one job at once, with arrays of shape (seeds,) in ms.
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
    """
    A pipeline. `work[s]` is the time of a forward of stage s for one micro-batch, in ms. A backward takes
    twice that.
    """

    work: tuple[float, ...] = (2.0, 2.0)
    replicas: int = 2
    micro: int = 4
    schedule: str = "GPipe"
    data_ms: float = 1.0
    post_ms: float = 2.0
    exchange_ms: float = 3.0
    send_ms: float = 0.1
    least_ms: float = 0.01
    """Time of a wait that does not have to wait for anything, in ms."""
    noise: float = 0.05
    exchange_first: bool = False
    """
    Whether the last gradient is sent only after gradients were exchanged, as with DDP in torch's
    pipelines.
    """
    unmarked: bool = False
    """Whether waits of ranks for other stages are not marked. Then they are included in what comes next."""

    @property
    def ranks(self) -> int:
        return len(self.work) * self.replicas

    def step_ms_of(self, stage: int) -> float:
        """Return how long a rank of `stage` works in a step, with its exchange, in ms."""
        return self.data_ms + self.post_ms + self.exchange_ms + 3 * self.work[stage] * self.micro

    def ranks_of(self, stage: int) -> range:
        return range(stage * self.replicas, (stage + 1) * self.replicas)

    @property
    def step_ms(self) -> float:
        """Return the approximate length of a step, in ms."""
        slots = self.micro + len(self.work) - 1
        return self.data_ms + self.post_ms + self.exchange_ms + 3 * max(self.work) * slots

    def order(self, stage: int) -> list[Op]:
        """Return the operations of a stage in a step, in order."""
        ahead = self.micro if self.schedule == "GPipe" else min(self.micro, len(self.work) - stage)
        ops: list[Op] = [(FORWARD, m) for m in range(ahead)]
        for m in range(self.micro):
            ops += [(BACKWARD, m)] + [(FORWARD, m + ahead)] * (m + ahead < self.micro)
        return ops


@dataclass(frozen=True)
class Slow:
    """A rank (stage × replicas + replica) that takes `ms` longer in one stage of the row, in each step."""

    rank: int
    stage: int
    ms: float


def windows(job: Pipeline, slow: Slow | None, seeds: int, steps: int = 50, seed: int = 0) -> list[Window]:
    """Return windows of a job. Every fault sees the same draws, except for what it changes itself."""
    rng = np.random.default_rng(seed)
    now = np.zeros((job.ranks, seeds))
    rows = []
    for _ in range(WARM + steps):
        noise = np.maximum(0.2, 1 + job.noise * rng.standard_normal((job.ranks, 2 + 2 * job.micro, seeds)))
        step = _Step(job, slow, now, noise)
        step.run()
        rows.append(step.taken)
    d = np.rint(np.array(rows[WARM:]) * 1e6).astype(np.int64)  # (steps, ranks, 2, 6, seeds)
    return [_window(job, d[..., seed]) for seed in range(seeds)]


class _Step:
    """
    A step of all ranks, in ms: `now` (ranks, seeds) is the current time, `taken` (ranks, 2, 6, seeds) the
    times.
    """

    def __init__(self, job: Pipeline, slow: Slow | None, now: np.ndarray, noise: np.ndarray) -> None:
        self.job, self.slow, self.now, self.noise = job, slow, now, noise
        self.taken = np.zeros((job.ranks, 2, N_STAGES, now.shape[1]))
        self.left = [job.order(rank // job.replicas) for rank in range(job.ranks)]
        self.done: dict[tuple[int, int, int], np.ndarray] = {}
        """Time at which a result is sent, by rank, FORWARD or BACKWARD, and micro-batch."""

    def run(self) -> None:
        for rank in range(self.job.ranks):
            self.work(rank, POST_SYNC, self.job.post_ms * self.noise[rank, 0])
            self.work(rank, DATA, self.job.data_ms * self.noise[rank, 1])
        over: set[int] = set()
        while len(over) < len(self.job.work):
            for rank in range(self.job.ranks):
                while self.left[rank] and self.turn(rank, *self.left[rank][0]):
                    del self.left[rank][0]
            for stage in range(len(self.job.work)):
                if stage not in over and not any(map(self.left.__getitem__, self.job.ranks_of(stage))):
                    self.exchange([*self.job.ranks_of(stage)])
                    over.add(stage)

    def work(self, rank: int, stage: int, ms: np.ndarray) -> None:
        if self.slow is not None and (self.slow.rank, self.slow.stage) == (rank, stage):
            ms = ms + self.slow.ms / (self.job.micro if stage in (FORWARD, BACKWARD) else 1)
        self.taken[rank, 0, stage] += ms
        self.now[rank] += ms

    def turn(self, rank: int, kind: int, micro: int) -> bool:
        """Run the next operation on a rank. Return False if its input has not been sent yet."""
        job, stage = self.job, rank // self.job.replicas
        source = rank + job.replicas * (1 if kind == BACKWARD else -1)
        if 0 <= source < job.ranks:
            if (source, kind, micro) not in self.done:
                return False
            wait = np.maximum(job.least_ms, self.done[source, kind, micro] + job.send_ms - self.now[rank])
            self.taken[rank, 0, kind if job.unmarked else SYNC_WAIT] += wait
            self.now[rank] += wait
        times = self.noise[rank, 2 + micro + job.micro * (kind == BACKWARD)]
        self.work(rank, kind, job.work[stage] * (1 + (kind == BACKWARD)) * times)
        if not (job.exchange_first and (kind, micro) == (BACKWARD, job.micro - 1)):
            self.done[rank, kind, micro] = self.now[rank].copy()
        return True

    def exchange(self, ranks: list[int]) -> None:
        leave = self.now[ranks].max(axis=0) + self.job.exchange_ms
        self.taken[ranks, 1, SYNC_WAIT] = leave - self.now[ranks]
        self.now[ranks] = leave
        for rank in ranks:
            self.done.setdefault((rank, BACKWARD, self.job.micro - 1), leave)


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
