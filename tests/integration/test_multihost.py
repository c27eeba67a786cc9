"""
One torchrun job over two hosts: network namespaces with a veth pair between them, each with a hostname
of its own, each with a launcher, as two machines would have.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import is_actor
from sessions import check_ledger

from traceml_ray.store.profiles import profiles_of
from traceml_ray.store.session_file import SessionFile
from traceml_ray.traces.merged_trace import merge
from traceml_ray.traces.sources import sources_of_profile

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = ("--layers", "2", "--width", "64", "--context", "32", "--batch-size", "4")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
MASTER_PORT = 29620
TOKEN = "multihost" * 8


def why_not() -> str:
    """Return why two hosts cannot be made here, "" if they can."""
    if os.getuid() != 0:
        return "two hosts are made of network namespaces, which takes root"
    if missing := [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]:
        return f"two hosts are made with {missing[0]}, which is not here"
    made = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"no namespaces here: {made.stderr.decode().strip()}"


NOT_HERE = why_not()
pytestmark = pytest.mark.skipif(bool(NOT_HERE), reason=NOT_HERE)


@dataclass
class Hosts:
    """Two namespaces that reach each other over `eth0`."""

    folder: Path
    names: list[str]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, host: int, *command: str, **environ: str) -> subprocess.Popen[str]:
        hostname = f"host-{'ab'[host]}"
        home = self.folder / hostname
        home.mkdir(exist_ok=True)
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "TRACEML_"))}
        settled = {
            "TRACEML_NICE": "0",
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "MARK": self.mark,
        }
        inside = 'hostname "$0" && exec "$@"'
        return subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self.names[host],
                "unshare",
                "--uts",
                "sh",
                "-c",
                inside,
                hostname,
                *command,
            ],
            env={**mine, **settled, **environ},
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def launch(self, host: int, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Start the launcher of one node of the job: 2 ranks."""
        return self.start(
            host,
            *(sys.executable, "-m", "traceml_ray.launch", "--nnodes", "2", "--node-rank", str(host)),
            *("--nproc-per-node", "2", "--master-addr", ADDRESSES[0], "--master-port", str(MASTER_PORT)),
            *arguments,
            **environ,
        )

    def processes(self) -> list[psutil.Process]:
        """Return what runs in the namespaces."""
        pids: set[int] = set()
        for name in self.names:
            listed = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            pids.update(map(int, listed.stdout.split()))
        processes = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    names = [f"tr-{os.getpid()}-{host}" for host in "ab"]
    made = Hosts(folder, names)
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield made
    finally:
        for process in made.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
        shutil.rmtree(folder)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10)


def private_folders(hosts: Hosts) -> set[Path]:
    """Return the folders that both launchers have for themselves, once they hold them."""
    end = time.monotonic() + 60
    while True:
        opened = [Path(file.path) for process in hosts.processes() for file in files_of(process)]
        folders = {path.parent for path in opened if path.name == ".in-use"}
        if len(folders) == 2:
            return folders
        assert time.monotonic() < end, opened
        time.sleep(0.05)


def files_of(process: psutil.Process) -> list[Any]:
    with contextlib.suppress(psutil.Error):
        return process.open_files()
    return []


def both(first: subprocess.Popen[str], other: subprocess.Popen[str]) -> list[str]:
    """Wait for both launchers, the second no longer than they may differ; return what they said on stderr."""
    outputs = [first.communicate(timeout=240)[1]]
    outputs.append(other.communicate(timeout=240)[1])
    return outputs


