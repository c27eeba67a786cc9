"""
Private folders under /tmp for sockets and undelivered data, and the removal of folders of dead processes.
Also reads the batches that agents and earlier relays left in such a folder.
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
    Make `folder` private to this user, and lock it for as long as this process lives. Return the lock.

    Raises OSError when this is impossible, or when another process holds the lock.
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
    """
    Make `folder` private to this user. Raises OSError if an existing one is not private, or it cannot be
    made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise OSError(f"{folder} is not a folder that only this user can enter: make it 0700, or remove it")


def is_private(folder: Path) -> bool:
    """
    Return whether `folder` exists, is not a link, belongs to this user, and only this user can
    enter it.
    """
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
    Remove a folder of ours with all its contents. A process that was just killed may still write a file, so
    that the removal fails half-way. It is therefore repeated for `within_s` seconds.
    """
    end = time.monotonic() + within_s
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(where: Path = PLACE) -> None:
    """Remove the folders of killed processes, whose locks are free. Recent undelivered rows are kept."""
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
"""Rank batches: each as decoded, and as it was sent."""


def spooled(folder: Path, errors: Errors, seen: set[Path]) -> Iterator[tuple[Path, Batches]]:
    """
    Yield each spool file of `folder` that is not in `seen`, in order of names, with its batches. Every file
    examined is added to `seen`. A file or batch that cannot be read is counted at `spool`.
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
