"""
Checks a node while a job trains on it: `python -m traceml_ray.signals.check.during`.

Nothing is taken from the job. The kernel counts how long the ranks wait for a core, what a CPU quota
withholds and what a hypervisor takes away; NVML has the clocks of the GPUs and why they are not higher. Only
cores that the job leaves idle are measured, for half a second of CPU time in all (`idle`). GPUs are never
computed on.

The process reads one `TrainingCheckPlan` from stdin and writes one `Checked` to stdout. The kernel ends it
when it has used MOST_CPU_S of CPU time, or MOST_S after its last trial.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from traceml_ray.errors import error_text
from traceml_ray.signals.check import idle
from traceml_ray.signals.check.cores import cpu_name
from traceml_ray.signals.check.probes import boot_id
from traceml_ray.signals.check.records import DURING, Checked, Measure
from traceml_ray.signals.check.state import StateWatch
from traceml_ray.signals.check.wanted import CpuDemand, RankThreads, between
from traceml_ray.wire.codec import ready

TRIALS, PERIOD_S = 10, 2.0
MOST_CPU_S = 2
IDLE_CPU_S = 1
MOST_S = 10.0
"""Time after the last trial in which the process must have ended, in s."""
_LATE = 0.2
"""Part of the time between two readings that one may be late; later ones are of no trial."""
_CHILDREN_EVERY = 5
_USED_PCT = 5.0
"""Utilization of a GPU from which on its clock is that of a GPU at work, in %."""
_ROOT = Path("/")


class TrainingCheckPlan(msgspec.Struct, frozen=True):
    """What to do on one node."""

    begin_ns: int
    """When the first trial begins (ns since the epoch, clock of this node): on all nodes at the same time."""
    about: int
    """Rank of the straggler."""
    pids: dict[int, int]
    """Process of each rank of this node."""
    node: str = ""
    number: int = 0
    """See `Checked.number`."""
    trials: int = TRIALS
    period_s: float = PERIOD_S


class _Idle:
    """The process that measures idle cores."""

    def __init__(self, plan: TrainingCheckPlan, cores: list[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "traceml_ray.signals.check.idle"],
            cwd="/",  # the user's folder may hold files named like modules
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=_to_background,  # this process has only one thread
        )
        assert self._process.stdin is not None
        given = idle.IdlePlan(plan.begin_ns, plan.period_s, plan.trials, cores)
        with contextlib.suppress(OSError):  # it has ended, so it has no trials
            self._process.stdin.write(msgspec.json.encode(given))
            self._process.stdin.close()

    def trials(self) -> list[idle.IdleTrial]:
        """End the process, and return its trials."""
        self._process.kill()
        assert self._process.stdout is not None
        lines = self._process.stdout.read().split(b"\n")[:-1]  # the last one may be cut
        self._process.wait()
        return [msgspec.json.decode(line, type=ready(idle.IdleTrial)) for line in lines]


def _to_background() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_CPU, (IDLE_CPU_S, IDLE_CPU_S))


class TrainingCheck:
    """
    The check of one node.

    Args:
        plan: what to do.
        root: the folder that contains `proc` and `sys`.
    """

    def __init__(self, plan: TrainingCheckPlan, root: Path = _ROOT) -> None:
        self._plan, self._errors = plan, list[str]()
        self._threads = RankThreads(plan.pids, root)
        first = str(next(iter(plan.pids.values()), "self"))
        self._watch = StateWatch(root, self._threads.cores, process=first)
        self._gpus, self._root = self._watch.gpus(), root
        self._clocks = defaultdict[int, list[float]](list)
        self._trials = list[tuple[float, CpuDemand]]()

    def run(self) -> Checked:
        """Make the trials."""
        plan = self._plan
        idle_cores = self._start_idle()
        self._threads.look_for_children()
        self._sleep_until(0)
        self._watch.restart()
        before, began = self._threads.read(), time.monotonic()
        for number in range(1, plan.trials + 1):
            late_s = self._sleep_until(number)
            self._sample()
            if number % _CHILDREN_EVERY == 0:
                self._threads.look_for_children()
            after, now = self._threads.read(), time.monotonic()
            if late_s <= _LATE * plan.period_s and now - began <= (1 + 2 * _LATE) * plan.period_s:
                self._trials.append((now - began, between(before, after, now - began)))
            before, began = after, now
        idle_trials = [] if idle_cores is None else self._idle_trials(idle_cores)
        return self._checked(idle_trials)

    def _start_idle(self) -> _Idle | None:
        try:
            return _Idle(self._plan, self._threads.cores)
        except (OSError, subprocess.SubprocessError) as error:
            self._errors.append(f"Idle cores were not measured: {error_text(error)}."[:256])
            return None

    def _idle_trials(self, process: _Idle) -> list[idle.IdleTrial]:
        try:
            return process.trials()
        except (OSError, msgspec.MsgspecError) as error:
            self._errors.append(f"Idle cores were not measured: {error_text(error)}."[:256])
            return []

    def _sleep_until(self, number: int) -> float:
        """Sleep until a trial begins. Return how late it is, in s."""
        due_ns = self._plan.begin_ns + int(number * self._plan.period_s * 1e9)
        left_s = (due_ns - time.time_ns()) / 1e9
        time.sleep(max(0.0, left_s))
        return max(0.0, -left_s)

    def _sample(self) -> None:
        self._watch.sample_cpu()
        for index, name in self._gpus.items():
            sample = self._watch.sample_gpu(index, name)
            if sample is not None and sample.sm_mhz and (sample.util_pct or 0) >= _USED_PCT:
                self._clocks[index].append(sample.sm_mhz * 1e6)

    def _checked(self, idle_trials: list[idle.IdleTrial]) -> Checked:
        state, plan = self._watch.result(), self._plan
        seconds = sum(took for took, _ in self._trials)
        others_s = [one.others_s for _, one in self._trials if one.others_s is not None]
        others = sum(others_s) / seconds if others_s and len(others_s) == len(self._trials) else None
        return Checked(
            t_ns=plan.begin_ns,
            node=plan.node,
            host=boot_id(),
            state=msgspec.structs.replace(state, others_cores=others),
            measures=[*self._measures(idle_trials)],
            errors=self._errors,
            seconds=seconds or None,
            number=plan.number,
            kind=DURING,
            about=plan.about,
        )

    def _measures(self, idle_trials: list[idle.IdleTrial]) -> Iterator[Measure]:
        for rank in self._plan.pids:
            shares = [one.got[rank] for _, one in self._trials if rank in one.got]
            yield Measure("ready_time", f"rank {rank}", "share", shares, "ranks", rank=rank)
        unstolen = [one.unstolen for _, one in self._trials if one.unstolen is not None]
        yield Measure("unstolen", "CPU", "share", unstolen, "cores")
        yield Measure(
            idle.PROBE,
            "CPU",
            "FLOP/s",
            [trial.flops for trial in idle_trials],
            cpu_name(self._root)[:256] or "CPU",
            [trial.others for trial in idle_trials],
        )
        for index, name in self._gpus.items():
            yield Measure("gpu_clock", f"GPU {index}", "Hz", self._clocks[index], name[:256], device=index)


def main() -> None:
    """Make the check of stdin."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=ready(TrainingCheckPlan))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    left_s = (plan.begin_ns - time.time_ns()) / 1e9 + plan.trials * plan.period_s + MOST_S
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, left_s))  # also if nobody waits for it any more
    sys.stdout.buffer.write(msgspec.json.encode(TrainingCheck(plan).run()))


if __name__ == "__main__":
    main()