def until_gone(hosts: Hosts) -> None:
    end = time.monotonic() + 20
    while hosts.processes():
        assert time.monotonic() < end, [process.cmdline() for process in hosts.processes()]
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("channel", "steps"), [("socket", 140), pytest.param("actor", 240, marks=pytest.mark.long)]
)
def test_session_over_two_hosts_names_the_fault_on_the_second(hosts: Hosts, channel: str, steps: int) -> None:
    script = (str(EXAMPLE), "--steps", str(steps), "--slow", "data:3:60", *SMALL)
    flags = ("--channel", channel, "--out", str(hosts.folder / "out"), *script)
    other = hosts.launch(1, *flags, RAY_AUTH_TOKEN=TOKEN)
    first = hosts.launch(0, *flags, RAY_AUTH_TOKEN=TOKEN)
    folders = private_folders(hosts)
    outputs = both(first, other)
    assert (first.returncode, other.returncode) == (0, 0), outputs
    assert "RAY_AUTH_TOKEN" not in outputs[0] + outputs[1]
    (folder,) = (hosts.folder / "out").iterdir()
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    verdict = summary["verdict"]
    named = (verdict["label"], verdict["stage"], verdict["rank"], verdict["node"])
    assert named == ("straggler", "data", 3, "host-b"), verdict["why"]
    session = summary["session"]
    assert (session["status"], session["world_size"], session["nnodes"]) == ("finished", 4, 2)
    ledger = check_ledger(folder)
    assert ledger["produced"] == ledger["stored"] == 4 * steps
    with SessionFile(folder / "session.sqlite") as file:
        processes = [process.identity for process in file.processes() if process.identity is not None]
        samples = file.node_samples([node.node_id for node in file.cluster()], 1 << 20)
        events, _ = file.events()
    who = sorted((i.global_rank, i.local_rank, i.node_rank, i.hostname) for i in processes)
    assert who == [(0, 0, 0, "host-a"), (1, 1, 0, "host-a"), (2, 0, 1, "host-b"), (3, 1, 1, "host-b")]
    nodes = {identity.node_rank: identity.node_id for identity in processes}
    assert None not in nodes.values() and len(set(nodes.values())) == 2
    assert {node for node, _ in samples} == set(nodes.values())
    assert [event.kind for event in events].count("relay_start") == 2
    assert f"session {folder.name!r} is written by the launcher on {ADDRESSES[0]}" in outputs[1]
    assert str(folder) in outputs[0]
    until_gone(hosts)
    assert not any(folder.exists() for folder in folders)
    assert not list(hosts.folder.glob("host-*/.ray"))


@pytest.mark.long
def test_failing_rank_on_the_second_host_is_named_and_both_launchers_fail(hosts: Hosts) -> None:
    script = (str(EXAMPLE), "--steps", "4000", "--fail", "2:150", *SMALL)
    flags = ("--out", str(hosts.folder / "out"), "--session", "failing", *script)
    other = hosts.launch(1, *flags, RAY_AUTH_TOKEN=TOKEN)
    first = hosts.launch(0, *flags, RAY_AUTH_TOKEN=TOKEN)
    folders = private_folders(hosts)
    outputs = both(first, other)
    assert (first.returncode, other.returncode) == (1, 1), outputs
    assert "planted by --fail at step 150" in outputs[1]
    summary = json.loads((hosts.folder / "out" / "failing" / "summary.json").read_text())
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["rank"]) == ("rank_lost", 2), verdict["why"]
    assert summary["session"]["status"] == "failed"
    check_ledger(hosts.folder / "out" / "failing")
    until_gone(hosts)
    assert not any(folder.exists() for folder in folders)


@pytest.mark.long
def test_session_without_a_token_works_with_a_warning_and_one_stop_ends_both(hosts: Hosts) -> None:
    script = (str(EXAMPLE), "--steps", "4000", *SMALL)
    flags = ("--out", str(hosts.folder / "out"), "--session", "open", *script)
    other, first = hosts.launch(1, *flags), hosts.launch(0, *flags)
    stored = hosts.folder / "out" / "open" / "session.sqlite"
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(Exception), SessionFile(stored) as file:
            if len([process for process in file.processes() if process.stored]) == 4:
                break
        time.sleep(0.5)
    first.send_signal(signal.SIGTERM)
    outputs = both(first, other)
    assert first.returncode != 0 and other.returncode != 0
    for text in outputs:
        assert text.count("no RAY_AUTH_TOKEN") == 1
    summary = json.loads((hosts.folder / "out" / "open" / "summary.json").read_text())
    assert len(summary["session"]["nodes"]) == 2
    check_ledger(hosts.folder / "out" / "open")
    until_gone(hosts)


