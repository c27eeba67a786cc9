"""
Attaches to a Ray cluster, makes the session's actors there, and exits. The launcher must not do that itself,
because Ray ends an attached process when the cluster's head is lost.

`python -m traceml_ray.launchers.helper` reads one JSON `HelperRequest` from stdin and writes one JSON
`HelperReply` to stdout. Credentials come in the environment. It exits within `deadline_s`, whatever Ray does.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import msgspec

from traceml_ray.ray.actors import ActorConfig, Attachment
from traceml_ray.ray.connection import attach
from traceml_ray.wire.codec import ready

from .cluster import die_with
from .lean_ray import until_joined

_DETAIL_CHARS = 300
_KILL_S = 2.0
_LOOK_S = 0.05
_REFUSED = 20
"""
Number of refused connections in a row after which a relay that answers is unreachable, not just
restarted.
"""
_answered = threading.Lock()
"""Acquired by the first reply, because the deadline and the work may both try to reply."""


class HelperRequest(msgspec.Struct, frozen=True):
    """The actors that the helper process is to start, and where."""

    parent: int
    address: str
    """host:port of the cluster's GCS."""
    actors: ActorConfig
    deadline_s: float
    temp_dir: str = ""
    """Folder of this node's raylet if the launcher started it. There may be other raylets."""
    first: bool = True
    """Whether to create the aggregator. If not, wait until the launcher of the first node has created it."""


class HelperReply(msgspec.Struct, frozen=True):
    """The result of a `HelperRequest`."""

    ok: bool
    detail: str = ""


def main() -> None:
    """Read the request from stdin, and write the reply to stdout."""
    stdout, sys.stdout = sys.stdout, sys.stderr  # stdout carries only the reply, whatever Ray prints
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ready(HelperRequest))
    die_with(request.parent)
    threading.Timer(
        request.deadline_s, _answer, (stdout, HelperReply(False, "Ray did not answer in time"))
    ).start()
    worker = threading.Thread(target=lambda: _answer(stdout, _attempt(request)))
    worker.start()  # not on the main thread: there Ray takes over the handling of signals
    worker.join()


def _answer(stdout: TextIO, reply: HelperReply) -> None:
    """Reply and exit at once, without a shutdown of Ray: it may hang, and the actors are detached."""
    _answered.acquire()
    stdout.write(msgspec.json.encode(reply).decode() + "\n")
    stdout.flush()
    os._exit(0)


def _attempt(request: HelperRequest) -> HelperReply:
    try:
        _make_actors(request)
    except Exception as error:
        last = str(error).strip().splitlines()[-1:]  # an error of several lines contains a remote traceback
        return HelperReply(False, f"{type(error).__name__}: {''.join(last)}"[:_DETAIL_CHARS])
    return HelperReply(True)


def _make_actors(request: HelperRequest) -> None:
    joins = bool(request.temp_dir) and not request.first
    where = Attachment(request.address, request.temp_dir)
    attach(where, request.deadline_s - 1, lambda _ray: until_joined(request.temp_dir) if joins else None)
    import ray

    from traceml_ray.ray.actors import find_aggregator
    from traceml_ray.ray.aggregator import ensure_aggregator

    actors = request.actors
    node_id, made = ray.get_runtime_context().get_node_id(), list[Any]()
    if request.first:
        made.append(ensure_aggregator(actors, node_id, fresh=True))
    while find_aggregator(actors.session) is None:
        time.sleep(_LOOK_S)
    made.append(_make_relay(actors, node_id))
    try:
        until_ready(
            lambda limit_s: ray.get(made[-1].ready.remote(), timeout=limit_s),
            ray.exceptions.ActorUnavailableError,
            actors.socket,
            request.deadline_s,
        )
    except BaseException:
        for actor in made:
            ray.kill(actor, no_restart=True)
        deadline = time.monotonic() + _KILL_S  # this process must not end before the order is sent
        while request.first and find_aggregator(actors.session) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        raise


def _make_relay(actors: ActorConfig, node_id: str) -> Any:
    """Make the relay of this launch. One node of a running cluster may have several launches of a job."""
    from traceml_ray.ray.membership import ensure_relay

    try:
        return ensure_relay(actors, node_id, fresh=True)
    except ValueError:  # another relay has this name
        launch = f".{secrets.token_hex(4)}"
        return ensure_relay(msgspec.structs.replace(actors, launch=launch), node_id, fresh=True)


def until_ready(
    ask: Callable[[float], object], unavailable: type[Exception], path: str, limit_s: float
) -> None:
    """
    Return when the relay answers and takes connections.

    A relay whose process was killed is made again by Ray; meanwhile calls fail, or nobody listens.

    Args:
        ask: calls the relay; takes the time that is left, s.
        unavailable: what that raises while the relay is being made again; any other error is final.
        path: of its socket.
        limit_s: how long that may take.

    Raises the last error: after `limit_s`, or at once where it is final.
    """
    deadline, refused = time.monotonic() + limit_s, 0
    while True:
        try:
            ask(max(0.0, deadline - time.monotonic()))
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.connect(path)  # connect from this node, as the ranks will
            return
        except (unavailable, OSError) as error:
            refused += isinstance(error, OSError)
            if refused > _REFUSED or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
