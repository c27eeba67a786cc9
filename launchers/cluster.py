"""
Starts and ends the private Ray cluster of one launch, which leaves nothing behind.

The cluster of one node listens on loopback only and has a token of its own. In a job of several nodes the
first node starts a head that the others can reach, and each of the others starts a raylet that joins it;
their token is the one that every node has been given. A token is never in arguments, and never put into the
environment of a rank. Everything on disk is in one private folder, which is also HOME, so that nothing is
written to `~/.ray`.

`python -m traceml_ray.launchers.cluster PARENT HEAD RANK ARGS…` is `ray ARGS…`, which ends with everything it
started when process PARENT dies. With a HEAD it waits for that first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import secrets
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from traceml_ray.errors import error_text
from traceml_ray.monitor.finish import KILL_S
from traceml_ray.ray.connection import ONE_NODE, find_token, node_address, resolve_address

from .lean_ray import disable_agents, use_temp_dir

OBJECT_STORE_BYTES = 75 * 1024 * 1024
"""Size of Ray's object store, in bytes: Ray's minimum, as our messages never use it."""
_IDLE_S, _IDLE_WINDOWS = 0.5, 4
"""Seconds over which the cores are measured, and how often in a row one has to be idle."""
JOIN_S = 300.0
"""How long the launchers of a job wait for the first one, in s; nodes may start minutes apart."""
_PORTS = range(20_000, 29_000)
"""
Ports for programs that bind them seconds later: above those of Ray's workers (10,002 to 19,999), below
torchrun's (29,400 and 29,500) and those that the kernel gives to outgoing connections (32,768 to 60,999 on
Linux), so that nobody takes one of them by chance.
"""
_PR_SET_PDEATHSIG = 1


class PrivateRay:
    """
    `ray start --block` for the node of this launch, in its own process session.

    Args:
        folder: private folder of the launch; short, because socket paths are made from it.
        environ: the user's environment.
        head: host:port of the head in a job of several nodes; "" in a job of one node.
        rank: rank of this node; the first (0) is the head, the others join it.

    Raises OSError when the head's host cannot be resolved.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str], head: str = "", rank: int = 0) -> None:
        self._joins = head if rank else ""
        self._rank = rank
        self._host = "127.0.0.1" if not head else node_address(head, rank) if not rank else ""
        self.address = head if rank else f"{self._host}:{head.rpartition(':')[2] or free_port()}"
        self.log = folder / "ray.log"
        self.folder = folder / "ray"
        """Ray's files of this node. No other node of the cluster uses this folder."""
        self._cwd = folder
        self.token = cluster_token(environ) if head else secrets.token_hex(32)
        auth = {"RAY_AUTH_TOKEN": self.token} if self.token else {}
        self.environ = {key: value for key, value in environ.items() if not key.startswith("RAY_")} | {
            "HOME": str(folder),
            "PYTHONUSERBASE": environ.get("PYTHONUSERBASE", site.getuserbase()),  # follows HOME otherwise
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token" if self.token else "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # relative to the raylet's
            **({} if head else ONE_NODE),
            **auth,
        }
        """Environment for processes that attach to this cluster."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start Ray without waiting for it. It ends with the calling *thread*. Raises OSError."""
        port = self.address.rpartition(":")[2]
        head = ["--head", f"--port={port}", f"--node-ip-address={self._host}", "--include-dashboard=false"]
        command = [
            *(sys.executable, "-m", __name__, str(os.getpid()), self._joins, str(self._rank)),
            *("start", "--block", f"--temp-dir={self.folder}", *([] if self._joins else head)),
            *(f"--object-store-memory={OBJECT_STORE_BYTES}", "--num-cpus=0", "--num-gpus=0"),
            *("--min-worker-port=0", "--max-worker-port=0", "--include-log-monitor=false", "--no-monitor"),
            *("--disable-usage-stats", "--log-style=record"),
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._cwd,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def yield_cores(self, nice: int) -> None:
        """Lower the priority of all processes of the cluster, and of those that they will start."""
        if (process := self._process) is not None:
            yield_cores(process.pid, nice)

    def exited(self) -> bool:
        """Whether the process has ended by itself."""
        if self._process is None:
            return False
        # Without reaping it: its session id must stay its own until `stop`.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def last_line(self) -> str:
        """Return the last line of the log of `ray start`."""
        with contextlib.suppress(OSError, IndexError):
            return self.log.read_text(errors="replace").split("\n")[-2][-300:]
        return "Ray ended at once, without a message"

    def stop(self, timeout: float = KILL_S) -> None:
        """
        Kill every process of the cluster, because none needs an orderly end. It is safe to call
        this twice.
        """
        process = self._process
        if process is not None:
            kill_session(process.pid, timeout)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)  # only now: until it is reaped, its session id is not used again
            self._process = None


