"""
Verdicts on work that varies: `python benchmarks/verdicts.py [--only NAME] [--jobs N]`.

Runs of the families in `tests/work_families.py` are judged as a session file is (*whole run*), as a live run
is at every stride (*live*), and by single windows of 50 and 200 steps. The cost of a cause is the time of the
run with it compared with the same draws without it. Tables in Markdown for RESULTS.md have a line for each
group of families (`--families`: for each family); `--notes` lists every run that is not right. `--random N`
judges N random jobs instead. If large sizes are rare and stay for long, a rank with a large size is late for
that time and looks like a fault: these runs are counted separately.

A run is *right* if the costliest cause is named with all its ranks and one of its stages, in the headline or
as a further name. It is also right if no rank needs a name, no rank is named, and the label fits the
imbalance of the ranks: `imbalance` from 12 % of the run on, `healthy` below 8 %, either one in between.
`ambiguous` without a rank is *imbalance seen*. A cause that costs less than 2 % needs no name. A run is
*wrong* if a healthy rank is named anywhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from figures import machine, publish
from judged_work import (
    COSTLY,
    FREE,
    POINTS,
    UNEVEN,
    WATCHING,
    claims_of,
    errors_of,
    naming,
    outcome,
    replayed,
)
from random_work import random_job
from varying_work import Played
from work_families import FAMILIES

from traceml_ray.analysis.verdict import DEFAULTS, Verdict, judge_window

SINGLE = (50, 200)
"""Lengths, in steps, of the windows that are judged separately."""
GRACE_STEPS = 60
"""Number of steps of a costly cause after which `healthy` is wrong."""
RANDOM = "random job"
MODES = ("whole", "live", "single")
OUTCOMES = {
    "right": "right",
    "small": "right rank, costs < 2 %",
    "seen": "imbalance seen",
    "not needed": "not named, costs < 8 % or is not sure",
    "partly": "other stage or part of the ranks",
    "abstained": "abstains",
    "missed": "not named",
    "overpriced": "cost too high",
    "label": "finding of nothing",
    "wrong": "**wrong rank**",
}
"""Outcomes of a whole run, with the heads of their columns."""


@dataclass
class Score:
    """The outcomes of the verdicts on some runs."""

    runs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    needed: int = 0
    """Number of runs whose costliest cause costs at least COSTLY and whose rows allow a name."""
    named: int = 0
    """Number of runs in `needed` that are right."""
    errors: list[float] = field(default_factory=list)
    """Errors of the claimed costs of named causes (claimed − true), in percentage points."""
    beside: Counter[str] = field(default_factory=Counter)
    """Causes in addition to the costliest one, and how many of them are named."""
    live_needed: int = 0
    live_named: int = 0
    """Number of runs with a costly cause, and of those in which some stride names it."""
    live_steps: list[int] = field(default_factory=list)
    """Number of steps from the beginning of a cause to its name."""
    live_wrong: int = 0
    """Number of runs in which some stride names a healthy rank."""
    strides: int = 0
    wrong_strides: int = 0
    watched: int = 0
    """Number of strides at which a healthy rank is watched."""
    unnamed_strides: int = 0
    """Number of strides at which a costly cause has lasted for GRACE_STEPS and was never named."""
    green: int = 0
    """Number of strides in `unnamed_strides` at which the verdict is `healthy`."""
    windows: int = 0
    wrong_windows: int = 0
    """Number of single windows, and of those that name a healthy rank."""
    notes: list[str] = field(default_factory=list)
    group: str = ""
    """Group of the runs. Runs of one group are counted together."""

    def add(self, other: Score) -> None:
        """Add the verdicts on other runs."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            elif not isinstance(mine, str):
                setattr(self, name, mine + value)


# -- judging a run -----------------------------------------------------------------------------------


def judged(name: str, seed: int, modes: Sequence[str]) -> Score:
    """Return the score of one run: of a family, or of a random job."""
    run, group = random_job(seed) if name == RANDOM else (FAMILIES[name].run(seed), FAMILIES[name].group)
    score = Score(runs=1, group=group)
    note = f"{name}, seed {seed} ({_truth(run)})"
    if {"live", "whole"} & set(modes):
        live, whole = replayed(run.window)
        if "whole" in modes:
            _add_whole(score, whole, run, note)
        if "live" in modes:
            _add_live(score, live, run, note)
    if "single" in modes:
        _add_single(score, run, note)
    return score


