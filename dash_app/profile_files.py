"""Requests for profiles (POST), and downloads of theirs; the server's guard has admitted who asks."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flask import Flask, Response, request

from traceml_ray.store import query
from traceml_ray.store.profiles import ProfileInfo, remove_profile, trace_name

from . import trace_job
from .breakdowns import is_here, pieces, traces_of
from .downloads import accepted, back, is_page
from .profiles import FIELDS, PATH, TABLE, TRACE, request_of
from .session_pages import SessionPages
from .trace_job import Job, JobError

_PIECE = 1 << 18
_JOBS: dict[str, Job] = {TRACE: "trace", TABLE: "table"}
_KINDS = {TABLE: "text/csv"}
_ASKED = (*FIELDS, "asked")


def serve(server: Flask, session: SessionPages) -> None:
    """Have the server take requests for profiles, and send what there is of them."""

    def ask() -> Response:
        try:
            wanted = request_of(request.form)
        except ValueError as error:
            if is_page():  # which says the same of these values
                return back({name: request.form[name] for name in FIELDS if name in request.form}, _ASKED)
            return _plain(str(error), 400)
        asked = secrets.token_hex(8)
        query.ask_one(session.source.reply, query.StartProfile(asked, wanted))
        return accepted(asked, _ASKED)

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
        if is_page():
            return back({}, _ASKED, "/profiles")
        return Response("{}\n", mimetype="application/json")

    server.add_url_rule(PATH, "profile-ask", ask, methods=["POST"])
    server.add_url_rule(f"{PATH}/<profile>/remove", "profile-remove", remove, methods=["POST"])
    server.add_url_rule(f"{PATH}/<profile>/<name>", "profile-file", download)


def _find_profile(pages: SessionPages, profile: str) -> ProfileInfo | None:
    listed = query.ask_one(pages.source.reply, query.GetProfiles())
    return next((info for info in listed.done if info.profile.id == profile), None)


def _run_job(pages: SessionPages, info: ProfileInfo, job: Job, name: str) -> Response:
    """Return a file that is made of the traces now. Raises JobError, OSError, QueryError."""
    folder = tempfile.TemporaryDirectory(prefix="traceml-")
    with folder, traces_of(pages.source, info) as traces:
        out = Path(folder.name) / name
        trace_job.run(job, traces, out)
        file = out.open("rb")  # goes on to be there when its folder is removed
    size = file.seek(0, 2)
    file.seek(0)

    def sent() -> Iterator[bytes]:
        with file:
            yield from iter(lambda: file.read(_PIECE), b"")

    headers = {"Content-Length": str(size)}
    return Response(sent(), headers=headers, mimetype=_KINDS.get(name, "application/gzip"))


def _plain(sentence: str, status: int) -> Response:
    return Response(f"{sentence}\n", status, mimetype="text/plain")
