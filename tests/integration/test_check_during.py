"""
The process that checks a machine while a job computes: three ranks, each on a machine of its own, one with a
smaller CPU quota, or one that sleeps.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from check_rigs import first_cpu, put, slow_cpu, why_no_cgroups

from traceml_ray.signals.check.during import TRIALS, TrainingCheckPlan
from traceml_ray.signals.check.judge import CheckResult
from traceml_ray.signals.check.judge_during import judged_during
from traceml_ray.signals.check.records import DURING, Checked
from traceml_ray.wire.codec import ready

HOSTS = 3
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_cgroups()), reason=why_no_cgroups()),
]

RANK = """
import sys, time
time.sleep(float(sys.argv[1]))
while True:
    end = time.thread_time() + 0.06
    while time.thread_time() < end:
        pass
    time.sleep(float(sys.argv[2]))
"""


def check_of(number: int, pid: int, begin_ns: int, boot_id: Path) -> subprocess.Popen[bytes]:
    """Start the check of a machine with one rank."""
    boot_id.write_text(f"machine-{number}")
    inside = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec nice -n 19 "$@"'
    command = sys.executable, "-m", "traceml_ray.signals.check.during"
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", inside, str(boot_id), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    )
    assert process.stdin is not None
    plan = TrainingCheckPlan(begin_ns, 1, {number: pid}, node=f"host-{number}", period_s=1.0)
    process.stdin.write(msgspec.json.encode(plan))
    process.stdin.close()
    return process


def checked_ranks(folder: Path, slow: float | None, asleep: int | None) -> CheckResult:
    """Check three ranks, each on a machine of its own. They share cores here: they compute in turn."""
    ranks = []
    for number in range(HOSTS):
        times = 0.07 * number, 0.14 + 0.1 * (number == asleep)
        ranks.append(subprocess.Popen([sys.executable, "-c", RANK, *map(str, times)]))
    try:
        with first_cpu() as first, contextlib.ExitStack() as stack:
            put(first, [rank.pid for rank in ranks])
            if slow is not None:
                put(stack.enter_context(slow_cpu(slow)), [ranks[1].pid])
            begin_ns = time.time_ns() + 3_000_000_000
            checks = [
                check_of(number, rank.pid, begin_ns, folder / f"boot-{number}")
                for number, rank in enumerate(ranks)
            ]
            outputs = [check.stdout.read() for check in checks if check.stdout is not None]
            assert [check.wait(10) for check in checks] == [0] * HOSTS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return judged_during([msgspec.json.decode(one, type=ready(Checked)) for one in outputs], "host-1")


def test_rank_with_a_smaller_cpu_quota_is_named_with_the_quota(tmp_path: Path) -> None:
    result = checked_ranks(tmp_path, 0.1, None)
    assert [(slow.nodes, slow.part, slow.probe) for slow in result.slow] == [
        (["host-1"], "CPU", "ready_time")
    ], result
    assert "The CPU quota of its container allows 0.2 of 2 cores." in result.slow[0].why


def test_rank_that_sleeps_is_on_a_machine_like_others(tmp_path: Path) -> None:
    result = checked_ranks(tmp_path, None, 1)
    assert result.slow == []


def test_process_of_the_check_measures_and_ends() -> None:
    plan = TrainingCheckPlan(time.time_ns() + 2_000_000_000, 0, {0: os.getpid()}, period_s=0.2)
    command = [sys.executable, "-m", "traceml_ray.signals.check.during"]
    done = subprocess.run(
        command, input=msgspec.json.encode(plan), capture_output=True, timeout=60, check=True
    )
    checked = msgspec.json.decode(done.stdout, type=ready(Checked))
    assert (checked.kind, checked.about, checked.t_ns) == (DURING, 0, plan.begin_ns)
    assert {measure.probe for measure in checked.measures} >= {"ready_time", "unstolen", "idle_matmul"}
    assert all(len(measure.values) <= TRIALS for measure in checked.measures)
