"""
Verdicts on simulated jobs on devices: `python benchmarks/device_tables.py [--held-out|--time]`.

Prints tables in Markdown for RESULTS.md, from the simulator in `tests/simulated_device.py`: windows of 50
steps with a fault on one rank and without a fault, for device-bound and host-bound jobs. The cost of a fault
is the time of the run with it compared with the same run without it. `--held-out` plays random jobs instead,
of seeds and kinds that were not used to choose any limit. `--notes` lists every wrong verdict.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from figures import machine, publish
from simulated_device import Job, windows
from simulated_jobs import (
    COSTLY,
    COUPLED_DEVICE_BOUND_JOBS,
    COUPLED_HOST_BOUND_JOBS,
    DEVICE_BOUND_JOBS,
    FREE,
    HOST_BOUND_JOBS,
    LARGE_DEVICE_BOUND_JOBS,
    LARGE_HOST_BOUND_JOBS,
    OTHER_DEVICE_BOUND_JOBS,
    OTHER_HOST_BOUND_JOBS,
    SummedSteps,
    coupled_job,
    other_job,
    play,
    random_job,
    several_faults,
    single_faults,
)

from traceml_ray.analysis.verdict import DEFAULTS, judge_window
from traceml_ray.analysis.window import Window

KINDS = {
    "device-bound": DEVICE_BOUND_JOBS | OTHER_DEVICE_BOUND_JOBS,
    "host-bound": HOST_BOUND_JOBS | OTHER_HOST_BOUND_JOBS,
    "coupled, device-bound": COUPLED_DEVICE_BOUND_JOBS,
    "coupled, host-bound": COUPLED_HOST_BOUND_JOBS,
    "large steps, device-bound": LARGE_DEVICE_BOUND_JOBS,
    "large steps, host-bound": LARGE_HOST_BOUND_JOBS,
}
RANKS = (2, 4, 8, 64)
NOISE = ((0.02, 0.05), (0.05, 0.10), (0.10, 0.10), (0.10, 0.20))
LOUD = ((0.15, 0.20),)
HOST_BOUND_FROM = 0.95
"""A job is host-bound if its hosts take more than this share of the time of its devices."""
DEVELOPED_ON = (30_000, 41_000, 90_000, 210_000, 250_000, 310_000)
"""Seeds of random jobs with which rules were chosen. The second is for `coupled` jobs."""
HELD_OUT_SEED = 510_000
FAULTS = (
    f"| windows | faults | cost ≥ {COSTLY:.0%} | rank right | and stage | abstains | healthy | wrong rank | "
    f"cost < {FREE:.0%} | of these `straggler` |\n|---|---|---|---|---|---|---|---|---|---|"
)
HEALTHY = (
    "| windows without a fault | | healthy | abstains | `imbalance` | ranks named "
    f"| stalls cost ≥ {COSTLY:.0%} | healthy | abstains | `imbalance` | ranks named |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def of_faults(name: str, totals: SummedSteps) -> str:
    """Return a row of a table of faults."""
    cells = (
        totals.windows, totals.costs, totals.rank, totals.stage, totals.abstains, totals.healthy,
        totals.wrong, totals.free, totals.free_named,
    )  # fmt: skip
    return f"| {name} | " + " | ".join(f"{cell:,}" for cell in cells) + " |"


def of_healthy(name: str, totals: SummedSteps) -> str:
    """
    Return a row of a table of windows without a fault. Windows slowed by stalls alone are counted
    separately.
    """
    cells = []
    for labels in (totals.labels, totals.stalls):
        kinds = [labels[kind] for kind in ("healthy", "accounting_only", "imbalance")]
        cells += [labels.total(), *kinds, labels.total() - sum(kinds)]
    return f"| {name} | " + " | ".join(f"{cell:,}" for cell in cells) + " |"


def tables(seeds: int) -> Iterable[tuple[str, SummedSteps | None]]:
    """Yield the rows of the tables of fixed jobs."""
    yield FAULTS, None
    for kind, jobs in KINDS.items():
        for which, several in (("one stage", False), ("several", True)):
            totals = SummedSteps()
            for number, (name, job) in enumerate(jobs.items()):
                for ranks in RANKS:
                    here = replace(job, ranks=ranks)
                    faults = several_faults(ranks - 1) if several else single_faults(here, ranks - 1)
                    play(totals, here, faults, seeds, 100 * number + ranks, f"{name}, {ranks} ranks")
            yield of_faults(f"{kind}, {which}", totals), totals
    yield "\n" + HEALTHY, None
    for kind, jobs in KINDS.items():
        for which, noises, plain in (
            ("devices' rows alone", NOISE, True),
            ("", NOISE, False),
            ("noise 15 / 20 %", LOUD, False),
        ):
            totals = SummedSteps()
            for number, (name, job) in enumerate(jobs.items()):
                for ranks in RANKS:
                    for device, host in noises:
                        for tails in (0.0, 0.002):
                            here = replace(
                                job, ranks=ranks, device_noise=device, host_noise=host, tails=tails
                            )
                            note = f"{name}, {ranks} ranks, {device}/{host}"
                            play(totals, here, [None], 2 * seeds, 10 * number + ranks, note, plain=plain)
            yield of_healthy(", ".join(filter(None, (kind, which))), totals), totals


def held_out(jobs: int, seed: int, steps: int) -> Iterable[tuple[str, SummedSteps | None]]:
    """Yield the rows of the tables of random jobs: of the kind used to choose limits, and of another kind."""
    tallies: dict[str, tuple[SummedSteps, SummedSteps, SummedSteps]] = {}
    for source, make in (("random", random_job), ("other random", other_job), ("coupled", coupled_job)):
        rng = np.random.default_rng(seed + len(source))
        for number in range(jobs):
            job, ratio = make(rng)
            kind = "host-bound" if ratio > HOST_BOUND_FROM else "device-bound"
            one, several, without = tallies.setdefault(
                f"{source}, {kind}", (SummedSteps(), SummedSteps(), SummedSteps())
            )
            rank, note = int(rng.integers(job.ranks)), _described(number, job, ratio)
            play(one, job, single_faults(job, rank), 1, seed + number, note, steps=steps)
            play(several, job, several_faults(rank), 1, seed + number, note, steps=steps)
            play(without, job, [None], 6, seed + jobs + number, note, steps=steps)
    yield FAULTS, None
    for name, (one, several, _) in sorted(tallies.items()):
        yield of_faults(f"{name}, one stage", one), one
        yield of_faults(f"{name}, several", several), several
    yield "\n" + HEALTHY, None
    for name, (_, _, without) in sorted(tallies.items()):
        yield of_healthy(name, without), without


def times(ranks: int) -> Iterable[str]:
    """Yield the CPU seconds for judging a window of `ranks` ranks, with and without the hosts' part."""
    yield f"| 50 steps × {ranks:,} ranks | without hosts | with |\n|---|---|---|"
    for name, job in {**DEVICE_BOUND_JOBS, **HOST_BOUND_JOBS}.items():
        [[window]] = windows(replace(job, ranks=64), [None])
        many = replace(window, groups=(None,) * 64)._of([*range(64)] * (ranks // 64), ranks, [])
        wide = replace(many, ranks=np.arange(ranks))
        plain = replace(wide, host=None, leads=None)
        yield f"| {name} | " + " | ".join(f"{_seconds(timed):.3f} s" for timed in (plain, wide)) + " |"


def _seconds(window: Window, times: int = 9) -> float:
    """Return the median CPU time of a judgement, in s."""
    seconds = []
    for _ in range(times):
        began = time.process_time()
        judge_window(window, DEFAULTS)
        seconds.append(time.process_time() - began)
    return float(np.median(seconds))


def _described(number: int, job: Job, ratio: float) -> str:
    waits = "+".join(sorted(job.waits)) or "no waits"
    several = f"{job.layers} layers" if job.layers else f"{job.micro} micro-batches, {job.syncs} synced"
    return f"#{number} host/device {ratio:.2f}, {job.ranks} ranks, {waits}, {several}"


def published(lines: Iterable[tuple[str, SummedSteps]]) -> list[tuple[str, str, str, str]]:
    """
    Return the rows of RESULTS.md: the printed rows, added up by whether a job is device-bound or
    host-bound.
    """
    counts: dict[tuple[str, str], list[int]] = {}
    columns = FAULTS.partition("\n")[0].count("|")
    for line, totals in lines:
        pace = "host-bound" if "host-bound" in line else "device-bound"
        if line.count("|") == columns:
            others = totals.abstains + totals.healthy
            new = [totals.rank, totals.costs, others, totals.wrong]
            key = pace, "fault"
        elif "alone" in line or "noise" in line:  # rows of another method or another noise
            continue
        else:
            unnamed = sum(totals.labels[kind] for kind in ("healthy", "accounting_only", "imbalance"))
            new = [0, 0, unnamed, totals.labels.total() - unnamed]
            key = pace, "without a fault"
        counts[key] = [a + b for a, b in zip(counts.get(key, [0] * 4), new, strict=True)]
    return [
        (f"{pace}, {what}", f"{rank:,} of {costs:,}" if costs else "", f"{others:,}", f"{wrong:,}")
        for (pace, what), (rank, costs, others, wrong) in counts.items()
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--held-out", action="store_true", help="judge random jobs that no limit was chosen by"
    )
    parser.add_argument(
        "--time", action="store_true", help="only measure the time to judge a window of 8,192 ranks"
    )
    parser.add_argument("--jobs", type=int, default=150, help="random jobs of each kind (default: 150)")
    parser.add_argument("--seeds", type=int, default=4, help="windows of each fault and job (default: 4)")
    parser.add_argument(
        "--steps", type=int, default=50, help="steps of a window of random jobs (default: 50)"
    )
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED, help="seed of the random jobs")
    parser.add_argument("--notes", action="store_true", help="list every wrong verdict")
    args = parser.parse_args()
    print(f"{machine()}\n")
    began = time.monotonic()
    if args.time:
        print("\n".join(times(8192)))
        return
    lines = held_out(args.jobs, args.seed, args.steps) if args.held_out else tables(args.seeds)
    rows = []
    for line, totals in lines:
        print(line, flush=True)
        if totals is not None:
            rows.append((line, totals))
        if args.notes and totals is not None:
            print("\n".join(f"    {note}" for note in totals.notes))
    head = ("simulated windows", f"cost ≥ {COSTLY:.0%}: right by rank", "no rank named", "wrong rank")
    publish("device_held_out" if args.held_out else "device", head, published(rows))
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
