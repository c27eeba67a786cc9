"""The first and the last lines of a report: what it is about, and where its files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS
from traceml_ray.document.text import LABEL, shortened
from traceml_ray.reports.deaths import exit_words
from traceml_ray.reports.headlines import named
from traceml_ray.store.bundles import FOLDER as BUNDLES
from traceml_ray.store.bundles import bundle_files, kept_why, names_of
from traceml_ray.store.results import RunInfo
from traceml_ray.store.session import DATABASE, REPORTS

_MAX_BUNDLES = 3
_SHELL = 128
"""A shell adds the number of the signal to it."""


def title(summary: dict[str, Any], folder: Path) -> list[str]:
    """Return the first lines of a report: the session, who and why where a run has failed, and its size."""
    name = f"traceml-ray · session {summary['session']['id']}"
    verdict, kept = summary["verdict"], kept_why(folder)
    # Who and why comes before anything else where a run has failed, or this was kept of it.
    first = f"bundle of {kept}" if kept else ""
    if LABELS[verdict["label"]].kind == "failure":
        first = f"{named(verdict)}: {verdict['exit_reason'] or verdict['why']}"
    about = [first, " · ".join(about_session(summary))]
    return [
        *(name, "=" * len(name)),
        *(shortened(line) for line in about if line),
        *(shortened(line) for line in run_of(summary["runs"], summary["run"])),
    ]


def about_session(summary: Mapping[str, Any]) -> list[str]:
    """Return how a session ended, how it was started, and its size."""
    session = summary["session"]
    ranks, nodes = session["world_size"], session["nnodes"]
    size = f"{text.count(ranks, 'rank')} on {text.count(nodes, 'node')}" if ranks and nodes else None
    if size and session["silent_ranks"]:
        size += f" (no report from {text.ranks(session['silent_ranks'])})"
    status = session["status"]
    if status == "failed" and session["exit_code"] is not None:
        status += f" (exit code {session['exit_code']})"
    if status == "stopped" and session["exit_code"]:
        code = session["exit_code"]
        status += f" by {exit_words(code if code < 0 else _SHELL - code)}"
    about = [status, session["launcher"], size, session["strategy"], _duration(session)]
    return [fact for fact in about if fact]


def run_of(runs: Sequence[RunInfo], chosen: str | None) -> list[str]:
    """Return which run this is of, where there is more than one or it has a name of its own."""
    for number, run in enumerate(runs):
        if run.id == chosen and (len(runs) > 1 or run.name != run.id):
            position = f" ({number + 1} of {len(runs)})" if len(runs) > 1 else ""
            return [f"run {run.name}{position}: {run.status}"]
    return []


def files(folder: Path) -> list[str]:
    """Return where the files of the session, or of the bundle, in `folder` are."""
    # Not through rich: a path is copied, so it is never wrapped.
    here = bundle_files(folder) or [DATABASE, *REPORTS]
    lines = [f"{'Files':{LABEL}}{folder}", f"{'':{LABEL}}{' · '.join(here)}"]
    count, newest = bundles_in(folder)
    if count > len(newest):
        lines.append(f"{'':{LABEL}}{count} bundles of incidents, the newest are:")
    return lines + [f"{'':{LABEL}}{name}" for name in newest]


def bundles_in(folder: Path) -> tuple[int, list[str]]:
    """Return how many bundles of incidents a session has, and the newest of them, relative to its folder."""
    bundles = names_of(folder)
    return len(bundles), [f"{BUNDLES}/{name}" for name in bundles[-_MAX_BUNDLES:]]


def _duration(session: Mapping[str, Any]) -> str | None:
    if session["started_at"] is None or session["ended_at"] is None:
        return None
    began, ended = (datetime.fromisoformat(session[name]) for name in ("started_at", "ended_at"))
    return text.duration(round((ended - began).total_seconds()))
