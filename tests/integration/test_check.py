"""A check of several nodes: nodes of Ray and of torchrun, with planted faults and without."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from check_rigs import (
    address,
    first_cpu,
    network,
    put,
    slow_cpu,
    slow_disk,
    slow_link,
    why_no_cgroups,
    why_no_links,
)
from ray_cluster import FakeCluster, fake_cluster, until

from traceml_ray.ray.check import check_cluster
from traceml_ray.signals.check import coordinator
from traceml_ray.signals.check.conclusion import concluded
from traceml_ray.signals.check.coordinator import Outcome
from traceml_ray.signals.check.judge import CheckResult
from traceml_ray.signals.check.nodes import NoAnswerError, TaskProcess
from traceml_ray.signals.check.records import CHECKS
from traceml_ray.signals.check.tasks import Describe, Exchange, Listen, Plan, TaskReply
from traceml_ray.store.session_file import SessionFile

SECONDS = 6.0
NODES = 4
in_cgroups = pytest.mark.skipif(bool(why_no_cgroups()), reason=why_no_cgroups())
in_namespaces = pytest.mark.skipif(bool(why_no_links()), reason=why_no_links())


def test_two_processes_exchange_data_apart_from_any_job() -> None:
    one, other = TaskProcess(os.environ), TaskProcess(os.environ)
    try:
        machine = one.ask(Describe(), 60).machine
        assert machine is not None and machine.cores >= 1 and len(machine.boot_id) == 36
        port = one.ask(Listen("127.0.0.1"), 60).port
        assert port is not None
        replies: dict[int, TaskReply] = {}

        def take_part(place: int, process: TaskProcess) -> None:
            replies[place] = process.ask(Exchange("127.0.0.1", port, place, 0.5), 60)

        thread = threading.Thread(target=take_part, args=(1, other))
        thread.start()
        take_part(0, one)
        thread.join()
        assert [reply.error for reply in replies.values()] == ["", ""]
        assert [measure.probe for measure in replies[0].measures] == ["all_reduce", "all_gather"]
        assert all(min(measure.values) > 0 and len(measure.values) >= 4 for measure in replies[0].measures)
        assert replies[1].measures == ()
    finally:
        one.end()
        other.end()


def test_process_that_hangs_is_killed_and_made_again() -> None:
    process = TaskProcess(os.environ)
    try:
        assert process.ask(Describe(), 60).machine is not None
        (child,) = [one for one in psutil.Process().children() if "check.process" in " ".join(one.cmdline())]
        child.suspend()
        with pytest.raises(NoAnswerError, match="did not answer in time"):
            process.ask(Describe(), 0.5)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert process.ask(Describe(), 60).machine is not None
    finally:
        process.end()


@pytest.fixture(scope="module")
def nodes() -> Iterator[FakeCluster]:
    with contextlib.ExitStack() as cgroups, fake_cluster(NODES, 1, lean=True) as cluster:
        if not why_no_cgroups():
            first = cgroups.enter_context(first_cpu())
            put(first, [raylet(node).pid for node in (cluster.head, *cluster.others)])
        yield cluster


def check(**more: Any) -> tuple[CheckResult, Outcome]:
    outcome = check_cluster(Plan(**{"seconds": SECONDS, "disturb": True, **more}), lambda *_: None)
    return concluded(outcome), outcome


def raylet(node: Any) -> psutil.Process:
    """Return the raylet of a node."""
    (process,) = node.all_processes["raylet"]
    return psutil.Process(process.process.pid)


@pytest.mark.long
@pytest.mark.usefixtures("nodes")
def test_healthy_cluster_names_nothing(tmp_path: Path) -> None:
    result, outcome = check(path=str(tmp_path))
    assert [slow.why for slow in result.slow] == []
    assert len(outcome.checks) == NODES and not outcome.silent


@pytest.mark.long
@in_cgroups
def test_node_with_less_cpu_is_named(nodes: FakeCluster) -> None:
    with slow_cpu(0.6) as cgroup:
        put(cgroup, [raylet(nodes.others[1]).pid])
        result, outcome = check(pairs=False)
    assert outcome.silent == {}
    table = [(row.node, row.probe, row.lower, row.others, row.why) for row in result.levels]
    assert [slow.nodes for slow in result.slow] == [[name_of(nodes.others[1])]], table
    assert 0.25 < result.slow[0].lower < 0.5


@pytest.mark.long
@in_cgroups
def test_node_with_a_slow_disk_is_named(nodes: FakeCluster) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, slow_disk(Path(folder), 20 << 20) as cgroup:
        put(cgroup, [raylet(nodes.others[0]).pid])
        result, outcome = check(path=folder, pairs=False)
    assert outcome.silent == {}
    assert [(slow.what, slow.nodes) for slow in result.slow] == [("disk", [name_of(nodes.others[0])])], result


def name_of(node: Any) -> str:
    """Return the label of a node."""
    return f"{os.uname().nodename} {node.node_ip_address}"


@pytest.mark.long
@pytest.mark.usefixtures("nodes")
def test_cluster_that_a_job_has_taken_is_not_disturbed() -> None:
    @ray.remote(num_cpus=1)
    class Job:
        def ready(self) -> bool:
            return True

    jobs = [Job.remote() for _ in range(NODES)]
    try:
        ray.get([job.ready.remote() for job in jobs], timeout=60)
        result, outcome = check(disturb=False)
    finally:
        for job in jobs:
            ray.kill(job)
    assert list(outcome.in_use.values()) == ["1 of 1 CPUs"] * NODES
    assert outcome.rounds == [] and not any(one.measures for one in outcome.checks)
    assert len([sentence for sentence in result.unsure if "1 of 1 CPUs" in sentence]) == NODES


@pytest.mark.long
def test_node_that_does_not_answer_is_named(nodes: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "START_S", 15.0)
    stopped = raylet(nodes.others[2])
    stopped.suspend()
    try:
        result, outcome = check(seconds=2.0, pairs=False)
    finally:
        stopped.resume()
    assert list(outcome.silent) == [name_of(nodes.others[2])]
    assert any(f"{name_of(nodes.others[2])} did not answer" in line for line in result.errors)
    assert len(outcome.checks) == NODES - 1


SCRIPT = """
import time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""


