"""
What the monitor reports under each training framework, on two ranks, one of them made late.

    make frameworks
    python tests/frameworks/run.py [--only lightning,hf_trainer/data] [--keep DIR] [--docs FILE.md]

Each case runs with the monitor, and once without monitor and fault. Faults are sleeps, so no number changes.
A case is right if both runs have the same exit code; all losses and the final weights are equal to the bit;
the verdict names the late rank and stage and nothing else; each iteration was counted once; the median step
has the length of an iteration; and the report has no sentence that is false in all cases. With one of our
callbacks (`adapter`) the framework's own log must also have the verdict and the step time.

Prints a table in Markdown. The exit code is 1 if a case is wrong. A case whose launcher is not installed is
reported and not run. `--docs` writes the first ten lines of a report for each framework into a page.
"""

from __future__ import annotations

import argparse
import csv
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
STEPS, LATE_MS, LIMIT_S, TIMED_OUT = 60, 50, 400, 124
STAGE = {"data": "data", "forward": "forward", "between": "post_sync"}
INNOCENT = {"optimizer", "checkpoint", "evaluation", "all_reduce", "barrier"}
"""Parts that are never late here."""
FALSE = {
    "no data wait was seen": "says that no data wait was seen",
    "do not exchange": "says that the ranks exchange nothing",
}
MARK = "<!-- what follows is written by tests/frameworks/run.py -->\n"
BIN = f"{Path(sys.executable).parent}/"
MPI = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
MPI["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
LAUNCHERS = {
    "deepspeed": "deepspeed --num_gpus 2",
    "accelerate launch": "accelerate launch --cpu --num_processes 2 --mpirun_hostfile hosts",
    "mpirun": "mpirun -np 2 python",
    "torchrun on 2 nodes": "python -m torch.distributed.run --nnodes 2 --node-rank {node} "
    "--nproc-per-node 1 --master-port 29518",
}
"""Commands that start two ranks, or one on each of two nodes. On CPUs `accelerate launch` does so by MPI."""
NAMES = {
    "hf_trainer": "Hugging Face Trainer",
    "accelerate_loop": "Accelerate",
    "lightning_fit": "Lightning",
    "timm_loop": "timm",
    "ignite_engine": "PyTorch-Ignite",
    "trl_sft": "TRL and PEFT",
    "deepspeed_zero": "DeepSpeed",
    "titan_chunked": "torchtitan's chunked loss",
    "gan_loop": "A GAN in plain torch",
    "actor_critic": "Actor and critic in plain torch",
    "ray_hf": "Ray Train with Hugging Face and Ray Data",
    "ray_lightning": "Ray Train with Lightning",
    "ray_data": "Ray Train with Ray Data",
}

ABORTED = "terminate called without an active exception"
"""Now and then written by a process of torch's that ends, with or without a monitor."""


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
        launcher = self.launcher.replace(" ", "-") if self.launcher != "torchrun" else ""
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

    @property
    def steps(self) -> int:
        """Iterations of the loop; optimizer steps, where there is one optimizer."""
        return 4 * STEPS if self.live else STEPS

    @property
    def live(self) -> bool:
        """Whether Ray has to be up while it runs: for a verdict in a log, or for the rows of another node."""
        return "adapter" in self.features or "nodes" in self.launcher

    @property
    def missing(self) -> str:
        """The program that its launcher needs and that is not here; "" if all is."""
        needed = "mpirun" if self.launcher in ("accelerate launch", "mpirun") else ""
        return needed if needed and shutil.which(needed) is None else ""

    def command(self, out: Path, monitor: bool) -> list[str]:
        """Return the command line, files going to `out`."""
        script = [f"{HERE}/scripts/{self.script}.py", *f"--out {out} --steps {self.steps}".split()]
        script += (
            f"--late {self.late} --late-rank {self.rank} --late-ms {self.late_ms} {self.features}".split()
        )
        alone = [] if monitor else ["--no-monitor"]
        if self.script.startswith("ray_"):
            return [sys.executable, *script, *alone]
        files = ["--session", "session", "--out", str(out), *alone]
        if self.launcher == "torchrun":
            return [sys.executable, "-m", "traceml_ray.launch", *files, "--nproc-per-node", "2", *script]
        arguments = [
            BIN + word if Path(BIN + word).exists() else word for word in LAUNCHERS[self.launcher].split()
        ]
        run = [sys.executable, "-m", "traceml_ray.cli", "run", *files]
        if "{node}" not in arguments:
            return [*run, "--", *arguments, *script]
        nodes = ["--nnodes", "2", "--node-rank", "{node}", "--master-addr", "127.0.0.1"]
        first, second = (
            shlex.join(word.replace("{node}", node) for word in (*run, *nodes, "--", *arguments, *script))
            for node in "01"
        )
        return ["bash", "-c", f"{second} & {first} && wait $!"]


def cases() -> list[Case]:
    """Return every case."""
    everywhere = [("data", 1), ("forward", 0), ("between", 1)]
    cases_to_run = [Case(script, late, rank) for script in NAMES for late, rank in everywhere]
    cases_to_run += [
        Case("deepspeed_zero", late, 1, f"--zero {zero}") for zero, late in ((1, "data"), (2, "forward"))
    ]
    for script in ("hf_trainer", "accelerate_loop", "lightning_fit"):
        cases_to_run += [
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
    cases_to_run += [Case(script, "data", 0, "dispatch") for script in ("hf_trainer", "accelerate_loop")]
    cases_to_run += [
        Case("gan_loop", "none", 0),
        Case("gan_loop", "data", 1, "validate"),
        Case("gan_loop", "data", 0, "workers"),
        Case("actor_critic", "none", 0),
        Case("actor_critic", "data", 0, "checkpoint"),
    ]
    for script in ("timm_loop", "trl_sft", "deepspeed_zero", "titan_chunked"):
        cases_to_run.append(Case(script, "forward", 1, "accumulate"))
    cases_to_run += [
        Case(script, "forward", 0, "validate") for script in ("ignite_engine", "ray_hf", "ray_lightning")
    ]
    cases_to_run += [
        Case("deepspeed_zero", "data", 1, launcher="deepspeed"),
        Case("accelerate_loop", "data", 1, launcher="accelerate launch"),
        Case("accelerate_loop", "forward", 0, launcher="mpirun"),
        Case("hf_trainer", "data", 1, launcher="mpirun"),
        Case("timm_loop", "data", 1, launcher="torchrun on 2 nodes"),
        Case("hf_trainer", "data", 1, "adapter accumulate checkpoint"),
        Case("hf_trainer", "forward", 0, "adapter validate checkpoint"),
        Case("lightning_fit", "data", 1, "adapter accumulate"),
        Case("lightning_fit", "forward", 0, "adapter validate checkpoint"),
    ]
    return cases_to_run


class Ended(NamedTuple):
    """How a run ended, and what it left."""

    code: int
    losses: dict[str, Any]
    summary: dict[str, Any]
    report: str
    log: list[dict[str, Any]]
    """What the framework logged: a mapping each time."""
    output: str


def run(case: Case, root: Path, monitor: bool) -> Ended:
    """Run a case in a folder of its own."""
    out = root / ("watched" if monitor else "plain") / case.name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "hosts").write_text("localhost slots=2\n")
    environment = {
        **os.environ,
        **MPI,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"TRACEML_NICE": "0"} if case.live else {}),
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
            code = TIMED_OUT
        finally:
            if process.poll() is None:  # a launcher ends its ranks
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    losses = {path.name: json.loads(path.read_text()) for path in sorted(out.glob("losses-*.json"))}
    session = out / "session"
    summary = session / "summary.json"
    output = (out / "log").read_text(errors="replace")
    if not summary.is_file():
        return Ended(code, losses, {}, "", [], output)
    report = (session / "report.txt").read_text()
    return Ended(code, losses, json.loads(summary.read_text()), report, logged(out), output)