def members(session: int) -> list[psutil.Process]:
    """
    Return the living processes of a session, oldest first. Ray's workers have process groups of their own.

    Raises OSError if processes cannot be listed, which needs `/proc`.
    """
    processes = []
    for pid in _pids():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(pid) == session:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
    return processes


def _pids() -> list[int]:
    try:
        return list(psutil.pids())
    except Exception as error:  # of any kind: psutil does not expect that there is not even this process
        raise OSError(f"cannot list processes: {error_text(error)}") from error


def kill_session(session: int, timeout: float) -> None:
    """
    Kill every process of a session except this one. Returns when they are gone, or after `timeout` s.

    If processes cannot be listed, kill the process group of the session's leader. What Ray has started ends
    with it.
    """
    deadline = time.monotonic() + timeout
    try:
        _pids()
    except OSError:
        with contextlib.suppress(OSError):
            if session != os.getpid():
                os.killpg(session, signal.SIGKILL)
        return
    while time.monotonic() < deadline:
        others = [process for process in members(session) if process.pid != os.getpid()]
        if not others:
            return
        for process in others:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)


def cluster_token(environ: Mapping[str, str]) -> str | None:
    """
    Return the token that every node of the job was given, looked up as Ray does. None: there is
    no token.
    """
    return find_token(environ)[0] or None


def free_port() -> int:
    """
    Return a TCP port that is free on this machine right now, and that no other program is given by chance
    before it is bound. Raises OSError when there is none.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


def yield_cores(session: int, nice: int) -> None:
    """
    Lower the priority of all threads of a session, and of all that they will start.

    Linux may divide CPU time between sessions first (autogroup). Then the priority of a thread counts only
    within its session, so both priorities are set.
    """
    if not nice:
        return
    for _ in range(2):  # again: a thread may have started another one before it was reached
        for process in _members_or_leader(session):
            for thread in _threads(process):
                with contextlib.suppress(OSError, psutil.Error):
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
                    psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_IDLE)
    with contextlib.suppress(OSError):  # not every kernel has it
        Path(f"/proc/{session}/autogroup").write_text(str(nice))


def _members_or_leader(session: int) -> list[psutil.Process]:
    with contextlib.suppress(OSError, psutil.Error):
        return members(session) or [psutil.Process(session)]
    return []


def _threads(process: psutil.Process) -> list[int]:
    with contextlib.suppress(OSError, psutil.Error):
        return [thread.id for thread in process.threads()]
    return [process.pid]


def wait_for_idle_core(
    most_s: float,
    cpu_pct: Callable[[float], float],
    cores: int,
    over: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """
    Return when a core has been idle for 2 s, after `most_s` seconds, or when `over` returns true. `cpu_pct`
    measures for the given number of seconds how busy all `cores` are, in percent of all cores.
    """
    until, idle = clock() + most_s, 0
    while clock() < until and idle < _IDLE_WINDOWS and not over():
        idle = idle + 1 if (1 - cpu_pct(_IDLE_S) / 100) * cores >= 1 else 0


def die_with(parent: int, with_signal: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it, in process `parent`, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:
        os._exit(1)


def _orphaned(_number: int, _frame: object) -> None:
    """End the whole cluster with this process. Otherwise Ray's agents would stay for a minute."""
    kill_session(os.getsid(0), timeout=5)
    os._exit(1)


def main() -> None:
    """Run the command `ray`, and end when the parent process ends."""
    signal.signal(signal.SIGUSR1, _orphaned)
    parent, head, rank, *arguments = sys.argv[1:]
    die_with(int(parent), signal.SIGUSR1)
    if head:
        address, local_ip = resolve_address(head, JOIN_S)
        arguments += [
            f"--address={address}",
            f"--node-ip-address={node_address(address, int(rank), local_ip)}",
        ]
    sys.modules["grpc"] = None  # type: ignore[assignment]  # as without ray[client]: no server on port 10001
    from ray.scripts.scripts import main as ray

    disable_agents()
    use_temp_dir(arguments)
    sys.argv = ["ray", *arguments]
    ray()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
