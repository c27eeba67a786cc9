"""A private Ray with a session's actors, created as the launcher does. Ranks are played over the socket."""

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
from ray_cluster import is_actor, until

from traceml_ray.identity import RankIdentity
from traceml_ray.launchers.cluster import PrivateRay
from traceml_ray.launchers.cluster import members as session_members
from traceml_ray.launchers.control import ask_finish
from traceml_ray.launchers.helper import HelperReply, HelperRequest
from traceml_ray.ray.actors import ActorConfig
from traceml_ray.settings import Settings
from traceml_ray.stages import N_STAGES
from traceml_ray.store.session import DATABASE
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

ROWS = 5


@contextlib.contextmanager
def private_ray() -> Iterator[PrivateRay]:
    """Start a private Ray, and end it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    (folder / "user").mkdir()
    ray = PrivateRay(folder, {**os.environ, "HOME": str(folder / "user")})
    ray.start()
    yield ray
    ray.stop()
    shutil.rmtree(folder)


def members(cluster: PrivateRay, name: str = "") -> list[psutil.Process]:
    """Return the processes of the cluster, or those of its actors of class `name`."""
    assert cluster._process is not None
    processes = []
    for process in session_members(cluster._process.pid):
        with contextlib.suppress(psutil.Error):
            if not name or is_actor(process, name):
                processes.append(process)
    return processes


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
            count: dict[str, Any] = msgspec.to_builtins(file.ledger())
            return count

    def keys(self, rank: int = 0) -> list[int]:
        with SessionFile(self.folder / DATABASE) as file:
            (keys,) = (rank_rows.keys.tolist() for rank_rows in file.rows()[0] if rank_rows.rank == rank)
            return list(keys)

    def finish(self) -> wire.Finished:
        finished = ask_finish(self.socket, wire.Finish(codec.VERSION, 0))
        assert finished is not None
        return finished


def ask_helper(
    cluster: PrivateRay, actors: ActorConfig, address: str = "", deadline_s: float = 40, **environ: str
) -> HelperReply:
    request = HelperRequest(os.getpid(), address or cluster.address, actors, deadline_s)
    ran = subprocess.run(
        [sys.executable, "-m", "traceml_ray.launchers.helper"],
        input=msgspec.json.encode(request),
        env={**cluster.environ, **environ},
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
    )
    return msgspec.json.decode(ran.stdout, type=HelperReply)


@contextlib.contextmanager
def live_session(cluster: PrivateRay, **settings: Any) -> Iterator[Session]:
    """Create a session on the cluster, and end it afterwards."""
    made = make_session(**settings)
    assert ask_helper(cluster, made.actors) == HelperReply(True)
    yield made
    ask_finish(made.socket, wire.Finish(codec.VERSION, 0))
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
    """Sends batches like an agent. Batches not known to be stored are sent again over a new connection."""

    def __init__(self, path: Path, number: int = 0) -> None:
        self.number = number
        self._path = path
        self._sock: socket.socket | None = None
        self._held: dict[int, bytes] = {}
        self._seq = 0
        self._acked = -1

    @property
    def produced(self) -> int:
        return self._seq * ROWS

    def send(self, *, final: bool = False) -> None:
        size = self.number + 1
        who = RankIdentity(
            self.number, self.number, 0, size, size, 1, "host", None, "job", 0, os.getpid(), "explicit"
        )
        keys = b"".join(
            (key << 8).to_bytes(8, "little") for key in range(self.produced, self.produced + ROWS)
        )
        batch = wire.RankBatch(
            codec.VERSION, f"rank{self.number}", self._seq, time.time_ns(), self.produced + ROWS, 0,
            self.produced, keys, bytes(ROWS), b"\x01".ljust(8, b"\x00") * N_STAGES * ROWS,
            identity=who, final=final,
        )  # fmt: skip
        self._held[self._seq] = codec.encode(batch)
        self._seq += 1
        self._offer(self._held[self._seq - 1])

    def settle(self) -> None:
        """Wait until everything is acknowledged."""
        until(self.take_replies, "acknowledged")

    def take_replies(self) -> bool:
        """Process replies; return whether everything is acknowledged. A lost connection is made anew."""
        try:
            while self._held and self._sock:
                data = self._sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
                reply = codec.decode(data, wire.RankReply)
                self._acked = reply.acked_seq
                self._held = {seq: held for seq, held in self._held.items() if seq > reply.settled_seq}
        except BlockingIOError:
            pass
        except OSError:
            self._sock = None
        if self._sock is None:
            self._acked = -1
            self._connect()
        return self._acked == self._seq - 1

    def _offer(self, data: bytes) -> None:
        if self._sock is None:
            self._connect()
            return
        try:
            self._sock.send(data)
        except OSError:
            self._sock = None

    def _connect(self) -> None:
        """Connect, and send everything that is held, oldest first."""
        try:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self._sock.connect(str(self._path))
            for held in self._held.values():
                self._sock.send(held)
        except OSError:
            self._sock = None
