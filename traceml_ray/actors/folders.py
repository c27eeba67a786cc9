"""Private folders under /tmp for sockets and what could not be delivered, and the removal of dead ones."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from pathlib import Path

PLACE = Path("/tmp")  # not TMPDIR: paths of sockets may not be long
_PREFIX = "traceml-"
_LOCK = ".in-use"
"""Not the name of a session's lock: a session may lie under /tmp too, and is nobody's to remove."""
_AGE_S = 60.0
"""A folder this young may still be being made."""


def hold(folder: Path) -> int:
    """
    Make `folder` for this user alone, and lock it for as long as this process lives; return the lock.

    Raises OSError when that cannot be, or when another process holds it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.utime(lock)
    except OSError:
        os.close(lock)
        raise
    return lock


def is_private(folder: Path) -> bool:
    """Return whether `folder` is there, of this user, and nobody else can enter it."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077


def leave(folder: Path) -> None:
    """Remove a folder of ours that holds nothing any more but its lock; else leave it as it is."""
    try:
        if {entry.name for entry in folder.iterdir()} <= {_LOCK}:
            (folder / _LOCK).unlink(missing_ok=True)
            folder.rmdir()
    except OSError:
        return


def sweep(where: Path = PLACE) -> None:
    """Remove the folders of processes that were killed: nobody holds their lock."""
    for lock in where.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            status = lock.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _AGE_S:
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue
