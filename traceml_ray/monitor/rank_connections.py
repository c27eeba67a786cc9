"""
The processes of this node that talk to the relay: a Unix SEQPACKET socket and the processes behind it. Also
what the kernel, and py-spy if it is installed, know about another process.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from traceml_ray.errors import Errors
from traceml_ray.monitor.private_folders import make_private

SPY_S = 5.0
SPY_BYTES = 12_000
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for the disk or the network's file system",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "ended",
}


def state(pid: int) -> str | None:
    """Return what the process does, in words: `running`, `stopped (SIGSTOP)`, …"""
    fields = _stat(pid)
    return _STATES.get(fields[0]) if fields else None


def exit_code(pid: int) -> int | None:
    """Return the exit code of a process whose parent has not waited for it yet. A signal is negative."""
    fields = _stat(pid)
    if not fields or fields[0] != "Z":
        return None
    status = int(fields[-1])
    return -(status & 0x7F) if status & 0x7F else status >> 8


def _stat(pid: int) -> list[str]:
    """
    Return the fields of /proc/<pid>/stat from the state on. The name before it may contain any
    characters.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def memory_events(pid: int, root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the file in which the kernel counts the out-of-memory kills of the process's cgroup."""
    file_here = None
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                files = [root / path.lstrip("/") / "memory.events", root / "memory.events"]
            elif "memory" in controllers.split(","):
                files = [root / "memory" / path.lstrip("/") / "memory.oom_control"]
                files.append(root / "memory" / "memory.oom_control")
            else:
                continue
            file_here = file_here or next((file for file in files if file.is_file()), None)
    return file_here


def oom_kills(file: Path | None) -> int | None:
    """Return the number of processes that the kernel has killed in that cgroup because memory ran out."""
    if file is not None:
        with contextlib.suppress(OSError, ValueError):
            lines = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
            return int(lines["oom_kill"]) if "oom_kill" in lines else None
    return None


def spy(pid: int) -> str:
    """
    Return the process's stacks as py-spy sees them; "" if py-spy is not installed. Takes up to `SPY_S`
    seconds.
    """
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=SPY_S, check=True)
        text = done.stdout[:SPY_BYTES].decode("utf-8", "replace")
        return re.sub(r"^Process .*\n", "", text)  # its arguments: those of a script may be secret
    return ""


MAX_PATH_BYTES = 90
_AT_ONCE = 64
"""Number of packets read from one process before it is another's turn."""
_PEERCRED = struct.Struct("3i")


@dataclass(eq=False)
class RankConnection:
    """One process. It is connected (`sock`), or it calls through Ray and is only watched."""

    pid: int
    sock: socket.socket | None = None
    pidfd: int | None = None
    gone: bool = False
    """Whether `on_gone` has been called with this process."""
    processes: set[str] = field(default_factory=set)

    def send(self, data: bytes) -> bool:
        """Send one packet without waiting. Return False when it could not be sent."""
        try:
            return self.sock is not None and self.sock.send(data) > 0
        except OSError:
            return False


@dataclass(eq=False)
class RankConnections:
    """
    Listens on `path`, whose folder is private to this user. Not thread-safe, except `select`.

    Args:
        path: path of the socket. A socket that a dead relay left there is replaced.
        max_packet: longest packet, in bytes. The kernel cuts a longer one.
        on_packet: called with the peer, the packet, and whether it was cut.
        on_gone: called once with each peer whose process has ended, all its packets read; where
            processes cannot be watched, when its connection is closed.

    Raises OSError when it cannot listen there.
    """

    path: Path
    max_packet: int
    on_packet: Callable[[RankConnection, bytes, bool], None]
    on_gone: Callable[[RankConnection], None]

    def __post_init__(self) -> None:
        self.errors = Errors()
        self._connected: set[RankConnection] = set()
        self._callers: dict[int, RankConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._server = listen(self.path)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)

    @property
    def ranks_connected(self) -> bool:
        """Whether a process that sent rank batches still holds its connection."""
        return any(peer.processes for peer in self._connected)

    @property
    def in_use(self) -> bool:
        """
        Whether a process that sent rank batches is known to be alive. A process that cannot be watched counts
        only while it is connected.
        """
        return self.ranks_connected or any(peer.pidfd is not None for peer in self._callers.values())

    def select(self, timeout: float) -> list[Callable[[], None]]:
        """Wait at most `timeout` seconds. Return the tasks that are due, to be called one by one."""
        return [key.data for key, _ in self._selector.select(timeout)]

    def caller(self, pid: int) -> RankConnection:
        """Return the peer for a process that does not connect. It is watched from its first call on."""
        peer = self._callers.get(pid)
        if peer is None:
            peer = self._callers[pid] = RankConnection(pid)
            try:
                self._watch(peer)
            except OSError as error:
                self.errors.note("pidfd", error)
        return peer

    def close(self) -> None:
        """Stop listening and close every connection; safe to call twice."""
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError as error:
            self.errors.note("accept", error)
            return
        sock.setblocking(False)
        cred = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        pid, uid, _ = _PEERCRED.unpack(cred)
        if uid != os.getuid():
            self.errors.note("socket", PermissionError(f"uid {uid} is not allowed"))
            sock.close()
            return
        peer = RankConnection(pid, sock)
        self._connected.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(peer, _AT_ONCE))
        try:
            self._watch(peer)
        except ProcessLookupError:  # it has ended; a child may still hold the connection
            self._read(peer)
            self._hang_up(peer)
        except OSError as error:  # in another pid namespace, or an old kernel
            self.errors.note("pidfd", error)

    def _watch(self, peer: RankConnection) -> None:
        peer.pidfd = os.pidfd_open(peer.pid)
        self._selector.register(peer.pidfd, selectors.EVENT_READ, lambda: self._process_gone(peer))

    def _read(self, peer: RankConnection, most: int = sys.maxsize) -> None:
        """Read what a process has sent, at most `most` packets."""
        for _ in range(most):
            if peer.sock is None:
                return
            try:
                data, _, flags, _ = peer.sock.recvmsg(self.max_packet)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It ended without reading our last reply. Linux reports that before its packets.
                continue
            except OSError:
                data, flags = b"", 0
            if data:
                self.on_packet(peer, data, bool(flags & socket.MSG_TRUNC))
            else:
                self._hang_up(peer)

    def _hang_up(self, peer: RankConnection) -> None:
        if peer.sock is not None:
            self._selector.unregister(peer.sock)
            peer.sock.close()
            peer.sock = None
            self._connected.discard(peer)
        if peer.pidfd is None and not peer.gone:
            peer.gone = True
            self._callers.pop(peer.pid, None)
            self.on_gone(peer)
        elif peer.pidfd is not None and not peer.processes:
            self._unwatch(peer)

    def _process_gone(self, peer: RankConnection) -> None:
        if peer.pidfd is None:  # closed earlier in the same round
            return
        self._read(peer)  # what it sent before its end
        self._unwatch(peer)
        self._hang_up(peer)

    def _unwatch(self, peer: RankConnection) -> None:
        if peer.pidfd is not None:
            self._selector.unregister(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = None


def listen(path: Path) -> socket.socket:
    """Return a listening socket at `path` (mode 0600), in a folder that only this user can enter."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(f"socket path is longer than {MAX_PATH_BYTES} bytes: {path}")
    make_private(path.parent)
    _remove_stale(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        server.bind(os.fspath(path))
        path.chmod(0o600)
        server.listen(128)
    except OSError:
        server.close()
        raise
    return server


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(os.fspath(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:  # its listener is gone
            path.unlink()
            return
    raise OSError(f"another relay is listening on {path}")
