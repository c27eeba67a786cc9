"""Ranks attached to Ray (`--channel actor`): a process that Ray is let into ends as it would have without."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from descent import DESCENT

from traceml_ray.agent.bootstrap import rank_environment
from traceml_ray.launchers.cluster import PrivateRay, members
from traceml_ray.launchers.control import ask_finish
from traceml_ray.launchers.helper import HelperReply, HelperRequest
from traceml_ray.ray.actors import FILE, ActorConfig, Attachment
from traceml_ray.settings import RelayPaths, Settings
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import read_spool

_SCRIPT = """
def handled():
    return [line for line in open("/proc/self/status") if line.startswith("SigCgt")]

def attached():
    from traceml_ray.agent import bootstrap
    return bootstrap.current().channel.generation > 0

def failed():
    from traceml_ray.agent import bootstrap
    return bool(dict(bootstrap.current().channel.errors))

before = sys.excepthook, handled(), sys.getswitchinterval()
torch.manual_seed(0)
net = torch.nn.Linear(64, 64)
optimizer = Descent(net.parameters())
end = time.monotonic() + 60
steps = 0
went = None
while time.monotonic() < end and (went is None or steps < went + 60):
    net(torch.ones(2, 64)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    time.sleep(0.02)
    if went is None and attached():
        went = steps
        print(json.dumps({"up": True}), flush=True)
        sys.stdin.readline()
print(json.dumps({
    "steps": steps,
    "untouched": (sys.excepthook, handled(), sys.getswitchinterval()) == before,
    "environ": sorted(name for name in os.environ if name.startswith("RAY")),
}), flush=True)
if sys.argv[1] == "raise":
    raise ValueError("as it was")
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(7)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if sys.argv[1] == "int":
    raise KeyboardInterrupt
if sys.argv[1] == "term":
    os.kill(os.getpid(), signal.SIGTERM)
raise SystemExit(3)
"""
SCRIPT = f"import json, os, signal, sys, time, torch\n{DESCENT}{_SCRIPT}"
ENDS = {"exit": 3, "raise": 1, "fork": 7, "int": -signal.SIGINT, "term": -signal.SIGTERM}
SHORT = ("exit",)
EXIT_S = 15
"""A rank that hangs at its end hangs for longer than a machine that is busy with other tests."""


@dataclass
class Node:
    """A private cluster, and what a rank of a session there needs to join."""

    folder: Path
    ray: PrivateRay
    settings: Settings
    paths: RelayPaths

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the cluster's processes of that name."""
        assert self.ray._process is not None
        processes = [p for p in members(self.ray._process.pid) if Path(p.cmdline()[0]).name == name]
        assert processes
        for process in processes:
            process.send_signal(number)

    def open_session(self) -> None:
        """Make the session's actors."""
        actors = ActorConfig(
            session=self.settings.session,
            folder=str(self.folder / "run"),
            settings=self.settings,
            socket=str(self.paths.socket),
            spool=str(self.paths.spool),
        )
        request = HelperRequest(os.getpid(), self.ray.address, actors, 40, temp_dir=str(self.ray.folder))
        helper = subprocess.run(
            [sys.executable, "-m", "traceml_ray.launchers.helper"],
            input=msgspec.json.encode(request),
            env=self.ray.environ,
            stdout=subprocess.PIPE,
            timeout=240,
            check=True,
        )
        assert msgspec.json.decode(helper.stdout, type=HelperReply) == HelperReply(True)

    def spooled(self) -> list[wire.RankBatch]:
        frames = [frame for path in (self.folder / "spool").iterdir() for frame in read_spool(path)]
        return [codec.decode(frame, wire.RankBatch) for frame in frames]


@pytest.fixture(scope="module")
def ray() -> Iterator[PrivateRay]:
    """One for all; the tests that stop a part of it are the last."""
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    (folder / "user").mkdir()
    made = PrivateRay(folder, {**os.environ, "HOME": str(folder / "user")})
    made.start()
    yield made
    made.stop()
    shutil.rmtree(folder)


@pytest.fixture
def node(ray: PrivateRay) -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    for name in ("run", "spool", "user"):
        (folder / name).mkdir()
    paths = RelayPaths(str(folder / "relay.sock"), str(folder / "spool"))
    settings = Settings(session=folder.name, channel="actor", interval=0.2)
    (folder / "token").write_text(str(ray.token))
    environ: dict[str, str | None] = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    (folder / FILE).write_bytes(msgspec.json.encode(Attachment(ray.address, str(ray.folder), environ)))
    made = Node(folder, ray, settings, paths)
    yield made
    made.signal("raylet", signal.SIGCONT)
    made.signal("gcs_server", signal.SIGCONT)
    ask_finish(folder / "relay.sock", wire.Finish(codec.VERSION, 0))
    shutil.rmtree(folder, ignore_errors=True)  # the relay removes its socket meanwhile


def start(node: Node, ending: str) -> subprocess.Popen[str]:
    """Start a rank; returns once it is attached, waiting for a line to go on."""
    script = node.folder / "script.py"
    script.write_text(SCRIPT)
    base = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(node.folder / "user")}
    rank = subprocess.Popen(
        [sys.executable, str(script), ending],
        env={**base, **rank_environment(node.settings, node.paths, base)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert rank.stdout is not None
    assert json.loads(rank.stdout.readline()) == {"up": True}
    return rank


def end(rank: subprocess.Popen[str], line: str = "\n") -> tuple[dict[str, Any], str]:
    """Let it go on to its end; what it printed last, and its stderr. From there on it is given `EXIT_S`."""
    assert rank.stdin is not None and rank.stdout is not None
    rank.stdin.write(line)
    rank.stdin.flush()
    result = json.loads(rank.stdout.readline())
    _, err = rank.communicate(timeout=EXIT_S)
    return result, err


@pytest.mark.parametrize(
    "ending",
    [*SHORT, *(pytest.param(ending, marks=pytest.mark.long) for ending in ENDS if ending not in SHORT)],
)
def test_attached_rank_ends_unchanged_with_no_trace_of_ray(node: Node, ending: str) -> None:
    node.open_session()
    rank = start(node, ending)
    result, err = end(rank)
    assert rank.returncode == ENDS[ending], err
    assert result["untouched"]
    assert result["environ"] == []
    if ending == "raise":
        assert err.splitlines()[0] == "Traceback (most recent call last):"
        assert err.splitlines()[-1] == "ValueError: as it was"
        assert len(err.splitlines()) == 4
    elif ending == "int":
        assert err.splitlines()[-1] == "KeyboardInterrupt"
    else:
        assert err == ""
    if ending == "term":
        return
    assert node.spooled()[-1].final  # a copy, which nobody reads here
    deadline = time.monotonic() + 20
    stored = 0
    while stored < result["steps"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        with SessionFile(node.folder / "run" / "session.sqlite") as file:
            stored = file.ledger().stored
    assert stored == result["steps"]


def run_alone(node: Node) -> None:
    """Run a rank that does not get attached, until it knows that."""
    base = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = SCRIPT.replace("time.monotonic() < end and", "time.monotonic() < end and not failed() and")
    rank = subprocess.Popen(
        [sys.executable, "-c", script, "exit"],
        env={**base, **rank_environment(node.settings, node.paths, base)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    result, err = end(rank, "")
    assert (rank.returncode, err) == (3, "")
    assert sum(len(batch.flags) for batch in node.spooled()) == result["steps"]


def test_rank_that_cannot_attach_leaves_rows_and_the_reason_in_the_spool(node: Node) -> None:
    (node.folder / FILE).unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:  # somebody is there
        listener.bind(str(node.paths.socket))
        listener.listen()
        run_alone(node)
    assert node.spooled()[-1].errors == {"channel.attach: FileNotFoundError": 1}


@pytest.mark.parametrize("process", ["raylet", pytest.param("gcs_server", marks=pytest.mark.long)])
def test_rank_does_not_attach_to_a_ray_that_does_not_answer(node: Node, process: str) -> None:
    node.open_session()
    node.signal(process, signal.SIGSTOP)  # the kernel still takes connections for it
    run_alone(node)
    assert node.spooled()[-1].errors == {"channel.attach: ConnectionError": 1}
