"""Ranks that stop, wait in vain, are killed or run out of memory: real DDP under the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import NoSamples, Rank, Straight
from torch import nn

from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.relay import RelayCore
from traceml_ray.settings import Settings
from traceml_ray.stages import BACKWARD
from traceml_ray.store.bundles import bundles_of
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import messages as wire

SCRIPT = """
import os
import resource
import sys
import time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder, fault, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank = int(os.environ["RANK"])


def all_here():
    dist.barrier()  # of every rank but one


def take_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
    return torch.empty(1 << 33, dtype=torch.uint8)


def train(at):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4000):
        time.sleep(0.01)
        loss = model(torch.full((2, 4), step % 5 / 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if at < 0 and (folder / "at").exists():
            at = int((folder / "at").read_text())
        if step == at and fault == "skip":
            (folder / f"weights.{rank}").write_text(repr(model.module.weight.flatten().tolist()))
            if rank != 1:
                all_here()
        if step == at and fault == "memory" and rank == 1:
            take_memory()


(folder / f"pid.{rank}").write_text(str(os.getpid()))
dist.init_process_group("gloo")
train(at)
"""


class Launch:
    """One launch of the script; `environ` makes hangs short."""

    def __init__(self, folder: Path, ranks: int, fault: str, at_step: int = -1) -> None:
        self.folder = folder
        script = folder / "train.py"
        script.write_text(SCRIPT)
        self.line = {line.strip(): number for number, line in enumerate(SCRIPT.splitlines(), 1)}
        environ = {
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),
            "TRACEML_INTERVAL": "0.25",
            "TRACEML_THRESHOLD_HANG_TIMEOUT_S": "2",
            "TRACEML_THRESHOLD_REPORT_TIMEOUT_S": "1.6",
        }
        flags = ("--nproc-per-node", str(ranks), "--out", str(folder), "--session", "s")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "traceml_ray.launch", *flags, script, folder, fault, str(at_step)],
            env={**os.environ, **environ},
            cwd=folder,
            stderr=(folder / "stderr").open("w"),
            stdout=subprocess.DEVNULL,
        )

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid.{rank}").read_text())

    def fault_at(self, step: int) -> None:
        """Have the fault in this step, which is to come."""
        (self.folder / "new").write_text(str(step))
        (self.folder / "new").rename(self.folder / "at")

    def verdicts(self) -> list[dict[str, Any]]:
        """What was judged live so far."""
        with (
            contextlib.suppress(SessionFileError),
            SessionFile(self.folder / "s" / "session.sqlite") as session,
        ):
            return session.verdicts()[0]
        return []

    def hangs(self) -> list[dict[str, Any]]:
        return [verdict for verdict in self.verdicts() if verdict["began_ns"]]

    def seen(self, rank: int) -> int:
        """How many rows of a rank are stored."""
        with (
            contextlib.suppress(SessionFileError),
            SessionFile(self.folder / "s" / "session.sqlite") as session,
        ):
            process = session.ranks().get(rank)
            return process.stored if process else 0
        return 0

    def until(self, done: Callable[[], Any], seconds: float = 90.0) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if result := done():
                return result
            assert self.process.poll() is None, (self.folder / "stderr").read_text()[-3000:]
            time.sleep(0.1)
        raise AssertionError([(v["label"], v["why"]) for v in self.verdicts()])

    def end(self) -> dict[str, Any]:
        self.process.wait(240)
        summary: dict[str, Any] = json.loads((self.folder / "s" / "summary.json").read_text())
        return summary

    def report(self) -> str:
        return (self.folder / "s" / "report.txt").read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(*what: Any) -> Launch:
        started.append(Launch(tmp_path, *what))
        return started[0]

    yield start
    for one in started:
        for rank in range(3):
            with contextlib.suppress(OSError, ValueError):
                os.kill(one.pid(rank), signal.SIGCONT)
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(240)


def weights(steps: int) -> list[float]:
    """What one process gets that trains alone on the same numbers."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        model(torch.full((2, 4), step % 5 / 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights: list[float] = model.weight.flatten().tolist()
    return weights


@pytest.mark.alone
def test_stopped_rank_goes_on_and_a_skipped_collective_does_not(launch: Callable[..., Launch]) -> None:
    job = launch(3, "skip")
    job.until(lambda: job.seen(1) > 30)
    os.kill(job.pid(1), signal.SIGSTOP)
    job.until(lambda: any(hang["stacks"] for hang in job.hangs()))
    hangs = job.hangs()
    assert {(hang["label"], hang["rank"]) for hang in hangs} == {("hang", 1)}
    assert "stopped (SIGSTOP)" in hangs[-1]["why"]
    *spied, others = hangs[-1]["stacks"]
    assert [stack["ranks"] for stack in spied] in ([], [[1]])  # py-spy may be installed
    assert others["ranks"] == [0, 2]
    assert f"train.py:{job.line['loss.backward()']} in train" in others["text"]
    os.kill(job.pid(1), signal.SIGCONT)
    job.until(lambda: job.hangs()[-1]["lasted_s"])
    step = job.seen(1) + 100
    job.fault_at(step)

    # Rank 1 leaves a barrier out: it waits for gradients, the others for the barrier.
    job.until(lambda: len({h["began_ns"] for h in job.hangs()}) == 2 and job.hangs()[-1]["stacks"])
    job.process.send_signal(signal.SIGTERM)
    summary = job.end()
    for rank in range(3):
        got = json.loads((job.folder / f"weights.{rank}").read_text())
        assert got == pytest.approx(weights(step + 1), rel=1e-3)
    verdict = summary["verdict"]
    named = verdict["label"], verdict["rank"], verdict["ranks"], verdict["stage"]
    assert named == ("hang", 1, [1], "sync_wait"), verdict["why"]
    barrier, backward = job.line["dist.barrier()  # of every rank but one"], job.line["loss.backward()"]
    assert f"the other 2 call barrier at all_here (train.py:{barrier})" in verdict["why"]
    assert f"rank 1 calls all_reduce at train (train.py:{backward})" in verdict["why"]
    assert [stack["ranks"] for stack in verdict["stacks"]] == [[1], [0, 2]]
    history = [(v["label"], v["lasted_s"] is None) for v in summary["verdicts"] if v["label"] == "hang"]
    assert history == [("hang", False), ("hang", True)]
    report = job.report()
    assert f"train.py:{barrier} in all_here" in report
    assert f"train.py:{backward} in train" in report
    assert {event["rank"] for event in summary["events"] if event["kind"] == "stacks"} == {0, 1, 2}


@pytest.mark.long
@pytest.mark.alone
def test_killed_rank_is_named_at_once_with_its_signal(launch: Callable[..., Launch]) -> None:
    job = launch(2, "none")
    job.until(lambda: job.seen(1) > 30)
    os.kill(job.pid(1), signal.SIGKILL)
    killed, step = time.time(), job.seen(1)
    summary = job.end()
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["rank"], verdict["exit_reason"]) == ("rank_lost", 1, "SIGKILL")
    assert verdict["last_step"] >= step - 1
    assert verdict["open_stage"] is not None
    ended = [e for e in summary["events"] if e["kind"] == "process_ended" and e["rank"] == 1]
    assert ended[0]["data"]["exit_code"] in (-signal.SIGKILL, None), "unless torchrun was quicker"
    assert datetime.fromisoformat(summary["session"]["ended_at"]).timestamp() < killed + 5


RECORDER = """
import json, sys, threading, time
import torch
import torch._inductor  # as an optimizer does
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from traceml_ray.signals.collectives import agent

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
dist.barrier()


def wait():
    all_reduce(torch.ones(4), "sum", [0, 1]).wait()


if rank == 0:
    end = time.monotonic() + 20  # gloo's thread retires the barrier after it let us go
    while not all(call.finished for call in agent.read("h").calls):
        assert time.monotonic() < end
        time.sleep(0.01)
    waiting = threading.Thread(target=wait)
    waiting.start()
    while (newest := agent.read("h").calls[-1]).finished or newest.age_ns < 0.4e9:
        assert time.monotonic() < end
        time.sleep(0.01)
    group = agent.read("h").groups[newest.group]
    print(json.dumps([newest.op, newest.where, newest.age_ns, newest.input_sizes, group.ranks]), flush=True)
    dist.distributed_c10d._get_default_store().set("seen", b"1")
    waiting.join()
else:
    dist.distributed_c10d._get_default_store().wait(["seen"])
    wait()
dist.barrier()
dist.destroy_process_group()
"""


def test_collective_without_a_mark_is_found_in_the_torch_flight_recorder(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(RECORDER)
    command = [sys.executable, tmp_path / "waits.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), tmp_path / "store"], env=environ, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(240)
    assert [rank.returncode for rank in ranks] == [0, 0]
    op, where, age_ns, sizes, members = json.loads(outputs[0])
    line = RECORDER.splitlines().index('    all_reduce(torch.ones(4), "sum", [0, 1]).wait()') + 1
    assert (op, where, sizes, members) == ("all_reduce", f"wait (waits.py:{line})", [[4]], [[0, 2, 1]])
    assert 0.4e9 < age_ns < 30e9


def test_killed_rank_is_named_live_while_the_job_goes_on() -> None:
    with tempfile.TemporaryDirectory(prefix="tr-") as name:
        aggregator = AggregatorCore(Path(name), Settings(), {})
        node = wire.NodeIdentity("node-0", "host-0", "127.0.0.1")
        relay = RelayCore(
            Path(name) / "run" / "relay.sock", node, Straight(aggregator), NoSamples(), Settings()
        )
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        ranks = [Rank(0, 2, pid=os.getpid()), Rank(1, 2, pid=process.pid)]
        try:
            for rank in ranks:
                relay.accept(rank.batch(40, open=wire.OpenStage(40, BACKWARD, 1)))
            relay.poll(0.3)
            process.kill()
            end = time.monotonic() + 5
            while aggregator.verdict is None or aggregator.verdict.label != "rank_lost":
                assert time.monotonic() < end
                relay.poll(0.1)
                aggregator.judge()
            verdict = aggregator.verdict
            assert (verdict.rank, verdict.exit_reason) == (1, "SIGKILL")
            assert (verdict.last_step, verdict.open_stage) == (39, "backward")
        finally:
            process.kill()
            process.wait(240)
            relay.close()
            aggregator.close()


@pytest.mark.long
def test_out_of_memory_is_recognised_by_the_error_of_the_allocator(launch: Callable[..., Launch]) -> None:
    job = launch(2, "memory", 60)
    summary = job.end()
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["rank"], verdict["open_stage"]) == ("oom", 1, "post_sync")
    assert "DefaultCPUAllocator" in verdict["exit_reason"]
    (bundle,) = bundles_of(job.folder / "s")
    assert (bundle.manifest.reason, bundle.manifest.rank) == ("oom", 1)
    assert verdict["last_step"] in (59, 60)
