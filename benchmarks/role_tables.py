"""
Verdicts on simulated pipelines with replicas: `python benchmarks/role_tables.py [JOBS] [SEED]`.

Random jobs of the simulator in `tests/simulated_pipeline.py`: 2 to 4 stages, even or uneven, of 2 to 4
replicas, each without a fault and with 15 and 30 % of the step in one stage of one rank. The cost of a fault
is the time of the run with it compared with the same run without it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from figures import publish
from simulated_pipeline import Pipeline, Slow, elapsed_ms, windows

from traceml_ray.analysis.verdict import DEFAULTS, judge_window
from traceml_ray.stages import BACKWARD, DATA, FORWARD, POST_SYNC, STAGES

SEEDS = 4
COSTLY, FREE = 0.08, 0.02


def random_job(rng: np.random.Generator) -> Pipeline:
    """Return a random pipeline."""
    depth, even = int(rng.choice([2, 2, 3, 4])), rng.random() < 0.5
    work = np.full(depth, rng.uniform(0.5, 5)) if even else rng.uniform(0.5, 5, depth)
    return Pipeline(
        tuple(work.tolist()),
        replicas=int(rng.choice([2, 2, 3, 4])),
        micro=int(rng.choice([2, 4, 8])),
        schedule=str(rng.choice(["GPipe", "1F1B"])),
        data_ms=float(rng.uniform(0, 3)),
        post_ms=float(rng.uniform(0.2, 3)),
        exchange_ms=float(rng.uniform(0.2, 10)),
        noise=float(rng.choice([0.02, 0.05, 0.15])),
        exchange_first=bool(rng.random() < 0.5),
    )


def judge(jobs: int, seed: int) -> None:
    """Print the table."""
    rng, counts = np.random.default_rng(seed), Counter[tuple[str, str]]()
    for number in range(jobs):
        job = random_job(rng)
        calm = windows(job, None, SEEDS, seed=number)
        for window in calm:
            verdict = judge_window(window, DEFAULTS).verdict
            counts["no fault", verdict.label if verdict.rank is None else "a rank is named"] += 1
        for stage in (FORWARD, BACKWARD, DATA, POST_SYNC):
            for size in (0.15, 0.30):
                slow = Slow(int(rng.integers(job.ranks)), stage, size * job.step_ms)
                late = windows(job, slow, SEEDS, seed=number)
                for window, usual in zip(late, calm, strict=True):
                    cost = 1 - elapsed_ms(usual) / elapsed_ms(window)
                    kind = "costs 8 %" if cost >= COSTLY else "costs < 2 %" if cost < FREE else "between"
                    verdict = judge_window(window, DEFAULTS).verdict
                    right = verdict.ranks == (slow.rank,) and STAGES[stage] in verdict.stages
                    named = "right rank and stage" if right else "WRONG"
                    counts[kind, verdict.label if verdict.rank is None else named] += 1
    rows = [(*key, f"{count:,}") for key, count in sorted(counts.items())]
    publish("roles", ("fault", "verdict", "windows"), rows)
    for (kind, what), count in sorted(counts.items()):
        print(f"{kind:12} {what:22} {count:6,}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", type=int, nargs="?", default=110, help="number of random jobs (default: 110)")
    parser.add_argument("seed", type=int, nargs="?", default=11, help="seed of the random jobs (default: 11)")
    args = parser.parse_args()
    judge(args.jobs, args.seed)
