"""
The WSGI application: the web app behind its guard, and two endpoints for other programs.

Answers are packed with gzip. What a URL names the version of, a browser keeps for good and asks for once.
"""

from __future__ import annotations

import functools
import gzip
from collections.abc import Sequence
from typing import Any

import dash
from dash import fingerprint
from dash.exceptions import DependencyException
from flask import Flask, Response, jsonify, request

from . import app, endpoints, metrics
from .security import Guard
from .session_pages import SessionPages

_PACKED = ("text/", "application/json", "application/javascript", "application/openmetrics", "image/x-icon")


def create_app(
    session: SessionPages, *, token: str | None, hosts: Sequence[str], poll_s: float = 1.0
) -> dash.Dash:
    """
    Return the app; `.server` is what a WSGI server takes.

    Args:
        session: the data; its owner polls it.
        token: that a browser has to give; None asks for none.
        hosts: names that `Host` may have.
        poll_s: seconds between two polls of the session; a browser asks as often.
    """
    server = Flask("traceml_ray.dash_app", static_folder=None)
    guard = Guard(token, hosts)
    guard.install(server)
    server.after_request(_pack)
    server.add_url_rule("/health", view_func=lambda: jsonify(metrics.health(session)))
    server.add_url_rule("/metrics", endpoint="metrics", view_func=lambda: _metrics(session))
    endpoints.serve_bundles(server, session)
    endpoints.serve_profiles(server, session)
    endpoints.serve_layers(server, session)
    server.register_error_handler(DependencyException, lambda _: ("", 404))  # of a file that does not exist
    dashboard = app.build(session, server=server, poll_s=poll_s)
    guard.scripts = dashboard.csp_hashes()
    return dashboard


def _metrics(session: SessionPages) -> Response:
    body, content_type = metrics.exposition(session, request.headers.get("Accept", ""))
    return Response(body, content_type=content_type)


def _pack(response: Response) -> Response:
    """Compress an answer for who takes that, and say how long it may be kept."""
    if response.status_code != 200 or not (response.content_type or "").startswith(_PACKED):
        return response
    lasting, (tag, _) = _names_its_version(), response.get_etag()
    if lasting:
        response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
    elif tag is not None:
        response.headers["Cache-Control"] = "private, no-cache"
    response.vary.add("Accept-Encoding")
    if not request.accept_encodings.quality("gzip"):
        return response
    response.direct_passthrough = False  # of files
    body = response.get_data()
    response.set_data(_packed_once(body) if lasting else gzip.compress(body, 5, mtime=0))
    response.headers["Content-Encoding"] = "gzip"
    if tag is not None:
        response.set_etag(tag, weak=True)  # the same content in other bytes
        response.make_conditional(request)
    return response


def _names_its_version() -> bool:
    """Return whether another version of what is asked for has another URL, see `dash.Dash.index`."""
    if request.path.startswith("/_dash-component-suites/"):
        check: Any = fingerprint.check_fingerprint  # it has no types
        return bool(check(request.path)[1])
    return "m" in request.args if request.path.startswith("/assets/") else request.path == "/_favicon.ico"


@functools.lru_cache(32)
def _packed_once(body: bytes) -> bytes:
    return gzip.compress(body, 9, mtime=0)
