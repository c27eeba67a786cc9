"""Reports one run to a session's aggregator, in a thread of its own: only the end waits for it."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from traceml_ray import wire
from traceml_ray.errors import Errors
from traceml_ray.monitor.finish import ANSWER_S, ASK_S, REPORT_S, STARTING_S, WORD_S
from traceml_ray.ray.config import ActorConfig
from traceml_ray.ray.discovery import find_aggregator

MADE_S = 5.0
"""How long an answer may take while the run goes on; the first one includes the making of the actor."""
TRIES = 4
RETRY_S = 0.5


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
        self._answer: wire.Finished | None = None
        self._written = self._gave_up = False
        self._heard = self._waits_at = 0.0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traceml-run", daemon=True)
        self._thread.start()

    def ensure(self) -> None:
        """See to it that the session runs: it may have ended itself since it was started."""
        self._make = True
        self._wake.set()

    def report(self, info: dict[str, wire.Value] | None = None, *events: wire.Event) -> None:
        """Send what is known of the run."""
        self._info = {**self._info, **(info or {})}
        self._events.extend(events)
        self._wake.set()

    def end(self, status: str) -> bool:
        """
        Say that the run is over, and return whether its files are written.

        The aggregator decides when, see `monitor.finish`; one that does not answer is not waited for.
        """
        started = self._heard = self._waits_at = time.monotonic()
        self._status = status
        self._wake.set()
        while self._thread.is_alive() and self._waits(started):
            self._thread.join(ASK_S)
        self._gave_up = True
        return self._written

    def _waits(self, started: float) -> bool:
        """Whether there was a reply lately, and the one that the files are written may still come."""
        silent_s = STARTING_S if self._answer is None else ANSWER_S
        return time.monotonic() < min(self._heard + silent_s, self._waits_at + WORD_S, started + REPORT_S)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._status is None:
            self._wake.wait()
            self._wake.clear()
            for _ in range(TRIES):
                if self._status is not None or self._send() is not None:
                    break
                time.sleep(RETRY_S)
        finished = self._send(self._status)
        while (finished is None or finished.pending) and not self._gave_up:
            time.sleep(ASK_S)
            finished = self._send(self._status)
        self._written = finished is not None and finished.state == "written"

    def _send(self, status: str | None = None) -> wire.Finished | None:
        """Send what there is; None when it was not answered."""
        events = self._events[: wire.MAX_ITEMS]
        message = wire.Run(wire.VERSION, self._job_id, self._info, events, status)
        try:
            aggregator = self._aggregator = self._find()
            if aggregator is None:
                return None
            timeout_s = ANSWER_S if status else MADE_S
            reply = ray.get(aggregator.finish.remote(wire.encode(message)), timeout=timeout_s)
            self._answer = finished = wire.decode(reply, wire.Finished)
            self._heard = time.monotonic()
            if finished.waiting or finished.state == "writing":
                self._waits_at = self._heard
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
