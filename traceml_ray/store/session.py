"""
The session folder: the files of a session, the process that holds it, and how a session is found.

`<out>/<session>/` holds `session.sqlite`, `summary.json`, `report.txt` and `report.html`. The launcher's
process (or the aggregator's, if there is no launcher) holds an flock on `.lock` as long as it lives, so a
second launch cannot write into a live session. Nothing is overwritten: an older session of the same name is
moved aside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from traceml_ray import text
from traceml_ray.files import read_file, write_file
from traceml_ray.settings import check_session_name
from traceml_ray.wire.codec import ready

DATABASE = "session.sqlite"
LIVE = "live.json"
LOCK = ".lock"
_MAX_JSON_BYTES = 64 << 20
_T = TypeVar("_T")

MonitorState = Literal["waiting_for_cpu", "starting", "running", "failed"]


class Live(msgspec.Struct, frozen=True):
    """Contents of `live.json`, which a session folder has from launch to end. It holds no secret."""

    pid: int
    """Process id of the launcher, or of the aggregator if there is no launcher."""
    socket: str
    """Socket of the relay on this node, which can be asked to end the session."""
    address: str
    """Address of the Ray cluster."""
    monitor: MonitorState = "running"
    """State of the monitor. A failed monitor is not started again; the rows are stored when training ends."""
    began_ns: int = 0
    """Time of the launch (ns, wall clock); 0 if a running monitor has written the file."""
    detail: str = ""
    """Reason why the monitor failed; "" if it has not failed."""


def holder(folder: Path) -> int | None:
    """Return the pid of the process that holds the session now; None if no process does."""
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
    """Return the state of the monitor of the session in `folder`; None if no process holds the session."""
    if (pid := holder(folder)) is None:
        return None
    try:
        return read_json(folder / LIVE, Live)
    except (OSError, ValueError):  # it is written a moment after the folder is made, before the database
        known = (folder / DATABASE).exists() or (folder / LIVE).exists()
        return Live(pid, "", "", "running" if known else "starting")


def start_text(live: Live) -> str:
    """Return why a live session does not answer yet, in sentences; "" if its monitor runs."""
    waited = f" ({text.age((time.time_ns() - live.began_ns) / 1e9)} so far)" if live.began_ns else ""
    return {
        "waiting_for_cpu": f"Training is running. The monitor is waiting for a free CPU core{waited}.",
        "starting": f"Training is running. The monitor is starting{waited}.",
        "running": "",
        "failed": "Training is running without a live monitor; its steps are stored when it ends "
        f"({live.detail}).",
    }[live.monitor]


def starting_sessions(out: Path) -> list[Path]:
    """Return the folders under `out` of live sessions that have no session file yet."""
    locks = [lock for lock in out.glob(f"*/{LOCK}") if not (lock.parent / DATABASE).exists()]
    return [lock.parent for lock in locks if holder(lock.parent) is not None]


def read_json(path: Path, kind: type[_T]) -> _T:
    """
    Return the contents of a JSON file of a session folder. Raises OSError, and ValueError for invalid
    contents.
    """
    try:
        return msgspec.json.decode(read_file(path, _MAX_JSON_BYTES), type=ready(kind))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def write_live(folder: Path, live: Live) -> None:
    """Write `live.json` into a session folder, readable for this user only. Raises OSError."""
    write_file(folder / LIVE, msgspec.json.encode(live))


def pid_in(fd: int) -> int | None:
    """Return the pid that is written in a lock file; None if there is none."""
    text = b""
    with contextlib.suppress(OSError):  # it is no file
        text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


PAGE = "report.html"
SINKS = "sinks.json"
"""The last states of the sinks. They are written after the session file is closed."""
REPORTS = ("summary.json", "report.txt", PAGE)
"""Reports of a session. The page is missing if it could not be made."""
_OWN = (
    *("session.*", "snapshot-*.sqlite*", "summary.json", "report.*", LIVE, "*.tmp", "*.spool"),
    *("alerts.json", SINKS),
    *("bundles", "profiles", "snapshots"),
)
"""Patterns of the files that a monitor writes into its session's folder."""
_LOOK_S = 0.2
"""Interval between two looks for a session that has not started yet, in s."""


class SessionError(ValueError):
    """A session that cannot be created or found. The message says which session, where, and what to do."""


class NoSessionError(SessionError):
    """There is no session of that name, or no session at all."""


class SessionHeldError(SessionError):
    """A session that another process holds."""


class SessionStartingError(SessionError):
    """A live session that has no file yet, because its monitor is starting."""


