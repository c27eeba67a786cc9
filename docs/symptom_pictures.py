"""
Draw the pictures of docs/symptoms: python docs/symptom_pictures.py OUT [NAME…]

Each is the head of the report of a played session with a planted fault. No browser is needed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from lived import Lived  # noqa: E402
from picture import draw_head, draw_part  # noqa: E402
from played import QUIET, Played  # noqa: E402
from sessions import MS  # noqa: E402

from traceml_ray.agent.batch_size import packed  # noqa: E402
from traceml_ray.signals.nodes.records import NodeSample  # noqa: E402
from traceml_ray.stages import DATA, FORWARD, N_STAGES, POST_SYNC, SYNC_WAIT  # noqa: E402
from traceml_ray.wire import messages as wire  # noqa: E402

SCALE = 8.0
"""A step of 160 ms, six of which fit into a second."""
RATE = 6


class Job(Played):
    """Ranks that do `work` (ms, ranks × steps × stages), and wait for whichever is last."""

    def work(self, n: int) -> np.ndarray:
        return np.array(QUIET) * SCALE + self._rng.uniform(0, 3, (self.world, n, N_STAGES))

    def rows(self, n: int) -> np.ndarray:
        local = self.work(n)
        if self.late is not None:
            local[self.late, np.arange(self.step, self.step + n) >= self.onset, self.stage] += self._late_ms
        busy = local[:, :, :SYNC_WAIT].sum(axis=2)
        local[:, :, SYNC_WAIT] = busy.max(axis=0) - busy + QUIET[SYNC_WAIT] * SCALE
        return (local * MS).astype("<i8")

    def _sample(self, node: int) -> NodeSample:
        sample = super()._sample(node)
        gpus = [msgspec.structs.replace(gpu, throttle=[]) for gpu in sample.gpus or ()]
        return msgspec.structs.replace(sample, gpus=gpus)


class TakesTurns(Job):
    """Batches have very different lengths, so that in each step another rank has the longest one."""

    def work(self, n: int) -> np.ndarray:
        local = super().work(n)
        self._tokens = self._rng.lognormal(8, 0.5, (self.world, n)).astype(np.int64)
        local[:, :, FORWARD] *= self._tokens / 3_000
        return local

    def of_rank(self, rank: int) -> dict[str, Any]:
        sizes = enumerate(self._tokens[rank].tolist())
        return {"sizes": packed([(self.step + number, 4, tokens) for number, tokens in sizes])}


class AllSlow(Job):
    """From a step on, storage is slower for everybody."""

    def work(self, n: int) -> np.ndarray:
        local = super().work(n)
        local[:, np.arange(self.step, self.step + n) >= 600, DATA] += 40
        return local


class Saves(Job):
    """Rank 0 saves a checkpoint every 20 steps."""

    def work(self, n: int) -> np.ndarray:
        local = super().work(n)
        local[0, np.arange(self.step, self.step + n) % 20 == 0, POST_SYNC] += 1_500
        return local


def play(job: Played, seconds: int) -> Played:
    for _ in range(seconds):
        job.play(RATE)
    return job


def slow_step(folder: Path) -> None:
    play(Saves(folder, late=None), 90).end()


def one_rank_late(folder: Path) -> None:
    play(Job(folder, late=5, late_ms=100, onset=60), 90).end()


def ranks_take_turns(folder: Path) -> None:
    play(TakesTurns(folder, late=None), 90).end()


def all_slow(folder: Path) -> None:
    play(AllSlow(folder, late=None), 180).end()


def memory_creeps(folder: Path) -> None:
    job = Job(folder, late=None)
    job.leaks = {3: 64 << 20}
    play(job, 240).end()


def out_of_memory(folder: Path) -> None:
    job = Job(folder, late=None)
    job.leaks = {3: 256 << 20}
    play(job, 120)
    job.dies(3, 1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    job.end(1)


def hang(folder: Path) -> None:
    job = play(Job(folder, late=None), 60)
    for second in range(1, 41):
        waiting = wire.OpenStage(job.step, SYNC_WAIT, second * 1_000 * MS)
        reading = wire.OpenStage(job.step, DATA, second * 1_000 * MS)
        job.play(0, **({"open": reading} if second == 1 else {"open": waiting, "silent": (6,)}))
    job.end(1)


def rank_died(folder: Path) -> None:
    job = play(Job(folder, late=None), 60)
    job.dies(6, -11)
    job.end(1)


def restarts(folder: Path) -> None:
    job = play(Job(folder, late=None), 60)
    job.dies(6, -9)
    job.begin(attempt=1)
    play(job, 60).end()


def where_the_hours_went(folder: Path) -> None:
    job = Lived(folder, 8, late_ms=60.0)
    every = tuple(range(8))
    job.start()
    job.step_on(280)
    job.interval("checkpoint_save", 22, every, step=280)
    job.step_on(200)
    job.interval("evaluation", 40, every)
    job.step_on(60)
    job.killed()
    job.again(1, 280, gap_s=75)
    job.interval("checkpoint_restore", 6, every)
    job.step_on(300)
    job.interval("checkpoint_save", 22, every, step=580)
    job.step_on(60)
    job.ended = True
    job.play(0)
    job.end()


SCENES: dict[str, Callable[[Path], None]] = {
    "slow-step": slow_step,
    "one-rank-late": one_rank_late,
    "ranks-take-turns": ranks_take_turns,
    "all-slow": all_slow,
    "memory-creeps": memory_creeps,
    "out-of-memory": out_of_memory,
    "hang": hang,
    "rank-died": rank_died,
    "restarts": restarts,
    "where-the-hours-went": where_the_hours_went,
}


PARTS = {"where-the-hours-went": ("Where the time went", "Nodes")}
"""Begin and end of the part of the report that is shown, if it is not the head."""


def draw(out: Path, names: list[str]) -> None:
    """Write one SVG for each scene."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names or SCENES:
        with tempfile.TemporaryDirectory() as folder:
            session = Path(folder) / "gpt-pretrain"
            SCENES[name](session)
            print(f"== {name}\n{(session / 'report.txt').read_text()}")
            if name in PARTS:
                draw_part(session / "report.txt", out / f"{name}.svg", *PARTS[name])
            else:
                draw_head(session / "report.txt", out / f"{name}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), sys.argv[2:])
