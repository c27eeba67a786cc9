"""
A straggler that is checked while the job runs (`confirm=during`): three machines, one whose CPU is held back,
or one whose rank sleeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from check_rigs import address, first_cpu, network, put, slow_cpu, why_no_cgroups, why_no_links

from traceml_ray.signals.check.records import CHECKS, DURING, Checked
from traceml_ray.store.session_file import SessionFile

HOSTS = 3
PORT = "29655"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_links()), reason=why_no_links()),
    pytest.mark.skipif(bool(why_no_cgroups()), reason=why_no_cgroups()),
]

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

seconds, asleep, folder = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
(folder / f"pid-{rank}").write_text(str(os.getpid()))


class Busy(torch.nn.Linear):
    def forward(self, batch):
        time.sleep(0.07 * rank)  # the machines share cores here: they compute one after the other
        end = time.thread_time() + 0.06
        while time.thread_time() < end:
            pass
        time.sleep(0.07 * (2 - rank) + 0.1 * (rank == asleep))
        return super().forward(batch)


model = torch.nn.parallel.DistributedDataParallel(Busy(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
over, end = torch.zeros(1), time.monotonic() + seconds
while not over:
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    over.fill_(rank == 0 and time.monotonic() > end)
    dist.broadcast(over, 0)
"""


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    with network(HOSTS) as names:
        try:
            yield names
        finally:
            for name in names:
                pids = subprocess.run(
                    ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
                )
                for pid in pids.stdout.split():
                    with contextlib.suppress(OSError):
                        os.kill(int(pid), 9)


def launch(folder: Path, names: list[str], *arguments: str) -> list[subprocess.Popen[str]]:
    """
    Start the launcher on each host. A host has a name and a boot id of its own, as a machine has. `ip netns
    exec` would hide the cgroups.
    """
    (folder / "train.py").write_text(SCRIPT)
    inside = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && hostname "$1" && shift && exec "$@"'
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TRACEML_"))}
    launched = []
    for number, name in enumerate(names):
        home = folder / f"host-{number}"
        home.mkdir()
        boot_id = home / "boot_id"
        boot_id.write_text(f"00000000-0000-0000-0000-00000000000{number}\n")
        flags = ("--nnodes", str(HOSTS), "--node-rank", str(number), "--nproc-per-node", "1")
        where = ("--master-addr", address(0), "--master-port", PORT, "--out", str(folder / "out"))
        launched.append(
            subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount"),
                    *("sh", "-c", inside, str(boot_id), f"host-{number}"),
                    *(sys.executable, "-m", "traceml_ray.launch", *flags, *where),
                    *("--session", "s", "--confirm", "during", str(folder / "train.py"), *arguments),
                ],
                env={
                    **kept,
                    "HOME": str(home),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "TRACEML_NICE": "0",
                    "RAY_AUTH_TOKEN": "during" * 8,
                },
                cwd=home,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return launched


def pid_of(folder: Path, rank: int) -> int:
    """Return the pid of a rank, once it trains."""
    file, end = folder / f"pid-{rank}", time.monotonic() + 120
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end, f"rank {rank} did not begin"
        time.sleep(0.1)
    return int(file.read_text())


def over(launched: list[subprocess.Popen[str]], folder: Path) -> tuple[dict[str, Any], list[Checked]]:
    """Return the summary of the job, and the checks in its session, once it has ended."""
    outputs = [process.communicate(timeout=280)[0] for process in launched]
    assert [process.returncode for process in launched] == [0] * HOSTS, outputs
    session = folder / "out" / "s"
    with SessionFile(session / "session.sqlite") as file:
        processes = [process.id for process in file.processes()]
        stored = [record for records in file.records_of(CHECKS, processes).values() for record in records]
    summary: dict[str, Any] = json.loads((session / "summary.json").read_text())
    assert not {name: count for name, count in errors_of(session).items() if "check during training" in name}
    return summary, stored


def errors_of(session: Path) -> dict[str, int]:
    """Return the errors that the relays have counted."""
    counted: dict[str, int] = {}
    with SessionFile(session / "session.sqlite") as file:
        for node in file.cluster():
            counted |= node.errors
    return counted


def is_complete(stored: list[Checked]) -> None:
    """Check that all hosts were measured once, at the same time."""
    assert [one.kind for one in stored] == [DURING] * HOSTS
    assert len({one.host for one in stored}) == HOSTS
    assert max(one.t_ns for one in stored) - min(one.t_ns for one in stored) < 1e9
    assert {one.about for one in stored} == {1}


def trained(hosts: list[str], asleep: int, cgroup: Path | None = None) -> dict[str, Any]:
    """
    Train until the straggler is checked, and return the verdict.

    Args:
        hosts: names of the hosts.
        asleep: rank that sleeps. -1: none.
        cgroup: where rank 1 computes. None: where all compute.
    """
    with tempfile.TemporaryDirectory(prefix="tr-", dir="/tmp") as name, first_cpu() as first:
        folder = Path(name)
        launched = launch(folder, hosts, "150", str(asleep), name)
        put(first, [process.pid for process in launched])
        if cgroup is not None:
            put(cgroup, [pid_of(folder, 1)])
        summary, stored = over(launched, folder)
    is_complete(stored)
    verdict: dict[str, Any] = summary["verdict"]
    assert (verdict["label"], verdict["rank"]) == ("straggler", 1), verdict["why"]
    assert verdict["confirmed"] is not None, summary["check"]
    return verdict


def test_node_whose_cpu_is_held_back_is_confirmed(hosts: list[str]) -> None:
    with slow_cpu(0.15) as cgroup:
        verdict = trained(hosts, -1, cgroup)
    assert verdict["confirmed"] is True, verdict
    assert "Confirmed by a check during training: The CPU of host-1 gets" in verdict["why"]
    assert "The CPU quota of its container allows 0.3 of 2 cores." in verdict["why"]


def test_rank_that_sleeps_is_not_confirmed(hosts: list[str]) -> None:
    verdict = trained(hosts, 1)
    assert verdict["confirmed"] is False, verdict
    assert "Not confirmed by a check during training: host-1 is as fast as other nodes" in verdict["why"]
    assert verdict["next"].startswith("Look at what rank 1 does")
