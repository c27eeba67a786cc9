"""
Builds `report.html`: one file of at most 2 MB that needs no network. It also works without its only script,
which shows moments in the timezone of the reader.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path

from traceml_ray import __version__, text
from traceml_ray import document as renderers
from traceml_ray.analysis.verdict_shapes import TimedEpisode
from traceml_ray.document.elements import Markup, join, sentence, tag, with_times
from traceml_ray.document.html import section
from traceml_ray.document.model import SIGNS, Section
from traceml_ray.document.timezone import timezone_of
from traceml_ray.reports import contents
from traceml_ray.reports.document import SECTIONS, ChartData, about_session, episode_of, more, run_of
from traceml_ray.reports.headlines import cost, line_of, named, part_of, sign_of, since
from traceml_ray.reports.headlines import coverage as covered
from traceml_ray.reports.profiles import by_operation
from traceml_ray.store.summary_shape import Summary

MAX_BYTES = 2_000_000
_SPARE = 2_000
"""Bytes reserved for the notes that replace left-out parts."""
_MAX_FINDINGS, _MAX_ALSO = 12, 4
_PARTS = {
    "The findings": ("findings",),
    "Numbers": ("numbers",),
    "The ranks that died": ("deaths",),
    "Last output": ("output",),
    "Stacks": ("stacks",),
    "The heatmap": ("by rank",),
    "The charts": ("by step",),
    "The stages": ("steps", "stages", "spans"),
    "The model": ("model", "tables"),
    "The change": ("change",),
    "Nodes and ranks": ("suspects", "nodes", "roles", "ranks", "of ranks"),
    "What happened": ("history", "events", "runs"),
    "The environment": ("environment", "monitor"),
}
"""Sections of the page by part, in order of reading. If there is no room for a part, its name is listed."""
_SIGNS = {
    "good": "M8 1a7 7 0 1 0 .01 0zM7 11.5 3.8 8.3l1.3-1.3L7 8.9l4-4 1.3 1.3z",
    "warning": "M8 1 15.5 15H.5z",
    "critical": "M8 0 16 8 8 16 0 8z",
    "notice": "M8 1 15.5 15H.5zM8 4.6 3.4 13.4h9.2z",
    "unsure": "M8 1a7 7 0 1 0 .01 0zM8 4a4 4 0 1 1-.01 0z",
}
_TONES = {
    "good": "#1b7a43", "notice": "#8a6d00", "warning": "#c05f0c", "critical": "#c22f2f", "unsure": "#6a7887",
}  # fmt: skip


def render(chart_data: ChartData, folder: Path) -> bytes:
    """
    Return the page of the session in `folder`. A part that would make the page larger than `MAX_BYTES` is
    left out, and a note says so. The parts come in order of reading.
    """
    with timezone_of("UTC"):
        return _render(chart_data, folder)


def _render(chart_data: ChartData, folder: Path) -> bytes:
    first = chart_data.summary.conclusion
    head = _head(f"{sign_of(first.tone)} {first.headline} · {chart_data.summary.session.id}")
    room, parts = MAX_BYTES - _SPARE - len(head.encode()), []
    for name, part in _parts(chart_data, folder):
        size = len(part.encode())
        if size > room:
            left = f"{name} takes {text.size(size)}, too much for this page: see summary.json."
            part, size = tag("p", left, cls="panel wide"), 0
        parts.append(part)
        room -= size
    return _whole(head, _heading(chart_data.summary), tag("main", parts))


def page_of_sections(title: str, heading: str, sections: Iterable[Section]) -> bytes:
    """Return a page with sections that do not belong to a single session, below `heading`."""
    with timezone_of("UTC"):
        about = tag("header", tag("h1", "traceml-ray · ", tag("b", heading)))
        return _whole(_head(title), about, tag("main", [section(made) for made in sections]))


def _whole(head: Markup, *body: Markup) -> bytes:
    inside = tag("html", head, tag("body", *body, _foot()), lang="en")
    return f"<!doctype html>\n{inside}\n".encode()


def _parts(chart_data: ChartData, folder: Path) -> Iterator[tuple[str, Markup]]:
    yield "The verdict", verdict_box(chart_data)
    for name, names in _PARTS.items():
        sections = (made for part in names for made in SECTIONS[part](chart_data))
        yield name, join(section(made, _MAX_FINDINGS if "findings" in names else None) for made in sections)
    yield "To see more", section(more(folder))


def _head(title: str) -> Markup:
    style = _asset("report.css")
    allowed = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(_asset('report.js'))}'; form-action 'none'"
    )
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=allowed),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("meta", name_="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", style),
    )


@cache
def _asset(name: str) -> Markup:
    return Markup(resources.files(renderers).joinpath(name).read_text("utf-8"))


def _digest(asset: Markup) -> str:
    """
    Return the digest by which the content security policy allows this part of the page, and nothing else of
    its kind.
    """
    return f"sha256-{b64encode(hashlib.sha256(asset.encode()).digest()).decode()}"


def _foot() -> Markup:
    zone = tag("span", "UTC", cls="zone-name")
    words = ". Colours and terms as in the web app; n/a: not known."
    about = f"traceml-ray {__version__}. Times without a timezone are in ", zone, words
    return tag("footer", tag("p", *about), tag("script", _asset("report.js")))


def _heading(summary: Summary) -> Markup:
    """Return the heading that names the session."""
    name = tag("h1", "traceml-ray · session ", tag("b", str(summary.session.id)))
    lines = [" · ".join(about_session(summary)), *run_of(summary.runs, summary.run)]
    return tag("header", name, (tag("p", line) for line in lines))


def verdict_box(chart_data: ChartData) -> Markup:
    """
    Return the box of the verdict: the finding, its reason, what to do, its cost, its confidence, and the data
    it covers.
    """
    summary = chart_data.summary
    one, first = summary.verdict, summary.conclusion
    is_first = first.subject == "steps"
    tone, sign, headline = first.tone, sign_of(first.tone), first.headline
    ends = is_first or contents.meaning(one).kind == "finding"  # whether it says what to do
    before = [tag("p", sentence(first.why)), tag("p", tag("b", "Next "), sentence(first.next))]
    episode = episode_of(summary)
    began = since(episode) if episode else ""
    operation = by_operation(summary)
    others = contents.findings_beside(summary)[:_MAX_ALSO]
    sentences = [
        tag("h2", headline[:1].upper() + headline[1:]),
        *(() if is_first else (*before, tag("h3", f"Steps: {named(one)}"))),
        tag("p", sentence(one.why)),
        tag("p", sentence(one.note)) if one.note else None,
        *(tag("p", line) for line in contents.evidence(summary.findings)),
        tag("p", tag("b", "By operation "), sentence(". ".join(operation))) if operation else None,
        tag("p", tag("b", "Next "), sentence(one.next)) if one.next and ends else None,
        *(tag("p", tag("b", "Also "), f"{SIGNS[other.severity]} {line_of(other)}") for other in others),
        tag("p", sentence(f"{began[:1].upper()}{began[1:]}."), cls="hint") if began else None,
    ]
    path = tag("path", d=_SIGNS[tone], fill=_TONES[tone])
    icon = tag("svg", path, viewBox="0 0 16 16", width=28, height=28, role="img", aria_label=f"{sign} {tone}")
    beside = tag(
        "div", _cost(summary, episode), tag("p", with_times(_coverage(chart_data)), cls="hint"), cls="cost"
    )
    inside = icon, tag("div", sentences, cls="sentences"), beside
    return tag("section", inside, cls=f"verdict {tone}", aria_label="Verdict")


def _cost(summary: Summary, episode: TimedEpisode | None) -> list[Markup]:
    """Return the cost of the named cause, and the confidence."""
    one = summary.verdict
    shown = []
    if one.cost_pct and one.label != "healthy":
        shown.append(tag("p", tag("span", text.percent(one.cost_pct), cls="value"), f" {part_of(one)}"))
    if episode:
        shown.append(tag("p", f"cost {cost(episode, contents.has_gpus(summary))}"))
    prefixes = ("costs ", "cost ") if episode and len(summary.episodes) == 1 else ("costs ",)
    rest = [line for line in contents.about_verdict(summary) if not (shown and line.startswith(prefixes))]
    return [*shown, *(tag("p", line) for line in rest)]


def _coverage(chart_data: ChartData) -> str:
    """Return how many ranks the report covers, and its time."""
    summary = chart_data.summary
    world, silent = summary.session.world_size, summary.session.silent_ranks
    newest = max((rank.last_seen for rank in summary.ranks.values() if rank.last_seen), default=None)
    when = summary.session.ended_at or newest
    known = world - len(silent) if world else 0
    reported = covered(known, world or 0, len(chart_data.deaths)) if known else "no rank has reported"
    return reported + (f", as of {when}" if when else "")
