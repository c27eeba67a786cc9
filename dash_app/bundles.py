"""The bundles of a session: listed on pages, downloaded as a tar, and made on request."""

from __future__ import annotations

import secrets
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from dash import html
from flask import Flask, Response, request

from traceml_ray import text
from traceml_ray.results import BundleInfo
from traceml_ray.store import query

from .components import Columns, part, rank_link, step_link, table, when
from .route import Route
from .session_cache import SessionCache
from .session_pages import SessionPages
from .source import Source

PATH = "/bundles/"
_CHUNK = 1 << 20
_BLOCK = 512
"""Of a tar."""


def data(cache: SessionCache) -> Sequence[BundleInfo]:
    """Return the bundles, the newest first."""
    return (cache.ask(query.Bundles()) or [])[::-1]


def rows(bundles: Sequence[Mapping[str, Any]], route: Route) -> Any:
    """Return the bundles as a table."""
    session = f"?session={quote(name)}" if (name := route.get("session")) else ""
    columns: Columns = {
        "began": lambda one: when(one["time"]),
        "reason": lambda one: one["reason"],
        ">rank": lambda one: rank_link(one["rank"], route),
        ">step": lambda one: step_link(one["step"], route),
        "why": lambda one: one["why"],
        ">size": lambda one: text.size(one["bytes"]),
        "download": lambda one: html.A(one["name"], href=f"{PATH}{quote(one['name'])}.tar{session}"),
    }
    none = "None: no rank has died, hung or run out of memory."
    return part(html.Div(table(columns, bundles, empty=none, label="Bundles"), id="bundles"))


def serve(server: Flask, session: SessionPages) -> None:
    """Have the server answer downloads, and requests for a bundle (POST); its guard admits both."""

    def download(name: str) -> Response:
        source = session.of(request.args.get("session")).source
        found = query.ask_one(source.reply, query.Bundles())
        bundle = next((each for each in found if each["name"] == name), None)
        if bundle is None:
            return Response("There is no such bundle.\n", 404, mimetype="text/plain")
        return Response(_tar(source, bundle), mimetype="application/x-tar")

    def dump() -> Response:
        asked = secrets.token_hex(8)
        query.ask_one(session.source.reply, query.Dump(asked))
        return Response(f'{{"request": "{asked}"}}\n', 202, mimetype="application/json")

    def failed(error: query.QueryError) -> Response:
        return Response(f"{error}\n", 503, mimetype="text/plain")

    server.add_url_rule(f"{PATH}<name>.tar", "bundle", download)
    server.add_url_rule(PATH.rstrip("/"), "dump", dump, methods=["POST"])
    server.register_error_handler(query.QueryError, failed)


def _tar(source: Source, bundle: BundleInfo) -> Iterator[bytes]:
    """Yield a tar of a bundle; of a file that is shorter by now, zeros follow."""
    for name, size in bundle["files"].items():
        entry = tarfile.TarInfo(f"{bundle['name']}/{name}")
        entry.size = size
        yield entry.tobuf()
        sent = 0
        while sent < size:
            asked = query.ReadBundle(bundle["name"], name, sent, min(_CHUNK, size - sent))
            chunk = query.ask_one(source.reply, asked) or bytes(asked.n)
            sent += len(chunk)
            yield chunk
        yield bytes(-size % _BLOCK)
    yield bytes(2 * _BLOCK)
