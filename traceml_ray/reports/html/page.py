"""Puts `report.html` together: one file of at most 2 MB that needs no script and no network."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from traceml_ray import __version__, text
from traceml_ray.reports.charted import Charted
from traceml_ray.reports.html import sections
from traceml_ray.reports.html.elements import Markup, tag
from traceml_ray.reports.severity import sign_of

MAX_BYTES = 2_000_000
_SPARE = 2_000
"""For what is said in place of parts that are left out."""


def render(charted: Charted, folder: Path) -> bytes:
    """
    Return the page of the session in `folder`. A part that would make it larger than `MAX_BYTES` is left out,
    which it says; the first ones are what people read first.
    """
    head = _head(charted)
    room, parts = MAX_BYTES - _SPARE - len(head.encode()), []
    for name, part in _parts(charted, folder):
        size = len(part.encode())
        if size > room:
            left = f"{name} would take {text.size(size)}, for which there is no room here: see summary.json."
            part, size = tag("p", left, cls="panel wide"), 0
        parts.append(part)
        room -= size
    body = tag("body", sections.heading(charted.summary), tag("main", parts), _foot())
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n".encode()


def _parts(charted: Charted, folder: Path) -> Iterator[tuple[str, Markup]]:
    yield "The verdict", sections.verdict(charted)
    yield "The findings", sections.findings(charted)
    yield "Numbers", sections.numbers(charted)
    yield "The ranks that died", sections.deaths(charted)
    yield "Last output", sections.outputs(charted)
    yield "Stacks", sections.stacks(charted)
    yield "The heatmap", sections.ranks_by_time(charted)
    yield "The charts", sections.times_by_step(charted)
    yield "The stages", sections.step_tables(charted)
    yield "The layers", sections.layers(charted)
    yield "The change", sections.before_and_since(charted)
    yield "Nodes and ranks", sections.places(charted)
    yield "Shards", sections.shards(charted)
    yield "What happened", sections.history(charted)
    yield "The environment", sections.surroundings(charted, folder)


def _head(charted: Charted) -> Markup:
    first = charted.summary["conclusion"]
    title = f"{sign_of(first['tone'])} {first['headline']} · {charted.summary['session']['id']}"
    style = _style()
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    allowed = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; form-action 'none'"
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
def _style() -> Markup:
    return Markup(Path(__file__).with_name("report.css").read_text("utf-8"))


def _foot() -> Markup:
    units = "Times are UTC. Colours and words as in the web app; what is not known is n/a, never 0."
    return tag("footer", tag("p", f"traceml-ray {__version__}. {units}"))
