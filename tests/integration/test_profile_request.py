"""Profiles of ranks that train: real DDP, relay and aggregator, asked over the relay's socket."""

from __future__ import annotations

import gzip
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from watched_job import WORLD, Job

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.cli import main
from traceml_ray.launchers.control import ControlError, profile
from traceml_ray.monitor import captures
from traceml_ray.store.profiles import FOLDER, StoredProfile, names_of, profiles_of
from traceml_ray.store.session import prepare
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

SCRIPT = """
import os
import sys
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=3)
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
model = DistributedDataParallel(layers)
if rank == 2:
    layers[2].register_forward_pre_hook(lambda *_: time.sleep(0.02 * os.path.exists("slow")))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while not os.path.exists("over"):
    time.sleep(0.01)
    inputs = torch.ones(4, 32)
    if rank == 1:
        more = torch.ones(int(sys.argv[1]), 100)
        for _ in range(20):
            more = more.cosh().acosh()
        inputs = inputs * more[0, 0]
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    over = torch.tensor(float(os.path.exists("stop")))
    dist.all_reduce(over)
    if over:
        break
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is near here: the first steps need not lie far ahead."""
    monkeypatch.setattr(captures, "AHEAD_S", 1.2)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, SCRIPT, [1], auto_profile=0)
    try:
        yield made
    finally:
        made.close()


def _names(path: Path) -> set[str]:
    with gzip.open(path) as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_ranks_record_the_same_steps_and_training_goes_on(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.wait_for_steps(20)
    stored = job.profile(steps=2)
    ranks = stored.profile.captured
    assert [rank.rank for rank in ranks] == [0, 1, 2], stored.profile.ranks
    steps = [[step.step for step in rank.steps] for rank in ranks]
    assert steps[0] == steps[1] == steps[2] == list(range(*_ends(stored)))
    assert all(step.stages_ns and sum(step.stages_ns) > 0 for rank in ranks for step in rank.steps)
    names = {rank.rank: _names(stored.trace(rank)) for rank in ranks}
    assert "aten::acosh" in names[1] and not any("aten::acosh" in names[rank] for rank in (0, 2))
    message = f"profile {stored.profile.id} of ranks 0-2: 2 steps from step {stored.profile.first_step} on"
    job.wait_for_event(message)
    # Some of the ranks, again; what cannot be is said.
    second = job.profile(ranks="1,7", steps=1, shapes=True)
    assert [(rank.rank, rank.state) for rank in second.profile.ranks] == [(1, "captured"), (7, "refused")]
    out = ["--out", str(job.folder)]
    assert main(["profile", "s", "--list", *out]) == 0
    listed = capsys.readouterr().out
    assert stored.profile.id in listed and second.profile.id in listed
    assert main(["profile", "s", "--remove", second.profile.id, *out]) == 0
    assert names_of(job.session.path) == [stored.profile.id]
    # The layers of some steps, of which one is slow.
    (job.folder / "slow").touch()
    assert main(["layers", "s", "--steps", "30", *out]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Layer 2 \(Linear\) takes \d[.\d]* ms longer on rank 2 \(", shown), shown
    assert re.search(r"Measured in \d+ steps of ranks 0-2", shown), shown
    assert job.end() == [0] * WORLD, job.errors()
    assert job.errors() == [""] * WORLD


def _ends(stored: StoredProfile) -> tuple[int, int]:
    first = stored.profile.first_step
    assert first is not None
    return first, first + stored.profile.n_steps


@pytest.mark.long
def test_rank_that_is_killed_while_it_records_is_named_and_the_others_are_kept(job: Job) -> None:
    job.wait_for_steps(20)
    stored_profiles: list[StoredProfile] = []
    asking = threading.Thread(target=lambda: stored_profiles.append(job.profile(steps=50)))
    asking.start()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not _recording(job):
        time.sleep(0.02)
    job.ranks[2].send_signal(signal.SIGKILL)
    asking.join(240)
    (stored,) = stored_profiles
    states = {rank.rank: rank.state for rank in stored.profile.ranks}
    assert states[2] == "failed" and "ended before its trace" in str(stored.profile.ranks[2].reason)
    assert not list((job.session.path / FOLDER).glob(".unfinished*"))
    assert {path.name for path in stored.path.iterdir()} == {"profile.json"} | {
        str(rank.file) for rank in stored.profile.captured
    }


def _recording(job: Job) -> bool:
    from traceml_ray.store.profiles import under_way

    now = under_way(job.session.path)
    return now is not None and any(rank.state == "recording" for rank in now.ranks)


@pytest.mark.long
def test_lasting_straggler_is_profiled_without_being_asked_and_its_operation_named(tmp_path: Path) -> None:
    limits = Thresholds(hold_s=0.5, warmup_steps=5)
    job = Job(tmp_path, SCRIPT, [800], thresholds=limits)
    try:
        job.wait_for_steps(50)
        deadline, kept_profiles = time.monotonic() + 90, []
        while time.monotonic() < deadline and not (kept_profiles and kept_profiles[0].profile.found):
            time.sleep(0.2)
            kept_profiles = profiles_of(job.session.path)
        (stored,) = kept_profiles
        profile = stored.profile
        assert profile.by_itself and profile.suspect == 1 and profile.median in (0, 2)
        assert [rank.rank for rank in profile.captured] == sorted([1, profile.median])
        assert any("`aten::cosh`" in line or "`aten::acosh`" in line for line in profile.found[:2])
        job.end()
        job.aggregator.finish(wire.Finish(codec.VERSION, 0))
        report = (job.session.path / "report.txt").read_text()
        assert "\nOperation  rank 1 spends" in report and profile.found[0][:30] in report
    finally:
        job.close()


def test_session_that_is_not_live_says_so(tmp_path: Path) -> None:
    folder = prepare(tmp_path, "s")
    folder.release()
    with pytest.raises(ControlError, match="is not live"):
        profile(folder.path, wire.ProfileRequest())
    assert not profiles_of(folder.path)
