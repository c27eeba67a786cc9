"""
How often the verdict is right: faults planted in real gloo DDP runs under the real launcher, relay,
aggregator and live judge.

    python benchmarks/faults.py [--quick] [--keep DIR] [--out FILE.json] [--traceml VENV/bin]
    python benchmarks/faults.py --rescore DIR    judge kept runs again with the present engine. With --busy,
                                                 "live" is then what this engine would have reported
    python benchmarks/faults.py --busy [--seconds 60] [--step-ms 12 25 50] [--seeds 0 1 2 3 4] [--only KIND]
                                                 with all cores busy: who is named without a fault, and
                                                 whether faults of 30 % are named (25 minutes)

    python benchmarks/faults.py --device …       with a simulated device for each rank: rows are on its
                                                 clock, sent and judged as on CUDA

There is one launch for each world size and seed. It has faults in random order, each with a balanced stretch
before and after it. Severity is the fault's share of the *faulty* step, excess ÷ (step + excess), which the
rules call excess. The step time is measured in the run itself, before the first fault.

Reported are: the last full window of each fault, judged as the live judge does (replayed every 5 steps); the
stored live verdicts, with their times; every full window of the balanced stretches; the results of simpler
methods on the same windows; and, on request, TraceML's results on runs with one fault each.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from figures import publish  # type: ignore[import-not-found]
from overhead import machine  # type: ignore[import-not-found]

from traceml_ray.analysis.evidence import chain
from traceml_ray.analysis.history import Replay, RunJudge
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import judge_window
from traceml_ray.analysis.window import Window
from traceml_ray.launchers.cluster import free_port
from traceml_ray.stages import BACKWARD, SEGMENT_BITS, STAGES, SYNC_WAIT
from traceml_ray.store.session_file import SessionFile

SCRIPT = str(Path(__file__).parent / "training" / "planted.py")
LIMITS = Thresholds()
WINDOW = LIMITS.window_steps
SPECIALS = ["rotating", "two_late", "co_critical", "balanced", "group_wide"]
SPECIAL_SHARE = 0.3
EVERY = 5
"""Steps between two judgements of the replay."""
BAR_STEPS, BAR_S, BAR_SMALL_S = 10, 3.0, 5.0
"""
Limits for naming a fault live: BAR_STEPS steps or BAR_S seconds, whichever is later. For a fault of 15 %,
BAR_SMALL_S replaces BAR_S.
"""
SMALL = 0.15
BUSY_STEPS_MS, BUSY_SEEDS, BUSY_SHARE = [12.0, 25.0, 50.0], [0, 1, 2, 3, 4], 0.3
BUSY_OPENING_S, BUSY_FAULT_S = 25.0, 6.0
SINGLE_FIRST, SINGLE_ROWS = 60, 260
"""First row of the fault, and number of all rows, in runs with one fault each."""
TRACEML_STAGES = {"INPUT_STRAGGLER": "data", "H2D_STRAGGLER": "prepare", "COMPUTE_STRAGGLER": "forward"}
"""TraceML's diagnoses of a late rank, with the stage they name. STRAGGLER names a rank without a stage."""
OURS = "traceml-ray"
Case = dict[str, Any]


class Late(msgspec.Struct, frozen=True):
    """`ranks` (one after the other, if `rotating`) take longer in `stage`: by `share` of the faulty step."""

    stage: str
    ranks: list[int]
    share: float
    rotating: bool = False


class Segment(msgspec.Struct, frozen=True):
    """Rows `first` to `first + steps - 1`, and which ranks are late in these rows."""

    kind: str
    first: int
    steps: int
    late: list[Late] = []

    @property
    def end(self) -> int:
        return self.first + self.steps

    def overlaps(self, verdict: Case) -> bool:
        """Return whether the window of `verdict` contains a row of this segment."""
        last = verdict["to_step"]
        return last is not None and self.first <= last < self.end + verdict["window_steps"] - 1

    def of_most(self, world: int) -> bool:
        """
        Return whether most ranks are late. Then they are slow together, which is reported after a longer
        time.
        """
        return self.kind == "group_wide" or (self.kind == "two_late" and 2 * len(self.late[0].ranks) > world)

    def right(self, verdict: Case, world: int) -> bool:
        """Return whether `verdict` matches what is planted in this segment."""
        label, stages = verdict["label"], set(verdict["stages"])
        if self.kind == "balanced":
            return bool(label == "healthy")
        truth = {late.stage for late in self.late}
        late = sorted({rank for late in self.late for rank in late.ranks})
        if self.kind == "rotating":
            return label == "imbalance" and stages == truth
        if self.of_most(world):
            return label == "group_wide" and stages == truth
        wanted = "co_critical" if self.kind == "co_critical" else "straggler"
        return (label, stages, sorted(verdict["ranks"])) == (wanted, truth, late)

    def __str__(self) -> str:
        late = ", ".join(
            f"{one.stage} of {'+'.join(map(str, one.ranks))} by {one.share:.0%}" for one in self.late
        )
        return late if self.kind == "fault" else f"{self.kind} ({late or 'nothing'})"


