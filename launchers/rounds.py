"""
Numbers the attempts of a job alike on all its nodes.

torchrun counts restarts on each node by itself (`TORCHELASTIC_RESTART_COUNT`). With c10d only a node whose
own ranks have failed counts: the others restart because of a change of membership. Ranks that train together
would then seem to belong to different attempts. So ranks get the number of their rendezvous.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from traceml_ray.identity import ATTEMPT

from .worker_starts import before_starts


@contextlib.contextmanager
def numbering() -> Iterator[None]:
    """Have torchrun's agent give ranks the number of their rendezvous within the block, if it is known."""
    with before_starts(_set_number, "attempts are numbered by torchrun"):
        try:
            yield
        finally:
            os.environ.pop(ATTEMPT, None)


def _set_number(group: Any) -> None:
    number = _number(group.spec.rdzv_handler)
    if number is None:
        os.environ.pop(ATTEMPT, None)
    else:
        os.environ[ATTEMPT] = str(number)


def _number(handler: Any) -> int | None:
    """Return the number of the newest rendezvous of a handler, from 0. None: nodes have no common number."""
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    number = getattr(state, "round", None)
    return number if isinstance(number, int) else None