@dataclass
class SessionFolder:
    """The folder of one session. With `lock_fd`, this process holds the session until `release`."""

    path: Path
    lock_fd: int | None = None
    moved: Path | None = None
    """New path of an older session with the same name; None: there was none."""

    @property
    def name(self) -> str:
        """Name of the session."""
        return self.path.name

    @property
    def sqlite(self) -> Path:
        """Path of the session file, which holds all recorded data."""
        return self.path / DATABASE

    @property
    def summary_json(self) -> Path:
        """Path of the summary, schema `traceml_ray/summary/1`."""
        return self.path / "summary.json"

    @property
    def report_html(self) -> Path:
        """Path of the report as one self-contained HTML page."""
        return self.path / PAGE

    @property
    def report_txt(self) -> Path:
        """Path of the report as plain text."""
        return self.path / "report.txt"

    def release(self) -> None:
        """Release the session, so that its name can be used again."""
        if self.lock_fd is not None:
            with contextlib.suppress(OSError):
                (self.path / LIVE).unlink(missing_ok=True)
            os.close(self.lock_fd)
            self.lock_fd = None


def prepare(out: str | Path, name: str | None = None, *, again: bool = False) -> SessionFolder:
    """
    Create the folder of a new session under `out` and lock it. Without `name`, a name is made up. `again`:
    continue in the existing folder (its holder was restarted).

    Raises `SessionError` if the session is already running, `out` cannot be written, or the name belongs to a
    folder that is not a session; `SettingError` for an invalid name.
    """
    if name is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    check_session_name(name)
    path = Path(out).absolute() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _lock_path(path, again)
    except OSError as error:
        raise SessionError(
            f"cannot write sessions into {path.parent}: {error.strerror or error}; "
            "choose another folder with --sessions or TRACEML_OUT"
        ) from error


def inherit(path: Path) -> SessionFolder:
    """
    Lock the session at `path` once its current holder releases it; waits for that. Raises OSError, also if
    another session has replaced it.
    """
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if not _same_file(fd, path / LOCK):
            raise FileNotFoundError(errno.ENOENT, "the session was moved", str(path))
        _sign(fd)
    except BaseException:
        os.close(fd)
        raise
    return SessionFolder(path, lock_fd=fd)


def find(session: str | Path | None, out: str | Path, *, starting: bool = False) -> Path:
    """
    Return the folder of a stored or live session.

    `session` is a name under `out`, a session folder, or a `session.sqlite`. None: the running session under
    `out` (the one launched last, if there are several), else the newest. With `starting`, the result may be a
    live session that has no session file yet, because its monitor is starting.

    Raises:
        NoSessionError: there is no session of that name.
        SessionStartingError: the session has no file yet; not with `starting`.
        SessionError: the path is not a session, or cannot be read. Each message names what was looked for.
    """
    try:
        folder = _find(session, out)
    except OSError as error:  # also for a name that no file can have
        where = f" at {error.filename}" if error.filename else ""
        reason = f"cannot look for session {str(session)[:80]!r}{where[:200]}: {error.strerror}"
        raise SessionError(reason) from error
    if not starting and not (folder / DATABASE).is_file():
        live = live_state(folder)
        why = f"session {folder.name!r} has no steps yet." + (f" {start_text(live)}" if live else "")
        raise SessionError(why) if live and live.monitor == "failed" else SessionStartingError(why)
    return folder


def await_session(
    session: str | Path | None,
    out: str | Path,
    wait_s: float,
    waits_for: tuple[type[SessionError], ...],
    notice: Callable[[str], object],
    *,
    starting: bool = False,
) -> Path:
    """
    Return the result of `find` once it raises none of `waits_for`; after `wait_s` seconds, raise that error.
    `notice` is called with a line of text for the person who waits.
    """
    by, noticed = time.monotonic() + wait_s, False
    while True:
        try:
            return find(session, out, starting=starting)
        except waits_for as error:
            if time.monotonic() >= by:
                waited = f" (waited {text.duration(wait_s)} for it: --wait)" if wait_s else ""
                raise type(error)(f"{error}{waited}") from error
            if not noticed:
                notice(f"{error}; waiting {text.duration(wait_s)} for it to begin (Ctrl-C ends)")
            noticed = True
        time.sleep(_LOOK_S)


def _find(session: str | Path | None, out: str | Path) -> Path:
    if session is None:
        return _newest(Path(out))
    given = Path(session)
    if given.is_file() and given.name == DATABASE:
        return given.parent
    for folder in (Path(out) / given, given):
        if (folder / DATABASE).is_file() or holder(folder) is not None:
            return folder
    path = next((path for path in (Path(out) / given, given) if path.exists()), None)
    raise _missing(given, Path(out)) if path is None else SessionError(_why_none(path))


