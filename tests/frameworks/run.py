"""
What the monitor reports of other people's software: one rank made late under each framework, on two ranks.

    make frameworks
    python tests/frameworks/run.py [--only lightning,hf_trainer/data] [--keep DIR] [--docs FILE.md]

Each case runs with the monitor, and once without and with nobody late: faults are sleeps, no number changes.
A case is right when both runs exit alike; all losses and the final weights are equal to the bit; the verdict
has the planted rank and stage and blames no part that is not late; each optimizer step was counted once; the
median step is as long as one was; and the report holds no sentence that is false of every case. Prints a
markdown table; exits 1 if a case is wrong. `--docs` writes the first ten lines of a report for each framework
into a page.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
STEPS, LATE_MS, LIMIT_S = 60, 50, 400
STAGE = {"data": "data", "forward": "forward", "between": "post_sync"}
INNOCENT = {"optimizer", "checkpoint", "evaluation", "all_reduce", "barrier"}
"""Parts that are never late here."""
FALSE = {
    "no data wait was seen": "says that no data wait was seen",
    "do not exchange": "says that the ranks exchange nothing",
}
MARK = "<!-- what follows is written by tests/frameworks/run.py -->\n"
BIN = f"{Path(sys.executable).parent}/"
LAUNCHERS = {"deepspeed": "--num_gpus 2"}
"""Commands that start ranks, with their arguments for two. On CPUs `accelerate launch` needs MPI for that."""
NAMES = {
    "hf_trainer": "Hugging Face Trainer",
    "accelerate_loop": "Accelerate",
    "lightning_fit": "Lightning",
    "timm_loop": "timm",
    "ignite_engine": "PyTorch-Ignite",
    "trl_sft": "TRL and PEFT",
    "deepspeed_zero": "DeepSpeed",
    "titan_chunked": "torchtitan's chunked loss",
    "ray_hf": "Ray Train with Hugging Face and Ray Data",
    "ray_lightning": "Ray Train with Lightning",
    "ray_data": "Ray Train with Ray Data",
}


class Case(NamedTuple):
    """One rank late in one place, in one script with these features (the words of its command line)."""

    script: str
    late: str
    rank: int
    features: str = ""
    launcher: str = "torchrun"

    @property
    def name(self) -> str:
        """Name of the case, and of its folder."""
        launcher = self.launcher.replace("torchrun", "")
        words = [self.script, *self.features.replace("--", "").split(), launcher, self.late]
        return "/".join([words[0], "-".join(filter(None, words[1:]))])

    @property
    def plain(self) -> Case:
        """Return the same run with nobody late."""
        return self._replace(late="none", rank=0)

    @property
    def late_ms(self) -> int:
        """By how much: a loader's worker that is late hides what a step takes."""
        return 2 * LATE_MS if "workers" in self.features else LATE_MS

    def command(self, out: Path, monitor: bool) -> list[str]:
        """Return the command line, files going to `out`."""
        script = [f"{HERE}/scripts/{self.script}.py", *f"--out {out} --steps {STEPS}".split()]
        script += (
            f"--late {self.late} --late-rank {self.rank} --late-ms {self.late_ms} {self.features}".split()
        )
        alone = [] if monitor else ["--no-monitor"]
        if self.script.startswith("ray_"):
            return [sys.executable, *script, *alone]
        files = ["--session", "session", "--out", str(out), *alone]
        if self.launcher == "torchrun":
            return [sys.executable, "-m", "traceml_ray.launch", *files, "--nproc-per-node", "2", *script]
        command = [BIN + self.launcher, *LAUNCHERS[self.launcher].split(), *script]
        return [sys.executable, "-m", "traceml_ray.cli", "run", *files, "--", *command]


def cases() -> list[Case]:
    """Return every case."""
    everywhere = [("data", 1), ("forward", 0), ("between", 1)]
    found = [Case(script, late, rank) for script in NAMES for late, rank in everywhere]
    found += [
        Case("deepspeed_zero", late, 1, f"--zero {zero}") for zero, late in ((1, "data"), (2, "forward"))
    ]
    for script in ("hf_trainer", "accelerate_loop", "lightning_fit"):
        found += [
            Case(script, "none", 0),
            Case(script, "data", 0, "accumulate"),
            Case(script, "forward", 1, "accumulate"),
            Case(script, "data", 1, "validate"),
            Case(script, "forward", 0, "validate"),
            Case(script, "between", 1, "validate checkpoint"),
            Case(script, "data", 0, "workers"),
            Case(script, "forward", 1, "bf16"),
            Case(script, "data", 1, "compile"),
        ]
    found += [Case(script, "data", 0, "dispatch") for script in ("hf_trainer", "accelerate_loop")]
    for script in ("timm_loop", "trl_sft", "deepspeed_zero", "titan_chunked"):
        found.append(Case(script, "forward", 1, "accumulate"))
    found += [
        Case(script, "forward", 0, "validate") for script in ("ignite_engine", "ray_hf", "ray_lightning")
    ]
    found += [
        Case("deepspeed_zero", "data", 1, launcher="deepspeed"),
    ]
    return found


