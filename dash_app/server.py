"""
The WSGI application: the web app behind its guard, and the other endpoints. These are `/health` and
`/metrics`, downloads of bundles and profiles, and requests (POST) for a bundle, a profile or a measurement of
layers.

Answers are compressed with gzip. A browser requests a URL that names a version only once, and keeps the
answer permanently.
"""

from __future__ import annotations

import functools
import gzip
import secrets
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import dash
from dash import fingerprint
from dash.exceptions import DependencyException
from flask import Flask, Response, jsonify, redirect, request

from traceml_ray.sinks.prometheus import Metrics, health
from traceml_ray.store import query
from traceml_ray.store.profiles import ProfileInfo, remove_profile, trace_name
from traceml_ray.store.results import BundleInfo
from traceml_ray.views.source import Source
from traceml_ray.wire.messages import LayersRequest

from . import app, trace_job
from .pages.events import BUNDLES_PATH
from .pages.layers import PATH as LAYERS_PATH
from .pages.profiles import FIELDS, TABLE, TRACE, request_of
from .pages.profiles import PATH as PROFILES_PATH
from .route import SCOPE
from .security import Guard
from .session_cache import is_here, pieces, traces_of
from .session_pages import SessionPages
from .trace_job import Job, JobError

_PACKED = ("text/", "application/json", "application/javascript", "application/openmetrics", "image/x-icon")
_CHUNK, _PIECE = 1 << 20, 1 << 18
"""Number of bytes requested of a bundle at a time, and number of bytes sent of a made file at a time."""
_BLOCK = 512
"""Size of a tar block, in bytes."""
_JOBS: dict[str, Job] = {TRACE: "trace", TABLE: "table"}
"""Files of a profile that are made from its traces on request: name of the file → job."""
_KINDS = {TABLE: "text/csv"}
_LAYERS_ASKED = ("steps", "asked")
"""Query names of the layers page that its form sets."""
_PROFILES_ASKED = (*FIELDS, "asked")
"""Query names of the profiles page that its form sets."""


def create_app(
    session: SessionPages, *, token: str | None, hosts: Sequence[str], poll_s: float = 1.0
) -> dash.Dash:
    """
    Return the app. Its `.server` is the application for a WSGI server.

    Args:
        session: the data; its owner polls it.
        token: the token required from a browser; None: no token is required.
        hosts: allowed values of the `Host` header.
        poll_s: seconds between two polls of the session; a browser asks as often.
    """
    server = Flask("traceml_ray.dash_app", static_folder=None)
    guard = Guard(token, hosts)
    guard.install(server)
    server.after_request(_pack)
    server.add_url_rule("/health", view_func=lambda: jsonify(health(session)))
    metrics = Metrics(session)
    server.add_url_rule("/metrics", endpoint="metrics", view_func=lambda: _metrics(metrics))
    _serve_bundles(server, session)
    _serve_profiles(server, session)
    _serve_layers(server, session)
    server.register_error_handler(DependencyException, lambda _: ("", 404))  # of a file that does not exist
    dashboard = app.build(session, server=server, poll_s=poll_s)
    guard.scripts = dashboard.csp_hashes()
    return dashboard


def _metrics(metrics: Metrics) -> Response:
    body, content_type = metrics.exposition(request.headers.get("Accept", ""))
    return Response(body, content_type=content_type)


def _pack(response: Response) -> Response:
    """Compress an answer if the client accepts that, and set how long it may be cached."""
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
    """
    Return whether the requested URL names its version, so that other versions have other URLs
    (`dash.Dash.index`).
    """
    if request.path.startswith("/_dash-component-suites/"):
        check: Any = fingerprint.check_fingerprint  # it has no types
        return bool(check(request.path)[1])
    return "m" in request.args if request.path.startswith("/assets/") else request.path == "/_favicon.ico"


@functools.lru_cache(32)
def _packed_once(body: bytes) -> bytes:
    return gzip.compress(body, 9, mtime=0)


def _serve_bundles(server: Flask, session: SessionPages) -> None:
    """Register the handlers for downloads of bundles, and for requests for a bundle (POST)."""

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
        return _back({}, ()) if _is_page() else _accepted(asked, ())

    def failed(error: query.QueryError) -> Response:
        return Response(f"{error}\n", 503, mimetype="text/plain")

    server.add_url_rule(f"{BUNDLES_PATH}<name>.tar", "bundle", download)
    server.add_url_rule(BUNDLES_PATH.rstrip("/"), "dump", dump, methods=["POST"])
    server.register_error_handler(query.QueryError, failed)


def _is_page() -> bool:
    """Return whether a button of a page has sent this request; False for another program."""
    return "text/html" in request.accept_mimetypes.values()


def _back(values: dict[str, str], asked: Collection[str], path: str = "") -> Response:
    """
    Redirect to the page whose button was pressed, or to `path`. In its URL, `values` replace the names in
    `asked`.
    """
    page = urlsplit(request.referrer or "")
    given = {name: value for name, value in parse_qsl(page.query) if name not in asked}
    kept = {name: value for name, value in given.items() if not path or name in SCOPE} | values
    target = f"/{(path or page.path).lstrip('/')}" + (f"?{urlencode(kept)}" if kept else "")
    return cast("Response", redirect(target, 303))