class Plan(msgspec.Struct, frozen=True):
    """The plan that `planted.py` reads."""

    world: int
    seed: int
    step_ms: float
    noise: float
    work: str
    rows: int
    segments: list[Segment]
    traceml: bool = False
    busy: bool = False
    device: bool = False
    measured: tuple[int, int] = (20, SINGLE_FIRST)


# -- running -------------------------------------------------------------------------------------


def planned(world: int, seed: int, args: argparse.Namespace) -> Plan:
    """Return the faults to plant in one run."""
    rng = random.Random(f"{world} {seed}")
    cases: list[tuple[str, list[Late]]] = []
    for (i, stage), (j, share) in itertools.product(enumerate(args.stages), enumerate(args.severities)):
        one = (seed + i + j) % world  # the seed shifts the culprit: over several seeds every rank is late
        cases += [
            ("fault", [Late(stage, [rank], share / 100)])
            for rank in (range(world) if args.every_rank else [one])
        ]
    for _ in range(100):  # the same fault twice in a row would give a single verdict
        rng.shuffle(cases)
        named = [(late[0].stage, late[0].ranks) for _, late in cases]
        if all(one != other for one, other in itertools.pairwise(named)):
            break
    for kind in args.specials:
        if kind != "two_late" or world > 2:
            # Faults of all ranks come last, because they need the run's own baseline.
            position = len(cases) if kind == "group_wide" else rng.randrange(len(cases) + 1)
            cases.insert(position, (kind, special(kind, world, rng)))
    segments, rows, more = [], args.opening, 0
    for kind, late in cases:
        segment = Segment(kind, rows + more, args.steps, late)
        # Also after it, so that no name remains for the next segment.
        more = lasting(args.step_ms[0]) if segment.of_most(world) else 0
        segments.append(msgspec.structs.replace(segment, steps=args.steps + more))
        rows = segments[-1].end + args.balanced
    return Plan(world, seed, args.step_ms[0], args.noise, args.work, rows, segments, device=args.device)


def lasting(step_ms: float) -> int:
    """Return the number of steps after which `group_wide` has lasted long enough, as a multiple of EVERY."""
    return EVERY * int(1.1 * LIMITS.hold_group_s * 1e3 / step_ms / EVERY + 1)


def special(kind: str, world: int, rng: random.Random) -> list[Late]:
    """Return which ranks are late in a scenario other than one late rank."""
    ranks = rng.sample(range(world), world)
    stage, other = rng.sample(["post_sync", "data", "forward", "backward"], 2)
    share = SPECIAL_SHARE
    return {
        "rotating": [Late(stage, ranks, share, rotating=True)],
        "two_late": [Late(stage, sorted(ranks[:2]), share)],
        "co_critical": [Late(stage, ranks[:1], share), Late(other, ranks[1:2], share)],
        "group_wide": [Late(stage, sorted(ranks), share)],
        "balanced": [],
    }[kind]