AHEAD_S = 3
SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(which, now);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += AHEAD_S;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="another clock is made with a C compiler")
def test_profile_over_two_hosts_whose_clocks_differ_is_on_one_clock(hosts: Hosts) -> None:
    source, shift = hosts.folder / "shift.c", hosts.folder / "shift.so"
    source.write_text(SHIFT)
    built = ("cc", "-shared", "-fPIC", f"-DAHEAD_S={AHEAD_S}", "-o", shift, source, "-ldl")
    subprocess.run(built, check=True, timeout=240)
    out = ("--out", str(hosts.folder / "out"))
    flags = (*out, "--session", "s", str(EXAMPLE), "--steps", "6000", *SMALL)
    other = hosts.launch(1, *flags, RAY_AUTH_TOKEN=TOKEN, LD_PRELOAD=str(shift))
    first = hosts.launch(0, *flags, RAY_AUTH_TOKEN=TOKEN)
    session = hosts.folder / "out" / "s"
    end, known = time.monotonic() + 90, 0
    while known < 4 and time.monotonic() < end:
        time.sleep(0.5)
        with contextlib.suppress(Exception), SessionFile(session / "session.sqlite") as file:
            known = len([process for process in file.processes() if process.stored > 50])
    asked = hosts.start(0, sys.executable, "-m", "traceml_ray.cli", "profile", "s", *out)
    output = asked.communicate(timeout=240)
    first.send_signal(signal.SIGTERM)
    both(first, other)
    assert asked.returncode == 0, output
    (stored,) = profiles_of(session)
    clocks = {rank.hostname: (rank.clock_offset_ns, rank.clock_bound_ns) for rank in stored.profile.captured}
    offset, bound = clocks["host-b"]
    assert offset is not None and bound is not None
    assert abs(offset + AHEAD_S * 1e9) <= bound < 0.1e9, clocks
    merged = merge(sources_of_profile(stored), hosts.folder / "merged.json.gz", stored.profile)
    assert merged.collectives >= stored.profile.n_steps and merged.apart == 0, merged
    assert [rank.rank for rank in merged.ranks] == [0, 1, 2, 3]


@pytest.mark.long
def test_rendezvous_without_node_ranks_works_on_a_given_cluster(hosts: Hosts) -> None:
    address, inside, cluster = given_cluster(hosts)
    off = {"RAY_AUTH_MODE": "disabled"}
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{MASTER_PORT}", "--rdzv-id", "meet")
    script = ("--out", str(hosts.folder / "out"), str(EXAMPLE), "--steps", "200", "--slow", "forward:1:60")
    launched = []
    for host in (1, 0):
        launcher = (sys.executable, "-m", "traceml_ray.launch", "--nnodes", "2", "--nproc-per-node", "1")
        flags = ("--rdzv-conf", f"is_host={1 - host}", "--ray-address", address)
        local = ("--local-addr", ADDRESSES[host])  # nobody resolves these hosts' names
        command = (*inside[host], *launcher, *meet, *flags, *local, *script, *SMALL)
        launched.append(hosts.start(host, *command, **off))
    other, first = launched
    outputs = both(first, other)
    assert (first.returncode, other.returncode) == (0, 0), outputs
    (session,) = (hosts.folder / "out").iterdir()
    assert session.name.startswith("meet-")
    summary = json.loads((session / "summary.json").read_text())
    assert summary["verdict"]["label"] == "straggler", (summary["verdict"]["why"], outputs)
    assert summary["verdict"]["stage"] == "forward"
    assert sorted(node["hostname"] for node in summary["session"]["nodes"]) == ["host-a", "host-b"]
    assert check_ledger(session)["stored"] == 2 * 200
    until_no_actor(hosts)
    assert all(node.poll() is None for node in cluster)


ALONE = """
import sys, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.03)
"""


