"""
Asks a live session to end, or to make a bundle or a profile, over the local socket of its relay and without
Ray. The progress of a bundle or profile is then read from the files in the session's folder.
"""

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
from traceml_ray.store.profiles import OVER, Profile, StoredProfile, profiles_of, under_way
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
PROFILE_S = 600.0
"""Time to wait for a profile, in s. The capture continues afterwards."""
_GONE_S = 10.0
"""A profile that was in progress and has been missing for this long, in s, could not be kept."""
_POLL_S = 0.1
UP_S = 60.0
"""Time to wait for a monitor that is starting, in s."""
_NO_BUNDLE = ("bundle: ", "no bundle: ")
"""Prefixes of the session's error messages that say a bundle could not be made."""


class ControlError(RuntimeError):
    """A live session cannot do what was requested. The message names the session and the reason."""


def dump(folder: Path, limit_s: float = DUMP_S) -> Path:
    """
    Request a bundle of the live session in `folder`; return the path of the bundle.

    Raises ControlError when the session is not live, does not answer, or makes no bundle in time.
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
        f"session {folder.name!r} has made no bundle within {limit_s:g} s; "
        "`traceml-ray status` may give the reason"
    )


def profile(folder: Path, wanted: wire.ProfileRequest, limit_s: float = PROFILE_S) -> StoredProfile:
    """
    Request a profile of steps of the live session in `folder`, and wait for it.

    Raises ControlError when the session is not live, does not answer, its run is over, or the profile is not
    ready within `limit_s` seconds.
    """
    asked, deadline = secrets.token_hex(8), time.monotonic() + limit_s
    text.advance("profile: waiting", None)
    check_goes_on(folder, wanted.run)
    request(folder, wire.ControlRequest(codec.VERSION, asked, wire.MeasureRequest(asked, wanted)), limit_s)
    goes_on, seen_s = True, None
    while goes_on and time.monotonic() < deadline:
        goes_on = holder(folder) is not None
        for stored in reversed(profiles_of(folder)):
            if asked in stored.profile.requests:
                return stored
        now = under_way(folder)
        what, share = "waiting", None
        if now is not None and asked in now.requests:
            seen_s, (what, share) = time.monotonic(), so_far(now)
        elif seen_s is not None and time.monotonic() - seen_s > _GONE_S:
            raise ControlError(
                f"session {folder.name!r} could not keep the profile; "
                "`traceml-ray status` may give the reason"
            )
        text.advance(f"profile: {what}", share)
        time.sleep(_POLL_S)
    if not goes_on:
        raise ControlError(f"session {folder.name!r} has ended before there was a profile")
    raise ControlError(
        f"session {folder.name!r} has made no profile within {limit_s:g} s; `traceml-ray status` may give "
        "the reason, and `traceml-ray profile --list` shows whether it came later"
    )


def so_far(now: Profile) -> tuple[str, float]:
    """Return the current phase of a profile in progress, and its progress from 0 to 1."""
    ranks = now.ranks
    if any(rank.state == "sending" for rank in ranks):
        total = sum(rank.total_bytes or 0 for rank in ranks)
        return "sending", sum(rank.bytes for rank in ranks) / total if total else 0.0
    done = sum(len(rank.steps) for rank in ranks if rank.state not in OVER)
    if any(rank.state == "recording" for rank in ranks):
        wanted = now.n_steps * sum(rank.state not in OVER for rank in ranks)
        return f"recording step {now.first_step} and after", done / wanted if wanted else 0.0
    return f"waiting for step {now.first_step}", 0.0


def check_goes_on(folder: Path, run: str | None) -> None:
    """
    Raise ControlError if the session in `folder` is not live, or if its `run` (None: any run) has no steps
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
    Send a request to the live session in `folder`. Waits for a relay that is busy or has not started yet.

    Raises ControlError when there is no live session, or when it has not answered within `limit_s` seconds
    after its monitor started.
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
    End the monitor of the live session in `folder` and let it write its files. Training continues.

    Raises ControlError when the session is not live, or does not answer.
    """
    live = _running(folder)
    finished = ask_finish(Path(live.socket), wire.Finish(codec.VERSION, _STOPPED, force=True))
    if finished is None:
        raise ControlError(f"the relay of session {folder.name!r} does not answer at {live.socket}")
    if not finished.ok:
        raise ControlError(f"session {folder.name!r} could not be written: {finished.detail}")


def _running(folder: Path, limit_s: float = UP_S) -> Live:
    """Wait until the monitor of the live session runs. Raises ControlError if it does not run in time."""
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
    """Return the names of other live sessions. A session that is just beginning has no file yet."""
    live = [path.parent for path in folder.parent.glob(f"*/{LIVE}") if path.parent != folder]
    names = [repr(folder.name) for folder in live if holder(folder) is not None]
    return f"; live is {listed(names)}, which may just be starting" if names else ""


def ask_finish(path: Path, message: wire.Finish, limit_s: float = LAUNCHER_S) -> wire.Finished | None:
    """
    Send `message` to the relay at `path` and wait for the requested end. None: no relay listens there.

    The end has failed when no reply arrives in time that shows that the relay is alive, or that a report is
    being made.
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
