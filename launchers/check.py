"""
The check of a job's nodes before it trains (`--check`), as a launcher runs it: in a process of its own,
within a time limit. If the check fails, the job trains without it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Mapping

import msgspec

from traceml_ray import text
from traceml_ray.signals.check.child import Child
from traceml_ray.signals.check.tasks import Plan
from traceml_ray.text import log
from traceml_ray.wire.codec import ready

from .arguments import CHECK_S, Nodes
from .check_process import CheckReply, CheckRequest, limit_s
from .cluster import JOIN_S
from .guard import guarded

NAMED = 3
"""Exit code of a job that does not start because the check has named something."""
_RESTART_S = 60.0
"""How long nodes wait for each other, in s, at a restart (all restart together) and in elastic jobs."""
LOOK_S = 15.0
"""How long a restart waits, in s, until it is known whether the session has a straggler."""


def is_wanted(args: argparse.Namespace) -> bool:
    """Return whether the flags ask for a check."""
    return bool(args.check or args.check_stop)


def check_nodes(args: argparse.Namespace, nodes: Nodes, environ: Mapping[str, str]) -> CheckReply | None:
    """
    Check the nodes of the job, and print the result. None: there is no result.

    Whatever happens to the check, the job can start. A signal that ends this process ends the check.
    """
    who = "the nodes of this job" if nodes.several else "this node"
    log(f"check: measuring {who}, before it starts")
    return _checked(_request(args, nodes), environ)


def check_at_restart(args: argparse.Namespace, nodes: Nodes, environ: Mapping[str, str]) -> CheckReply | None:
    """
    Check the nodes of a job whose ranks are about to be restarted, and print the result. None: there is no
    result.

    Args:
        args: the flags.
        nodes: the nodes that take part in the restart.
        environ: the user's environment.
    """
    log("check: a rank was late: measuring the nodes of this job, before its ranks start again")
    request = msgspec.structs.replace(_request(args, nodes), kind="restart", join_s=_RESTART_S)
    return _checked(request, environ)


def has_straggler(session: str, environ: Mapping[str, str]) -> bool:
    """
    Return whether a straggler is named in the newest run of a session. False, after a line that says why,
    if this is not known. Raises OSError.

    Args:
        session: folder of the session, which is on this node.
        environ: the user's environment.
    """
    reply = _ask(CheckRequest(os.getpid(), Plan(), session=session), environ, LOOK_S)
    if reply.error:
        log(f"no check at this restart: {reply.error}")
    return reply.straggler


def _request(args: argparse.Namespace, nodes: Nodes) -> CheckRequest:
    plan = Plan(seconds=args.check_seconds or CHECK_S, path=args.check_path or "", disturb=True)
    port = int(nodes.head.rpartition(":")[2] or 0) + 1
    # A node may join an elastic job at any time, and the first one has then been checked long ago.
    join_s = JOIN_S if nodes.fixed else _RESTART_S
    return CheckRequest(os.getpid(), plan, nodes.count, nodes.first, nodes.host, port, join_s)


def _checked(request: CheckRequest, environ: Mapping[str, str]) -> CheckReply | None:
    """Run the check and print its result. Raises nothing of its own."""
    reply = None
    with guarded("no check"):
        reply = _ask(request, environ, request.join_s + limit_s(request.plan, request.nodes))
        if reply.error:
            log(f"no check: {reply.error}")
            return None
        for line in reply.lines:
            log(f"check: {line}")
    return reply


def must_stop(args: argparse.Namespace, reply: CheckReply | None) -> bool:
    """Return whether the job must not start, after a line that says so."""
    if reply is None or not (args.check_stop and reply.named):
        return False
    log("check: the job is not started (--check-stop)")
    return True


def _ask(request: CheckRequest, environ: Mapping[str, str], most_s: float) -> CheckReply:
    """Run the process of the check for at most `most_s` seconds. Raises OSError if it cannot be started."""
    process = Child("traceml_ray.launchers.check_process", environ)
    try:
        reply = process.result(msgspec.json.encode(request), most_s)
        return msgspec.json.decode(reply, type=ready(CheckReply))
    except subprocess.TimeoutExpired:
        return CheckReply(error=f"it was not done within {text.duration(most_s)}")
    except subprocess.CalledProcessError as error:
        return CheckReply(error=f"its process ended with exit code {error.returncode}")
    except msgspec.MsgspecError as error:
        return CheckReply(error=f"its process sent no result ({error})")
