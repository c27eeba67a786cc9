"""
The web app in Dash: the shell around every page, and one callback that refreshes whatever the URL shows.

A browser sends a checksum of each part that it has. The answer has the parts that differ. For a chart that
only became longer, it has the new points: 5.6 kB for a node page with 8 GPUs instead of 9.1 kB (gzip). Dash's
`Patch` is not used, because it is applied to whatever a browser has. Pages compute nothing about training:
`SessionPages.view` has the data, and the modules of `pages` lay it out.

Also finds ranks, nodes and steps for the search box of every page.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import dash
import msgspec
import numpy as np
from dash import ClientsideFunction, Input, Output, State, dcc, html
from flask import Flask
from plotly.io.json import to_json_plotly

from traceml_ray.document import timezone
from traceml_ray.text import natural
from traceml_ray.views.figures import Figure
from traceml_ray.views.run_state import RunState
from traceml_ray.views.session_poll import keep_newest
from traceml_ray.views.values import whole_number

from . import shell
from .charts import Chart
from .elements import Content
from .pages import PAGES, has_nothing, start_layout
from .route import SCOPE, Route
from .session_pages import SessionPages

_MOST = 20


def search_targets(run: RunState, route: Route, asked: str) -> dict[str, str]:
    """
    Return links to the pages that the search text may mean ("5", "rank 5", "host-1", "step 9"), best first,
    by name.
    """
    wanted = asked.casefold().split()
    return dict(islice(_matching_targets(run, route, wanted), _MOST)) if wanted else {}


def _matching_targets(run: RunState, route: Route, wanted: list[str]) -> Iterator[tuple[str, str]]:
    number = whole_number(wanted[-1])
    if number is not None and wanted[0] != "step" and number in run.ranks:
        yield _rank(run, number), route.to("rank", number)
    for node in sorted(run.nodes, key=lambda node: natural(node.label)):
        names = f"node {node.label} {node.hostname} {node.address}".casefold()
        if all(word in names for word in wanted):
            yield f"node {node.label}", route.to("node", node.node_id)
    for rank in run.ranks:
        name = _rank(run, rank)
        if rank != number and all(word in name.casefold() for word in wanted):
            yield name, route.to("rank", rank)
    if number is not None and wanted[0] != "rank" and number <= (run.last_step or -1):
        yield f"step {number:,}", route.to("step", number)


def _rank(run: RunState, rank: int) -> str:
    return f"rank {rank} on {run.node_of(rank)}"


_LOG = logging.getLogger("traceml_ray.dash_app")
Parts = dict[str, dict[str, Any]]
"""Properties of elements, by element id."""


class _Page(NamedTuple):
    """A page made from one version of the session."""

    key: str
    """Identity of the page: while it stays the same, only its parts change."""
    layout: html.Div
    parts: Parts
    sums: dict[str, int]
    grown: Parts
    """
    For each chart: the points added since the previous version, and in `of` the checksum of that version.
    """


class Refresher:
    """Answers the refreshes of all browsers. A page is made once for all browsers that show it."""

    def __init__(self, session: SessionPages) -> None:
        self._session = session
        self._page = functools.lru_cache(64)(self._made)
        self._newest: OrderedDict[tuple[Route, str], _Page] = OrderedDict()

    def refresh(
        self, pathname: str | None, search: str | None, seen: Any, of_browser: Any = ""
    ) -> tuple[Any, dict[str, Any]]:
        """
        Return the elements of the page (`no_update` if the browser has the page already), and the changes of
        the page: `{"seen": …, "set": {id: properties}}`.

        `seen` is the `seen` of the browser's last answer: parts that the browser has are not sent again.
        `of_browser` is its timezone. Raises nothing: an error is counted, and the page has a line that says
        so.
        """
        of_browser = of_browser if isinstance(of_browser, str) and len(of_browser) < 64 else ""
        with timezone.timezone_of(of_browser):
            return self._refresh(pathname, search, seen, of_browser)

    def _refresh(
        self, pathname: str | None, search: str | None, seen: Any, of_browser: str
    ) -> tuple[Any, dict[str, Any]]:
        seen = seen if isinstance(seen, dict) else {}
        self._session.note_watched()
        try:
            route = Route.parse(pathname, search)
            if route is None:
                return _no_page(pathname), {"seen": {}, "set": {}}
            return self._answer(route, seen, of_browser)
        except Exception as error:
            if self._session.errors.note("refresh", error):
                _LOG.exception("refresh of %s", pathname)
            sentence = f"This page could not be made ({type(error).__name__}); the next refresh tries again."
            line = _parts(shell.problem(sentence))
            return dash.no_update, {"seen": {**seen, "sums": {**_known(seen), **_sums(line)}}, "set": line}

    def _answer(self, route: Route, seen: dict[str, Any], of_browser: str) -> tuple[Any, dict[str, Any]]:
        header = self._session.header(route)
        instead = header["state"] if has_nothing(route.page, header) else ""
        page = self._page(route, header["version"], instead, of_browser)
        outer = {**_parts(shell.parts(header, route)), "tab": shell.tab(header)}
        sums, seen_sums = {**_sums(outer), **page.sums}, _known(seen)
        new = seen.get("page") != page.key  # the elements contain their parts
        parts = outer if new else {**outer, **page.parts}
        changed = {
            id: page.grown[id] if id in page.grown and page.grown[id]["of"] == seen_sums.get(id) else props
            for id, props in parts.items()
            if seen_sums.get(id) != sums[id]
        }
        answer = {"seen": {"page": page.key, "sums": sums}, "set": changed}
        return page.layout if new else dash.no_update, answer

    def _made(self, route: Route, _version: int, instead: str, _timezone: str) -> _Page:
        """
        Return a page. If `instead`, a state, is set: the page that explains why there is nothing
        to show.
        """
        make = start_layout if instead else PAGES[route.page].layout
        layout = make(self._session.view(route), route)
        parts = _parts(layout)
        around = make.__module__, make.__name__, instead, route.key, route.select(*SCOPE), sorted(parts)
        key = f"{zlib.crc32(repr(around).encode()):x}"
        before = self._newest.get((route, instead))
        page = _Page(key, html.Div(layout, id="view", key=key), parts, _sums(parts), _grown(before, parts))
        keep_newest(self._newest, (route, instead), page)
        return page

    def search_targets(self, text: str, pathname: str | None, search: str | None) -> dict[str, str]:
        """Return the links to the pages that a text in the search box may mean, by name, the best first."""
        route = Route.parse(pathname, search) or Route()
        run = self._session.run_of(route)
        return search_targets(run, route, text) if run else {}

    def cell(self, asked: dict[str, Any] | None, search: str | None) -> str | None:
        """
        Return the tooltip of a cell of the heatmap: `asked["heading"]`, which the browser shows already,
        and what `pages.overview.cell` says of the rest of `asked`. None: there is nothing to say, or it
        failed (counted).
        """
        try:
            route = Route.parse("/", search)
            if not asked or route is None:
                return None
            heading, text = str(asked.get("heading", "")), ""
            if asked["ranks"]:
                route = msgspec.structs.replace(route, page="cell", key=msgspec.json.encode(asked).decode())
                text = self._session.view(route).get("text", "")
            return "\n".join(filter(None, (heading, text)))
        except Exception as error:
            if self._session.errors.note("cell", error):
                _LOG.exception("cell %s", asked)
            return None


def build(session: SessionPages, *, server: Flask, poll_s: float = 1.0) -> dash.Dash:
    """Return the Dash app on a Flask `server`. A browser requests updates every `poll_s` seconds."""
    app = dash.Dash(
        "traceml_ray.dash_app",
        server=server,  # type: ignore[arg-type]
        title="traceml-ray",
        update_title=None,  # type: ignore[arg-type]
        assets_folder=str(Path(__file__).parent / "assets"),
        serve_locally=True,
        suppress_callback_exceptions=True,
    )
    app.layout = shell.layout(poll_s)
    icon = f'<link rel="icon" href="{shell.icon("unsure")}">'
    app.index_string = app.index_string.replace("<html>", '<html lang="en">').replace("{%favicon%}", icon)
    refresher = Refresher(session)

    @app.callback(  # not `set_props`: when two answers overtake each other it applies both
        Output("page", "children"),
        Output("answer", "data"),
        *(Output(id, "content") for id in shell.PARTS),  # sent with the page: sent later, they would move it
        Input("due", "data"),  # not the tick: where an answer takes longer, each tick would discard one
        Input("url", "pathname"),
        Input("url", "search"),
        Input("timezone", "data"),  # an Input, not a State: the first refresh waits for it
        State("seen", "data"),
    )
    def refresh(_: int, pathname: str | None, search: str | None, of_browser: str, seen: Any) -> Any:
        elements, answer = refresher.refresh(pathname, search, seen, of_browser)
        around = [answer["set"].pop(id, {}).get("content", dash.no_update) for id in shell.PARTS]
        return (
            elements,
            answer if answer["seen"] != seen else {},
            *around,
        )  # {}: only that the server is there

    @app.callback(
        Output("heat-tip", "children", allow_duplicate=True),
        Input("asked", "data"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def cell(asked: dict[str, Any] | None, search: str | None) -> Any:
        return refresher.cell(asked, search) or dash.no_update

    _search_callbacks(app, refresher)
    _in_browser(app)
    return app


def _in_browser(app: dash.Dash) -> None:
    """Register the functions of the scripts in `assets` as callbacks."""
    clientside: Any = app.clientside_callback

    def call(name: str, *wiring: Any, namespace: str = "traceml", at_once: bool = False) -> None:
        clientside(ClientsideFunction(namespace, name), *wiring, prevent_initial_call=not at_once)

    def outputs(id: str, *names: str) -> list[Output]:
        return [Output(id, name, allow_duplicate=True) for name in names]

    where = Input("url", "pathname"), Input("url", "search")
    call("due", Output("due", "data"), Input("tick", "n_intervals"), *where)
    call("apply", Output("seen", "data"), Input("answer", "data"))
    call("open", *outputs("url", "pathname", "search"), Input("heat", "clickData"), namespace="heatmap")
    tip = outputs("heat-tip", "show", "bbox", "direction", "children")
    call("hover", *tip, Input("heat", "hoverData"), namespace="heatmap")
    call("watch", Output("lost", "children"), Input("clock", "n_intervals"))
    call("timezone", Output("timezone", "data"), Input("timezone", "id"), at_once=True)
    call("theme", Output("theme", "children"), Input("theme", "n_clicks"), at_once=True)
    paused = Output("tick", "disabled"), Output("pause", "children"), Output("paused", "children")
    call("pause", *paused, Input("pause", "n_clicks"))


def _parts(element: Any) -> Parts:
    """Return the properties of the parts and graphs in an element, as sent to a browser, by id."""
    if isinstance(element, Content):
        return {element.id: {"content": element.content}}
    if hasattr(element, "figure"):
        return {element.id: {"figure": element.figure}}
    inside = getattr(element, "children", element)
    inside = inside if isinstance(inside, (list, tuple)) else [inside] if inside is not element else []
    header = {element.id: {"head": element.head}} if isinstance(element, Chart) else {}
    return header | {id: props for child in inside for id, props in _parts(child).items()}


def _search_callbacks(app: dash.Dash, refresher: Refresher) -> None:
    """Make the search box of all pages open the matching pages."""
    where = State("url", "pathname"), State("url", "search")

    @app.callback(Output("places", "children"), Input("sought", "data"), *where, prevent_initial_call=True)
    def suggest(text: str | None, pathname: str | None, search: str | None) -> Any:
        return [html.Option(value=name) for name in refresher.search_targets(text or "", pathname, search)]

    @app.callback(
        Output("url", "pathname", allow_duplicate=True),
        Output("url", "search", allow_duplicate=True),
        Input("wanted", "data"),
        *where,
        prevent_initial_call=True,
    )
    def go(text: str | None, pathname: str | None, search: str | None) -> Any:
        text = (text or "").strip()
        if not text:
            return dash.no_update, dash.no_update
        matches = refresher.search_targets(text, pathname, search)
        every = (Route.parse(pathname, search) or Route()).to("ranks", q=text)
        href = matches.get(text) or next(iter(matches.values()), every)
        return href.partition("?")[0], _search(href)


def _search(href: str) -> str:
    """Return the query of a link."""
    _, mark, query = href.partition("?")
    return mark + query


def _known(seen: dict[str, Any]) -> dict[str, Any]:
    """Return the checksums that a browser sent."""
    sums = seen.get("sums")
    return sums if isinstance(sums, dict) else {}


def _sums(parts: Parts) -> dict[str, int]:
    return {id: zlib.crc32(to_json_plotly(props).encode()) for id, props in parts.items()}


def _grown(before: _Page | None, parts: Parts) -> Parts:
    """Return the new points of each chart that only became longer."""
    grown = {}
    for id, props in parts.items():
        old = before.parts.get(id, {}).get("figure") if before else None
        if before and old and (ends := _longer(old, props["figure"])):
            grown[id] = {"grown": ends, "of": before.sums[id]}
    return grown


def _longer(before: Figure, after: Figure) -> dict[str, Any] | None:
    """
    Return the points that `after` adds to the ends of its traces, the number of earlier values that stay
    (`keep`), and the layout. None: something else in a trace has changed.
    """
    old, new = before["data"], after["data"]
    if not new or len(old) != len(new):
        return None
    old_x, x = (_listed(traces[0].get("x")) or [] for traces in (old, new))
    if not x or x[0] not in old_x:
        return None
    start = old_x.index(x[0])
    keep, traces = len(old_x) - start, []
    for was, now in zip(old, new, strict=True):
        traces.append(ends := dict[str, Any]())
        for name in {*was, *now}:
            a, b = _listed(was.get(name)), _listed(now.get(name))
            if isinstance(a, list) and isinstance(b, list) and len(a) == len(old_x) and a[start:] == b[:keep]:
                ends[name] = b[keep:]
            elif a != b:
                return None
    return {"keep": keep, "data": traces, "layout": after["layout"]}


def _listed(values: Any) -> Any:
    return values.tolist() if isinstance(values, np.ndarray) else values


def _no_page(pathname: str | None) -> html.Div:
    overview = dcc.Link("Overview", href="/")
    which = f"No page has the address {pathname}. "
    return html.Div([html.H1("There is no such page"), html.P([which, overview])])