def _add_whole(score: Score, verdict: Verdict, run: Played, note: str) -> None:
    result, costliest, claims = outcome(verdict, run), run.costliest, claims_of(verdict)
    score.outcomes[result] += 1
    if costliest is not None and run.costs[costliest] >= COSTLY and run.sure[costliest]:
        score.needed += 1
        score.named += result == "right"
    if result != "wrong":
        score.errors += errors_of(claims, run)
    for other, cause in enumerate(run.causes):
        if other != costliest and run.costs[other] >= 2 * FREE:
            score.beside["cause"] += 1
            score.beside["cause, named"] += bool(naming(claims, cause))
    if costliest is not None and run.imbalance is not None and run.imbalance >= UNEVEN:
        score.beside["imbalance"] += 1
        score.beside["imbalance, named"] += any(claim.label == "imbalance" for claim in claims)
    if result not in ("right", "small", "not needed"):
        score.notes.append(f"{result}: {note}: {_line(verdict)}")


def _add_live(score: Score, live: list[tuple[int, Verdict]], run: Played, note: str) -> None:
    costliest = run.costliest
    needed = costliest is not None and run.sure[costliest] and run.costs[costliest] >= COSTLY
    cause = run.causes[costliest] if costliest is not None and needed else None
    wrong, named = 0, False
    for step, verdict in live:
        claims = claims_of(verdict)
        begun = frozenset(rank for one in run.causes if one.first <= step for rank in one.ranks)
        if any(claim.ranks - begun for claim in claims):
            wrong += 1
            if wrong == 1:
                score.notes.append(f"wrong live at step {step}: {note}: {_line(verdict)}")
        score.watched += str(verdict.label) == WATCHING and bool(set(verdict.ranks) - begun)
        if cause is None or step < cause.first or named:
            continue
        if naming(claims, cause):
            named = True
            score.live_steps.append(step - cause.first)
        elif cause.whole_from + GRACE_STEPS <= step < cause.end:
            score.unnamed_strides += 1
            score.green += verdict.label == "healthy"
    score.strides += len(live)
    score.wrong_strides += wrong
    score.live_wrong += wrong > 0
    score.live_needed += cause is not None
    score.live_named += named
    if cause is not None and not named:
        labels = dict(Counter(str(verdict.label) for _, verdict in live))
        score.notes.append(f"never named live: {note}: {labels}")


def _add_single(score: Score, run: Played, note: str) -> None:
    for size in SINGLE:
        for first in range(0, len(run.window.starts) - size + 1, size):
            verdict = judge_window(run.window.select(slice(first, first + size)), DEFAULTS).verdict
            score.windows += 1
            if any(claim.ranks - run.ranks for claim in claims_of(verdict)):
                score.wrong_windows += 1
                score.notes.append(f"wrong in {size} steps from {first}: {note}: {_line(verdict)}")


def _truth(run: Played) -> str:
    causes = (
        f"{sorted(cause.ranks)} {'+'.join(sorted(cause.stages))} {cost:.1%}" + ", not sure" * (not sure)
        for cause, cost, sure in zip(run.causes, run.costs, run.sure, strict=True)
    )
    uneven = "?" if run.imbalance is None else f"{run.imbalance:.1%}"
    return "; ".join([*causes, f"imbalance {uneven}"])


def _line(verdict: Verdict) -> str:
    claims = (
        f"{claim.label} {sorted(claim.ranks)} {'+'.join(claim.stages)}"
        + ("" if claim.cost is None else f" {claim.cost:.1f} %")
        for claim in claims_of(verdict)
    )
    return f"{' + '.join(claims)} ({verdict.pattern}, {verdict.confidence})"


# -- the tables --------------------------------------------------------------------------------------

WHOLE = [
    "whole runs of",
    "n",
    *OUTCOMES.values(),
    "costs ≥ 8 %: right",
    "cost off by, points: median / p90",
    "> 2",
]
LIVE = [
    "live", "runs that cost ≥ 8 %", "named", "after steps: median / p90", "`healthy` while not named",
    "runs with a wrong rank", "strides with one", "strides that watch one", "single windows",
    "with a wrong rank",
]  # fmt: skip


def whole_cells(name: str, score: Score) -> list[object]:
    """Return a row of the table of whole runs."""
    off = np.abs(score.errors) if score.errors else np.full(1, np.nan)
    return [
        name,
        score.runs,
        *(score.outcomes[result] or "" for result in OUTCOMES),
        share(score.named, score.needed),
        f"{np.median(off):.1f} / {np.quantile(off, 0.9):.1f}" if score.errors else "",
        share(int((off > POINTS).sum()), len(score.errors)),
    ]


def live_cells(name: str, score: Score) -> list[object]:
    """Return a row of the table of live verdicts and single windows."""
    steps = score.live_steps
    return [
        name,
        score.live_needed or "",
        score.live_named if score.live_needed else "",
        f"{np.median(steps):.0f} / {np.quantile(steps, 0.9):.0f}" if steps else "",
        share(score.green, score.unnamed_strides),
        score.live_wrong or "",
        share(score.wrong_strides, score.strides),
        score.watched or "",
        score.windows or "",
        score.wrong_windows or "",
    ]


