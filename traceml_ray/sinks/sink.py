"""What a sink is: a thin adapter from a session to one place outside."""

from __future__ import annotations

from typing import Protocol

from traceml_ray.store.results import SinkState


class Sink(Protocol):
    """One place that a session is reported to. Its own thread reports; no method waits or raises."""

    def state(self) -> SinkState:
        """Return how it is doing."""


class Unusable:
    """In place of a sink that could not be opened: it says why."""

    def __init__(self, name: str, why: str) -> None:
        self._state = SinkState(name=name, where="", failed=1, error=why)

    def state(self) -> SinkState:
        """Return why it reports nothing."""
        return self._state
