"""Jobs of four gloo ranks that a collective stops: rank, operation and line are named within 30 s."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session_file import SessionFile

SCRIPT = Path(__file__).with_name("collective_faults.py")
STEP = 20
LIMIT_S = 30.0
AT_ONCE = 5
"""Number of jobs at a time: after their start they only wait."""


class Fault(NamedTuple):
    """A fault of the script, and who has it."""

    name: str
    rank: int
    ops: tuple[str, ...]
    """Operations that the verdict names: the one that the rank calls, and that of the others."""
    lines: tuple[str, ...]
    """Marks of the lines that the verdict names."""
    dies: bool = False
    """Whether gloo may end the ranks: one that gets more bytes than it expects aborts."""


FAULTS = [
    Fault("missing", 2, ("all_reduce",), ("missing", "others")),
    Fault("other_op", 1, ("all_gather", "all_reduce"), ("other_op", "others")),
    Fault(
        "other_shape",
        2,
        ("all_reduce [8] Float", "all_reduce [4] Float"),
        ("other_shape", "others"),
        dies=True,
    ),
    Fault(
        "other_dtype",
        2,
        ("all_reduce [4] Long", "all_reduce [4] Float"),
        ("other_dtype", "others"),
        dies=True,
    ),
    Fault("other_order", 3, ("all_reduce",), ("order_first", "other_order")),
    Fault("early_exit", 3, ("all_reduce",), ("others",), dies=True),
    Fault("exception", 1, ("all_gather", "all_reduce"), ("exception", "others")),
    Fault("rank_0_barrier", 0, ("barrier", "all_reduce"), ("rank_0_barrier", "others")),
    Fault("sub_group", 3, (), ("sub_group",)),
    Fault("one_behind", 2, ("broadcast", "all_reduce"), ("one_behind", "others")),
    Fault("row", 3, ("broadcast", "all_reduce"), ("row", "row_others")),
    Fault("ring", 0, ("recv",), ("ring",)),
    Fault("receive", 1, ("recv", "all_reduce"), ("receive", "others")),
    Fault("other_root", 3, ("scatter",), ("other_root",)),
    Fault("thread", 1, ("all_reduce",), ("thread", "others")),
    Fault("objects", 1, ("all_gather", "all_reduce"), ("objects", "others")),
    Fault("monitored", 2, ("monitored_barrier",), ("missing", "monitored")),
    Fault("micro_batch", 1, ("all_reduce",), ("micro_batch", "others"), dies=True),
    Fault("layer", 2, (), ("layer", "sharded")),
]
BUSY = ("evaluates", "uploads")
"""Jobs in which rank 0 works for two minutes while the others wait."""


def place(mark: str) -> str:
    """Return the file and line with a mark as a verdict writes them."""
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1):
        if line.endswith(f"#! {mark}"):
            return f"({SCRIPT.name}:{number})"
    raise AssertionError(mark)


class Outcome(NamedTuple):
    """What was said of a job."""

    labels: set[str]
    """Labels of all verdicts on times without progress."""

    seconds: float | None
    """Time between the last progress and the first verdict on the hang, in s. None: it never hung."""
    verdict: dict[str, Any]
    """Verdict in the summary."""


def stops(folder: Path) -> list[dict[str, Any]]:
    """Return the verdicts on times without progress."""
    with contextlib.suppress(SessionFileError), SessionFile(folder / "s" / "session.sqlite") as session:
        return [one for one in session.verdicts()[0] if one["began_ns"]]
    return []


def run(folder: Path, fault: str, step: int, label: str = "hang", more_s: int = 4) -> Outcome:
    """Run a job until it has a verdict with `label`, and `more_s` seconds more, or until it ends."""
    folder.mkdir()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    flags = ("--nproc-per-node", "4", "--out", str(folder), "--session", "s")
    command = [sys.executable, "-m", "traceml_ray.launch", *flags, str(SCRIPT), fault, str(step)]
    with (folder / "stderr").open("w") as stderr:
        job = subprocess.Popen(command, env=environ, cwd=folder, stderr=stderr, stdout=subprocess.DEVNULL)
    try:
        end, seconds = time.monotonic() + 150, None
        while job.poll() is None and seconds is None and time.monotonic() < end:
            time.sleep(0.2)
            if (stop := next((one for one in stops(folder) if one["label"] == label), None)) is not None:
                seconds = (time.time_ns() - stop["began_ns"]) / 1e9
        if job.poll() is None:
            time.sleep(more_s)  # the stacks arrive
            job.terminate()
        job.wait(120)
    finally:
        job.kill()
        job.wait(60)
    labels = {one["label"] for one in stops(folder)}
    return Outcome(labels, seconds, json.loads((folder / "s" / "summary.json").read_text())["verdict"])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What was said of each job: all run in one pool, because most of their time they wait."""
    folder = tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = {job: pool.submit(run, folder / job, job, STEP, "stalled", 20) for job in BUSY}
        jobs |= {fault.name: pool.submit(run, folder / fault.name, fault.name, STEP) for fault in FAULTS}
        jobs["before"] = pool.submit(run, folder / "before", "other_op", 0)
        return {name: job.result() for name, job in jobs.items()}


