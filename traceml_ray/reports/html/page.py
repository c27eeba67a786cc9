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


def render(found: Charted, folder: Path) -> bytes:
    """
    Return the page of the session in `folder`. A part that would make it larger than `MAX_BYTES` is left out,
    which it says; the first ones are what people read first.
    """
    head = _head(found)
    room, parts = MAX_BYTES - _SPARE - len(head.encode()), []
    for name, part in _parts(found, folder):
        size = len(part.encode())
        if size > room:
            left = f"{name} would take {text.size(size)}, for which there is no room here: see summary.json."
            part, size = tag("p", left, cls="panel wide"), 0
        parts.append(part)
        room -= size
    body = tag("body", sections.heading(found.summary), tag("main", parts), _foot())
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n".encode()


def _parts(found: Charted, folder: Path) -> Iterator[tuple[str, Markup]]:
    yield "The verdict", sections.verdict(found)
    yield "The findings", sections.findings(found)
    yield "Numbers", sections.numbers(found)
    yield "The ranks that died", sections.deaths(found)
    yield "Last output", sections.outputs(found)
    yield "Stacks", sections.stacks(found)
    yield "The heatmap", sections.ranks_by_time(found)
    yield "The charts", sections.times_by_step(found)
    yield "The stages", sections.step_tables(found)
    yield "The layers", sections.layers(found)
    yield "The change", sections.before_and_since(found)
    yield "Nodes and ranks", sections.places(found)
    yield "Shards", sections.shards(found)
    yield "What happened", sections.history(found)
    yield "The environment", sections.surroundings(found, folder)


def _head(found: Charted) -> Markup:
    first = found.summary["conclusion"]
    title = f"{sign_of(first['tone'])} {first['headline']} · {found.summary['session']['id']}"
    style = _style()
    own = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    allowed = f"default-src 'none'; img-src data:; style-src 'sha256-{own}'; form-action 'none'"
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
