"""Downloads of bundles, and requests for one; the server's guard has admitted who asks."""

from __future__ import annotations

import secrets
import tarfile
from collections.abc import Collection, Iterator
from typing import cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from flask import Flask, Response, redirect, request

from traceml_ray.store import query
from traceml_ray.store.results import BundleInfo
from traceml_ray.views.source import Source

from .bundles import PATH
from .route import SCOPE
from .session_pages import SessionPages

_CHUNK = 1 << 20
_BLOCK = 512
"""Size of a tar block, in bytes."""


def serve(server: Flask, session: SessionPages) -> None:
    """Have the server answer downloads, and requests for a bundle (POST)."""

    def download(name: str) -> Response:
        source = session.of(request.args.get("session")).source
        bundles = query.ask_one(source.reply, query.GetBundles())
        bundle = next((bundle for bundle in bundles if bundle.name == name), None)
        if bundle is None:
            return Response("There is no such bundle.\n", 404, mimetype="text/plain")
        return Response(_tar(source, bundle), mimetype="application/x-tar")

    def dump() -> Response:
        asked = secrets.token_hex(8)
        query.ask_one(session.source.reply, query.Dump(asked))
        return back({}, ()) if is_page() else accepted(asked, ())

    def failed(error: query.QueryError) -> Response:
        return Response(f"{error}\n", 503, mimetype="text/plain")

    server.add_url_rule(f"{PATH}<name>.tar", "bundle", download)
    server.add_url_rule(PATH.rstrip("/"), "dump", dump, methods=["POST"])
    server.register_error_handler(query.QueryError, failed)


def is_page() -> bool:
    """Return whether the button of a page has sent this request, and no program."""
    return "text/html" in request.accept_mimetypes.values()


def back(values: dict[str, str], asked: Collection[str], path: str = "") -> Response:
    """
    Lead back to the page whose button it was, or to `path`, with `values` in the URL in place of what it had
    `asked` before.
    """
    page = urlsplit(request.referrer or "")
    given = {name: value for name, value in parse_qsl(page.query) if name not in asked}
    kept = {name: value for name, value in given.items() if not path or name in SCOPE} | values
    target = f"/{(path or page.path).lstrip('/')}" + (f"?{urlencode(kept)}" if kept else "")
    return cast("Response", redirect(target, 303))


def accepted(asked: str, fields: Collection[str]) -> Response:
    """Answer a request with its id: as JSON, or in the URL a page is led back to, in place of `fields`."""
    if is_page():
        return back({"asked": asked}, fields)
    return Response(f'{{"request": "{asked}"}}\n', 202, mimetype="application/json")


def _tar(source: Source, bundle: BundleInfo) -> Iterator[bytes]:
    """Yield a tar of a bundle; of a file that is shorter by now, zeros follow."""
    for name, size in bundle.files.items():
        entry = tarfile.TarInfo(f"{bundle.name}/{name}")
        entry.size = size
        yield entry.tobuf()
        sent = 0
        while sent < size:
            asked = query.ReadBundle(bundle.name, name, sent, min(_CHUNK, size - sent))
            chunk = query.ask_one(source.reply, asked) or bytes(asked.n)
            sent += len(chunk)
            yield chunk
        yield bytes(-size % _BLOCK)
    yield bytes(2 * _BLOCK)