def _missing(given: Path, out: Path) -> NoSessionError:
    if len(given.parts) > 1:
        return NoSessionError(f"no session at {given}: there is no such folder")
    names = _names(out) or why_unreadable(out) or "none"
    return NoSessionError(f"no session {str(given)!r} under {out}; sessions there: {names}")


def _why_none(path: Path) -> str:
    """Return why there is no session at `path`, and what to do."""
    if not path.is_dir():
        return f"{path} is a file, not a session: give the name or folder of one, or its {DATABASE}"
    if names := _names(path):
        return f"{path} is a folder of sessions: choose one with --sessions {path} NAME; there: {names}"
    return f"{path} is not a session: it has no {DATABASE}"


def why_unreadable(out: Path) -> str | None:
    """Return why the sessions under `out` cannot be listed; None if they can, even if there are none."""
    try:
        os.scandir(out).close()
    except OSError as error:
        return f"{error.strerror or error}".lower()
    return None


def _names(out: Path) -> str:
    """Return the names of the newest sessions under `out`."""
    return ", ".join(folder.name for folder in _sessions(out)[:5])


def remove(path: Path) -> list[str]:
    """
    Remove the session at `path`. Return the entries that are left in its folder because traceml-ray did not
    write them.

    No process can start a session there meanwhile. Raises SessionHeldError for a live session, SessionError
    if `path` is not a session, OSError.
    """
    if path.is_symlink() or not (path / DATABASE).is_file():
        raise SessionError(f"{path} is not the folder of a session")
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _flock(fd, path.name)
        own_entries = [entry for entry in path.iterdir() if any(map(entry.match, _OWN))]
        for entry in sorted(own_entries, key=_order):  # cut short, it is a session still
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        left = sorted(_contents(path) - {LOCK})
        if not left:
            (path / LOCK).unlink(missing_ok=True)
            path.rmdir()
        return left
    finally:
        os.close(fd)


def _order(entry: Path) -> int:
    """Return the sort key for removal: the database comes nearly last, then the files that belong to it."""
    return (
        0 if entry.is_dir() else 1 + entry.name.startswith("session.") + entry.name.startswith(f"{DATABASE}-")
    )


def _sessions(out: Path) -> list[Path]:
    """Return the session folders under `out`, the newest first, including starting sessions."""
    folders = []
    for path in [*out.glob(f"*/{DATABASE}"), *(folder / LOCK for folder in starting_sessions(out))]:
        try:
            folders.append((path.stat().st_mtime_ns, path.parent))
        except OSError:
            continue
    return [folder for _, folder in sorted(folders, reverse=True)]


def _newest(out: Path) -> Path:
    """
    Return the running session that was launched last. Without one, return the session
    that was written last.
    """
    sessions = _sessions(out)
    if not sessions:
        raise no_sessions(out)
    live = [folder for folder in sessions if holder(folder) is not None]
    return max(live, key=_launched_ns, default=sessions[0])


def _launched_ns(folder: Path) -> int:
    """Return when a process locked the session (ns)."""
    try:
        return (folder / LOCK).stat().st_mtime_ns
    except OSError:
        return 0


def no_sessions(out: Path) -> NoSessionError:
    """Return the error for a folder without sessions."""
    why = why_unreadable(out)
    where = f"{out} ({why})" if why else str(out)
    return NoSessionError(
        f"no session under {where}; name the folder of sessions with --sessions or TRACEML_OUT"
    )


def _lock_path(path: Path, again: bool) -> SessionFolder:
    """
    Lock `path`. A finished session of that name is moved aside first, unless `again`. Retries while another
    launch competes.
    """
    moved: Path | None = None
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        contents = _contents(path)
        if contents and not contents & {DATABASE, LOCK}:
            raise SessionError(f"{path} exists and is not a session; choose another name")
        try:
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another launch has just moved the folder away
            continue
        try:
            _flock(fd, path.name)
            if not _same_file(fd, path / LOCK):
                os.close(fd)
                continue
            if not again and _contents(path) - {LOCK}:
                moved = _move_aside(path)
                os.close(fd)
                continue
            _sign(fd)
        except BaseException:
            os.close(fd)
            raise
        return SessionFolder(path, lock_fd=fd, moved=moved)


def _contents(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def _flock(fd: int, name: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            pid = pid_in(fd)
            who = f" (pid {pid})" if pid else ""
            text = f"session {name!r} is already running{who}; choose another name"
            raise SessionHeldError(text) from None
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # a filesystem without locks
            raise


def _sign(fd: int) -> None:
    """Write this process's pid into the lock file."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)


def _same_file(fd: int, path: Path) -> bool:
    """Whether `path` is still the file behind `fd`. Another launch may have moved the folder away."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _move_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return path.rename(aside)
