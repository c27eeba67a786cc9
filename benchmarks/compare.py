"""
How often two equal runs are reported as different, and whether a planted regression is detected: `python
benchmarks/compare.py [--runs 7] [--steps 300] [--keep DIR]`.

The example trains on 2 ranks, `--runs` times, and each run is compared with each other run. Between them,
runs with `data` lengthened by 15 % of a step, on one rank and on both, are made and compared with each of the
equal runs. Nothing else should run meanwhile. Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import Figure, machine, publish_figures, table

from traceml_ray.reports.comparison import Comparison, compare, render_comparison

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
OTHERS = ("RAY_ADDRESS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
RANKS, PLANTED = 2, 0.15


def launch(out: Path, name: str, steps: int, slow_ms: float = 0.0, ranks: tuple[int, ...] = ()) -> str:
    """Train once, with `data` longer by `slow_ms` on `ranks`; return the session's name."""
    arguments = [*itertools.chain(*(("--slow", f"data:{rank}:{slow_ms:.3f}") for rank in ranks))]
    arguments += ["--steps", str(steps), "--workers", "0", "--eval-every", "1000000"]
    launcher = [
        "-m",
        "traceml_ray.launch",
        "--nproc-per-node",
        str(RANKS),
        "--session",
        name,
        "--out",
        str(out),
    ]
    environ = {name: value for name, value in os.environ.items() if name not in OTHERS}
    subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE), *arguments],
        env={**environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        timeout=300,
        check=True,
    )
    return name


def measure(out: Path, runs: int, steps: int) -> tuple[list[str], dict[str, float]]:
    """
    Make the sessions: equal ones, and ones with a planted delay. Return their names, with the
    planted ms.
    """
    launch(out, "first", steps)  # not counted: the machine was busy with something else just before
    equal = [launch(out, "equal-0", steps)]
    step_ms = step_of(compare(equal[0], equal[0], out=out))
    slow_ms, planted = PLANTED * step_ms, {}
    for number in range(1, runs):
        equal.append(launch(out, f"equal-{number}", steps))
        if number in (runs // 3, 2 * runs // 3):
            ranks = (1,) if number == runs // 3 else (0, 1)
            planted[launch(out, f"data-of-{'-'.join(map(str, ranks))}", steps, slow_ms, ranks)] = slow_ms
    return equal, planted


def step_of(comparison: Comparison) -> float:
    """Return the mean step of the first session, in ms."""
    return float(next(change.a or 0.0 for change in comparison.changes if change.what == "step"))


def report(out: Path, equal: list[str], planted: dict[str, float]) -> list[Figure]:
    """Compare all sessions; return a line for each kind of pair."""
    pairs = [compare(a, b, out=out) for a, b in itertools.combinations(equal, 2)]
    wrong = [comparison for comparison in pairs if comparison.word != "no difference"]
    for compared in wrong:
        print(render_comparison(compared))
    apart = sorted(abs(comparison.change_pct or 0.0) for comparison in pairs)
    half = sorted(((comparison.high_pct or 0.0) - (comparison.low_pct or 0.0)) / 2 for comparison in pairs)
    placed = sum(comparison.stage is not None for comparison in pairs)
    rows = sum(change.word in ("better", "worse") for comparison in pairs for change in comparison.changes)
    figures = [
        Figure("equal", "pairs in which a stage was named", f"{placed} of {len(pairs)}"),
        Figure(
            "equal",
            f"pairs of {len(equal)} runs called different",
            f"{len(wrong)} of {len(pairs)}",
            "≤ 1 of 20",
        ),
        Figure(
            "equal", "means apart, median and largest", f"{apart[len(apart) // 2]:.1f} and {apart[-1]:.1f} %"
        ),
        Figure(
            "equal",
            "half of an interval, median and largest",
            f"± {half[len(half) // 2]:.1f} and {half[-1]:.1f} %",
        ),
        Figure("equal", "single numbers called different", f"{rows} of {sum(len(f.changes) for f in pairs)}"),
    ]
    for name, slow_ms in planted.items():
        compared = [compare(session, name, out=out) for session in equal]
        print(render_comparison(compared[0]))
        asked = sorted(100 * slow_ms / step_of(comparison) for comparison in compared)
        measured = sorted(comparison.change_pct or 0.0 for comparison in compared)
        right = sum(comparison.word == "worse" and comparison.stage == "data" for comparison in compared)
        ranks = {tuple(sorted(rank.rank for rank in comparison.ranks)) for comparison in compared}
        figures += [
            Figure(name, "planted in `data`", f"{asked[0]:.1f} to {asked[-1]:.1f} % of a step"),
            Figure(name, "measured", f"{measured[0]:.1f} to {measured[-1]:.1f} %"),
            Figure(name, "worse, and by `data`", f"{right} of {len(compared)}", "all"),
            Figure(name, "ranks named", " or ".join(", ".join(map(str, named)) for named in sorted(ranks))),
        ]
    return figures


def main() -> None:
    """Make the sessions, compare them, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7, help="number of equal runs (default: 7)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default: 300)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the sessions in this folder")
    parser.add_argument("--markdown", action="store_true", help="print the table for RESULTS.md")
    arguments = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.keep or Path(folder)
        made = measure(out, arguments.runs, arguments.steps)
        figures = report(out, *made)
        print(table(figures, arguments.markdown))
        named = [one._replace(what=f"{one.part}: {one.what}") for one in figures]
        publish_figures("comparison", named, budgeted=True)


if __name__ == "__main__":
    main()
