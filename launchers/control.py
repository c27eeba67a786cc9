"""Talks to the relay of a live session over its local socket, without Ray."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections import Counter
from pathlib import Path

from traceml_ray import text
from traceml_ray.monitor.finish import LAUNCHER_S, REPORT_S, SILENT_S
from traceml_ray.store.bundles import bundles_of
from traceml_ray.store.session import (
    DATABASE,
    LIVE,
    Live,
    holder,
    live_state,
    read_json,
    start_text,
)
from traceml_ray.text import listed
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

_STOPPED = -15
DUMP_S = 15.0
"""Time limit of a bundle, in s; the stacks of the ranks take some seconds."""
_POLL_S = 0.1
UP_S = 60.0
"""How long to wait for a monitor that is starting, in s."""
_NO_BUNDLE = ("bundle: ", "no bundle: ")
"""Prefixes of the session's error messages that say a bundle could not be made."""


class ControlError(RuntimeError):
    """A live session that cannot be stopped; the message names it and the reason."""


def dump(folder: Path, limit_s: float = DUMP_S) -> Path:
    """
    Have a bundle of the live session in `folder` made; return where it is.

    Raises ControlError when it is not live, does not answer, or makes none in time.
    """
    asked, before = secrets.token_hex(8), _failures(folder)
    request(folder, wire.ControlRequest(codec.VERSION, asked), limit_s)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for bundle in reversed(bundles_of(folder)):
            if any(cause.request == asked for cause in bundle.manifest.causes):
                return bundle.path
        if why := _failures(folder) - before:
            raise ControlError(f"session {folder.name!r} has made no bundle: {listed([*why])}")
        time.sleep(_POLL_S)
    raise ControlError(
        f"session {folder.name!r} has made no bundle within {limit_s:g} s; `traceml-ray status` may say why"
    )


def check_goes_on(folder: Path, run: str | None) -> None:
    """
    Raise ControlError where the session in `folder` is not live, or no step of its `run` (None: of any) is
    left to record.
    """
    from traceml_ray.reports.summary import runs_of
    from traceml_ray.store.rank_processes import why_over
    from traceml_ray.store.schema import SessionFileError
    from traceml_ray.store.session_file import SessionFile

    _running(folder)
    try:
        with SessionFile(folder / DATABASE) as file:
            runs = runs_of(file)
    except SessionFileError:  # the session is just starting
        return
    if why := why_over(runs, run):
        raise ControlError(f"session {folder.name!r}: {why}")


def _failures(folder: Path) -> Counter[str]:
    """Return how often the session has failed to make or keep a bundle, by reason."""
    from traceml_ray.store.schema import SessionFileError
    from traceml_ray.store.session_file import SessionFile

    try:
        with SessionFile(folder / DATABASE) as file:
            errors = file.meta().get("errors", {})
    except SessionFileError:  # there is no file yet
        errors = {}
    return Counter({what.partition(": ")[2]: n for what, n in errors.items() if what.startswith(_NO_BUNDLE)})


def request(folder: Path, message: wire.ControlRequest, limit_s: float) -> None:
    """
    Hand a request to the live session in `folder`; waits for a relay that is busy, or not there yet.

    Raises ControlError when there is none, or it has not answered within `limit_s` seconds from when its
    monitor runs.
    """
    live, deadline = _running(folder), time.monotonic() + limit_s
    try:
        while not Path(live.socket).exists() and holder(folder) is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(live.socket)
            sock.send(codec.encode(message))
            codec.decode(sock.recv(wire.MAX_BATCH_BYTES), wire.Finished)
    except (OSError, ValueError) as error:
        late = f" within {limit_s:g} s" if isinstance(error, TimeoutError) else ""
        raise ControlError(
            f"the relay of session {folder.name!r} does not answer{late} at {live.socket}"
        ) from None


def stop(folder: Path) -> None:
    """
    End the monitor of the live session in `folder` and have its files written; training goes on.

    Raises ControlError when it is not live, or does not answer.
    """
    live = _running(folder)
    finished = ask_finish(Path(live.socket), wire.Finish(codec.VERSION, _STOPPED, force=True))
    if finished is None:
        raise ControlError(f"the relay of session {folder.name!r} does not answer at {live.socket}")
    if not finished.ok:
        raise ControlError(f"session {folder.name!r} could not be written: {finished.detail}")


def _running(folder: Path, limit_s: float = UP_S) -> Live:
    """Wait until the monitor of the live session runs. Raises ControlError where it does not in time."""
    deadline = time.monotonic() + limit_s
    while (live := live_state(folder)) is not None and (why := start_text(live)):
        if live.monitor == "failed" or time.monotonic() > deadline:
            raise ControlError(f"session {folder.name!r}: {why}")
        text.advance(why, None)
        time.sleep(_POLL_S)
    try:
        return read_json(folder / LIVE, Live)
    except (OSError, ValueError):
        why = f"is not live: it has ended{_others(folder)}"
        if holder(folder) is not None:
            why = "is starting: its monitor does not answer yet"
        raise ControlError(f"session {folder.name!r} {why}") from None


def _others(folder: Path) -> str:
    """Return which sessions beside it are live: one that begins has no file to be found by yet."""
    live = [path.parent for path in folder.parent.glob(f"*/{LIVE}") if path.parent != folder]
    names = [repr(folder.name) for folder in live if holder(folder) is not None]
    return f"; live is {listed(names)}, which may just be starting" if names else ""


def ask_finish(path: Path, message: wire.Finish, limit_s: float = LAUNCHER_S) -> wire.Finished | None:
    """
    Send `message` to the relay at `path` and wait for the end that it asks for; None where there is none.

    The end has failed when no reply in time shows that the relay is there, or that a report is being made.
    """
    started = time.monotonic()
    deadline = started + limit_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(SILENT_S)
        try:
            sock.connect(os.fspath(path))
        except (OSError, ValueError):  # no socket can have this path
            return None
        with contextlib.suppress(OSError, codec.WireError):
            sock.send(codec.encode(message))
            while (now := time.monotonic()) < deadline:
                sock.settimeout(min(SILENT_S, deadline - now))
                answer = codec.decode(sock.recv(wire.MAX_BATCH_BYTES), wire.Finished)
                if not answer.pending:
                    return answer
                if answer.state == "writing":
                    deadline = min(time.monotonic() + LAUNCHER_S, started + REPORT_S)
    return wire.Finished(codec.VERSION, "failed", "the relay did not answer in time")
