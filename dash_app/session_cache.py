"""What pages are made of: the newest answers about a session, and what is read of its profiles."""

from __future__ import annotations

import weakref
from typing import Any

from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import Source

from .breakdowns import Breakdowns


class SessionCache(SessionPoll):
    """Arguments as of `SessionPoll`."""

    def __init__(self, source: Source, **how: Any) -> None:
        super().__init__(source, **how)
        renew = weakref.WeakMethod(self.renew)  # a session that is no longer shown goes at once
        self.breakdowns = Breakdowns(source, self.errors, lambda: (of_this := renew()) and of_this())
