"""What is left of ranks that are killed or run out of memory: real DDP, relay and aggregator."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sessions import NoSamples, Straight

from traceml_ray import wire
from traceml_ray.agent.bootstrap import rank_environment
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.relay import RelayCore
from traceml_ray.settings import Settings
from traceml_ray.store.bundles import Bundle, bundles_of
from traceml_ray.store.session_file import SessionFile

WORLD, FAILS = 2, 1
GROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
LIMITS = "memory.limit_in_bytes", "memory.max"
LIMIT = 1 << 30
SCRIPT = """
import os
import signal
import sys
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import traceml_ray

fault, rank = sys.argv[1], int(os.environ["RANK"])


def fail():
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raises":
        with traceml_ray.capture_oom("big batch"):
            bytearray(1 << 62)
    held = []
    while True:
        held.append(bytearray(b"x") * (1 << 26))


dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4000):
    time.sleep(0.01)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 120 and rank == 1:
        fail()
"""


class Job:
    """Two ranks, of which the second fails, and what watches them."""

    def __init__(self, folder: Path, fault: str, group: Path | None = None) -> None:
        self.folder, self.settings = folder / "s", Settings(interval=0.25)
        self.folder.mkdir()
        self.aggregator = AggregatorCore(self.folder, self.settings, {"world_size": WORLD})
        socket = folder / "run" / "relay.sock"
        node = wire.NodeIdentity("node-0", "host-0", "127.0.0.1")
        self.relay = RelayCore(socket, node, Straight(self.aggregator), NoSamples(), self.settings)
        (folder / "train.py").write_text(SCRIPT)
        environ = rank_environment(Settings(session="s", socket=str(socket), interval=0.25), dict(os.environ))
        environ |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "train.py", fault],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=folder,
                stderr=subprocess.DEVNULL,
                preexec_fn=(lambda: enter(group)) if rank == FAILS and group else None,
            )
            for rank in range(WORLD)
        ]

    def watch(self) -> tuple[Bundle, list[str]]:
        """Watch the ranks to their end; the bundle, and the first lines of the report."""
        end, judge_at = time.monotonic() + 60, 0.0
        while any(rank.poll() is None for rank in self.ranks) or self.relay._connections.ranks_connected:
            assert time.monotonic() < end
            self.relay.turn(0.05)
            if time.monotonic() > judge_at:
                judge_at = time.monotonic() + 0.25
                self.aggregator.commit()
                self.aggregator.judge()
        for _ in range(3):
            self.relay.turn(0.3)
        failures = [
            wire.RankFailure(rank, rank, each.pid, each.returncode, time.time_ns())
            for rank, each in enumerate(self.ranks)
        ]
        self.aggregator.finish(wire.Finish(wire.VERSION, 1, failures))
        assert not any("bundle" in place for place in self.aggregator.errors)
        (bundle,) = bundles_of(self.folder)
        report = (self.folder / "report.txt").read_text()
        assert f"bundles/{bundle.path.name}" in report
        return bundle, report.splitlines()

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait(10)
        self.relay.close()
        self.aggregator.close()


@contextlib.contextmanager
def job(fault: str, group: Path | None = None) -> Iterator[Job]:
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        contextlib.closing(Job(Path(name), fault, group)) as made,
    ):
        yield made


def check(bundle: Bundle) -> None:
    """The last seconds of all ranks are there; of one that was killed, all but its last tick."""
    with SessionFile(bundle.path / "session.sqlite") as file:
        rows, _ = file.rows()
        assert {of.rank: len(of.keys) >= 80 for of in rows} == dict.fromkeys(range(WORLD), True)
        samples, _ = file.memory_samples()
        last = {of.process: of.t_ns[-1] for of in samples}
        assert last.keys() == {process.id for process in file.processes()}
        assert max(last.values()) - min(last.values()) < 20e9
    values = bundle.manifest.environment[0]["values"]
    assert {"torch", "python", "traceml_ray"} <= values.keys()
    assert bundle.manifest.memory_from[0]["values"]["rss_bytes"] == "kernel"


def test_killed_rank_leaves_the_last_seconds_of_all_ranks() -> None:
    with job("killed") as one:
        bundle, report = one.watch()
        check(bundle)
    found = bundle.manifest
    assert (found.reason, found.rank, found.exception) == ("killed", FAILS, None)
    assert found.ranks["1"]["exit_reason"] == "SIGKILL"
    assert "rank 1" in report[2] and "SIGKILL" in report[2]


def test_error_of_memory_is_noted_where_it_was_and_raised_on() -> None:
    with job("raises") as one:
        bundle, report = one.watch()
        check(bundle)
    found = bundle.manifest
    assert (found.reason, found.rank, found.exception) == ("oom", FAILS, "MemoryError: ")
    assert found.traceback is not None and "bytearray(1 << 62)" in found.traceback
    assert "big batch" in [cause.where for cause in found.causes]
    assert "rank 1" in report[2] and "MemoryError" in report[2]


def enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup with a limit."""
    place = next((place for place in GROUPS if (place / "cgroup.procs").exists()), None)
    if place is None:
        pytest.skip("no cgroups of memory")
    made = place / f"traceml-{uuid.uuid4().hex}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup: {error}")
    try:
        limits = [made / name for name in LIMITS if (made / name).exists()]
        if not limits:
            pytest.skip("no controller of memory")
        limits[0].write_text(str(LIMIT))
        yield made
    finally:
        made.rmdir()


def test_rank_that_the_kernel_kills_at_its_limit_is_out_of_memory(group: Path) -> None:
    with job("takes", group) as one:
        bundle, report = one.watch()
        check(bundle)
    found = bundle.manifest
    assert (found.reason, found.rank, found.exception) == ("oom", FAILS, None)
    assert "rank 1" in report[2] and "memory ran out" in report[2]
