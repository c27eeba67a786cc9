"""
Do two recorders agree? Steps of real gloo DDP runs, recorded by torch's profiler and by the monitor at once.

    python benchmarks/traces.py [--world 3] [--severities 15 30 60] [--stages …] [--specials …] [--seed 0]
                                [--no-example] [--keep DIR]

The faults are those of `faults.py`: one rank late in each stage by each severity, two ranks late in one stage
and in two, a late rank that changes, all ranks slower, none; then the healthy example model. It takes 6
minutes for each severity; the options choose parts.

For each fault, some steps are captured on all ranks. The traces alone are reduced to the six stages
(`traces.traced_rows`) and compared with the rows of the same steps: by which share of a step a stage differs,
and which rank the verdict's rules name from each of both. The check follows StageFrontier (arXiv 2606.06751):
both must name the same rank and stage, and shares of stages must agree within 5 % of the step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from faults import LIMITS, SPECIALS, Plan, launch, markdown, said, say  # type: ignore[import-not-found]
from faults import planned as plan_of
from figures import publish
from overhead import machine  # type: ignore[import-not-found]

from traceml_ray.analysis.verdict import judge_window
from traceml_ray.analysis.window import Window
from traceml_ray.launchers.control import profile
from traceml_ray.stages import SEGMENT_BITS, STAGES
from traceml_ray.store.profiles import StoredProfile
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session import DATABASE
from traceml_ray.store.session_file import SessionFile
from traceml_ray.traces.sources import sources_of_profile
from traceml_ray.traces.trace import read_trace
from traceml_ray.traces.traced_rows import traced_rows
from traceml_ray.wire import messages as wire

STEPS, STEP_MS, NOISE = 26, 50.0, 0.05
FIRST, FAULT, QUIET = 150, 180, 60
STAGES_LATE = ["post_sync", "data", "prepare", "forward", "backward"]
INTO = 20
"""Number of steps of a fault before the capture is requested."""
EXAMPLE = str(Path(__file__).parents[1] / "examples" / "train_gpt.py")
MOST_APART = 0.05


class Compared(NamedTuple):
    """What two recorders say about the same steps of all ranks."""

    what: str
    steps: int
    step_ms: float
    worst: float
    """Largest difference of any stage of a rank, as a share of the mean step."""
    stage: str
    """The stage with the largest difference."""
    rows: str
    """What the verdict's rules name from the rows."""
    trace: str
    """What the verdict's rules name from the traces."""


def planned(args: argparse.Namespace) -> Plan:
    """Return a plan with everything requested, one fault after the other."""
    fixed = {"every_rank": False, "opening": FIRST, "steps": FAULT, "balanced": QUIET, "device": False}
    options = {**fixed, "step_ms": [STEP_MS], "noise": NOISE, "work": "sleep", **vars(args)}
    plan: Plan = plan_of(args.world, args.seed, argparse.Namespace(**options))
    return plan


def last_step(folder: Path) -> int:
    """Return the newest stored step; -1 if there is none."""
    if not (folder / DATABASE).exists():
        return -1
    with contextlib.suppress(SessionFileError), SessionFile(folder / DATABASE) as file:  # it is being made
        newest = [int(rows.keys[-1]) >> SEGMENT_BITS for rows in file.rows()[0] if len(rows.keys)]
        return max(newest, default=-1)
    return -1


def capture(folder: Path, from_step: int, running: Callable[[], bool]) -> StoredProfile:
    """Wait for a step of a running session, and capture the following steps. Raises RuntimeError."""
    while last_step(folder) < from_step:
        if not running():
            raise RuntimeError(f"{folder}: the run has ended before step {from_step}")
        time.sleep(0.1)
    result = profile(folder, wire.ProfileRequest(steps=STEPS))
    if len(result.profile.captured) < len(result.profile.ranks):
        raise RuntimeError(f"not all ranks were captured: {result.profile.ranks}")
    return result


