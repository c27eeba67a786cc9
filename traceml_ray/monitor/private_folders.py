"""
Private folders under /tmp for sockets and what could not be delivered, and the removal of dead ones; the
batches that agents, and relays before, left in one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from traceml_ray.errors import Errors
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import SUFFIX, read_spool

PLACE = Path("/tmp")  # not TMPDIR: paths of sockets may not be long
_PREFIX = "traceml-"
_LOCK = ".in-use"
"""
Name of the lock file. It differs from a session's lock: a session may be under /tmp too, and must not be
removed.
"""
_AGE_S = 60.0
"""Age in s up to which a folder may still be under construction."""
_ROWS_S = 86_400.0
"""How long undelivered rows are kept, in s."""


def lock_private(folder: Path) -> int:
    """
    Make `folder` for this user alone, and lock it for as long as this process lives; return the lock.

    Raises OSError when that cannot be, or when another process holds it.
    """
    make_private(folder)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.utime(lock)
    except OSError:
        os.close(lock)
        raise
    return lock


def make_private(folder: Path) -> None:
    """Make `folder` for this user alone. Raises OSError when what is there is not so, or nothing can be."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise OSError(f"{folder} is not a folder that only this user can enter: make it 0700, or remove it")


def is_private(folder: Path) -> bool:
    """Return whether `folder` is there (not a link to one) and only this user, its owner, can enter it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return ours and not stat.S_IMODE(status.st_mode) & 0o077


def remove_if_empty(folder: Path) -> None:
    """Remove a folder of ours that holds nothing but its lock."""
    try:
        if {entry.name for entry in folder.iterdir()} <= {_LOCK}:
            (folder / _LOCK).unlink(missing_ok=True)
            folder.rmdir()
    except OSError:
        return


def remove(folder: Path, within_s: float = 1.0) -> None:
    """
    Remove a folder of ours with all that is in it. A process that has just been killed may still write a
    file, and the removal then fails half-way: it is repeated for `within_s` seconds.
    """
    end = time.monotonic() + within_s
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(where: Path = PLACE) -> None:
    """Remove the folders of processes that were killed: their lock is free. Young rows are kept."""
    for lock in where.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            folder, now = lock.parent, time.time()
            if not is_private(folder) or now - lock.lstat().st_mtime < _AGE_S:
                continue
            left = [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*/*{SUFFIX}")]  # of a relay, of a launcher
            if any(now - rows.lstat().st_mtime < _ROWS_S for rows in left):
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder, 0.0)
        except OSError:
            continue


Batches = list[tuple[wire.RankBatch, bytes]]
"""Each as decoded, and as it was sent."""


def spooled(folder: Path, errors: Errors, seen: set[Path]) -> Iterator[tuple[Path, Batches]]:
    """
    Yield each spool file of `folder` that is not among `seen`, in order of names, with its batches; all that
    were looked at are added to `seen`. A file or batch that cannot be read is counted at `spool`.
    """
    for path in sorted(set(folder.glob(f"*{SUFFIX}")) - seen):
        seen.add(path)
        batches: Batches = []
        try:
            for frame in read_spool(path):
                try:
                    batches.append((codec.decode(frame, wire.RankBatch), frame))
                except codec.WireError as error:
                    errors.note("spool", error)
        except OSError as error:
            errors.note("spool", error)
        else:
            yield path, batches