def launch(plan: Plan, folder: Path, traceml: Path | None = None) -> None:
    """Train as planned under our launcher, or TraceML's; all files go to `folder`. Raises RuntimeError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    ranks = ("--nproc-per-node", str(plan.world))
    ours = (sys.executable, "-m", "traceml_ray.launch", *ranks, "--out", str(folder), "--session", "session")
    command = [*ours, SCRIPT, str(folder / "plan.json")]
    if traceml is not None:
        ports = ("--master-port", str(free_port()), "--aggregator-port", str(free_port()))
        where = ("--logs-dir", str(folder), "--run-name", "session", "--args", str(folder / "plan.json"))
        command = [str(traceml / "traceml"), "run", SCRIPT, *ranks, *ports, *where]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder, stdout=log, stderr=log
        )
        try:
            code = process.wait(90 + 4 * plan.rows * plan.step_ms / 1e3)
        except BaseException:
            process.send_signal(signal.SIGTERM)  # the launcher ends its ranks and everything else it started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()
            raise
    if code:
        raise RuntimeError(f"{command} ended with {code}:\n{(folder / 'log').read_text()[-3000:]}")


def single_runs(args: argparse.Namespace, root: Path) -> list[Case]:
    """Run one fault at a time, and no fault, under our launcher and under TraceML's."""
    share = sorted(args.severities)[len(args.severities) // 2] / 100
    results = []
    for world in sorted({min(args.worlds), max(args.worlds)}):
        for number, stage in enumerate([*args.stages, None]):
            rank = (number + 1) % world
            late = [Late(stage, [rank], share)] if stage else []
            kind = "fault" if stage else "balanced"
            segment = Segment(kind, SINGLE_FIRST, SINGLE_ROWS - SINGLE_FIRST, late)
            plan = Plan(world, 0, args.step_ms[0], args.noise, args.work, SINGLE_ROWS, [segment])
            ours, theirs = (root / f"single-{world}-{stage}-{who}" for who in ("ours", "traceml"))
            say(f"{world} ranks, alone: {segment}")
            launch(plan, ours)
            launch(msgspec.structs.replace(plan, traceml=True), theirs, args.traceml)
            verdict = json.loads((ours / "session" / "summary.json").read_bytes())["verdict"]
            summary = json.loads((theirs / "session" / "final_summary.json").read_bytes())
            diagnosis = summary["step_time"]["diagnosis"]
            ranks = diagnosis["ranks"] if diagnosis["kind"].endswith("STRAGGLER") else []
            theirs_named = [TRACEML_STAGES.get(diagnosis["kind"]), ranks[0] if ranks else None]
            results.append(
                {
                    "what": f"{world} ranks: {segment}",
                    "truth": [stage, rank] if late else None,
                    OURS: [verdict["label"], verdict["stage"], verdict["rank"]],
                    "TraceML": [diagnosis["kind"], *theirs_named],
                }
            )
    return results


def say(what: str) -> None:
    """Print the progress."""
    print(what, "…", file=sys.stderr, flush=True)


# -- scoring -------------------------------------------------------------------------------------


class Run:
    """One finished run: its plan, its rows, its live verdicts."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = folder.name, folder
        self.plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=Plan)
        times = json.loads((folder / "plan.times.json").read_bytes())
        self.began_ns: list[int] = times["began_ns"]
        self.base_ms: float = times["base_ms"]
        with SessionFile(folder / "session" / "session.sqlite") as file:
            history = StepHistory(LIMITS, deep=True)
            history.add_rows(file.rows()[0])
            self.window = history.between(-1, 1 << 62, sorted(history.reported()), self.plan.world)
            self.live = file.verdicts()[0]
        self._steps = self.window.keys >> SEGMENT_BITS
        self.planted = [segment for segment in self.plan.segments if segment.late]

    def until(self, end: int) -> Window:
        """Return the full window that ends before row `end`."""
        index = int(np.searchsorted(self._steps, end))
        return self.window.select(slice(max(0, index - WINDOW), index))

    def quiet_ends(self) -> list[int]:
        """Return the ends of the full windows, every 10 rows, in which nothing is planted."""
        # A verdict is withdrawn some time after its cause is gone; the windows until then are left out, too.
        begins = [LIMITS.warmup_steps]
        for segment in self.planted:
            hold_s = LIMITS.hold_group_s if segment.of_most(self.plan.world) else LIMITS.hold_s
            gone = int(1.2 * hold_s * 1e3 / self.base_ms) + LIMITS.hold_steps - WINDOW
            begins.append(segment.end + EVERY * max(0, -(-gone // EVERY)))
        ends = [*(segment.first for segment in self.planted), self.plan.rows]
        stretches = zip(begins, ends, strict=True)
        return [
            end for first, last in stretches for end in range(first + WINDOW, last + 1, LIMITS.stride_steps)
        ]

    def replay(self) -> dict[int, Case]:
        """
        Judge as a live judge that polls every 5 steps would. Return the verdicts by the ends of their
        windows.
        """
        judge = RunJudge(LIMITS, first_step=0)
        ends = range(LIMITS.warmup_steps + WINDOW, self.plan.rows + 1, EVERY)
        return {end: msgspec.to_builtins(judge.update(self.until(end))) for end in ends}


def said(verdict: Case) -> str:
    """Return a verdict in short form."""
    who = f" {'+'.join(sorted(verdict['stages']))}" if verdict["stages"] else ""
    ranks = f" of {'+'.join(map(str, verdict['ranks']))}" if verdict["ranks"] else ""
    return verdict["label"] + who + ranks


def score(run: Run) -> dict[str, list[Case]]:
    """Return the results of a run: by `planted` segment, by `quiet` window, and false live `alarms`."""
    replayed = run.replay()
    common = {"run": run.name, "world": run.plan.world, "base_ms": run.base_ms}
    quiet = [
        {
            **common,
            "end": end,
            "label": replayed[end]["label"],
            "said": said(replayed[end]),
            "best": {name: float(scores.max()) for name, scores in simpler(run.until(end)).items()},
        }
        for end in run.quiet_ends()
    ]
    alarms = [
        {**common, "end": verdict["to_step"], "said": said(verdict)}
        for verdict in run.live
        if verdict["label"] == "straggler" and not any(segment.overlaps(verdict) for segment in run.planted)
    ]
    planted = [{**common, **judged(run, segment, replayed)} for segment in run.plan.segments]
    return {"planted": planted, "quiet": quiet, "alarms": alarms}


def judged(run: Run, segment: Segment, replayed: dict[int, Case]) -> Case:
    """Return the verdicts on a segment: at its end, live, replayed, and by simpler methods."""
    world, verdict = run.plan.world, replayed[segment.end]
    truth = [(late.stage, late.ranks[0]) for late in segment.late][:1]
    suspects = [(suspect["stage"], suspect["rank"]) for suspect in verdict["suspects"]]
    live = [verdict for verdict in run.live if segment.overlaps(verdict)]
    wrong = sum(verdict["label"] == "straggler" and not segment.right(verdict, world) for verdict in live)
    hit = next((verdict["t_ns"] for verdict in live if segment.right(verdict, world)), None)
    ends = range(segment.first + EVERY, segment.end + 1, EVERY)
    began = run.began_ns[segment.first]
    case = {
        "what": str(segment),
        "kind": segment.kind,
        "share": segment.late[0].share if segment.late else 0.0,
        "step_ms": verdict["mean_step_ms"],
        "row": segment.first,
        "onset_ns": began,
        "label": verdict["label"],
        "said": said(verdict),
        "right": segment.right(verdict, world),
        "top2": set(truth) <= set(suspects[:2]),
        "parts": Counter(
            "right" if segment.right(replayed[end], world) else replayed[end]["label"]
            for end in (*ends, *range(segment.end + EVERY, segment.end + WINDOW, EVERY))
        ),
        "replay_steps": next((e - segment.first for e in ends if segment.right(replayed[e], world)), None),
        "live_said": list(dict.fromkeys(map(said, live))),
        "live_wrong": wrong,
        "live_right": not wrong if segment.kind == "balanced" else hit is not None,
        "live_s": hit and (hit - began) / 1e9,
        "live_steps": hit and bisect.bisect(run.began_ns, hit) - segment.first,
    }
    if segment.kind == "fault":
        scores = simpler(run.until(segment.end))
        case["simpler"] = {name: place(score, *truth[0]) for name, score in scores.items()}
    return case


def simpler(window: Window) -> dict[str, Any]:
    """
    Return the scores that simpler methods give to each rank and stage, (R, 6) or (R, 5), as shares of the
    mean step.

    They are computed with and without separating backward from the wait for peers. Waiting ranks are not
    excused.
    """
    joined = window.d[:, :, :SYNC_WAIT].copy()
    joined[:, :, BACKWARD] += window.d[:, :, SYNC_WAIT]
    scores = {}
    for view, d in (("", joined), (", split", window.d)):
        step, mean = d.sum(axis=2).mean(), d.mean(axis=0)
        others = (mean.sum(axis=0) - mean) / (len(mean) - 1)
        scores[f"mean over the other ranks{view}"] = (mean - others) / step
        slowest = d == d.max(axis=1, keepdims=True)
        scores[f"time of the slowest rank{view}"] = np.where(slowest, d, 0).mean(axis=0) / step
        front = chain(np.ascontiguousarray(d))
        share = front.leaders * (front.exposed / front.leaders.sum(axis=1))[:, None]
        scores[f"frontier share{view}"] = share.sum(axis=0) / front.total_ns
    return scores


def place(scores: Any, stage: str, rank: int) -> dict[str, float]:
    """Return the position of the true rank and stage in the order by `scores` (R, S), and the best score."""
    return {"place": int((scores > scores[rank, STAGES.index(stage)]).sum()) + 1, "best": float(scores.max())}


# -- telling -------------------------------------------------------------------------------------


def pct(hits: Iterable[bool]) -> str:
    """Return the share of true values."""
    return f"{100 * np.mean(list(hits)):.0f} %"


def counted(labels: Counter[str]) -> str:
    """Return the number of each label, the most frequent first."""
    return ", ".join(f"{number} {label}" for label, number in labels.most_common())


def spread(values: Iterable[float | None], digits: int) -> str:
    """Return median / p90 / worst, as order statistics. None is sorted after all other values."""
    ordered = sorted(np.inf if value is None else value for value in values)
    picked = (ordered[int(share * (len(ordered) - 1) + 0.5)] for share in (0.5, 0.9, 1.0))
    return " / ".join("never" if value == np.inf else f"{value:.{digits}f}" for value in picked)


def markdown(head: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a table. `head` has the column names, separated by |."""
    lines = [head, " | ".join(["---"] * (head.count("|") + 1)), *(" | ".join(map(str, row)) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def in_time(case: Case) -> bool:
    """Return whether the fault was named live within the limit."""
    bar_s = BAR_SMALL_S if case["share"] <= SMALL else BAR_S
    return case["live_s"] is not None and (case["live_s"] <= bar_s or case["live_steps"] <= BAR_STEPS)


def faults_table(faults: list[Case]) -> str:
    """Return the table of single faults, by world size and severity."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in sorted(faults, key=lambda case: (case["world"], case["share"])):
        for world in (str(case["world"]), "all"):
            groups.setdefault((world, f"{case['share']:.0%}"), []).append(case)
    rows = []
    for key, cases in (*sorted(groups.items()), (("all", "all"), faults)):
        tops = (pct(case[what] for case in cases) for what in ("right", "top2"))
        steps, live, seconds = (
            spread((case[what] for case in cases), digits)
            for what, digits in (("replay_steps", 0), ("live_steps", 0), ("live_s", 1))
        )
        wrong = sum(case["live_wrong"] for case in cases)
        rows.append((*key, len(cases), *tops, steps, pct(map(in_time, cases)), live, seconds, wrong))
    head = "ranks | severity | n | top-1 | top-2 | replayed: steps | live: in time | steps | s | wrong names"
    return markdown(head, rows)


def simpler_table(faults: list[Case], quiet: list[Case]) -> str:
    """Return a comparison with simpler methods, on the same windows."""
    wrong = sum(window["label"] == "straggler" for window in quiet)
    ours = [pct(case["right"] for case in faults), pct(case["top2"] for case in faults)]
    rows = [("**traceml-ray**", *ours, f"{wrong} of {len(quiet)}", f"{LIMITS.min_excess:.1%}", ours[0])]
    for name in faults[0]["simpler"]:
        best = sorted((window["best"][name] for window in quiet), reverse=True)
        bar = best[min(wrong, len(best) - 1)]
        results = [case["simpler"][name] for case in faults]
        hits = (pct(one["place"] <= most for one in results) for most in (1, 2))
        alarms = f"{sum(one >= LIMITS.min_excess for one in best)} of {len(best)}"
        above = pct(one["place"] == 1 and one["best"] > bar for one in results)
        rows.append((name, *hits, alarms, f"{bar:.1%}", above))
    head = f"method | top-1 | top-2 | balanced windows ≥ 5 % | threshold for {wrong} of them | top-1 above it"
    publish("simpler", head.split(" | "), rows)
    return markdown(head, rows)


def specials_table(specials: list[Case]) -> str:
    """Return the table of all scenarios other than one late rank."""
    rows = []
    for kind in sorted({case["kind"] for case in specials}):
        cases = [case for case in specials if case["kind"] == kind]
        right = (sum(case[what] for case in cases) for what in ("right", "live_right"))
        rows.append((kind, len(cases), *right, counted(Counter(case["label"] for case in cases))))
    return markdown("scenario | n | right | right live | labels of the last window", rows)


def singles_table(singles: list[Case]) -> str:
    """
    Return a comparison with TraceML: same script and seed, one fault per run, verdict at the end
    of the run.
    """
    faults = [case for case in singles if case["truth"]]
    quiet = [case for case in singles if not case["truth"]]
    rows: list[Sequence[object]] = []
    for who in (OURS, "TraceML"):
        hits = (pct(case[who][1 + first :] == case["truth"][first:] for case in faults) for first in (0, 1))
        alarms = sum(case[who][2] is not None for case in quiet)
        rows.append((who, len(faults), *hits, f"{alarms} of {len(quiet)}"))
    lines = [f"- {case['what']}: {OURS} {case[OURS]}, TraceML {case['TraceML']}" for case in singles]
    head = "one fault a run | n | stage and rank | rank | a rank blamed where nothing is"
    publish("traceml", head.split(" | "), rows)
    return markdown(head, rows) + "\n\n" + "\n".join(lines)


def missed(planted: list[Case], quiet: list[Case], alarms: list[Case]) -> list[str]:
    """Return the cases that a person should check."""
    lines = [
        f"- {case['run']}, row {case['row']}: {case['what']}: {case['said']}; live: "
        + (", ".join(case["live_said"]) or "no change")
        for case in planted
        if not case["right"] or case["live_wrong"] or (case["kind"] == "fault" and not in_time(case))
    ]
    odd = [window for window in quiet if window["label"] != "healthy"]
    for case in odd + alarms:
        live = "live, " if case in alarms else ""
        lines.append(f"- {case['run']}, {live}to row {case['end']}: nothing is planted: {case['said']}")
    return lines or ["- nothing"]


def published(faults: list[Case], specials: list[Case], quiet: list[Case], alarms: list[Case]) -> None:
    """Publish the results of the launches: single faults by size, other scenarios, balanced windows."""
    rows: list[Sequence[object]] = []
    for share in sorted({case["share"] for case in faults}):
        cases = [case for case in faults if case["share"] == share]
        right = f"{sum(case['right'] for case in cases)} of {len(cases)}"
        live = spread((case["live_s"] for case in cases), 1)
        timely = pct(map(in_time, cases))
        rows.append(
            (f"faults of {share:.0%}", right, live, timely, sum(case["live_wrong"] for case in cases))
        )
    if specials:
        right = f"{sum(case['right'] for case in specials)} of {len(specials)}"
        rows.append(("other scenarios", right, "", "", sum(case["live_wrong"] for case in specials)))
    named = sum(window["label"] == "straggler" for window in quiet)
    rows.append(("balanced windows that name a rank", "", "", "", f"{named} of {len(quiet)}"))
    rows.append(("live verdicts that name a rank then", "", "", "", len(alarms)))
    head = ("planted", "right by rank and stage", "named live after, s: median / p90 / worst", "in time")
    publish("faults", (*head, "wrong names"), rows)


def report(scored: list[dict[str, list[Case]]], singles: list[Case] | None, plan: Plan) -> str:
    """Return the whole report as Markdown."""
    planted, quiet, alarms = ([case for one in scored for case in one[what]] for what in scored[0])
    faults = [case for case in planted if case["kind"] == "fault"]
    specials = [case for case in planted if case["kind"] != "fault"]
    published(faults, specials, quiet, alarms)
    base = np.median([case["base_ms"] for case in quiet])
    labels = Counter(window["label"] for window in quiet)
    mixed = sum((case["parts"] for case in faults), Counter())
    parts = [
        machine(),
        f"{len(scored)} launches; a step without a fault takes {base:.0f} ms (median), {plan.noise:.0%} "
        f"noise in each stage; faults: {plan.work}. In time: named live within {BAR_STEPS} steps or "
        f"{BAR_S:.0f} s of onset ({SMALL:.0%} faults: {BAR_SMALL_S:.0f} s), whichever is later. "
        "Steps and seconds: median / p90 / worst.",
        f"{len(quiet)} balanced windows: {counted(labels)}. Live: {len(alarms)} straggler verdicts there. "
        f"{mixed.total()} windows that hold a part of a fault, or all of it: {counted(mixed)}.",
        *([faults_table(faults), simpler_table(faults, quiet)] if faults else []),
        *([specials_table(specials)] if specials else []),
        singles_table(singles) if singles else "TraceML was not asked (--traceml).",
        "\n".join(["Missed, late or wrong:", "", *missed(planted, quiet, alarms)]),
    ]
    return "\n\n".join(parts)


# -- on cores that are all busy ------------------------------------------------------------------


def busy_plan(kind: str, step_ms: float, seed: int, args: argparse.Namespace) -> Plan:
    """Return a run of two ranks that work all the time: `healthy`, or with a fault in each stage in turn."""
    rows = int(args.seconds * 1e3 / step_ms)
    segments = []
    if kind == "faults":
        row = int(BUSY_OPENING_S * 1e3 / step_ms)
        steps = int(BUSY_FAULT_S * (1 - BUSY_SHARE) * 1e3 / step_ms)
        for number, stage in enumerate(args.stages):
            late = [Late(stage, [(number + seed) % 2], BUSY_SHARE)]
            segments.append(Segment("fault", row, steps, late))
            row += steps + int(BUSY_FAULT_S * 1e3 / step_ms)
        rows = row
    return Plan(2, seed, step_ms, args.noise, "cpu", rows, segments, busy=True)


def busy(args: argparse.Namespace) -> None:
    """
    Run jobs that fill the cores. Print who was named, how often the verdict changed, and what was
    missed.
    """
    healthy: list[Case] = []
    faults: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="busy-") as made:
        root = (args.rescore or args.keep or Path(made)).absolute()
        kinds = [args.only] if args.only else ["healthy", "faults"]
        for kind, step_ms, seed in itertools.product(kinds, args.step_ms, args.seeds):
            folder = root / f"{kind}-{step_ms:g}-ms-seed-{seed}"
            if kind == "faults" and seed > args.seeds[0] + 1:
                continue  # two runs of five faults each
            if args.rescore is None:
                say(f"{kind}, {step_ms:g} ms, seed {seed}")
                launch(busy_plan(kind, step_ms, seed, args), folder)
            run = Run(folder)
            if args.rescore is not None:
                run.live = [
                    {**verdict, "t_ns": run.began_ns[end - 1]} for end, verdict in run.replay().items()
                ]
            (healthy if kind == "healthy" else faults).extend(
                [undisturbed(run)] if kind == "healthy" else [busy_fault(run, one) for one in run.planted]
            )
    print("\n\n".join([machine(), *filter(None, [healthy_table(healthy), busy_table(faults)])]))
    quiet = sum(not case["named"] for case in healthy)
    live = spread((case["live_s"] for case in faults), 1) if faults else ""
    publish(
        "faults_busy",
        ("runs", "measured"),
        [
            ("healthy runs in which nobody is named", f"{quiet} of {len(healthy)}"),
            ("faults that are named right", f"{sum(case['right'] for case in faults)} of {len(faults)}"),
            ("named after, s: median / p90 / worst", live),
            ("wrong names", sum(case["wrong"] for case in faults)),
        ],
    )
    if args.out:
        args.out.write_text(json.dumps({"healthy": healthy, "faults": faults}, indent=1))


def undisturbed(run: Run) -> Case:
    """Return the live verdicts on a run without planted faults, and its final verdict."""
    said_live = [said(verdict) for verdict in run.live if verdict["window_steps"]]
    verdicts = [what for what, _ in itertools.groupby(said_live) if not what.startswith("telemetry_limited")]
    changes = sum(one != other for one, other in itertools.pairwise(verdicts))
    elapsed_s = (run.began_ns[-1] - run.began_ns[0]) / 1e9
    after = Replay(len(run.window.starts), LIMITS)
    after.add(run.window)
    whole = after.done()
    every = run.window.d.sum(axis=2).mean(axis=1) / 1e6
    single = Counter(judge_window(run.until(end), LIMITS).verdict.label for end in run.quiet_ends())
    return {
        "run": run.name,
        "asked_ms": run.plan.step_ms,
        "step_ms": float(np.median(every)),
        "seconds": elapsed_s,
        "named": sorted({said(one) for one in run.live if one["ranks"] and one["label"] != "watching"}),
        "changes": changes,
        "said": verdicts,
        "single": sum(count for label, count in single.items() if label != "healthy"),
        "windows": single.total(),
        "brief": msgspec.to_builtins(whole.episodes.brief),
        "whole": said(msgspec.to_builtins(whole.run_verdict())),
    }


def busy_fault(run: Run, segment: Segment) -> Case:
    """Return the live verdicts on a fault on a busy core."""
    live = [verdict for verdict in run.live if segment.overlaps(verdict)]
    began = run.began_ns[segment.first]
    hit = next((verdict["t_ns"] for verdict in live if segment.right(verdict, run.plan.world)), None)
    return {
        "run": run.name,
        "asked_ms": run.plan.step_ms,
        "what": str(segment),
        "right": hit is not None,
        "live_s": hit and (hit - began) / 1e9,
        "wrong": sum(
            bool(verdict["ranks"]) and not segment.right(verdict, run.plan.world) for verdict in live
        ),
        "said": list(dict.fromkeys(map(said, live))),
    }


def healthy_table(cases: list[Case]) -> str:
    """Return the table of ranks that were named although nothing is planted."""
    rows = [
        (
            f"{case['asked_ms']:g} ms",
            f"{case['step_ms']:.0f} ms",
            f"{case['seconds']:.0f} s",
            f"{case['single']} of {case['windows']}",
            ", ".join(case["named"]) or "nobody",
            case["changes"],
            f"{60 * case['changes'] / case['seconds']:.1f}",
            f"{case['brief']['count']}, {case['brief']['cost_s']:.1f} s",
            case["whole"],
        )
        for case in cases
    ]
    head = "step asked | step (median) | run | single windows not healthy | named live | changes | a minute"
    quiet = sum(not case["named"] for case in cases)
    calm = sum(60 * case["changes"] <= case["seconds"] for case in cases)
    sentence = f"Nobody named in {quiet} of {len(cases)} runs; at most one change a minute in {calm}."
    return f"{markdown(head + ' | brief ones | whole run', rows)}\n\n{sentence}" if cases else ""


def busy_table(cases: list[Case]) -> str:
    """Return the table of how many faults were named."""
    rows = []
    for key in [*sorted({case["asked_ms"] for case in cases}), None]:
        some = [case for case in cases if key in (case["asked_ms"], None)]
        step = "all" if key is None else f"{key:g} ms"
        live = spread((case["live_s"] for case in some), 1) if some else ""
        rows.append((step, len(some), pct(case["right"] for case in some) if some else "", live,
                     sum(case["wrong"] for case in some)))  # fmt: skip
    missed = [f"- {case['run']}: {case['what']}: live: {', '.join(case['said']) or 'nothing'}"
              for case in cases if not case["right"] or case["wrong"]]  # fmt: skip
    head = f"step asked | faults of {BUSY_SHARE:.0%} | named right | s (median / p90 / worst) | wrong names"
    return "\n\n".join([markdown(head, rows), *missed]) if cases else ""


QUICK = {"worlds": [2], "seeds": [0], "stages": ["data", "backward"], "severities": [15, 60],
         "specials": ["rotating", "co_critical"], "opening": 100}  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    local = STAGES[:SYNC_WAIT]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a short run of two minutes, as a check of the benchmark")
    add("--worlds", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks")
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1],
        help="one launch for each seed and number of ranks (default: 0 1)",
    )
    add(
        "--stages",
        nargs="+",
        choices=local,
        default=list(local),
        help="stages in which faults are planted (default: all local ones)",
    )
    add(
        "--severities",
        type=int,
        nargs="+",
        default=[15, 30, 60],
        help="severity of the faults, %% of the faulty step (default: 15 30 60)",
    )
    add(
        "--specials",
        nargs="*",
        choices=SPECIALS,
        default=SPECIALS,
        help="faults that are not one late rank in one stage (default: all)",
    )
    add("--every-rank", action="store_true", help="make each rank late in turn, not a random one")
    add(
        "--work",
        choices=("sleep", "cpu"),
        default="sleep",
        help="what a late rank does with the time (default: sleep)",
    )
    add(
        "--step-ms",
        type=float,
        nargs="+",
        default=[40.0],
        help="approximate time of a step without a fault, ms (default: 40)",
    )
    add(
        "--noise",
        type=float,
        default=0.05,
        help="standard deviation of each stage's time, as a share (default: 0.05)",
    )
    add("--opening", type=int, default=360, help="steps before the first fault")
    add("--steps", type=int, default=80, help="steps with each fault (default: 80)")
    add("--balanced", type=int, default=100, help="steps without a fault after each fault (default: 100)")
    add("--device", action="store_true", help="let ranks compute on a simulated device")
    add("--busy", action="store_true", help="run two ranks that keep one core each busy")
    add(
        "--seconds",
        type=float,
        default=60.0,
        help="approximate time of a busy run without faults, s (default: 60)",
    )
    add("--only", choices=("healthy", "faults"), help="only busy runs of this kind")
    add("--out", type=Path, help="write the results as JSON")
    add("--keep", type=Path, metavar="DIR", help="keep plans and sessions in this folder")
    add("--rescore", type=Path, metavar="DIR", help="judge the runs that --keep left again, without new runs")
    add("--traceml", type=Path, metavar="BIN", help="also run TraceML; folder of its command")
    args = parser.parse_args(argv)
    if args.busy:
        vars(args).update({"step_ms": BUSY_STEPS_MS, "seeds": BUSY_SEEDS} | chosen(args, parser))
        return args
    if args.quick:
        vars(args).update(QUICK)
    lengths = args.opening - LIMITS.warmup_steps, args.steps, args.balanced
    if any(length % EVERY or length < WINDOW for length in lengths):
        parser.error(
            f"--steps, --balanced, and --opening without the {LIMITS.warmup_steps} steps of warm-up, must "
            f"be {WINDOW} or more and multiples of {EVERY}"
        )
    return args


def chosen(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the command-line values for options whose defaults differ in a busy run."""
    return {
        name: getattr(args, name)
        for name in ("step_ms", "seeds")
        if getattr(args, name) != parser.get_default(name)
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run, score, print."""
    args = parse(argv)
    if args.busy:
        busy(args)
        return
    singles = None
    with tempfile.TemporaryDirectory(prefix="faults-") as made:
        root = (args.rescore or args.keep or Path(made)).absolute()
        folders = sorted(path.parent for path in root.glob("*-seed-*/plan.times.json"))
        if args.rescore is None:
            folders = []
            for seed, world in itertools.product(args.seeds, args.worlds):
                say(f"{world} ranks, seed {seed}")
                folders.append(root / f"{world}-ranks-seed-{seed}")
                launch(planned(world, seed, args), folders[-1])
            singles = single_runs(args, root) if args.traceml else None
        runs = [Run(folder) for folder in folders]
        scored = [score(run) for run in runs]
    print(report(scored, singles, runs[0].plan))
    if args.out:
        args.out.write_text(json.dumps({"runs": scored, "singles": singles}, indent=1))


if __name__ == "__main__":
    main()