def baseline(case: Case, root: Path) -> Ended:
    """Run a case without a monitor; again where torch aborted or hung at exit, when the training was over."""
    for _ in range(3):
        ended = run(case, root, monitor=False)
        at_exit = ABORTED in ended.output or ended.code == TIMED_OUT
        if not (ended.code and len(ended.losses) == 2 and at_exit):
            break
        print(f"{case.name} without a monitor: failed at exit, run again", file=sys.stderr, flush=True)
    return ended


def logged(out: Path) -> list[dict[str, Any]]:
    """Return what the framework's own log of a run has: the Trainer's state, or Lightning's CSV."""
    for path in sorted(out.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)[
        -1:
    ]:
        return list(json.loads(path.read_text())["log_history"])
    for path in out.glob("lightning_logs/*/metrics.csv"):
        with path.open() as file:
            return list(csv.DictReader(file))
    return []


def wrong(case: Case, watched: Ended, plain: Ended) -> list[str]:
    """Return what is wrong, in words."""
    if watched.code != plain.code or plain.code:
        return [f"exit {watched.code}, without the monitor {plain.code}"]
    if not watched.summary:
        return ["no session was left"]
    steps, verdict = watched.summary["steps"], watched.summary["verdict"]
    problems = []
    if watched.losses != plain.losses or len(plain.losses) != 2:
        problems.append("losses differ")
    truth = ("straggler", STAGE[case.late], case.rank) if case.late != "none" else ("healthy", None, None)
    if (verdict["label"], verdict["stage"], verdict["rank"]) != truth:
        problems.append(f"says {verdict_line(verdict)}")
    if verdict["span"] in INNOCENT:
        problems.append(f"look at `{verdict['span']}` first")
    if (steps["count"], steps["covers"]["to_step"]) != (case.steps, case.steps - 1):
        problems.append(f"{steps['count']} steps of {case.steps}, the last is {steps['covers']['to_step']}")
    if "adapter" in case.features:
        problems += wrong_in_log(case, watched)
    if case.late != "none" and (steps["median_ms"] or 0) < LATE_MS / 2:
        problems.append(f"median step {steps['median_ms']} ms")
    if "network" in json.dumps(verdict["machine"]):
        problems.append("its own traffic as an anomaly")
    text = " ".join(watched.report.split()).lower()
    return problems + [words for phrase, words in FALSE.items() if phrase in text]