def _accepted(asked: str, fields: Collection[str]) -> Response:
    """
    Answer a request with its id: as JSON, or in the URL of the page to redirect to, in place of
    `fields`.
    """
    if _is_page():
        return _back({"asked": asked}, fields)
    return Response(f'{{"request": "{asked}"}}\n', 202, mimetype="application/json")


def _tar(source: Source, bundle: BundleInfo) -> Iterator[bytes]:
    """Yield a tar of a bundle. A file that has become shorter is filled up with zeros."""
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


def layers_request_of(values: Mapping[str, str]) -> LayersRequest:
    """
    Return the request that the values of the form of layers ask for. Raises ValueError with what is
    wrong.
    """
    steps = (values.get("steps") or "20").strip()
    if not (steps.isascii() and steps.isdecimal()):
        raise ValueError(f"{steps[:20]!r} is not a number of steps")
    return LayersRequest.checked(int(steps[:9]), values.get("run") or None)


def _serve_layers(server: Flask, session: SessionPages) -> None:
    """Register the handlers for measurements of layers."""

    def ask() -> Response:
        try:
            wanted = layers_request_of(request.form)
        except ValueError as error:
            return Response(f"{error}\n", 400, mimetype="text/plain")
        asked = secrets.token_hex(8)
        query.ask_one(session.source.reply, query.StartLayers(asked, wanted))
        return _accepted(asked, _LAYERS_ASKED)

    server.add_url_rule(LAYERS_PATH, "layers-ask", ask, methods=["POST"])


def _serve_profiles(server: Flask, session: SessionPages) -> None:
    """Register the handlers for profiles: requests, downloads and removal."""

    def ask() -> Response:
        try:
            wanted = request_of(request.form)
        except ValueError as error:
            if _is_page():  # the page shows the same error for these values
                return _back(
                    {name: request.form[name] for name in FIELDS if name in request.form}, _PROFILES_ASKED
                )
            return _plain(str(error), 400)
        asked = secrets.token_hex(8)
        query.ask_one(session.source.reply, query.StartProfile(asked, wanted))
        return _accepted(asked, _PROFILES_ASKED)

    def download(profile: str, name: str) -> Response:
        pages = session.of(request.args.get("session"))
        info = _find_profile(pages, profile)
        if info is None:
            return _plain("There is no such profile.", 404)
        if job := _JOBS.get(name):
            try:
                return _run_job(pages, info, job, name)
            except (JobError, OSError) as error:
                return _plain(str(error), 503)
        rank = next((r for r in info.profile.captured if trace_name(r.rank) == name), None)
        if rank is None:
            return _plain("There is no such trace.", 404)
        sent = pieces(pages.source, info.profile, name, rank.total_bytes)
        return Response(sent, mimetype="application/gzip")

    def remove(profile: str) -> Response:
        pages = session.of(request.args.get("session"))
        info = _find_profile(pages, profile)
        if info is None:
            return _plain("There is no such profile.", 404)
        if not pages.source.stored:
            query.ask_one(pages.source.reply, query.RemoveProfile(profile))
        elif is_here(info):
            remove_profile(Path(info.path).parents[1], profile)
        pages.renew()
        if _is_page():
            return _back({}, _PROFILES_ASKED, "/profiles")
        return Response("{}\n", mimetype="application/json")

    server.add_url_rule(PROFILES_PATH, "profile-ask", ask, methods=["POST"])
    server.add_url_rule(f"{PROFILES_PATH}/<profile>/remove", "profile-remove", remove, methods=["POST"])
    server.add_url_rule(f"{PROFILES_PATH}/<profile>/<name>", "profile-file", download)


def _find_profile(pages: SessionPages, profile: str) -> ProfileInfo | None:
    listed = query.ask_one(pages.source.reply, query.GetProfiles())
    return next((info for info in listed.done if info.profile.id == profile), None)


def _run_job(pages: SessionPages, info: ProfileInfo, job: Job, name: str) -> Response:
    """Make a file from the traces now, and return it. Raises JobError, OSError, QueryError."""
    folder = tempfile.TemporaryDirectory(prefix="traceml-")
    with folder, traces_of(pages.source, info) as traces:
        out = Path(folder.name) / name
        trace_job.run(job, traces, out)
        file = out.open("rb")  # an open file stays readable when its folder is removed
    size = file.seek(0, 2)
    file.seek(0)

    def sent() -> Iterator[bytes]:
        with file:
            yield from iter(lambda: file.read(_PIECE), b"")

    headers = {"Content-Length": str(size)}
    return Response(sent(), headers=headers, mimetype=_KINDS.get(name, "application/gzip"))


def _plain(sentence: str, status: int) -> Response:
    return Response(f"{sentence}\n", status, mimetype="text/plain")
