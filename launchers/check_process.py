"""
Checks the nodes of a job before it trains, in a process of its own on each node:
`python -m traceml_ray.launchers.check_process`.

It reads one JSON `CheckRequest` from stdin and writes one JSON `CheckReply` to stdout. The process of the
first node waits for those of the others, has all of them measure, and sends each the result. Messages between
nodes are lines of JSON: tasks of a fixed set and their results. Whoever connects can disturb the check, but
no more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from traceml_ray import text
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.errors import error_text
from traceml_ray.signals.check.child import LineReader
from traceml_ray.signals.check.nodes import LocalNode, NoAnswerError, TaskProcess, reply_of
from traceml_ray.signals.check.records import Checked
from traceml_ray.signals.check.tasks import Plan, Task, TaskReply, Tasks
from traceml_ray.text import log
from traceml_ray.wire.codec import ready

from .cluster import JOIN_S, die_with

if TYPE_CHECKING:
    from traceml_ray.signals.check.coordinator import Outcome

_HELLO_S = 5.0
_AGAIN_S = 0.2
_TELL_S = 10.0
"""After this time in s, a line says what the check waits for."""
_SPARE_S = 10.0
_LATE = "the check had begun without this node"


class CheckRequest(msgspec.Struct, frozen=True):
    """The check of a job, as one of its nodes takes part."""

    parent: int
    plan: Plan
    nodes: int = 1
    """Smallest number of nodes of the job."""
    first: bool = True
    host: str = ""
    """Host of the first node."""
    port: int = 0
    """Port at which the first node waits for the others."""
    join_s: float = JOIN_S
    """How long the nodes wait for each other, in s."""
    session: str = ""
    """Folder of a session: nothing is measured, but whether it has a straggler is looked up. "": a check."""
    kind: str = "check"
    """See `Checked.kind`."""


class CheckReply(msgspec.Struct, frozen=True, tag="reply"):
    """Result of a check."""

    named: bool = False
    """Whether a node, device or link is slower than its peers, or a node did not answer."""
    lines: tuple[str, ...] = ()
    """The result, for a person."""
    checks: tuple[Checked, ...] = ()
    """What this node measured."""
    error: str = ""
    """Why there is no result."""
    straggler: bool = False
    """Whether the session has a straggler, if only this was asked."""


class TaskRequest(msgspec.Struct, frozen=True, tag="asked"):
    """A task for a node."""

    task: Tasks
    limit_s: float


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First line of a node that takes part."""

    host: str


_ToNode: Any = TaskRequest | CheckReply


