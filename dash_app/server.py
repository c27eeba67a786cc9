"""The WSGI application: the web app behind its guard, and two endpoints for other programs."""

from __future__ import annotations

from collections.abc import Sequence

import dash
from dash.exceptions import DependencyException
from flask import Flask, Response, jsonify, request

from . import app, metrics
from .security import Guard
from .session_pages import SessionPages


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
    server.add_url_rule("/health", view_func=lambda: jsonify(metrics.health(session)))
    server.add_url_rule("/metrics", endpoint="metrics", view_func=lambda: _metrics(session))
    server.register_error_handler(DependencyException, lambda _: ("", 404))  # of a file that does not exist
    dashboard = app.build(session, server=server, poll_s=poll_s)
    guard.scripts = dashboard.csp_hashes()
    return dashboard


def _metrics(session: SessionPages) -> Response:
    body, content_type = metrics.exposition(session, request.headers.get("Accept", ""))
    return Response(body, content_type=content_type)
