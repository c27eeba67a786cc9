"""The main job, end to end: an unchanged script under the launcher, a planted fault, a true verdict."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from traceml_ray.analysis.uneven_work import amounts
from traceml_ray.store.session_file import SessionFile

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
GAIN_TOLERANCE = 0.20
SMALL = ("--layers", "2", "--width", "64", "--context", "32", "--batch-size", "4")
"""
A model that leaves cores idle: where ranks fight for them, one that sleeps lets the others run faster, and
a planted millisecond does not cost the job one.
"""


def launch(
    out: Path,
    session: str,
    ranks: int,
    steps: int,
    *arguments: str,
    flags: tuple[str, ...] = (),
    script: tuple[str, ...] = (str(SCRIPT),),
) -> subprocess.CompletedProcess[str]:
    """Run the example under the launcher; the finished process."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "traceml_ray.launch", "--nproc-per-node", str(ranks)),
            *("--out", str(out), "--session", session, *flags),
            *(*script, "--steps", str(steps), *arguments),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=out,
        capture_output=True,
        text=True,
        timeout=240,
    )


def summary_of(out: Path, session: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / session / "summary.json").read_text())
    return summary


def check_ledger(summary: dict[str, Any], ranks: int, steps: int) -> None:
    ledger = summary["ledger"]
    assert ledger["produced"] == ledger["stored"] == ranks * steps
    assert ledger["in_flight"] == 0
    assert ledger["dropped"] == {"agent": 0, "relay": 0, "aggregator": 0}


def lengths_of(ranks: int, steps: int) -> list[list[int]]:
    """How long the batches of each rank are in each step (S, R), with --lengths."""
    example = runpy.run_path(str(SCRIPT))
    _, _, context, batch = (int(number) for number in SMALL[1::2])
    args = argparse.Namespace(context=context, batch_size=batch, seed=0, workers=0, lengths=True)
    made = []
    for rank in range(ranks):
        me = example["Process"](rank, ranks, torch.device("cpu"))
        batches, _ = example["loaders"](args, me, example["Faults"]([], None, rank))
        made.append([tokens.shape[1] for tokens, _ in itertools.islice(batches, steps)])
    return [list(step) for step in zip(*made, strict=True)]


def check_sizes(out: Path, lengths: list[list[int]]) -> None:
    """Check that the size of each rank's batch is stored for each step."""
    batch = int(SMALL[-1])
    with SessionFile(out / "s" / "session.sqlite") as file:
        processes = {process.id: rank for rank, process in file.ranks().items()}
        stored = file.step_sizes(processes, np.arange(len(lengths)))
    pieces = {processes[process]: sizes for process, sizes in stored.items()}
    totals = amounts(pieces, range(len(processes)), np.arange(len(lengths)))
    assert totals["tokens"].tolist() == [[batch * length for length in step] for step in lengths]
    assert (totals["samples"] == batch).all()


def check_throughput(throughput: dict[str, Any], ranks: int, printed: str, lengths: list[list[int]]) -> None:
    """Check it against a count by hand, and the pace that the script itself prints."""
    layers, width, _, batch = (int(number) for number in SMALL[1::2])
    warm = lengths[10:]
    tokens = batch * sum(map(sum, warm)) / len(warm)
    weights = layers * 12 * width * width + width * 256
    products = layers * (2 + 5) * 2 * batch * width  # of attention, forward and backward
    flops = 3 * 2 * weights * batch * sum(lengths[2]) + products * sum(length**2 for length in lengths[2])
    assert throughput["samples_per_step"] == ranks * batch
    assert throughput["tokens_per_step"] == pytest.approx(
        tokens, rel=0.05
    )  # of pieces that are partly inside
    assert (throughput["step_flops"], throughput["flops_step"], throughput["dtype"]) == (flops, 2, "float32")
    pace = [float(ms) for ms in re.findall(r"([\d.]+) ms/step", printed)][1:]
    steps_per_s = 1e3 * len(pace) / sum(pace)
    assert throughput["tokens_per_s"] == pytest.approx(throughput["tokens_per_step"] * steps_per_s, rel=0.05)
    assert throughput["mfu_pct"] == pytest.approx(100 * flops * steps_per_s / (ranks * 0.5e12), rel=0.05)
    assert (throughput["why"], throughput["total_steps"], throughput["eta_s"]) == ({}, 80, None)


@pytest.mark.parametrize(
    ("fault", "rank", "ms", "ranks", "steps", "stage"),
    [
        pytest.param("backward", 1, 60, 2, 70, "backward", marks=pytest.mark.long),
        pytest.param("optimizer", 2, 30, 3, 80, "post_sync", marks=pytest.mark.long),
    ],
)
def test_planted_fault_is_named_with_its_cost(
    tmp_path: Path, fault: str, rank: int, ms: int, ranks: int, steps: int, stage: str
) -> None:
    done = launch(tmp_path, "s", ranks, steps, "--slow", f"{fault}:{rank}:{ms}", *SMALL)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = summary_of(tmp_path, "s")
    verdict = summary["verdict"]
    named = (verdict["label"], verdict["stage"], verdict["rank"])
    assert named == ("straggler", stage, rank), verdict["why"]
    mean_step_ms = sum(stage["exposed_ms"] for stage in summary["stages"])
    planted = ms / mean_step_ms
    assert verdict["cost_pct"] / 100 == pytest.approx(planted, rel=GAIN_TOLERANCE)
    assert summary["session"]["status"] == "finished"
    check_ledger(summary, ranks, steps)
    assert f"straggler: rank {rank}" in done.stderr.replace(f" ({os.uname().nodename})", "")