@pytest.mark.long
def test_node_that_ends_late_on_a_given_cluster_is_in_the_session(
    hosts: Hosts,
) -> None:
    address, inside, cluster = given_cluster(hosts)
    launched = []
    for host, steps in enumerate((100, 400)):
        run = (sys.executable, "-m", "traceml_ray.cli", "run", "--nnodes", "2", "--node-rank", str(host))
        flags = ("--master-addr", ADDRESSES[0], "--ray-address", address, "--session", "late")
        flags = (*flags, "--out", str(hosts.folder / "out"))
        who = {"RANK": str(host), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        command = (*inside[host], *run, *flags, "--", sys.executable, "-c", ALONE, str(steps))
        launched.append(hosts.start(host, *command, RAY_AUTH_MODE="disabled", **who))
    first, other = launched
    _, outputs = first.communicate(timeout=240)
    assert (first.returncode, other.poll()) == (0, None), outputs
    assert (
        "the files are written without 1 of 2 nodes (host-b): they are written again when all have" in outputs
    )
    folder = hosts.folder / "out" / "late"
    early = json.loads((folder / "summary.json").read_text())["ledger"]["stored"]
    assert 100 <= early < 500
    _, outputs = other.communicate(timeout=240)
    assert other.returncode == 0, outputs
    assert "could not be delivered" not in outputs
    until_no_actor(hosts)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ledger"]["stored"] == check_ledger(folder)["stored"] == 500
    assert summary["session"]["status"] == "finished"
    assert all(node.poll() is None for node in cluster)


@pytest.mark.long
def test_node_that_ends_late_beside_a_private_ray_keeps_its_rows_and_says_so(hosts: Hosts) -> None:
    """The private Ray ends with the first node."""
    launched = []
    for host, steps in enumerate((100, 900)):
        run = (sys.executable, "-m", "traceml_ray.cli", "run", "--nnodes", "2", "--node-rank", str(host))
        flags = ("--master-addr", ADDRESSES[0], "--session", "late", "--out", str(hosts.folder / "out"))
        who = {"RANK": str(host), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        command = (*run, *flags, "--", sys.executable, "-c", ALONE, str(steps))
        launched.append(hosts.start(host, *command, RAY_AUTH_TOKEN="t" * 32, **who))
    first, other = launched
    _, outputs = first.communicate(timeout=240)
    assert (first.returncode, other.poll()) == (0, None), outputs
    assert "the files are written without 1 of 2 nodes (" in outputs and "with --ray-address" in outputs
    _, outputs = other.communicate(timeout=240)
    assert other.returncode == 0, outputs
    (kept,) = re.findall(r"rows of 1 ranks could not be delivered.*; they are in (\S+)", outputs)
    shutil.rmtree(Path(kept).parent)
    ledger = check_ledger(hosts.folder / "out" / "late")
    assert 100 <= ledger["stored"] < 1000


def given_cluster(hosts: Hosts) -> tuple[str, list[tuple[str, ...]], list[subprocess.Popen[str]]]:
    """Start a Ray over both hosts; return its address, what commands begin with there, and its processes."""
    address, off = f"{ADDRESSES[0]}:6399", {"RAY_AUTH_MODE": "disabled"}
    inside = [host_of_its_own_processes(hosts, host) for host in (0, 1)]
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus", "0", "--block")
    ray = (*ray, "--disable-usage-stats", "--object-store-memory", "78643200", "--node-ip-address")
    head = (ADDRESSES[0], "--head", "--port", "6399", "--include-dashboard", "false")
    folder = ("--temp-dir", str(hosts.folder / "ray"))
    cluster = [hosts.start(0, *inside[0], *ray, *head, *folder, **off)]
    until_listening(hosts, 0, address)
    cluster.append(hosts.start(1, *inside[1], *ray, ADDRESSES[1], "--address", address, **off))
    return address, inside, cluster


def until_no_actor(hosts: Hosts) -> None:
    end = time.monotonic() + 10
    while actors := [process for process in hosts.processes() if is_our_actor(process)]:
        assert time.monotonic() < end, actors
        time.sleep(0.1)


def host_of_its_own_processes(hosts: Hosts, host: int) -> tuple[str, ...]:
    """Return what a command begins with to see this host's processes only: Ray looks for its node there."""
    holder = hosts.start(host, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sleep", "140")
    end = time.monotonic() + 10
    while not (asleep := [p for p in psutil.Process(holder.pid).children(True) if p.name() == "sleep"]):
        assert time.monotonic() < end
        time.sleep(0.05)
    return ("nsenter", "--target", str(asleep[0].pid), "--pid", "--mount", "--")


def until_listening(hosts: Hosts, host: int, address: str) -> None:
    where, _, port = address.rpartition(":")
    script = f"import socket; socket.create_connection(({where!r}, {port}), 1)"
    end = time.monotonic() + 30
    while hosts.start(host, sys.executable, "-c", script).wait():
        assert time.monotonic() < end
        time.sleep(0.1)


def is_our_actor(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return is_actor(process, "NodeRelay|Aggregator")
    return False
