"""Relay and aggregator as actors of a private Ray cluster; ranks are played over the relay's socket."""

from __future__ import annotations

import contextlib
import os
import shutil
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
import psutil
import pytest
from ray_cluster import until

from traceml_ray import wire
from traceml_ray.actors.config import ActorConfig
from traceml_ray.identity import RankIdentity
from traceml_ray.launchers.cluster import PrivateRay, free_port
from traceml_ray.launchers.cluster import members as session_members
from traceml_ray.launchers.control import ask_finish
from traceml_ray.launchers.helper import HelperReply, HelperRequest
from traceml_ray.session import DATABASE
from traceml_ray.settings import Settings
from traceml_ray.store.session_file import SessionFile

ROWS = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[PrivateRay]:
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    (folder / "user").mkdir()
    ray = PrivateRay(folder, {**os.environ, "HOME": str(folder / "user")})
    ray.start()
    yield ray
    ray.stop()
    shutil.rmtree(folder)


def members(cluster: PrivateRay, name: str = "") -> list[psutil.Process]:
    """Return the cluster's processes, or its actors of that class."""
    assert cluster._process is not None
    found = []
    for process in session_members(cluster._process.pid):
        with contextlib.suppress(psutil.Error):
            if not name or "".join(process.cmdline()[:1]).startswith(f"ray::{name}"):
                found.append(process)
    return found


@dataclass
class Session:
    folder: Path
    actors: ActorConfig

    @property
    def socket(self) -> Path:
        return Path(self.actors.socket)

    def ledger(self) -> dict[str, Any]:
        if not (self.folder / DATABASE).exists():
            return {}
        with SessionFile(self.folder / DATABASE) as file:
            return file.ledger()

    def keys(self) -> list[int]:
        with SessionFile(self.folder / DATABASE) as file:
            (found,), _ = file.rows()
            return found.keys.tolist()

    def finish(self) -> wire.Finished:
        finished = ask_finish(self.socket, wire.Finish(wire.VERSION, 0))
        assert finished is not None
        return finished


