"""A check of several nodes: nodes of Ray and of torchrun, with planted faults and without."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from check_rigs import (
    FINE_US,
    address,
    first_cpu,
    hold_back,
    network,
    put,
    slow_cpu,
    slow_disk,
    slow_link,
    why_no_cgroups,
    why_no_links,
)
from ray_cluster import FakeCluster, fake_cluster, until

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.ray.check import check_cluster
from traceml_ray.reports.answers import Answers
from traceml_ray.signals.check import coordinator
from traceml_ray.signals.check.conclusion import concluded
from traceml_ray.signals.check.coordinator import Outcome
from traceml_ray.signals.check.judge import CheckResult
from traceml_ray.signals.check.nodes import NoAnswerError, TaskProcess
from traceml_ray.signals.check.records import CHECKS
from traceml_ray.signals.check.tasks import Describe, Exchange, Listen, Plan, TaskReply
from traceml_ray.signals.finding import Finding
from traceml_ray.store.query import Findings
from traceml_ray.store.session import SessionError
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
        with pytest.raises(NoAnswerError, match="did not answer within"):
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
    assert any(f"{name_of(nodes.others[2])} gave no result" in line for line in result.errors)
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


RESTARTED = """
import os, sys, time, torch
import torch.distributed as dist
folder, what = sys.argv[1:]
host, rank = os.uname().nodename, int(os.environ["RANK"])
failed = os.path.join(folder, "failed-" + host)
is_first = not os.path.exists(failed)
torch.set_num_threads(1)
# torch keeps the store of the first attempt, and with it the addresses of ranks that are gone.
serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=serves)
store = dist.PrefixStore("first" if is_first else "second", server)
dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256)] * 12))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
last, step = torch.zeros(1), 0
while not last:
    model(torch.ones(512, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if what == "sleeps" and host == "host-1":
        time.sleep(0.1)
    last[0] = os.path.exists(os.path.join(folder, "fail" if is_first else "end"))
    dist.all_reduce(last)
    step += 1
    if step == 10 and is_first:
        open(os.path.join(folder, "begun-" + host), "w").close()
dist.barrier()
if is_first:
    open(failed, "w").close()
    sys.exit(7)
dist.destroy_process_group()
"""
NAMES = [f"host-{number}" for number in range(3)]
SLOW = NAMES[1]
LIMIT_S = 600
"""Time for a job that starts twice and is checked in between, beside other work."""
WAIT_S = 150.0
"""Time for each part of it."""
RENDEZVOUS = {
    "c10d": ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:29400", "--rdzv-id", "job"),
    "static": ("--master-addr", address(0), "--master-port", "29400"),
}


class RestartedJob:
    """
    A job of three hosts whose ranks fail together, once, when the test says so, and are then restarted.

    Args:
        folder: an empty folder.
        hosts: their network namespaces.
        what: what makes a rank of the second host late: it `sleeps`, or nothing in the script (`computes`).
        rendezvous: key of `RENDEZVOUS`.
    """

    def __init__(self, folder: Path, hosts: list[str], what: str, rendezvous: str) -> None:
        self.folder, self.session = folder, folder / "out" / "s"
        (folder / "train.py").write_text(RESTARTED)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "TRACEML_"))}
        kept |= {"TRACEML_NICE": "0", "RAY_AUTH_TOKEN": "t" * 32, "GLOO_SOCKET_IFNAME": "eth0"}
        self.launchers = [
            self._start(number, host, (*RENDEZVOUS[rendezvous], *_of_host(number, rendezvous)), what, kept)
            for number, host in enumerate(hosts)
        ]

    def _start(
        self, number: int, host: str, meet: tuple[str, ...], what: str, environ: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        named = ("sh", "-c", 'hostname "$0" && exec "$@"', NAMES[number])
        # `ip netns exec` would hide the cgroups, and what a quota withholds would be taken for other work.
        inside = ("nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", *named)
        flags = ("--nnodes", "3", "--node-rank", str(number), *meet, "--max-restarts", "1")
        ours = ("--confirm", "restart", "--check-seconds", "4", "--session", "s")
        command = (*inside, sys.executable, "-m", "traceml_ray.launch", *flags, *ours)
        mine = self.folder / NAMES[number]
        mine.mkdir()
        with (mine / "output").open("w") as output:
            return subprocess.Popen(
                [
                    *(*command, "--sessions", str(self.folder / "out")),
                    *(str(self.folder / "train.py"), str(self.folder), what),
                ],
                cwd=mine,
                env={**environ, "HOME": str(mine)},
                stdout=output,
                stderr=output,
            )

    def tell(self, what: str) -> None:
        """Have all ranks `fail` after the same step, or `end`."""
        (self.folder / what).touch()

    def until(self, done: Callable[[], Any], what: str) -> None:
        """Wait until something is done. Raises AssertionError, also if a launcher has ended before."""

        def is_done() -> bool:
            assert all(job.poll() is None for job in self.launchers), self.output()
            return bool(done())

        try:
            until(is_done, what, WAIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.findings()}\n{self.output()}") from None

    def findings(self) -> dict[str, Finding]:
        """Return the findings on the newest attempt by label."""
        with contextlib.suppress(SessionError):
            findings = Answers(self.session, Thresholds()).answer(Findings(None))
            return {finding.label: finding for finding in findings}
        return {}

    def is_confirmed(self) -> bool | None:
        """Return whether a check confirms the straggler. None: there is none, or it is not known."""
        straggler = self.findings().get("straggler")
        return None if straggler is None else straggler.evidence.get("confirmed")

    def summary(self) -> dict[str, Any]:
        """Wait for the end of the job; return the findings of its summary by label."""
        for job in self.launchers:
            assert job.wait(WAIT_S) == 0, self.output()
        summary = json.loads((self.session / "summary.json").read_text())
        return {finding["label"]: finding for finding in summary["findings"]}

    def output(self) -> str:
        """Return the end of what each host has printed."""
        return "\n".join(f"--- {name}:\n{self._printed(name)[-3000:]}" for name in NAMES)

    def _printed(self, name: str) -> str:
        return (self.folder / name / "output").read_text()

    def texts(self) -> list[str]:
        """Return the report, and what the terminal of the first host has shown, in one line each."""
        report = (self.session / "report.txt").read_text()
        return [" ".join(text.split()) for text in (report, self._printed(NAMES[0]))]

    def is_checked(self) -> bool:
        """Return whether a check runs on the second host."""
        for process in psutil.Process(self.launchers[1].pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "traceml_ray.launchers.check_process" in process.cmdline():
                    return True
        return False

    def end(self) -> None:
        """End the launchers, which end their ranks."""
        for job in self.launchers:
            job.terminate()
        for job in self.launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(20)
            job.kill()


def _of_host(number: int, rendezvous: str) -> tuple[str, ...]:
    """Return the arguments of the rendezvous that differ between hosts."""
    if rendezvous == "static":
        return ()
    return ("--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", address(number))


@contextlib.contextmanager
def restarted(folder: Path, what: str, rendezvous: str) -> Iterator[RestartedJob]:
    """Run a job whose processes come before others, until all its hosts have trained some steps; yield it."""
    with network(3) as hosts, first_cpu() as first:
        job = RestartedJob(folder, hosts, what, rendezvous)
        try:
            put(first, [launcher.pid for launcher in job.launchers])
            job.until(lambda: all((folder / f"begun-{name}").exists() for name in NAMES), "the first steps")
            yield job
        finally:
            job.end()


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@in_cgroups
@in_namespaces
def test_straggler_on_a_slow_node_is_confirmed_at_the_restart_of_its_ranks(tmp_path: Path) -> None:
    with restarted(tmp_path, "computes", "c10d") as job, slow_cpu(0.2, FINE_US) as cgroup:
        # While the ranks share the cores of this machine, each gets less than a limit that a check notices.
        put(cgroup, [job.launchers[1].pid])
        job.until(lambda: "straggler" in job.findings(), "a straggler of the first attempt")
        job.tell("fail")
        job.until(job.is_checked, "a check")
        hold_back(cgroup, 0.6)
        job.until(lambda: not job.is_checked(), "the end of the check")
        hold_back(cgroup, 0.2)
        job.until(job.is_confirmed, "a confirmed straggler")
        job.tell("end")
        named = job.summary()
    straggler, node = named["straggler"], named["slow_node"]
    assert straggler["nodes"] == node["nodes"] == [SLOW], (named, job.output())
    assert straggler["evidence"]["confirmed"] is True and node["explains"] == straggler["key"], named
    why = f"Confirmed by a check at the restart: {node['why']}"
    assert why in straggler["why"] and straggler["next"] == node["next"], named
    for shown in job.texts():
        assert why in shown, shown


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@in_cgroups
@in_namespaces
def test_straggler_that_sleeps_is_not_the_fault_of_its_node(tmp_path: Path) -> None:
    with restarted(tmp_path, "sleeps", "static") as job:
        job.until(lambda: "straggler" in job.findings(), "a straggler of the first attempt")
        job.tell("fail")
        job.until(job.is_checked, "a check")
        job.until(lambda: not job.is_checked(), "the end of the check")
        job.until(lambda: job.is_confirmed() is False, "a straggler that is not confirmed")
        job.tell("end")
        named = job.summary()
    straggler = named["straggler"]
    assert straggler["nodes"] == [SLOW] and "slow_node" not in named, (named, job.output())
    assert straggler["evidence"]["confirmed"] is False, named
    why = f"Not confirmed by a check at the restart: {SLOW} is as fast as other nodes"
    assert why in straggler["why"], named
    for shown in job.texts():
        assert why in shown, shown