def share(part: int, total: int) -> str:
    """Return a share with its total; "" if the total is 0."""
    return f"{part:,} of {total:,}" if total else ""


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def report(scores: Sequence[tuple[str, Score]], modes: Sequence[str], by_family: bool) -> str:
    """Return the tables of runs, by family or by group, and their summary."""
    lines: dict[str, Score] = {}
    total, calm = Score(), Score()
    for name, score in scores:
        lines.setdefault(name if by_family else score.group, Score()).add(score)
        total.add(score)
        if score.group.startswith(("healthy", "imbalance")) and "rare" not in score.group:
            calm.add(score)
    lines["**all**"] = total
    parts = []
    if "whole" in modes:
        parts.append(markdown(WHOLE, [whole_cells(*item) for item in lines.items()]))
    if {"live", "single"} & set(modes):
        parts.append(markdown(LIVE, [live_cells(*item) for item in lines.items()]))
    parts.append("\n".join(summary(total, calm)))
    return "\n\n".join(parts)


def summary(total: Score, calm: Score) -> Iterable[str]:
    """Yield the summary of the tables. `calm` covers the runs in which no rank is late."""
    windows, wrong = calm.windows + calm.strides, calm.wrong_windows + calm.wrong_strides
    yield (
        f"- {windows:,} windows in which no rank is late ({calm.windows:,} by themselves, {calm.strides:,} "
        f"live): {wrong:,} name a rank ({calm.wrong_windows:,} and {calm.wrong_strides:,}), and so do "
        f"{calm.outcomes['wrong']:,} of {calm.runs:,} verdicts on their runs."
    )
    if total.needed:
        yield (
            f"- {total.needed:,} causes that cost {COSTLY:.0%} or more: {total.named / total.needed:.1%} are "
            "named with rank and stage over the whole run."
        )
    if total.live_needed:
        yield f"- Live: {total.live_named / total.live_needed:.1%} of {total.live_needed:,}."
    if total.beside:
        beside = total.beside
        yield (
            f"- Beside the costliest cause {beside['cause, named']} of {beside['cause']} other causes "
            f"(≥ {2 * FREE:.0%}) are named, and {beside['imbalance, named']} of {beside['imbalance']} "
            f"imbalances (≥ {UNEVEN:.0%})."
        )


def published(total: Score) -> list[tuple[str, str]]:
    """Return the rows of RESULTS.md."""
    return [
        (f"whole runs ({OUTCOMES[result]})", share(total.outcomes[result], total.runs))
        for result in ("right", "wrong")
    ] + [
        (
            f"causes that cost {COSTLY:.0%} or more: named over the whole run",
            share(total.named, total.needed),
        ),
        ("the same, named live", share(total.live_named, total.live_needed)),
        ("live verdicts (one a stride) that name a healthy rank", share(total.wrong_strides, total.strides)),
        ("single windows that name a healthy rank", share(total.wrong_windows, total.windows)),
    ]


def main() -> None:
    """Judge the families; print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="", help="only families whose name or group contains this text")
    add("--seeds", type=int, default=20, help="seeds of each family (default: 20)")
    add("--first-seed", type=int, default=0, help="first of these seeds (default: 0)")
    add("--random", type=int, default=0, metavar="N", help="judge N random jobs instead of the families")
    add("--jobs", type=int, default=1, help="number of processes (default: 1)")
    for mode in MODES:
        add(f"--{mode}", action="store_true", help="judge only in this way; may be combined with the others")
    add("--families", action="store_true", help="print a line for each family")
    add("--notes", action="store_true", help="list every run that is not right")
    args = parser.parse_args()
    modes = [mode for mode in MODES if getattr(args, mode)] or MODES
    names = [name for name, family in FAMILIES.items() if args.only in name or args.only in family.group]
    seeds = range(args.first_seed, args.first_seed + (args.random or args.seeds))
    runs = [(name, seed) for name in ([RANDOM] if args.random else names) for seed in seeds]
    began = time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        judgements = pool.map(judged, *zip(*runs, strict=True), [modes] * len(runs), chunksize=10)
        scores = [(name, score) for (name, _), score in zip(runs, judgements, strict=True)]
    took = time.monotonic() - began
    what = f"{args.random} random jobs" if args.random else f"{len(names)} families"
    print(f"{machine()}; {what}, seeds {seeds[0]} to {seeds[-1]}, {took:.0f} s\n")
    print(report(scores, modes, args.families))
    total = Score()
    for _, score in scores:
        total.add(score)
    publish("random_jobs" if args.random else "families_of_work", ("what", "measured"), published(total))
    if args.notes:
        print("\n".join(["", *(f"- {note}" for _, score in scores for note in score.notes)]))


if __name__ == "__main__":
    main()
