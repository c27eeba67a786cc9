"""
Confirms stragglers under torchrun (`confirm=restart`): when torchrun restarts the ranks, and one of them was
a straggler, the nodes are checked before the new ranks start.

All launchers of a job are then at the same point of the restart: the rendezvous is over, and no rank runs.
With a static rendezvous each node restarts by itself, when its own ranks have failed. So the first node,
which has the session, says in torchrun's store whether there is a check; no other node waits long for that.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from traceml_ray import text
from traceml_ray.text import log

from .check import LOOK_S, check_at_restart, has_straggler
from .check_process import CheckReply
from .monitor import Monitor
from .worker_starts import before_starts

_ANSWER_S = 2 * LOOK_S
"""How long a node waits for what the first node says, in s."""
_AGAIN_S = 0.2
_CHECK, _NO_CHECK = b"check", b"no check"


@contextlib.contextmanager
def confirming(
    args: argparse.Namespace, monitor: Monitor | None, environ: Mapping[str, str]
) -> Iterator[None]:
    """Have torchrun's agent confirm stragglers at each restart within the block, if the setting says so."""
    if monitor is None or monitor.settings.confirm != "restart":
        yield
        return
    times = 0

    def confirm(group: Any) -> None:
        nonlocal times
        times += 1
        if times > 1:
            monitor.store(_confirm(args, monitor, environ, group, times - 1))

    with before_starts(confirm, "no check at this restart"):
        yield


def _confirm(
    args: argparse.Namespace, monitor: Monitor, environ: Mapping[str, str], group: Any, restart: int
) -> CheckReply | None:
    """
    Check the nodes of a restart if there was a straggler. None: nothing was measured.

    Args:
        args: the flags.
        monitor: the monitor of this node.
        environ: the user's environment.
        group: torchrun's worker group, after the rendezvous.
        restart: number of this restart on this node, from 1.
    """
    nodes = replace(monitor.nodes, count=int(group.group_world_size), fixed=True)
    # Other backends have a store for each rendezvous, and nodes that have seen fewer restarts than others.
    key = f"traceml-ray/restart-{restart}" if args.rdzv_backend == "static" else "traceml-ray/restart"
    if not nodes.first:
        return check_at_restart(args, nodes, environ) if _is_to_check(group.store, key) else None
    try:
        if has_straggler(monitor.folder, environ):
            group.store.set(key, _CHECK)
            return check_at_restart(args, nodes, environ)
    finally:
        group.store.set(key, _NO_CHECK)  # also for a node that comes after the check
    return None


def _is_to_check(store: Any, key: str) -> bool:
    """
    Return whether the first node says that there is a check. Asks again and again, instead of waiting in the
    store, which would keep signals from being handled.
    """
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        if store.check([key]):
            return bytes(store.get(key)) == _CHECK
        time.sleep(_AGAIN_S)
    log(f"no check at this restart: the first node did not answer within {text.duration(_ANSWER_S)}")
    return False