def launch(folder: Path, *flags: str, inside: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
    """Start the launcher with a check of few seconds."""
    (folder / "train.py").write_text(SCRIPT)
    command = (sys.executable, "-m", "traceml_ray.launch", "--check", "--check-seconds", "3", *flags)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TRACEML_"))}
    return subprocess.Popen(
        [*inside, *command, "--sessions", str(folder / "out"), str(folder / "train.py")],
        cwd=folder,
        env={**kept, "TRACEML_NICE": "0", "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_check_before_training_is_in_the_session(tmp_path: Path) -> None:
    job = launch(tmp_path, "--session", "s", "--check-path", str(tmp_path))
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    assert "check: measuring this node, before it starts" in output
    with SessionFile(tmp_path / "out" / "s" / "session.sqlite") as file:
        (stored,) = [record for _, _, record in file.records(CHECKS, 0)]
    assert stored.kind == "check" and {measure.probe for measure in stored.measures} >= {
        "cpu_matmul",
        "disk_read",
    }


@pytest.mark.long
def test_ctrl_c_during_the_check_ends_the_job_and_leaves_nothing(tmp_path: Path) -> None:
    job = launch(tmp_path, "--session", "s")
    me = psutil.Process(job.pid)
    until(
        lambda: [one for one in me.children(recursive=True) if "check.process" in " ".join(one.cmdline())],
        "check",
    )
    measuring = me.children(recursive=True)
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=60)
    assert job.returncode not in (0, 3), output
    _, alive = psutil.wait_procs(measuring, timeout=10)
    assert alive == [] and not (tmp_path / "out" / "s").exists()


@pytest.mark.long
def test_check_that_fails_does_not_stop_training(tmp_path: Path) -> None:
    job = launch(tmp_path, "--no-monitor")
    me = psutil.Process(job.pid)
    until(lambda: any("check_process" in " ".join(one.cmdline()) for one in me.children(True)), "a check")
    (process,) = [one for one in me.children() if "check_process" in " ".join(one.cmdline())]
    process.kill()
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    assert "no check: its process ended with exit code -9" in output


HOSTS = 4


def check_over_hosts(folder: Path, hosts: list[str], cgroup: Path) -> list[tuple[int, str]]:
    """Check hosts of a network as nodes of a job; return the exit codes and outputs of their launchers."""
    launched = []
    for number, name in enumerate(hosts):
        mine = folder / name
        mine.mkdir()
        inside = (
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0" && exec "$@"',
            f"host-{number}",
        )
        flags = ("--nnodes", str(len(hosts)), "--node-rank", str(number), "--master-addr", address(0))
        launched.append(launch(mine, *flags, "--check-stop", "--no-monitor", inside=inside))
    put(cgroup, [job.pid for job in launched])
    outputs = [job.communicate(timeout=280)[0] for job in launched]
    return [(job.returncode, output) for job, output in zip(launched, outputs, strict=True)]


@pytest.mark.long
@in_namespaces
def test_node_with_a_slow_network_is_named_on_all_nodes_and_stops_the_job(tmp_path: Path) -> None:
    with network(HOSTS) as hosts, first_cpu() as first:
        slow_link(hosts[2], 100)
        ended = check_over_hosts(tmp_path, hosts, first)
    assert [code for code, _ in ended] == [3] * HOSTS, ended
    for _, output in ended:
        assert "host-2" in output and "the job is not started (--check-stop)" in output
