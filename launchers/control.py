"""Talks to the relay of a live session over its local socket, without Ray."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from traceml_ray import wire
from traceml_ray.session import LIVE, Live, read_json

FINISH_TIMEOUT_S = 8.0
SILENT_S = 1.2
"""A relay that brings a session to its end says so all the time; one that is silent for so long hangs."""
_STOPPED = -15


class ControlError(RuntimeError):
    """A live session that does not do what it is told; the message says which and why."""


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


def ask_finish(path: Path, message: wire.Finish) -> wire.Finished | None:
    """Send `message` to the relay at `path` and wait for its answer; None when it gives none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(SILENT_S)
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        try:
            sock.connect(os.fspath(path))
            sock.send(wire.encode(message))
            while time.monotonic() < deadline:
                data = sock.recv(wire.MAX_BATCH_BYTES)
                if wire.tag_of(data) != "rank_reply":  # a sign of life
                    return wire.decode(data, wire.Finished)
        except (OSError, ValueError):  # WireError is one, and so is a path that none can be
            return None
    return None
