"""Requests to have layers measured (POST); the server's guard has admitted who asks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from flask import Flask, Response, request

from traceml_ray.store import query
from traceml_ray.wire.messages import LayersRequest

from .downloads import accepted
from .pages.layers import PATH
from .session_pages import SessionPages

_ASKED = ("steps", "asked")


def request_of(values: Mapping[str, str]) -> LayersRequest:
    """Return what a form asks for. Raises ValueError, which says what is wrong."""
    steps = (values.get("steps") or "20").strip()
    if not (steps.isascii() and steps.isdecimal()):
        raise ValueError(f"{steps[:20]!r} is no number of steps")
    return LayersRequest.checked(int(steps[:9]), values.get("run") or None)


def serve(server: Flask, session: SessionPages) -> None:
    """Have the server take requests for layers."""

    def ask() -> Response:
        try:
            wanted = request_of(request.form)
        except ValueError as error:
            return Response(f"{error}\n", 400, mimetype="text/plain")
        asked = secrets.token_hex(8)
        query.ask_one(session.source.reply, query.StartLayers(asked, wanted))
        return accepted(asked, _ASKED)

    server.add_url_rule(PATH, "layers-ask", ask, methods=["POST"])