def ask_helper(
    cluster: PrivateRay, actors: ActorConfig, address: str = "", deadline_s: float = 40
) -> HelperReply:
    request = HelperRequest(os.getpid(), address or cluster.address, actors, deadline_s)
    ran = subprocess.run(
        [sys.executable, "-m", "traceml_ray.launchers.helper"],
        input=msgspec.json.encode(request),
        env=cluster.environ,
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    return msgspec.json.decode(ran.stdout, type=HelperReply)


@pytest.fixture
def session(cluster: PrivateRay, request: pytest.FixtureRequest) -> Iterator[Session]:
    made = make_session(**getattr(request, "param", {}))
    assert ask_helper(cluster, made.actors) == HelperReply(True)
    yield made
    ask_finish(made.socket, wire.Finish(wire.VERSION, 0))
    until(lambda: not members(cluster, "NodeRelay") and not members(cluster, "Aggregator"), "actors end")
    shutil.rmtree(made.folder.parent)


def make_session(**settings: Any) -> Session:
    out = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    folder = out / "run"
    folder.mkdir()
    (folder / "spool").mkdir()
    actors = ActorConfig(
        session=out.name,
        folder=str(folder),
        socket=str(out / "relay.sock"),
        spool=str(folder / "spool"),
        settings=Settings(session=out.name, **settings),
    )
    return Session(folder, actors)


class Rank:
    """Sends batches like an agent: what is not acknowledged is sent again over a new connection."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sock: socket.socket | None = None
        self._held: dict[int, bytes] = {}
        self._seq = 0

    @property
    def produced(self) -> int:
        return self._seq * ROWS

    def send(self, *, final: bool = False) -> None:
        who = RankIdentity(0, 0, 0, 1, 1, 1, "host", None, "job", 0, os.getpid(), "explicit")
        keys = b"".join(
            (key << 8).to_bytes(8, "little") for key in range(self.produced, self.produced + ROWS)
        )
        batch = wire.RankBatch(
            wire.VERSION, "rank0", self._seq, time.time_ns(), self.produced + ROWS, 0, self.produced, keys,
            bytes(ROWS), b"\x01".ljust(8, b"\x00") * wire.N_STAGES * ROWS, identity=who, final=final,
        )  # fmt: skip
        self._held[self._seq] = wire.encode(batch)
        self._seq += 1
        self._offer(self._held[self._seq - 1])

    def settle(self) -> None:
        """Wait until everything is acknowledged."""
        until(self._acknowledged, "acknowledged")

    def _acknowledged(self) -> bool:
        try:
            while self._held and self._sock:
                data = self._sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
                acked = wire.decode(data, wire.RankReply).acked_seq
                self._held = {seq: held for seq, held in self._held.items() if seq > acked}
        except BlockingIOError:
            pass
        except OSError:
            self._sock = None
        if self._sock is None:
            for held in list(self._held.values()):
                self._offer(held)
        return not self._held

    def _offer(self, data: bytes) -> None:
        try:
            if self._sock is None:
                self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                self._sock.connect(str(self._path))
                for held in self._held.values():
                    self._sock.send(held)
            else:
                self._sock.send(data)
        except OSError:
            self._sock = None


def test_what_ranks_send_is_stored_and_the_session_ends_on_request(
    cluster: PrivateRay, session: Session
) -> None:
    rank = Rank(session.socket)
    for _ in range(4):
        rank.send()
    rank.settle()
    until(lambda: session.ledger().get("stored") == 4 * ROWS, "stored while it runs")
    with SessionFile(session.folder / DATABASE) as file:
        assert [node["hostname"] for node in file.nodes()] == [socket.gethostname()]
    rank.send(final=True)
    assert session.finish() == wire.Finished(wire.VERSION, True)
    assert session.keys() == [step << 8 for step in range(5 * ROWS)]
    assert (session.folder / "summary.json").exists()
    until(lambda: not members(cluster, "NodeRelay") and not members(cluster, "Aggregator"), "actors end")


def test_an_aggregator_killed_again_and_again_loses_and_doubles_nothing(
    cluster: PrivateRay, session: Session
) -> None:
    rank = Rank(session.socket)
    for kill in range(3):
        for _ in range(30):
            rank.send()
            time.sleep(0.02)
        (old,) = until(lambda: members(cluster, "Aggregator"), f"aggregator {kill}")
        old.kill()
        until(lambda: [p for p in members(cluster, "Aggregator") if p != old], "it comes back")  # noqa: B023
    rank.send(final=True)
    rank.settle()
    assert session.finish().ok
    assert session.keys() == [step << 8 for step in range(rank.produced)]
    assert session.ledger()["dropped"] == {"agent": 0, "relay": 0, "aggregator": 0}


def test_a_relay_killed_comes_back_on_its_socket_and_what_it_lost_is_counted(
    cluster: PrivateRay, session: Session
) -> None:
    rank = Rank(session.socket)
    for _ in range(20):
        rank.send()
        time.sleep(0.02)
    (old,) = members(cluster, "NodeRelay")
    old.kill()
    for _ in range(20):
        rank.send()
    rank.settle()
    rank.send(final=True)
    rank.settle()
    assert session.finish().ok
    keys, ledger = session.keys(), session.ledger()
    assert keys == sorted(set(keys))
    assert ledger["produced"] == rank.produced
    assert ledger["stored"] == len(keys)
    assert ledger["stored"] + sum(ledger["dropped"].values()) == rank.produced
    assert ledger["in_flight"] == 0


def test_a_session_that_is_live_on_the_cluster_is_not_taken_over(
    cluster: PrivateRay, session: Session
) -> None:
    reply = ask_helper(cluster, session.actors)
    assert not reply.ok
    assert session.actors.session in reply.detail


def test_a_cluster_that_is_not_there_is_said_within_the_deadline(cluster: PrivateRay) -> None:
    made = make_session()
    address = f"127.0.0.1:{free_port()}"
    reply = ask_helper(cluster, made.actors, address, deadline_s=3)
    assert not reply.ok
    assert address in reply.detail
    shutil.rmtree(made.folder.parent)


def test_a_relay_that_cannot_listen_leaves_no_actors(cluster: PrivateRay) -> None:
    made = make_session()
    made.folder.parent.chmod(0o755)
    reply = ask_helper(cluster, made.actors)
    assert not reply.ok
    assert "0700" in reply.detail
    until(lambda: not members(cluster, "Aggregator"), "actors end")
    shutil.rmtree(made.folder.parent)


@pytest.mark.parametrize("session", [{"idle_ttl": 1.0}], indirect=True)
def test_actors_nobody_talks_to_end_themselves(cluster: PrivateRay, session: Session) -> None:
    until(lambda: not members(cluster, "NodeRelay") and not members(cluster, "Aggregator"), "actors end")
    assert not session.ledger()["produced"]


def test_the_whole_monitor_is_small_and_leaves_the_home_folder_alone(
    cluster: PrivateRay, session: Session
) -> None:
    Rank(session.socket).send()
    pss = {process.pid: process.memory_full_info().pss for process in members(cluster)}
    assert sum(pss.values()) < 550e6
    user = Path(cluster.environ["HOME"]) / "user"
    assert list(user.iterdir()) == []
    assert not (Path(cluster.environ["HOME"]) / ".ray").exists()


def test_the_token_is_in_no_argument_no_log_and_no_session(cluster: PrivateRay, session: Session) -> None:
    token = cluster.environ["RAY_AUTH_TOKEN"]
    everyone = members(cluster)
    assert len(everyone) > 5
    assert not [process for process in everyone if token in " ".join(process.cmdline())]
    written = [path for path in cluster.folder.parent.rglob("*") if path.is_file()]
    written += [path for path in session.folder.rglob("*") if path.is_file()]
    assert {"ray.log", "session.sqlite"} <= {path.name for path in written}
    assert [path for path in written if token.encode() in path.read_bytes()] == []