def test_healthy_run_names_no_rank(tmp_path: Path) -> None:
    """That it trains as without a monitor, to the bit: see `test_chaos`."""
    ranks = 2
    alike = [f"--slow=data:{rank}:30" for rank in range(ranks)]  # a core that another takes costs little
    flags = "--flops", "--peak-tflops", "0.5", "--total-steps", "80"
    done = launch(tmp_path, "s", ranks, 80, *alike, "--lengths", *SMALL, flags=flags)
    assert done.returncode == 0, done.stderr[-4000:]
    summary, lengths = summary_of(tmp_path, "s"), lengths_of(ranks, 80)
    check_throughput(summary["throughput"], ranks, done.stdout, lengths)
    check_sizes(tmp_path, lengths)
    verdict = summary["verdict"]  # where others use the cores, one or the other may well be late in turn
    assert (verdict["label"], verdict["rank"]) in (("healthy", None), ("ambiguous", None)), verdict["why"]
    check_ledger(summary, ranks, 80)


UNEVEN = ("--lengths", "--layers", "3", "--width", "128", "--context", "512", "--batch-size", "4")
"""Batches of very different length, whose steps are long beside what else a machine does."""


@pytest.mark.long
@pytest.mark.parametrize("late_ms", [0, 120])
def test_lengths_that_vary_are_an_imbalance_and_a_late_rank_beside_it_is_named(
    tmp_path: Path, late_ms: int
) -> None:
    slow = ("--slow", f"data:1:{late_ms}") if late_ms else ()
    done = launch(tmp_path, "s", 2, 250, *UNEVEN, *slow)
    assert done.returncode == 0, done.stderr[-4000:]
    verdict = summary_of(tmp_path, "s")["verdict"]
    findings = {finding["label"]: finding for finding in (verdict, *verdict["also"])}
    if late_ms:
        late = findings["straggler"]
        assert (late["stage"], late["rank"]) == ("data", 1), late["why"]
    else:
        assert {*findings} == {"imbalance"}, verdict["why"]
        assert {*verdict["stages"]} <= {"forward", "backward"}
        reason = verdict["reason"]
        assert (reason["what"], reason["samples"], reason["unknown_ranks"]) == ("tokens", None, [])
        assert reason["share"] > 0.5 and reason["in_compute"] > 0.9


@pytest.mark.long
def test_actor_channel_names_the_planted_fault(tmp_path: Path) -> None:
    """Ranks that attach to Ray while they train; the script around the example says whether they did."""
    around = tmp_path / "around.py"
    around.write_text(
        "import os, runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "ray = sys.modules.get('ray')\n"
        "told = [name for name in os.environ if name.startswith('RAY')]\n"
        "sys.stdout.write(f'attached {ray is not None and ray.is_initialized()} {told}\\n')\n"
    )
    losses = {}
    for name, flags in (("watched", ("--channel", "actor")), ("plain", ("--no-monitor",))):
        log = tmp_path / name
        arguments = ("--slow", "data:1:30", "--loss-log", str(log), *SMALL)
        done = launch(tmp_path, "s", 2, 260, *arguments, flags=flags, script=(str(around), str(SCRIPT)))
        assert done.returncode == 0, done.stderr[-4000:]
        losses[name] = log.read_text(), log.with_name(f"{name}.rank1").read_text()
        assert done.stdout.count("attached True []") == (2 if name == "watched" else 0), done.stdout[-500:]
    assert losses["watched"] == losses["plain"]
    summary = summary_of(tmp_path, "s")
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["stage"], verdict["rank"]) == ("straggler", "data", 1), verdict["why"]
    check_ledger(summary, 2, 260)


@pytest.mark.long
@pytest.mark.parametrize(("channel", "step"), [("socket", 30), ("actor", 350)])
def test_script_that_raises_keeps_its_traceback_and_exit_code(
    tmp_path: Path, channel: str, step: int
) -> None:
    arguments = ("--fail", f"1:{step}", *SMALL)
    watched = launch(tmp_path, "s", 2, 2 * step, *arguments, flags=("--channel", channel))
    plain = launch(tmp_path, "s", 2, 2 * step, *arguments, flags=("--no-monitor",))
    assert watched.returncode == plain.returncode == 1

    def traceback_of(text: str) -> list[str]:
        lines = [line.partition("]:")[2] for line in text.splitlines() if line.startswith("[rank1]:")]
        return [re.sub(r"0x[0-9a-f]+", "", line) for line in lines]

    assert traceback_of(watched.stderr) == traceback_of(plain.stderr) != []
    summary = summary_of(tmp_path, "s")
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["rank"]) == ("rank_lost", 1), verdict["why"]
    assert step - 2 <= verdict["last_step"] <= step
    assert "RuntimeError" in verdict["exit_reason"]
    assert summary["session"]["status"] == "failed"
