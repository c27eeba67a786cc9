"""
Confirms stragglers under torchrun (`confirm=restart`): when torchrun restarts the ranks, and one of them was
a straggler, the nodes are checked before the new ranks start.

All launchers of a job are then at the same point of the restart: the rendezvous is over, and no rank runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from .check import check_at_restart
from .guard import guarded
from .monitor import Monitor


@contextlib.contextmanager
def confirming(
    args: argparse.Namespace, monitor: Monitor | None, environ: Mapping[str, str]
) -> Iterator[None]:
    """Have torchrun's agent confirm stragglers at each restart within the block, if the setting says so."""
    start: Any = getattr(LocalElasticAgent, "_start_workers", None)
    if monitor is None or monitor.settings.confirm != "restart" or start is None:
        yield
        return
    times = 0

    @functools.wraps(start)
    def start_workers(agent: Any, group: Any, *more: Any, **named: Any) -> Any:
        nonlocal times
        times += 1
        if times > 1:
            with guarded("no check at this restart"):
                nodes = replace(monitor.nodes, count=int(group.group_world_size), fixed=True)
                monitor.store(check_at_restart(args, nodes, monitor.folder, environ))
        return start(agent, group, *more, **named)

    LocalElasticAgent._start_workers = start_workers  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalElasticAgent._start_workers = start  # type: ignore[method-assign]
