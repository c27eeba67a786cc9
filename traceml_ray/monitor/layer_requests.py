"""Requests to have layers measured, on their way to the ranks of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from traceml_ray.errors import Errors
from traceml_ray.monitor.live_runs import RunNow
from traceml_ray.wire import messages as wire

SEND_S = 30.0
"""How long a command is part of all replies, in s: by then every relay has asked."""
WAIT_S = 120.0
"""A request that came before its run waits so long for it."""
MAX_WAITING = 8


class LayerRequests:
    """
    One per session; any thread may call it.

    Args:
        errors: the aggregator's, by place.
        runs: the runs that go on.
        ticks: monotonic seconds.
    """

    def __init__(self, errors: Errors, runs: Callable[[], list[RunNow]], ticks: Callable[[], float]) -> None:
        self._errors, self._runs, self._ticks = errors, runs, ticks
        self._lock = threading.Lock()
        self._waiting: list[tuple[wire.LayersRequest, str, float]] = []
        self._sent: list[tuple[wire.Command, float]] = []
        self.commands: list[wire.Command] = []
        """Commands for the ranks, sent with every reply to a relay."""

    def ask(self, request: wire.LayersRequest, asked: str) -> str | None:
        """Take the request of a person, by its id; return why nothing will be measured, None otherwise."""
        with self._lock:
            if len(self._waiting) + len(self._sent) >= MAX_WAITING:
                self._errors.count("layers: too many requests wait")
                return f"{MAX_WAITING} requests wait already; ask again in {SEND_S:g} s"
            self._waiting.append((request, asked, self._ticks()))
            return None

    def tick(self) -> None:
        """
        Have the ranks of a run told what is new, and no longer what all have heard; once a second. An error
        is counted.
        """
        try:
            if self._waiting or self._sent:
                runs = self._runs()  # takes another lock
                with self._lock:
                    self._tick(runs)
        except Exception as error:
            self._errors.swallow("layers", error)

    def _tick(self, runs: list[RunNow]) -> None:
        now, waiting = self._ticks(), []
        for request, asked, since in self._waiting:
            run = next((run for run in reversed(runs) if request.run in (None, run.run, run.name)), None)
            if run is not None:
                command = wire.LayersCommand(id=asked, run=run.run, steps=request.steps)
                self._sent.append((wire.Command("layers", msgspec.structs.asdict(command)), now))
            elif now - since > WAIT_S:
                self._errors.count("layers: no such run goes on")
            else:
                waiting.append((request, asked, since))
        self._waiting = waiting
        self._sent = [(command, since) for command, since in self._sent if now - since < SEND_S]
        self.commands = [command for command, _ in self._sent]
