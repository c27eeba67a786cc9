"""The WSGI application: the web app behind its guard, and two endpoints for other programs."""

from __future__ import annotations

from collections.abc import Sequence

import dash
from dash.exceptions import DependencyException
from flask import Flask, Response, jsonify, request

from . import app, metrics
from .board import Board
from .security import Guard


def create_app(board: Board, *, token: str | None, hosts: Sequence[str], poll_s: float = 1.0) -> dash.Dash:
    """
    Return the app; `.server` is what a WSGI server takes.

    Args:
        board: the data; its owner polls it.
        token: that a browser has to give; None asks for none.
        hosts: names that `Host` may have.
        poll_s: seconds between two polls of the board; a browser asks as often.
    """
    server = Flask("traceml_ray.dash_app", static_folder=None)
    guard = Guard(token, hosts)
    guard.install(server)
    server.add_url_rule("/health", view_func=lambda: jsonify(metrics.health(board)))
    server.add_url_rule("/metrics", endpoint="metrics", view_func=lambda: _metrics(board))
    server.register_error_handler(DependencyException, lambda _: ("", 404))  # of a file that is not there
    made = app.build(board, server=server, poll_s=poll_s)
    guard.scripts = made.csp_hashes()
    return made


def _metrics(board: Board) -> Response:
    body, content_type = metrics.exposition(board, request.headers.get("Accept", ""))
    return Response(body, content_type=content_type)
