"""Jobs and faults for the simulated device, and how the verdicts on them are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from simulated_device import Fault, Job, windows

from traceml_ray.analysis.evidence import chain
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import DEFAULTS, Verdict, judge_window
from traceml_ray.analysis.window import Window
from traceml_ray.stages import BACKWARD, DATA, FORWARD, POST_SYNC, PREPARE, STAGES

NOISY = Job(
    host=(1, 1, 0.5, 3, 4), device=(4, 0, 0.5, 10, 20), buckets=4, launch_ms=0.005,
    device_noise=0.05, host_noise=0.10,
)  # fmt: skip
HOST_BOUND = replace(NOISY, host=(5, 2, 1, 12, 20), device=(2, 0, 0.5, 6, 12))
EQUAL = replace(NOISY, host=(4, 1, 1, 12, 18))


def waiting(job: Job, *places: str) -> Job:
    """Return the job with a host that waits for its device at these places."""
    return replace(job, waits=frozenset(places))


DEVICE_BOUND_JOBS = {
    "8 steps ahead": NOISY.holding(8),
    "1 step ahead": NOISY.holding(1),
    "loss.item()": waiting(NOISY, "loss"),
    ".item() at the end": waiting(NOISY, "end"),
    "blocking copy": waiting(NOISY, "copy"),
    "slow exchange": replace(NOISY, exchange_ms=20.0).holding(8),
}
HOST_BOUND_JOBS = {
    "host-bound": HOST_BOUND.holding(8),
    "host-bound, loss.item()": waiting(HOST_BOUND, "loss"),
}
OTHER_DEVICE_BOUND_JOBS = {
    "GradScaler": waiting(NOISY, "scaler"),
    "accumulation": replace(NOISY, micro=4, host=(1, 4, 2, 12, 16), device=(4, 0, 2, 40, 80)).holding(4),
}
SEVERAL_SYNCS = replace(NOISY, micro=2, syncs=2, host=(1, 2, 1, 6, 8), device=(4, 0, 1, 20, 40))
HOST_BOUND_SYNCS = replace(HOST_BOUND, micro=2, syncs=2, host=(5, 4, 2, 24, 40), device=(2, 0, 1, 12, 24))
COUPLED_DEVICE_BOUND_JOBS = {
    "FSDP": replace(NOISY, layers=6, exchange_ms=12.0).holding(4),
    "FSDP, slow exchange": replace(NOISY, layers=6, exchange_ms=36.0).holding(4),
    "FSDP, loss.item()": waiting(replace(NOISY, layers=6, exchange_ms=12.0), "loss"),
    "FSDP, every second step": replace(NOISY, layers=6, exchange_ms=12.0, sampled=2).holding(4),
    "two synced backwards": SEVERAL_SYNCS.holding(4),
    "two synced backwards, loss.item()": waiting(SEVERAL_SYNCS, "loss"),
}
COUPLED_HOST_BOUND_JOBS = {
    "host-bound, FSDP": replace(HOST_BOUND, layers=6, exchange_ms=6.0).holding(4),
    "host-bound, two synced backwards": HOST_BOUND_SYNCS.holding(4),
    "host-bound, two synced backwards, loss.item()": waiting(HOST_BOUND_SYNCS, "loss"),
}
LARGE = {"kernels": (5, 0, 1, 40, 80), "slots": 5}
"""A step of many kernels. The launch queue holds a twenty-fifth of them, so the host is never far ahead."""
LARGE_DEVICE_BOUND_JOBS = {
    "large step": replace(NOISY, **LARGE),
    "large step, slow exchange": replace(NOISY, exchange_ms=20.0, **LARGE),
    "large step, loss.item()": waiting(replace(NOISY, **LARGE), "loss"),
    "large step, GradScaler": waiting(replace(NOISY, **LARGE), "scaler"),
    "large step, accumulation": replace(
        NOISY, micro=4, host=(1, 4, 2, 12, 16), device=(4, 0, 2, 40, 80), kernels=(5, 0, 1, 10, 20), slots=5
    ),
}
LARGE_HOST_BOUND_JOBS = {
    "host-bound, large step": replace(HOST_BOUND, **LARGE),
    "host-bound, large step, loss.item()": waiting(replace(HOST_BOUND, **LARGE), "loss"),
    "equal speeds, large step": replace(EQUAL, **LARGE),
}
OTHER_HOST_BOUND_JOBS = {
    "host-bound, GradScaler": waiting(HOST_BOUND, "scaler"),
    "host-bound, blocking copy": waiting(HOST_BOUND, "copy"),
    "host-bound, .item() at the end": waiting(HOST_BOUND, "end"),
    "equal speeds": EQUAL.holding(8),
    "equal speeds, loss.item()": waiting(EQUAL, "loss"),
}
SINGLE = [
    ("host", (DATA,)), ("host", (PREPARE,)), ("host", (FORWARD,)), ("host", (BACKWARD,)),
    ("host", (POST_SYNC,)),
    ("device", (FORWARD,)), ("device", (BACKWARD,)), ("device", (POST_SYNC,)),
]  # fmt: skip
SLOWER = 1.3


def single_faults(job: Job, rank: int, sizes: Sequence[float] = (0.15, 0.30)) -> list[Fault]:
    """Return each fault of a single stage, with these sizes as shares of the step."""
    step = max(sum(job.host), sum(job.device) + job.exchange_ms)
    return [Fault(rank, where, stages, ms=size * step) for where, stages in SINGLE for size in sizes]


def several_faults(rank: int) -> list[Fault]:
    """Return faults of several stages: a throttled device, and a larger batch."""
    return [
        Fault(rank, "device", (POST_SYNC, PREPARE, FORWARD, BACKWARD), times=SLOWER),
        Fault(rank, "device", (PREPARE, FORWARD, BACKWARD), times=SLOWER),
    ]


def random_job(rng: np.random.Generator) -> tuple[Job, float]:
    """Return a random job, and how long its hosts take compared with its devices."""
    device = 10 ** rng.uniform(0.8, 2.3) * rng.dirichlet((3, 1, 8, 16)) * np.array([1, 0.3, 1, 1])
    shares = rng.dirichlet((3, 1, 1, 8, 10))
    exchange = float(rng.uniform(0.02, 0.4) * device.sum())
    ratio = float(rng.uniform(0.4, 1.3))
    host = ratio * device.sum() * shares
    places = ("loss", "end", "scaler", "copy")
    job = Job(
        host=tuple(host),
        device=(device[0], 0.0, *device[1:]),
        kernels=(int(rng.integers(1, 6)), 0, 1, int(rng.integers(3, 16)), int(rng.integers(5, 24))),
        exchange_ms=exchange,
        buckets=int(rng.choice([1, 2, 4])),
        ranks=int(rng.choice([2, 3, 4, 6, 8, 12, 16, 24, 32])),
        events_too=bool(rng.random() < 0.5),
        waits=frozenset(place for place in places if rng.random() < 0.25),
        micro=int(rng.choice([1, 1, 1, 2, 4])),
        contention=float(rng.uniform(0, 0.25)),
        device_noise=float(rng.uniform(0.01, 0.1)),
        host_noise=float(rng.uniform(0.02, 0.15)),
        tails=float(rng.choice([0, 0.002, 0.01])),
        spread=float(rng.uniform(0, 0.01)),
        memory=float(rng.choice([0, 0, 0.5, 0.8])),
        launch_ms=float(rng.uniform(0.003, 0.008)),
    )
    return job.holding(float(rng.uniform(0.5, 10))), ratio


def other_job(rng: np.random.Generator) -> tuple[Job, float]:
    """Return a random job of another kind: finer kernels, heavier tails, longer and shorter queues."""
    device = float(rng.uniform(20, 400)) * rng.dirichlet((2, 0.5, 5, 9))
    ratio = float(np.exp(rng.uniform(np.log(0.2), np.log(1.6))))
    host = ratio * device.sum() * rng.dirichlet((2, 2, 1, 5, 7))
    place = str(rng.choice(["", "", "loss", "end", "scaler", "copy"]))
    job = Job(
        host=tuple(host),
        device=(device[0], 0.0, *device[1:]),
        kernels=(int(rng.integers(4, 10)), 0, 2, *rng.integers((10, 20), (30, 50)).tolist()),
        exchange_ms=float(rng.uniform(0.01, 0.6) * device.sum()),
        buckets=int(rng.choice([1, 3, 8])),
        ranks=int(rng.choice([2, 5, 8, 16, 48])),
        events_too=bool(rng.random() < 0.7),
        waits=frozenset([place] if place else []),
        micro=int(rng.choice([1, 1, 3, 8])),
        contention=float(rng.uniform(0.05, 0.15)),
        device_noise=float(np.exp(rng.uniform(np.log(0.003), np.log(0.1)))),
        host_noise=float(np.exp(rng.uniform(np.log(0.01), np.log(0.15)))),
        tails=float(rng.choice([0, 0.005])),
        tail_times=8.0,
        spread=float(rng.uniform(0, 0.015)),
        memory=float(rng.choice([0, 0.3, 0.6])),
        launch_ms=float(rng.uniform(0.003, 0.008)),
    )
    return job.holding(float(np.exp(rng.uniform(np.log(0.2), np.log(20))))), ratio


def coupled_job(rng: np.random.Generator) -> tuple[Job, float]:
    """
    Return a random job whose ranks exchange several times a step: FSDP, or several synchronised
    backwards.
    """
    job, ratio = random_job(rng)
    layers, syncs = int(rng.integers(2, 9)), int(rng.integers(2, 4))
    sampled = int(rng.choice([1, 1, 2]))
    if rng.random() < 0.5:
        return replace(job, micro=1, layers=layers, sampled=sampled), ratio
    return replace(job, micro=syncs, syncs=syncs), ratio


@dataclass
class SummedSteps:
    """Counts of verdicts: on windows with a fault, by its cost; on windows without a fault, by label."""

    windows: int = 0
    costs: int = 0
    """Number of faults that cost `COSTLY` or more."""
    rank: int = 0
    stage: int = 0
    """Of the faults in `costs`: number with the right rank and the right stage."""
    abstains: int = 0
    healthy: int = 0
    wrong: int = 0
    """Number of faults, of any cost, for which another rank was named."""
    free: int = 0
    """Number of faults that cost less than `FREE`."""
    free_named: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    stalls: Counter[str] = field(default_factory=Counter)
    """
    Labels of windows without a fault whose stalls (`tails`) cost `COSTLY` or more. `labels` has the other
    windows.
    """
    notes: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict, fault: Fault | None, cost: float, note: str = "") -> None:
        self.windows += 1
        named = verdict.rank is not None
        labels = self.stalls if fault is None and cost >= COSTLY else self.labels
        labels[verdict.label] += 1
        if fault is None:
            if verdict.meaning.kind == "finding":
                self.notes.append(f"{note}, stalls cost {cost:.0%}: {_line(verdict)}")
            return
        right = verdict.rank == fault.rank and verdict.ranks == (fault.rank,)
        if named and not right:
            self.wrong += 1
            self.notes.append(f"{note} {fault} costs {cost:.0%}: WRONG {_line(verdict)}")
        if cost >= COSTLY:
            self.costs += 1
            self.rank += right
            self.stage += right and (STAGES[fault.stages[0]] in verdict.stages or len(fault.stages) > 1)
            self.abstains += verdict.meaning.kind == "abstention"
            self.healthy += not named and verdict.meaning.kind != "abstention"
            if not right or (len(fault.stages) == 1 and verdict.stage != STAGES[fault.stages[0]]):
                self.notes.append(f"{note} {fault} costs {cost:.0%}: {_line(verdict)}")
        elif cost < FREE:
            self.free += 1
            self.free_named += verdict.label == "straggler"


COSTLY, FREE = 0.08, 0.02


def _line(verdict: Verdict) -> str:
    return f"{verdict.label} {verdict.stages} {verdict.ranks} {verdict.gain_pct} {verdict.confidence}"


def total_ns(window: Window) -> int:
    """Return the elapsed time of a window."""
    return chain(window.d).total_ns


def play(
    totals: SummedSteps,
    job: Job,
    faults: Sequence[Fault | None],
    seeds: int,
    seed: int,
    note: str = "",
    thresholds: Thresholds = DEFAULTS,
    *,
    plain: bool = False,
    steps: int = 50,
) -> None:
    """Judge windows of `faults` of `steps` steps, `seeds` of each. `plain`: without the hosts' part."""
    alone = list(faults) == [None]
    of_each = windows(job, faults if alone else [*faults, None], seeds, steps, seed)
    calm = of_each[-1]
    if alone and job.tails:
        [calm] = windows(replace(job, tails=0.0), [None], seeds, steps, seed)
    for fault, played in zip(faults, of_each, strict=False):
        for window, usual in zip(played, calm, strict=True):
            judged = replace(window, host=None, leads=None) if plain else window
            cost = 1 - total_ns(usual) / total_ns(window)
            totals.add(judge_window(judged, thresholds).verdict, fault, cost, note)
