"""Talks to the relay of a live session over its local socket, without Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from traceml_ray import wire
from traceml_ray.monitor.finish import LAUNCHER_S, REPORT_S, SILENT_S
from traceml_ray.session import LIVE, Live, read_json

_STOPPED = -15


class ControlError(RuntimeError):
    """A live session that cannot be stopped; the message names it and the reason."""


def stop(folder: Path) -> None:
    """
    End the monitor of the live session in `folder` and have its files written; training goes on.

    Raises ControlError when it is not live, or does not answer.
    """
    try:
        live = read_json(folder / LIVE, Live)
    except (OSError, ValueError):
        raise ControlError(f"session {folder.name!r} is not live: no usable {folder / LIVE}") from None
    finished = ask_finish(Path(live.socket), wire.Finish(wire.VERSION, _STOPPED, force=True))
    if finished is None:
        raise ControlError(f"the relay of session {folder.name!r} does not answer at {live.socket}")
    if not finished.ok:
        raise ControlError(f"session {folder.name!r} could not be written: {finished.detail}")


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
        except (OSError, ValueError):  # a path that none can be
            return None
        with contextlib.suppress(OSError, wire.WireError):
            sock.send(wire.encode(message))
            while (now := time.monotonic()) < deadline:
                sock.settimeout(min(SILENT_S, deadline - now))
                answer = wire.decode(sock.recv(wire.MAX_BATCH_BYTES), wire.Finished)
                if not answer.pending:
                    return answer
                if answer.state == "writing":
                    deadline = min(time.monotonic() + LAUNCHER_S, started + REPORT_S)
    return wire.Finished(wire.VERSION, "failed", "the relay did not answer in time")