class LineConnection:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection, self._lines = connection, LineReader(connection.fileno())

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError."""
        self._connection.settimeout(_SPARE_S)
        self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self, kind: Any, limit_s: float) -> Any:
        """
        Return the next message. Raises OSError (also when the other side is gone, sends too much, or
        nothing for `limit_s` seconds), or `msgspec.MsgspecError`.
        """
        try:
            return msgspec.json.decode(self._lines.line(limit_s), type=ready(kind))
        except EOFError as error:
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._connection.close()


class JoinedNode:
    """A node whose process has connected to that of the first node."""

    reserved = ""

    def __init__(self, name: str, address: str, connection: LineConnection) -> None:
        self.name, self.address, self.connection = name, address, connection

    def ask(self, task: Task, limit_s: float) -> TaskReply:
        """Have a task done. Raises NoAnswerError."""
        try:
            self.connection.send(TaskRequest(task, limit_s))  # type: ignore[arg-type]
            reply: TaskReply = self.connection.receive(TaskReply, limit_s + _SPARE_S)
        except (OSError, msgspec.MsgspecError) as error:
            self.connection.close()
            raise NoAnswerError(str(error) or type(error).__name__) from None
        return reply


class Gathering:
    """
    Gathers the nodes of a job, on the first one.

    Args:
        request: the check.
        first: the node of this process.
    """

    def __init__(self, request: CheckRequest, first: LocalNode) -> None:
        self._request, self._first = request, first
        self._lock = threading.Condition()
        self._joined: list[JoinedNode] = []
        self._begun = False

    def nodes(self) -> list[JoinedNode]:
        """Return the other nodes, once they are all there, or `join_s` seconds are over. Raises OSError."""
        wanted = self._request.nodes - 1
        if not wanted:
            return []
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", self._request.port), family=family, dualstack_ipv6=both)
        threading.Thread(
            target=self._accept, args=(server,), name="traceml-check-accept", daemon=True
        ).start()
        deadline, tell_at = time.monotonic() + self._request.join_s, time.monotonic() + _TELL_S
        with self._lock:
            while len(self._joined) < wanted and time.monotonic() < deadline:
                self._lock.wait(1.0)
                if time.monotonic() > tell_at and len(self._joined) < wanted:
                    log(f"check: waiting for {wanted - len(self._joined)} of {wanted + 1} nodes")
                    tell_at = float("inf")
            self._begun = True
            return list(self._joined)

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, (address, *_) = server.accept()
            except OSError:
                continue
            line = LineConnection(connection)
            # A scanner of ports that says nothing must not keep the others waiting.
            threading.Thread(target=self._welcome, args=(line, connection, address), daemon=True).start()

    def _welcome(self, line: LineConnection, connection: socket.socket, address: str) -> None:
        try:
            host = line.receive(Hello, _HELLO_S).host
            with self._lock:
                if self._begun:
                    line.send(CheckReply(error=_LATE))
                    line.close()
                    return
                self._first.address = _plain(connection.getsockname()[0])
                self._joined.append(JoinedNode(self._name(host), _plain(address), line))
                self._lock.notify()
        except (OSError, msgspec.MsgspecError):
            line.close()

    def _name(self, host: str) -> str:
        """Return a label that no other node has."""
        taken = {self._first.name, *(node.name for node in self._joined)}
        labels = (host, *(f"{host} ({number})" for number in range(2, len(taken) + 3)))
        return next(label for label in labels if label not in taken)


def _plain(address: str) -> str:
    """Return an IPv4 address that a socket for both versions has written as one of IPv6."""
    return address.removeprefix("::ffff:")


def _check_as_first(request: CheckRequest) -> CheckReply:
    """Run the check, and tell the other nodes what it says."""
    from traceml_ray.signals.check.coordinator import Coordinator  # it imports numpy

    first = LocalNode(socket.gethostname())
    joined = Gathering(request, first).nodes()
    missing = request.nodes - 1 - len(joined)
    try:
        outcome = Coordinator([first, *joined], request.plan).run()
    finally:
        first.end()
    if missing:
        outcome.errors.append(
            f"{text.count(missing, 'node')} did not come within {text.duration(request.join_s)}"
        )
    reply = _reply_of(outcome)
    for node in joined:
        with contextlib.suppress(OSError):
            node.connection.send(_of_node(reply, outcome, node.name, request.kind))
    return _of_node(reply, outcome, first.name, request.kind)


def _has_straggler(session: Path) -> bool:
    """Return whether a straggler was named in the newest attempt of the newest run of a session."""
    from traceml_ray.reports.answers import Answers

    from .stragglers import ask_straggler

    return ask_straggler(Answers(session, Thresholds()).reply)


def _reply_of(outcome: Outcome) -> CheckReply:
    from traceml_ray.signals.check.conclusion import concluded, lines

    result = concluded(outcome)
    return CheckReply(bool(result.slow or outcome.silent), tuple(lines(result)))


def _of_node(reply: CheckReply, outcome: Outcome, name: str, kind: str) -> CheckReply:
    """Return the reply for one node: with what that node measured."""
    mine = [check for check in outcome.checks if check.node == name]
    checks = tuple(msgspec.structs.replace(check, kind=kind) for check in mine)
    return msgspec.structs.replace(reply, checks=checks)


def _check_as_other(request: CheckRequest) -> CheckReply:
    """Do the tasks that the first node sends, until it sends the result."""
    if request.nodes < 2:
        return CheckReply(error="the job may begin with one node, so only the first node is checked")
    line, process = _connected(request), TaskProcess(os.environ)
    line.send(Hello(socket.gethostname()))
    try:
        while True:
            # The first node waits for the others, and for nodes that take turns.
            message = line.receive(_ToNode, request.join_s + limit_s(request.plan, request.nodes))
            if isinstance(message, CheckReply):
                return message
            line.send(reply_of(process, message.task, message.limit_s))
    finally:
        process.end()


def _connected(request: CheckRequest) -> LineConnection:
    """Connect to the process of the first node. Raises OSError if it is not there within `join_s`."""
    deadline = time.monotonic() + request.join_s
    while True:
        try:
            return LineConnection(socket.create_connection((request.host, request.port), _HELLO_S))
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"nothing answers at {request.host}:{request.port} ({error})") from None
        time.sleep(_AGAIN_S)


def limit_s(plan: Plan, nodes: int) -> float:
    """Return how long a check may take once its nodes are there, in s, if all are on one machine."""
    return 300.0 + 3.0 * plan.seconds * nodes


def check(request: CheckRequest) -> CheckReply:
    """Take part in a check, or look for a straggler. Raises nothing."""
    try:
        if request.session:
            return CheckReply(straggler=_has_straggler(Path(request.session)))
        return _check_as_first(request) if request.first else _check_as_other(request)
    except Exception as error:
        return CheckReply(error=error_text(error)[:300])


def main() -> None:
    """Read the request from stdin, and write the reply to stdout."""
    stdout, sys.stdout = sys.stdout, sys.stderr
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ready(CheckRequest))
    die_with(request.parent)
    reply = check(request)
    stdout.write(msgspec.json.encode(reply).decode() + "\n")
    stdout.flush()
    os._exit(0)  # threads may still wait for nodes


if __name__ == "__main__":
    main()
