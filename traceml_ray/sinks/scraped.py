"""`/metrics` of a session at a port of its own, for Prometheus: `--metrics-port`, without the web app."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from traceml_ray.errors import error_text
from traceml_ray.settings import Settings
from traceml_ray.store.results import SinkState
from traceml_ray.views import serving
from traceml_ray.views.session_poll import SessionPoll

from .prometheus import Metrics
from .report import Report

TOKEN = "TRACEML_METRICS_TOKEN"
"""Variable with the bearer token that a scrape must send, if there is one."""
_TIMEOUT_S = 10.0
"""How long one request may take to arrive."""
_Start = Callable[..., Any]


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: stderr is nobody's."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serves at a socket that listens already, with a thread for each request."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, application: Any) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()
        self.set_app(application)


class Scraped:
    """
    The server of `/metrics`.

    Args:
        session: whose metrics these are.
        settings: where it listens, and for how many ranks there are series.
        token: that a scrape must send as a bearer token; "": none.

    Raises OSError if it cannot listen there, SettingError for a host that has no address.
    """

    takes_reports = False

    def __init__(
        self, session: SessionPoll, settings: Settings, token: str = os.environ.get(TOKEN, "")
    ) -> None:
        self._metrics = make_wsgi_app(Metrics(session, settings.metrics_ranks).registry)
        self._token = token
        self._lock = threading.Lock()
        self._sent = self._failed = 0
        self._error = ""
        host, port = settings.metrics_host, settings.metrics_port or 0
        self._names = serving.names_of(host) if serving.is_loopback(host) else None
        try:
            listening = serving.listen(host, port)
        except OSError as error:
            raise OSError(serving.not_listening(host, port, error)) from None
        self._server = _Server(listening, self._answer)
        self.where = f"{serving.url_of(host, listening)}metrics"
        threading.Thread(target=self._server.serve_forever, name="traceml-metrics", daemon=True).start()

    def state(self) -> SinkState:
        """Return how many scrapes were answered, and how many failed."""
        with self._lock:
            return SinkState(
                name="prometheus", where=self.where, sent=self._sent, failed=self._failed, error=self._error
            )

    def offer(self, report: Report) -> None:
        """Do nothing: metrics are made when they are asked for."""

    def close(self, deadline_s: float = 0.0) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in ("/metrics", "/"):
            start("404 Not Found", [])
            return [b"The metrics are at /metrics.\n"]
        host = environ.get("HTTP_HOST", "")
        if self._names is not None and not serving.is_named(host, self._names):  # a foreign page
            start("403 Forbidden", [])
            return [b"The Host header must name this machine.\n"]
        given = environ.get("HTTP_AUTHORIZATION", "").partition("Bearer ")[2]
        if self._token and not serving.same(given, self._token):
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [f"This needs the token in {TOKEN}.\n".encode()]
        try:
            body: Iterable[bytes] = self._metrics(environ, start)
        except Exception as error:
            with self._lock:
                self._failed, self._error = self._failed + 1, error_text(error)
            start("500 Internal Server Error", [])
            return [b"The metrics could not be made; `traceml-ray status` says why.\n"]
        with self._lock:
            self._sent, self._error = self._sent + 1, ""
        return body


def opened(session: SessionPoll, settings: Settings) -> Scraped:
    """Return the server that the settings ask for."""
    return Scraped(session, settings)
