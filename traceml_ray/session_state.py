"""
Who holds a session, and how far its monitor is: what the files in its folder say, before there is a database.

The launcher's process (the aggregator's, where there is no launcher) holds an flock on `.lock` for as long as
it lives, and keeps `live.json`. All of this can be imported from `session`, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from traceml_ray import text
from traceml_ray.files import read_file, write_file
from traceml_ray.typed import ready

DATABASE = "session.sqlite"
LIVE = "live.json"
LOCK = ".lock"
_MAX_JSON_BYTES = 64 << 20
_T = TypeVar("_T")

MonitorState = Literal["waiting_for_cpu", "starting", "running", "failed"]


class Live(msgspec.Struct, frozen=True):
    """What is in `live.json` of a session folder from its launch to its end. No secret."""

    pid: int
    """Of the launcher, or of the aggregator where there is none."""
    socket: str
    """Of the relay on this node: it can be asked to end the session."""
    address: str
    """Of the Ray cluster."""
    monitor: MonitorState = "running"
    """State of the monitor. A failed one is not started again; the rows are stored when training ends."""
    began_ns: int = 0
    """Time of the launch (ns, wall clock); 0 where a running monitor has written the file."""
    detail: str = ""
    """Why it has failed."""


def holder(folder: Path) -> int | None:
    """Return the pid of the process that holds the session right now, None where there is none."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError as error:
        return pid_in(fd) if error.errno == errno.EWOULDBLOCK else None
    finally:
        os.close(fd)


def live_state(folder: Path) -> Live | None:
    """Return how far the monitor of the session in `folder` is; None where nobody holds the session."""
    if (pid := holder(folder)) is None:
        return None
    try:
        return read_json(folder / LIVE, Live)
    except (OSError, ValueError):  # it is written a moment after the folder is made, before the database
        known = (folder / DATABASE).exists() or (folder / LIVE).exists()
        return Live(pid, "", "", "running" if known else "starting")


def start_text(live: Live) -> str:
    """Return why a live session does not answer yet, in sentences; "" where its monitor runs."""
    waited = f" ({text.age((time.time_ns() - live.began_ns) / 1e9)} so far)" if live.began_ns else ""
    return {
        "waiting_for_cpu": f"Training is running. The monitor is waiting for a free CPU core{waited}.",
        "starting": f"Training is running. The monitor is starting{waited}.",
        "running": "",
        "failed": "Training is running without a live monitor; its steps are stored when it ends "
        f"({live.detail}).",
    }[live.monitor]


def starting_sessions(out: Path) -> list[Path]:
    """Return the folders under `out` of live sessions that have no file yet."""
    locks = [lock for lock in out.glob(f"*/{LOCK}") if not (lock.parent / DATABASE).exists()]
    return [lock.parent for lock in locks if holder(lock.parent) is not None]


def read_json(path: Path, kind: type[_T]) -> _T:
    """Return what a JSON file of a session folder holds. Raises OSError, ValueError for other contents."""
    try:
        return msgspec.json.decode(read_file(path, _MAX_JSON_BYTES), type=ready(kind))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def write_live(folder: Path, live: Live) -> None:
    """Write `live.json` into a session folder, for this user only. Raises OSError."""
    write_file(folder / LIVE, msgspec.json.encode(live))


def pid_in(fd: int) -> int | None:
    """Return the pid that is written in a lock; None where there is none."""
    text = b""
    with contextlib.suppress(OSError):  # it is no file
        text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None