class Ended(NamedTuple):
    """How a run ended, and what it left."""

    code: int
    losses: dict[str, Any]
    summary: dict[str, Any]
    report: str


def run(case: Case, root: Path, monitor: bool) -> Ended:
    """Run a case in a folder of its own."""
    out = root / ("watched" if monitor else "plain") / case.name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = case.command(out, monitor)
    with (out / "log").open("wb") as log:
        log.write(f"{shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command, cwd=out, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            if process.poll() is None:  # a launcher ends its ranks
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    losses = {path.name: json.loads(path.read_text()) for path in sorted(out.glob("losses-*.json"))}
    session = out / "session"
    summary = session / "summary.json"
    if not summary.is_file():
        return Ended(code, losses, {}, "")
    return Ended(code, losses, json.loads(summary.read_text()), (session / "report.txt").read_text())


def wrong(case: Case, watched: Ended, plain: Ended) -> list[str]:
    """Return what is wrong, in words."""
    if watched.code != plain.code or plain.code:
        return [f"exit {watched.code}, without the monitor {plain.code}"]
    if not watched.summary:
        return ["no session was left"]
    steps, verdict = watched.summary["steps"], watched.summary["verdict"]
    found = []
    if watched.losses != plain.losses or len(plain.losses) != 2:
        found.append("losses differ")
    truth = ("straggler", STAGE[case.late], case.rank) if case.late != "none" else ("healthy", None, None)
    if (verdict["label"], verdict["stage"], verdict["rank"]) != truth:
        found.append(f"says {said(verdict)}")
    if verdict["part"] in INNOCENT:
        found.append(f"look at `{verdict['part']}` first")
    if steps["count"] != STEPS:
        found.append(f"{steps['count']} steps of {STEPS}")
    if case.late != "none" and (steps["median_ms"] or 0) < LATE_MS / 2:
        found.append(f"median step {steps['median_ms']} ms")
    if "network" in json.dumps(verdict["machine"]):
        found.append("its own traffic as an anomaly")
    text = " ".join(watched.report.split()).lower()
    return found + [words for phrase, words in FALSE.items() if phrase in text]


def said(verdict: dict[str, Any]) -> str:
    """Return a verdict in short."""
    where = f" in {verdict['stage']}" if verdict["stage"] else ""
    return verdict["label"] + (f" rank {verdict['rank']}" if verdict["rank"] is not None else "") + where


def row(case: Case, watched: Ended, problems: list[str]) -> str:
    """Return the case's line of the table."""
    cost = watched.summary.get("overhead", {}).get("training_thread_us_per_step")
    count = watched.summary.get("steps", {}).get("count")
    planted = f"rank {case.rank}, {case.late}" if case.late != "none" else "nothing"
    launcher = f"`{case.launcher}` " if case.launcher != "torchrun" else ""
    features = launcher + case.features.replace("--", "")
    verdict = said(watched.summary["verdict"]) if watched.summary else "none"
    cost_text = "" if cost is None else f"{cost:.0f}"
    result = "; ".join(problems) or "right"
    return f"| {NAMES[case.script]} | {features} | {planted} | {verdict} | {count} | {cost_text} | {result} |"


def page(root: Path) -> str:
    """Return the first ten lines of a report of each framework that was run, the command before each."""
    text = ""
    for script, title in NAMES.items():
        reports = [(case, root / "watched" / case.name / "session" / "report.txt") for case in cases()]
        found = [(case, path) for case, path in reports if case.script == script and path.is_file()]
        for case, path in found[:1]:
            words = [word.removeprefix(BIN) for word in case.command(Path("out"), True)]
            command = shlex.join(Path(word).name if word.endswith(".py") else word for word in words)
            head = "\n".join(line.rstrip() for line in path.read_text().splitlines()[:10])
            text += f"\n## {title}\n\n    {command}\n\n```\n{head}\n```\n"
    return text


def main() -> int:
    """Run the cases that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="beginnings of names of cases, by commas")
    parser.add_argument(
        "--keep", type=Path, default=Path("build/frameworks"), help="where the runs' files go"
    )
    parser.add_argument("--docs", type=Path, help="page that gets the reports' first lines")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    args = parser.parse_args()
    chosen = [case for case in cases() if case.name.startswith(tuple(args.only.split(",")))]
    if args.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    plain: dict[Case, Ended] = {}
    failed = 0
    print(
        "| framework | with | planted | verdict | steps | µs a step | result |\n|---|---|---|---|---|---|---|"
    )
    for case in chosen:
        if case.plain not in plain:
            plain[case.plain] = run(case.plain, args.keep.absolute(), monitor=False)
        watched = run(case, args.keep.absolute(), monitor=True)
        problems = wrong(case, watched, plain[case.plain])
        failed += bool(problems)
        print(row(case, watched, problems), flush=True)
    print(f"\n{len(chosen) - failed} of {len(chosen)} cases right")
    if args.docs:
        before = args.docs.read_text().split(MARK)[0]
        args.docs.write_text(before + MARK + page(args.keep))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