def wrong_in_log(case: Case, watched: Ended) -> list[str]:
    """Return what is wrong of the verdict in the framework's own log."""
    rows = [row for row in watched.log if row.get("traceml/step_ms")]
    if not rows:
        return ["no verdict in the framework's log"]
    row = {
        name: float(value) for name, value in rows[-1].items() if name.startswith("traceml/") and value != ""
    }
    problems = []
    if row.get("traceml/late_rank") != case.rank:
        problems.append(f"its log names {row.get('traceml/late_rank')}")
    micro = 2 if "accumulate" in case.features else 1
    if row.get("traceml/micro_batches") != micro:
        problems.append(f"its log counts {row.get('traceml/micro_batches')} micro-batches in a step")
    if not 0.7 < row["traceml/step_ms"] / watched.summary["verdict"]["mean_step_ms"] < 1.4:
        problems.append(f"its log says {row['traceml/step_ms']} ms a step")
    if watched.output.count(f"traceml-ray: straggler: rank {case.rank} ") < 2:  # the launcher's own is one
        problems.append("no sentence in its output")
    return problems


def verdict_line(verdict: dict[str, Any]) -> str:
    """Return a verdict in short."""
    where = f" in {verdict['stage']}" if verdict["stage"] else ""
    return str(verdict["label"]) + (f" rank {verdict['rank']}" if verdict["rank"] is not None else "") + where


def row(case: Case, watched: Ended | None, problems: list[str]) -> str:
    """Return the case's line of the table."""
    summary = watched.summary if watched else {}
    cost = summary.get("overhead", {}).get("training_thread_us_per_step")
    count = summary.get("steps", {}).get("count")
    planted = f"rank {case.rank}, {case.late}" if case.late != "none" else "nothing"
    launcher = f"`{case.launcher}` " if case.launcher != "torchrun" else ""
    features = launcher + case.features.replace("--", "")
    verdict = verdict_line(summary["verdict"]) if summary else "none"
    cost_text = "" if cost is None else f"{cost:.0f}"
    result = "; ".join(problems) or "right"
    return f"| {NAMES[case.script]} | {features} | {planted} | {verdict} | {count} | {cost_text} | {result} |"


def page(root: Path) -> str:
    """Return the first ten lines of a report of each framework that was run, the command before each."""
    text = ""
    for script, title in NAMES.items():
        reports = [(case, root / "watched" / case.name / "session" / "report.txt") for case in cases()]
        reports_of_script = [
            (case, path) for case, path in reports if case.script == script and path.is_file()
        ]
        for case, path in reports_of_script[:1]:
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
    parser.add_argument(
        "--only", default="", help="only cases whose names begin with one of these, separated by commas"
    )
    parser.add_argument(
        "--keep", type=Path, default=Path("build/frameworks"), help="folder for the files of the runs"
    )
    parser.add_argument("--docs", type=Path, help="page to write the first lines of the reports into")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    args = parser.parse_args()
    chosen = [case for case in cases() if case.name.startswith(tuple(args.only.split(",")))]
    if args.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    plain: dict[Case, Ended] = {}
    failed, here = 0, [case for case in chosen if not case.missing]
    print(
        "| framework | with | planted | verdict | steps | µs a step | result |\n|---|---|---|---|---|---|---|"
    )
    for case in chosen:
        if case.missing:
            print(row(case, None, [f"not run: {case.missing} is not here"]))
            continue
        if case.plain not in plain:
            plain[case.plain] = baseline(case.plain, args.keep.absolute())
        watched = run(case, args.keep.absolute(), monitor=True)
        problems = wrong(case, watched, plain[case.plain])
        failed += bool(problems)
        print(row(case, watched, problems), flush=True)
    print(f"\n{len(here) - failed} of {len(here)} cases right, {len(chosen) - len(here)} not run")
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from figures import publish

    counts = [
        ("cases right", f"{len(here) - failed} of {len(here)}"),
        ("cases not run", len(chosen) - len(here)),
    ]
    publish("frameworks", ("what", "measured"), counts)
    if args.docs:
        before = args.docs.read_text().split(MARK)[0]
        args.docs.write_text(before + MARK + page(args.keep))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
