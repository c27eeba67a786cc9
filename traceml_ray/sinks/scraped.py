"""`/metrics` of a session at a port of its own, for Prometheus: `--metrics-port`, without the web app."""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from traceml_ray.errors import error_text
from traceml_ray.ray.connection import join
from traceml_ray.settings import Settings
from traceml_ray.store.results import SinkState
from traceml_ray.views.session_poll import SessionPoll

from .prometheus import Metrics

TOKEN = "TRACEML_METRICS_TOKEN"
"""Variable with the bearer token that a scrape must send, if there is one."""
_TIMEOUT_S = 10.0
"""How long one request may take to arrive."""
_EVERYWHERE = ("0.0.0.0", "::", "")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_Start = Callable[..., Any]


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: stderr is nobody's."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Scraped:
    """
    The server of `/metrics`.

    Args:
        session: whose metrics these are.
        settings: where it listens, and for how many ranks there are series.
        token: that a scrape must send as a bearer token; "": none.

    Raises OSError if it cannot listen there.
    """

    def __init__(
        self, session: SessionPoll, settings: Settings, token: str = os.environ.get(TOKEN, "")
    ) -> None:
        self._metrics = make_wsgi_app(Metrics(session, settings.metrics_ranks).registry)
        self._token = token
        self._lock = threading.Lock()
        self._sent = self._failed = 0
        self._error = ""
        host, port = settings.metrics_host, settings.metrics_port or 0
        self._names = _LOOPBACK if host in _LOOPBACK else None
        try:
            family = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]  # IPv4 first
            server = type("_Server", (_Server,), {"address_family": family})
            self._server: WSGIServer = make_server(host, port, self._answer, server, _Handler)
        except OSError as error:
            raise OSError(f"cannot listen on {join(host, port)}: {error.strerror}") from None
        name = socket.gethostname() if host in _EVERYWHERE else host
        self.where = f"http://{join(name, self._server.server_port)}/metrics"
        threading.Thread(target=self._server.serve_forever, name="traceml-metrics", daemon=True).start()

    def state(self) -> SinkState:
        """Return how many scrapes were answered, and how many failed."""
        with self._lock:
            return SinkState(
                name="prometheus", where=self.where, sent=self._sent, failed=self._failed, error=self._error
            )

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in ("/metrics", "/"):
            start("404 Not Found", [])
            return [b"The metrics are at /metrics.\n"]
        if self._names is not None and _host(environ) not in self._names:  # a foreign page, by DNS rebinding
            start("403 Forbidden", [])
            return [b"The Host header must name this machine.\n"]
        given = environ.get("HTTP_AUTHORIZATION", "").partition("Bearer ")[2]
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
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


def _host(environ: Mapping[str, Any]) -> str | None:
    """Return the name in the `Host` header; None without one that can be read."""
    given: str = environ.get("HTTP_HOST", "")
    try:
        return urlsplit("//" + given).hostname
    except ValueError:
        return None
