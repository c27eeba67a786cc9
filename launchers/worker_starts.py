"""Lets functions of ours run whenever torchrun's agent is about to start the ranks of its node."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from .guard import guarded


@contextlib.contextmanager
def before_starts(act: Callable[[Any], None], failed: str) -> Iterator[None]:
    """
    Within the block, have `act` called with torchrun's worker group before each start of ranks. It does
    nothing with a torch that starts ranks in another way.

    Args:
        act: the function. What it raises is not passed on.
        failed: what to say if it raises.
    """
    start: Any = getattr(LocalElasticAgent, "_start_workers", None)
    if start is None:
        yield
        return

    @functools.wraps(start)
    def start_workers(agent: Any, group: Any, *more: Any, **named: Any) -> Any:
        with guarded(failed):
            act(group)
        return start(agent, group, *more, **named)

    LocalElasticAgent._start_workers = start_workers  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalElasticAgent._start_workers = start  # type: ignore[method-assign]
