"""The sink of alerts: follows the reports of a session and has a sender for each destination."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from traceml_ray.errors import error_text
from traceml_ray.files import write_file
from traceml_ray.settings import Settings
from traceml_ray.sinks.report import Report
from traceml_ray.sinks.sink import Sender, Unusable, close_all
from traceml_ray.store.results import SinkState
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.wire.codec import ready

from .config import AlertFileError, Alertmanager, Config, Destination, parse, resolved
from .rules import AlertMachine, AlertMessage, AlertState, seen_of
from .send import PAUSES_S, send_again, where_of

FILE = "alerts.json"
"""Name of the file with what was sent so far, in the session folder."""
TICK_S = 1.0
"""Seconds between two looks at the newest report, if no new one comes."""
OLD_S = 60.0
"""Age of the newest report, in s, from which on it is not known any more what it says."""
_MOST_WAITING = 64
"""Largest number of messages that wait for a destination."""


class Saved(msgspec.Struct, kw_only=True):
    """Contents of the file. It holds no secret."""

    owner: str
    """The process that may write the file: the one that opened it last."""
    state: AlertState
    unsent: dict[str, list[AlertMessage]] = {}
    """Messages that were not delivered yet, by destination."""


class Alerts:
    """
    Sends the alerts of a session.

    Args:
        folder: of the session.
        config: rules and destinations.
        environ: variables that destinations refer to.
        clock: wall clock in ns.
        pauses_s: pauses between attempts to send a message, in s.
    """

    takes_reports = True

    def __init__(
        self,
        folder: Path,
        config: Config,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], int] = time.time_ns,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._path, self._clock, self._pauses_s = folder / FILE, clock, pauses_s
        self._owner = f"{os.getpid()}-{uuid.uuid4().hex}"
        saved = self._read()
        self._machine = AlertMachine(config, saved.state)
        self._unsent = {one.name: [*saved.unsent.get(one.name, [])] for one in config.destinations}
        self._lock = threading.Lock()
        """Held while the state or the list of unsent messages is changed, and while the file is written."""
        self._ending = threading.Event()
        self._senders = {one.name: self._sender(one, environ) for one in config.destinations}
        self._names = ", ".join(
            f"{name} {sender.state().where}".strip() for name, sender in self._senders.items()
        )
        self._changed = threading.Condition()
        self._reports: list[Report] = []
        self._closing = False
        self._newest: Report | None = None
        self._came_ns = 0
        self._error = ""
        self._save(taking_over=True)
        for name, messages in self._unsent.items():
            for message in messages:
                self._senders[name].offer(message)
        self._thread = threading.Thread(target=self._run, name="traceml-alerts", daemon=True)
        self._thread.start()

    def offer(self, report: Report) -> None:
        """Have a report compared with the rules."""
        with self._changed:
            self._reports.append(report)
            self._changed.notify_all()

    def state(self) -> SinkState:
        """Return how many messages were sent to all destinations together, and which one has failed last."""
        states = [(name, sender.state()) for name, sender in self._senders.items()]
        errors = [f"{name}: {state.error}" for name, state in states if state.error]
        return SinkState(
            name="alerts",
            where=self._names,
            sent=sum(state.sent for _, state in states),
            failed=sum(state.failed for _, state in states),
            dropped=sum(state.dropped for _, state in states),
            error="; ".join([*errors, *filter(None, [self._error])]),
        )

    def close(self, deadline_s: float) -> None:
        """Send what is due, until `deadline_s` (`time.monotonic`) at the latest."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        self._ending.set()
        close_all([sender.close for sender in self._senders.values()], deadline_s)

    def look(self) -> None:
        """Compare the newest report with the rules, and hand on the messages that are due."""
        with self._changed:
            reports, self._reports = self._reports, []
        now_ns = self._clock()
        for report in reports:
            self._newest, self._came_ns = report, now_ns
            self._step(report, now_ns)
        if not reports and self._newest is not None:
            self._step(self._newest, now_ns)

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._reports or self._closing, TICK_S)
                closing = self._closing
            try:
                self.look()
                self._error = ""
            except Exception as error:
                self._error = error_text(error)

    def _step(self, report: Report, now_ns: int) -> None:
        seen = seen_of(report, now_ns, self._path.parent.name)
        if now_ns - self._came_ns > OLD_S * 1e9 and not seen.over:
            seen = msgspec.structs.replace(seen, findings=None)
        with self._lock:
            before = self._machine.mark()
            messages = self._machine.step(seen)
            for name, new in messages.items():
                self._unsent[name] = [*self._unsent[name], *new][-_MOST_WAITING:]
            changed = self._machine.mark() != before
        if changed:
            self._save()
        for name, new in messages.items():
            for message in new:
                self._senders[name].offer(message)

    def _sender(
        self, destination: Destination, environ: Mapping[str, str]
    ) -> Sender[AlertMessage] | Unusable:
        name, pauses_s = destination.name, self._pauses_s
        try:
            place, secrets = resolved(destination.place, environ)
        except AlertFileError as error:
            return Unusable(name, str(error))
        # Alertmanager is sent again what goes on, so that only the newest message counts.
        most = 1 if isinstance(place, Alertmanager) else _MOST_WAITING

        def send(message: AlertMessage) -> None:
            try:
                send_again(place, message, secrets, self._ending, pauses_s)
            finally:
                self._settle(name, message)

        return Sender(name, where_of(place), send, most=most)

    def _settle(self, name: str, message: AlertMessage) -> None:
        """Note that a message was delivered, or given up; older ones were replaced by it."""
        with self._lock:
            waiting = [one.id for one in self._unsent[name]]
            if message.id in waiting:
                self._unsent[name] = self._unsent[name][waiting.index(message.id) + 1 :]
        self._save()

    def _read(self) -> Saved:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._path.read_bytes(), type=ready(Saved))
        return Saved(owner="", state=AlertState())

    def _save(self, taking_over: bool = False) -> None:
        """Write the file, unless another process has taken over."""
        with self._lock:
            if not taking_over and self._read().owner != self._owner:
                return
            saved = Saved(owner=self._owner, state=self._machine.state, unsent=self._unsent)
            with contextlib.suppress(OSError):  # a full disk: a restart then sends again what was sent
                write_file(self._path, msgspec.json.encode(saved))


def opened(session: SessionPoll, settings: Settings) -> Alerts:
    """Return the alerts that the settings ask for. Raises AlertFileError."""
    source = session.source
    return Alerts(Path(source.out) / source.target, parse(settings.alerts or ""))
