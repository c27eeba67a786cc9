"""
Numbers the attempts of a job alike on all its nodes.

torchrun counts restarts on each node by itself (`TORCHELASTIC_RESTART_COUNT`). With c10d only a node whose
own ranks have failed counts: the others restart because of a change of membership. Ranks that train together
would then seem to belong to different attempts. So ranks get the number of their rendezvous.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from traceml_ray.identity import ATTEMPT

from .guard import guarded


@contextlib.contextmanager
def numbering() -> Iterator[None]:
    """Have torchrun's agent give ranks the number of their rendezvous within the block, if it is known."""
    start: Any = getattr(LocalElasticAgent, "_start_workers", None)
    if start is None:
        yield
        return

    @functools.wraps(start)
    def start_workers(agent: Any, group: Any, *more: Any, **named: Any) -> Any:
        with guarded("attempts are numbered by torchrun"):
            number = _number(group.spec.rdzv_handler)
            if number is None:
                os.environ.pop(ATTEMPT, None)
            else:
                os.environ[ATTEMPT] = str(number)
        return start(agent, group, *more, **named)

    LocalElasticAgent._start_workers = start_workers  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalElasticAgent._start_workers = start  # type: ignore[method-assign]
        os.environ.pop(ATTEMPT, None)


def _number(handler: Any) -> int | None:
    """Return the number of the newest rendezvous of a handler, from 0. None: nodes have no common number."""
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    number = getattr(state, "round", None)
    return number if isinstance(number, int) else None