@pytest.mark.long
@pytest.mark.alone
def test_rank_operation_and_line_are_named_in_each_job(outcomes: dict[str, Outcome]) -> None:
    wrong = []
    for fault in FAULTS:
        _, seconds, verdict = outcomes[fault.name]
        why = verdict["why"]
        known = [f"`{op}`" in why or f" {op} " in why or f" {op};" in why for op in fault.ops]
        known += [place(mark) in why for mark in fault.lines]
        known += [verdict["ranks"] == [fault.rank] or f"rank {fault.rank} " in why.lower()]
        died = verdict["label"] == "rank_lost"
        known += [(died and fault.dies) or verdict["label"] == "hang"]
        known += [died or (seconds is not None and seconds <= LIMIT_S)]
        print(fault.name, verdict["label"], verdict["ranks"], seconds and round(seconds, 1), why, sep=" | ")
        wrong += [] if all(known) else [(fault.name, known, seconds, verdict["label"], why)]
    assert not wrong


@pytest.mark.long
@pytest.mark.alone
def test_other_operation_before_the_first_step_is_named(outcomes: dict[str, Outcome]) -> None:
    _, seconds, verdict = outcomes["before"]
    assert (verdict["label"], verdict["ranks"], verdict["last_step"]) == ("hang", [1], None), verdict["why"]
    assert place("other_op") in verdict["why"] and seconds is not None and seconds <= LIMIT_S


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("job", BUSY)
def test_rank_that_works_with_pauses_or_waits_for_a_process_that_works_does_not_hang(
    job: str, outcomes: dict[str, Outcome]
) -> None:
    labels, _, verdict = outcomes[job]
    assert (labels, verdict["ranks"]) == ({"stalled"}, [0]), verdict["why"]


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_nothing_is_a_hang_in_half_an_hour_of_healthy_training_with_long_pauses(tmp_path: Path) -> None:
    script, minutes = SCRIPT.with_name("healthy_training.py"), os.environ.get("HEALTHY_MINUTES", "30")
    flags = ("--nproc-per-node", "4", "--out", str(tmp_path), "--session", "s")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "traceml_ray.launch", *flags, str(script), minutes]
    subprocess.run(command, env=environ, cwd=tmp_path, check=True, timeout=60 * float(minutes) + 900)
    with SessionFile(tmp_path / "s" / "session.sqlite") as session:
        verdicts = session.verdicts()[0]
    stalls = [one for one in verdicts if one["began_ns"]]
    assert {one["label"] for one in stalls} <= {"stalled"}, [one["why"] for one in stalls]
    assert {rank for one in stalls for rank in one["ranks"]} <= {0}
    summary = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert summary["collectives"]["mismatch"] is None
