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

import traceml_ray
from traceml_ray import cli
from traceml_ray.agent.bootstrap import rank_environment
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.relay import RelayCore
from traceml_ray.settings import RelayPaths, Settings
from traceml_ray.store.bundles import Bundle, bundles_of
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

WORLD, FAILS = 2, 1
GROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
LIMITS = "memory.limit_in_bytes", "memory.max"
LIMIT = 3 << 28
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

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder, self.settings = folder / "s", Settings(interval=0.25)
        self.folder.mkdir()
        self.aggregator = AggregatorCore(self.folder, self.settings, {"world_size": WORLD})
        socket = folder / "run" / "relay.sock"
        node = wire.NodeIdentity("node-0", "host-0", "127.0.0.1")
        self.relay = RelayCore(socket, node, Straight(self.aggregator), NoSamples(), self.settings)
        (folder / "train.py").write_text(SCRIPT)
        environ = rank_environment(
            Settings(session="s", interval=0.25), RelayPaths(str(socket)), dict(os.environ)
        )
        environ |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "train.py", fault],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=folder,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(WORLD)
        ]

    def watch(self) -> tuple[Bundle, list[str]]:
        """Watch the ranks to their end; the bundle, and the first lines of the report."""
        end, judge_at = time.monotonic() + 60, 0.0
        while any(rank.poll() is None for rank in self.ranks) or self.relay._connections.ranks_connected:
            assert time.monotonic() < end
            self.relay.poll(0.05)
            if time.monotonic() > judge_at:
                judge_at = time.monotonic() + 0.25
                self.aggregator.commit()
                self.aggregator.judge()
        for _ in range(3):
            self.relay.poll(0.3)
        failures = [
            wire.RankFailure(rank, rank, process.pid, process.returncode, time.time_ns())
            for rank, process in enumerate(self.ranks)
        ]
        self.aggregator.finish(wire.Finish(codec.VERSION, 1, failures))
        assert not any("bundle" in place for place in self.aggregator.errors)
        (bundle,) = bundles_of(self.folder)
        report = (self.folder / "report.txt").read_text()
        assert f"bundles/{bundle.path.name}" in report
        return bundle, report.splitlines()

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait(240)
        self.relay.close()
        self.aggregator.close()


@contextlib.contextmanager
def job(fault: str) -> Iterator[Job]:
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        contextlib.closing(Job(Path(name), fault)) as made,
    ):
        yield made


def check(bundle: Bundle, world: int = WORLD) -> None:
    """The last seconds of all ranks are there; of one that was killed, all but its last tick."""
    with SessionFile(bundle.path / "session.sqlite") as file:
        rows, _ = file.rows()
        assert {rank_rows.rank: len(rank_rows.keys) >= 80 for rank_rows in rows} == dict.fromkeys(
            range(world), True
        )
        samples, _ = file.memory_samples()
        last = {rank_samples.process: rank_samples.t_ns[-1] for rank_samples in samples}
        assert last.keys() == {process.id for process in file.processes()}
        assert max(last.values()) - min(last.values()) < 20e9
    values = bundle.manifest.environment[0]["values"]
    assert {"torch", "python", "traceml_ray"} <= values.keys()
    assert bundle.manifest.memory_from[0]["values"]["rss_bytes"] == "kernel"


LAUNCHED = """
import os
import signal
import sys
import time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

bad, go, group = os.environ["RANK"] == "1", Path(sys.argv[1]), sys.argv[2:]
if bad and group:
    Path(group[0], "cgroup.procs").write_text(str(os.getpid()))
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
held = []
for step in range(4000):
    time.sleep(0.02)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if bad and go.exists():
        time.sleep(0.2)  # it is sampled once a second: some samples are of its growth
        held.append(bytearray(b"x") * (1 << 26))
        if not group and len(held) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_three_ranks_under_the_launcher_leave_a_bundle_on_request_and_one_of_their_end(
    tmp_path: Path, group: Path | None
) -> None:
    (tmp_path / "train.py").write_text(LAUNCHED)
    command = [sys.executable, "-m", "traceml_ray.launch", "--nproc-per-node", "3", "--out", str(tmp_path)]
    arguments = ["--session", "s", "train.py", "go", *([str(group)] if group else [])]
    folder, began = tmp_path / "s", time.monotonic()
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            [*command, *arguments], cwd=tmp_path, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        while not _reported(folder, 3):
            assert job.poll() is None and time.monotonic() < began + 60, (tmp_path / "log").read_text()
            time.sleep(0.1)
        assert cli.main(["dump", str(folder)]) == 0
        (requested,) = bundles_of(folder)
        (tmp_path / "go").touch()
        assert job.wait(240) == 1
    finally:
        job.terminate()
        job.wait(240)
    stacks = (requested.path / "stacks.txt").read_text()
    assert [stacks.count(f"rank {rank} (") for rank in range(3)] == [1, 1, 1]
    assert traceml_ray.analyze(requested.path).sources[0].ranks == [0, 1, 2]
    _, ended = bundles_of(folder)
    check(ended, 3)
    how = ("oom", "memory ran out") if group else ("killed", "SIGKILL")
    assert (requested.manifest.reason, ended.manifest.reason, ended.manifest.rank) == ("request", how[0], 1)
    report = (folder / "report.txt").read_text()
    assert "rank 1" in report.splitlines()[2] and how[1] in report.splitlines()[2]
    assert "Rank 1's host memory " in " ".join(report.split()), "what it took at its end is said"
    with SessionFile(folder / "session.sqlite") as file:
        reduced = [(group["name"], group["process_group"], group["bytes"]) for group in file.groups()]
    assert reduced.count(("all_reduce of gradients", "world", 20)) == 3


def _reported(folder: Path, ranks: int) -> bool:
    """Whether so many ranks have steps and samples on disk."""
    with contextlib.suppress(SessionFileError), SessionFile(folder / "session.sqlite") as file:
        rows, _ = file.rows()
        return sum(len(rank_rows.keys) >= 80 for rank_rows in rows) == ranks
    return False


@pytest.mark.long
def test_killed_rank_leaves_the_last_seconds_of_all_ranks() -> None:
    with job("killed") as one:
        bundle, report = one.watch()
        check(bundle)
    manifest = bundle.manifest
    assert (manifest.reason, manifest.rank, manifest.exception) == ("killed", FAILS, None)
    assert manifest.ranks["1"]["exit_reason"] == "SIGKILL"
    assert "rank 1" in report[2] and "SIGKILL" in report[2]


def test_error_of_memory_is_noted_where_it_was_and_raised_on() -> None:
    with job("raises") as one:
        bundle, report = one.watch()
        check(bundle)
    manifest = bundle.manifest
    assert (manifest.reason, manifest.rank, manifest.exception) == ("oom", FAILS, "MemoryError: ")
    assert manifest.traceback is not None and "bytearray(1 << 62)" in manifest.traceback
    assert "big batch" in [cause.where for cause in manifest.causes]
    assert "rank 1" in report[2] and "MemoryError" in report[2]


@pytest.fixture
def group() -> Iterator[Path | None]:
    """A cgroup with a limit; None where none can be made."""
    place = next((place for place in GROUPS if (place / "cgroup.procs").exists()), None)
    made = place / f"traceml-{uuid.uuid4().hex}" if place is not None else None
    try:
        if made is not None:
            made.mkdir()
            limits = [made / name for name in LIMITS if (made / name).exists()]
            limits[0].write_text(str(LIMIT))
    except (OSError, IndexError):  # not root, or no controller of memory
        if made is not None and made.exists():
            made.rmdir()
        made = None
    yield made
    if made is not None:
        made.rmdir()
