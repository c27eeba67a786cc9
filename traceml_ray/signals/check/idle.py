"""
Multiplies matrices on a core that a job leaves idle: `python -m traceml_ray.signals.check.idle`.

It is started with the lowest priority that the kernel has (SCHED_IDLE). Time counts only while it runs, so
what a job takes does not make it slower. It reads one `IdlePlan` from stdin, and writes one line for each
trial.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from traceml_ray.signals.check.wanted import core_times
from traceml_ray.wire.codec import ready

PROBE = "idle_matmul"
WORK_S = 0.04
"""CPU time of a trial, in s."""
MOST_OTHERS = 0.5
"""See `IdleTrial.others`. The judge does not use trials of which others had more."""
_SIDE = 384
_FLOPS = 2.0 * _SIDE**3
_LATE = 0.4
"""Part of the time between two trials after which a trial that found no idle core is given up."""


class IdlePlan(msgspec.Struct, frozen=True):
    """When the trials are."""

    begin_ns: int
    """When the first one begins (ns since the epoch, clock of this machine)."""
    period_s: float
    trials: int
    cores: list[int]
    """The cores to use: those of the ranks."""


class IdleTrial(msgspec.Struct, frozen=True):
    """Result of one trial."""

    flops: float
    """FLOP per second of CPU time."""
    others: float
    """
    Share of the trial in which others had the cores, at most MOST_OTHERS. Time in which this process waited
    is not counted, so the trial counts while a job is busy, too. But others slow caches and clocks down: the
    judge names no difference that is smaller than this share.
    """


def main() -> None:
    """Make the trials."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=ready(IdlePlan))
    os.sched_setaffinity(0, plan.cores)
    import numpy as np

    left, right, result = (np.full((_SIDE, _SIDE), 0.5, np.float32) for _ in range(3))
    np.matmul(left, right, out=result)
    for number in range(plan.trials):
        due_ns = plan.begin_ns + int((number + 0.5) * plan.period_s * 1e9)
        left_s = (due_ns - time.time_ns()) / 1e9
        if left_s < -_LATE * plan.period_s:
            continue
        time.sleep(max(0.0, left_s))
        before, began, used, done = core_times(plan.cores), time.monotonic(), time.thread_time(), 0
        while time.thread_time() - used < WORK_S and time.monotonic() - began < _LATE * plan.period_s:
            np.matmul(left, right, out=result)
            done += 1
        spent, took = time.thread_time() - used, time.monotonic() - began
        if spent < WORK_S / 2:
            continue
        others = max(1 - spent / took, 0.0)
        after = core_times(plan.cores)
        if before is not None and after is not None:
            others = max(others, (after.busy - before.busy - spent) / (took * len(plan.cores)))
        trial = IdleTrial(done * _FLOPS / spent, min(MOST_OTHERS, others))
        sys.stdout.buffer.write(msgspec.json.encode(trial) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
