"""Tells a session's aggregator about one run, from a thread of its own: nobody waits for it but the end."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from traceml_ray import wire
from traceml_ray.errors import Errors
from traceml_ray.ray.config import ActorConfig
from traceml_ray.ray.discovery import answers, find_aggregator

ANSWER_S = 5.0
"""How long one answer may take; the first one includes the making of the actor."""
TRIES = 4
RETRY_S = 0.5
PATIENCE_S = 2.5
"""How long ranks may still deliver when the run is over; then its files are written without."""
WRITE_S = 2.5
"""How long the writing itself may take before the end goes on without it."""
ASK_AGAIN_S = 0.1
SIGN_S = 0.5
"""How long a sign of life may take when the run is over."""


class RunReporter:
    """
    Used by Ray Train's controller. No method raises, only `end` waits.

    What could not be delivered is kept and goes with the next message; the last one goes out at the
    end of the run.
    """

    def __init__(self, config: ActorConfig, job_id: str) -> None:
        self.errors = Errors()
        """What could not be sent, by kind of failure."""
        self._config = config
        self._job_id = job_id
        self._info: dict[str, wire.Value] = {}
        self._events: list[wire.Event] = []
        self._aggregator: Any | None = None
        self._make = False
        self._status: str | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traceml-run", daemon=True)
        self._thread.start()

    def ensure(self) -> None:
        """See to it that the session runs: it may have ended itself since it was started."""
        self._make = True
        self._wake.set()

    def tell(self, info: dict[str, wire.Value] | None = None, *events: wire.Event) -> None:
        """Hand on what is known of the run."""
        self._info = {**self._info, **(info or {})}
        self._events.extend(events)
        self._wake.set()

    def end(self, status: str) -> bool:
        """
        Say that the run is over and wait until its files are written; False when they may not be.

        Takes as long as ranks still deliver, at most PATIENCE_S + WRITE_S; an aggregator that hangs is
        not waited for.
        """
        self._status = status
        self._wake.set()
        known = self._aggregator
        if known is not None and not answers(known, SIGN_S):
            return False
        lost = known is None and self.errors  # it was asked before, in vain
        self._thread.join(PATIENCE_S + (0 if lost else WRITE_S))
        return not self._thread.is_alive() and not self._events

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._status is None:
            self._wake.wait()
            self._wake.clear()
            for _ in range(TRIES):
                if self._status is not None or self._send() is not None:
                    break
                time.sleep(RETRY_S)
        deadline = time.monotonic() + PATIENCE_S
        forced = False
        while not forced:
            forced = time.monotonic() > deadline
            finished = self._send(self._status, forced)
            if finished is not None and not finished.waiting:
                return
            time.sleep(ASK_AGAIN_S)

    def _send(self, status: str | None = None, force: bool = False) -> wire.Finished | None:
        """Send what there is; None when it was not answered."""
        events = self._events[: wire.MAX_ITEMS]
        message = wire.Run(wire.VERSION, self._job_id, self._info, events, status, force)
        try:
            aggregator = self._aggregator = self._find()
            if aggregator is None:
                return None
            reply = ray.get(
                aggregator.run.remote(wire.encode(message)), timeout=WRITE_S if status else ANSWER_S
            )
            finished = wire.decode(reply, wire.Finished)
        except Exception as error:
            self.errors.note("run", error)
            self._aggregator = None
            return None
        del self._events[: len(events)]
        return finished

    def _find(self) -> Any | None:
        if self._make:
            from traceml_ray.ray.aggregator import ensure_aggregator  # it is slow to import

            made = ensure_aggregator(self._config, ray.get_runtime_context().get_node_id())
            self._make = False
            return made
        return self._aggregator or find_aggregator(self._config.session)