def compare(what: str, stored: StoredProfile) -> Compared:
    """Return what both recorders say about the steps that both recorded completely on all ranks."""
    ranks = []
    for source in sources_of_profile(stored):
        rows = {step.step: step.stages_ns for step in source.steps if step.stages_ns is not None}
        traced = {row.step: row.stages_ns for row in traced_rows(read_trace(source.path), source.steps)}
        ranks.append((rows, traced))
    steps = sorted(set.intersection(*({*rows} & {*traced} for rows, traced in ranks)))
    of_rows, of_traces = (
        np.array([[rank[which][step] for rank in ranks] for step in steps], np.int64) for which in (0, 1)
    )
    step_ns = of_rows.sum(axis=2).mean()
    apart = np.abs((of_traces - of_rows).mean(axis=0)) / step_ns
    stage = STAGES[int(apart.max(axis=0).argmax())]
    named = [judged(steps, stages) for stages in (of_rows, of_traces)]
    return Compared(what, len(steps), step_ns / 1e6, float(apart.max()), stage, *named)


def judged(steps: Sequence[int], d: Any) -> str:
    """Return what the verdict's rules name from durations (steps, ranks, stages)."""
    world = d.shape[1]
    window = Window(
        keys=np.array(steps, np.int64) << SEGMENT_BITS,
        ranks=np.arange(world),
        nodes=("node-0",) * world,
        d=d,
        flags=np.zeros(d.shape[:2], np.uint8),
        expected=world,
    )
    result: str = said(msgspec.to_builtins(judge_window(window, LIMITS).verdict))
    return result


def faults(args: argparse.Namespace, root: Path) -> list[Compared]:
    """Capture each fault of one run."""
    plan, folder = planned(args), root / "faults"
    running = threading.Thread(target=launch, args=(plan, folder))
    running.start()
    sessions = []
    for segment in plan.segments:
        say(f"{plan.world} ranks: {segment}")
        stored = capture(folder / "session", segment.first + INTO, running.is_alive)
        if (stored.profile.first_step or 0) + STEPS > segment.end:
            raise RuntimeError(f"{segment} was over before it was captured: is the machine busy?")
        sessions.append((str(segment), stored))
    running.join()
    return [compare(what, stored) for what, stored in sessions]


def example(root: Path) -> Compared:
    """Capture the example model."""
    say("the example model")
    command = [sys.executable, "-m", "traceml_ray.launch", "--nproc-per-node", "2", "--out", str(root)]
    command += ["--session", "example", EXAMPLE, "--steps", "100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        (root / "log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as run,
    ):
        try:
            stored = capture(root / "example", 40, lambda: run.poll() is None)
        finally:
            run.terminate()
    return compare("the example model, 2 ranks, healthy", stored)


def main() -> None:
    """Run, compare, print. The exit code is 1 if the two recorders do not agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=3, help="number of ranks (default: 3)")
    parser.add_argument(
        "--severities",
        type=float,
        nargs="*",
        default=[15.0, 30.0, 60.0],
        help="severity of the faults, %% of the faulty step (default: 15 30 60)",
    )
    parser.add_argument(
        "--stages",
        nargs="*",
        choices=STAGES_LATE,
        default=STAGES_LATE,
        help="stages in which a rank is late (default: all)",
    )
    parser.add_argument(
        "--specials",
        nargs="*",
        choices=SPECIALS,
        default=SPECIALS,
        help="faults that are not one late rank in one stage (default: all)",
    )
    parser.add_argument("--no-example", action="store_true", help="leave out the example model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs (default: 0)")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="traces-") as made:
        root = (args.keep or Path(made)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        results = faults(args, root) if args.stages or args.specials else []
        results += [] if args.no_example else [example(root)]
    rows = [
        (one.what, one.steps, f"{one.step_ms:.1f} ms", f"{one.worst:.1%} ({one.stage})", one.rows, one.trace)
        for one in results
    ]
    print(machine())
    same = sum(one.rows == one.trace for one in results)
    apart = max((one.worst for one in results), default=0.0)
    publish(
        "traces",
        ("what", "measured", "budget"),
        [
            ("captures in which rows and traces name the same", f"{same} of {len(results)}", "all"),
            ("largest difference of a stage, of the step", f"{apart:.1%}", f"{MOST_APART:.0%}"),
        ],
    )
    print(markdown("planted | steps | step | furthest apart, of the step | from rows | from traces", rows))
    sys.exit(any(one.worst > MOST_APART or one.rows != one.trace for one in results))


if __name__ == "__main__":
    main()
