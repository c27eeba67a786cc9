"""
The web app in Dash: the shell around every page, and one callback that refreshes whatever the URL shows.

A browser sends a checksum of each part that it has; the answer holds the parts that differ. Pages compute
nothing about training: `SessionPages.view` has the data, the modules of `pages` lay it out.
"""

from __future__ import annotations

import functools
import logging
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import dash
import msgspec
from dash import ClientsideFunction, Input, Output, State, dcc, html
from flask import Flask
from plotly.io.json import to_json_plotly

from . import shell
from .components import Content
from .pages import PAGES, has_nothing, start
from .route import SCOPE, Route
from .session_pages import SessionPages

_LOG = logging.getLogger("traceml_ray.dash_app")
Parts = dict[str, dict[str, Any]]
"""Properties by id."""


class _Page(NamedTuple):
    """A page as of one version of the session."""

    key: str
    """While it stays, only the parts change."""
    layout: html.Div
    parts: Parts
    sums: dict[str, int]


class Refresher:
    """Answers the browsers' refreshes; a page is made once for all browsers that show it."""

    def __init__(self, session: SessionPages) -> None:
        self._session = session
        self._page = functools.lru_cache(64)(self._made)

    def refresh(self, pathname: str | None, search: str | None, seen: Any) -> tuple[Any, dict[str, Any]]:
        """
        Return the page's elements if it is another page, and `{"seen", "set"}`: `set` is `{id: properties}`.

        `seen` is that of the last answer, so that nothing is sent twice. An error is counted, and is one line
        on the page.
        """
        seen = seen if isinstance(seen, dict) else {}
        self._session.note_watched()
        try:
            route = Route.of(pathname, search)
            if route is None:
                return _no_page(pathname), {"seen": {}, "set": {}}
            return self._answer(route, seen)
        except Exception as error:
            if self._session.errors.note("refresh", error):
                _LOG.exception("refresh of %s", pathname)
            sentence = f"This page could not be made ({type(error).__name__}); the next refresh tries again."
            line = _parts(shell.problem(sentence))
            return dash.no_update, {"seen": {**seen, "sums": {**_known(seen), **_sums(line)}}, "set": line}

    def _answer(self, route: Route, seen: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        header = self._session.header(route)
        instead = header["state"] if has_nothing(route.page, header) else ""
        page = self._page(route, header["version"], instead)
        outer = _parts(shell.parts(header, route))
        sums, known = {**_sums(outer), **page.sums}, _known(seen)
        new = seen.get("page") != page.key  # with the elements come their parts
        parts = outer if new else {**outer, **page.parts}
        changed = {id: _without_repeats(props) for id, props in parts.items() if known.get(id) != sums[id]}
        answer = {"seen": {"page": page.key, "sums": sums}, "set": changed}
        return page.layout if new else dash.no_update, answer

    def _made(self, route: Route, _version: int, instead: str) -> _Page:
        """Return a page, or, `instead` being the state, the one that says why there is nothing to show."""
        module = start if instead else PAGES[route.page]
        layout = module.layout(self._session.view(route), route)
        parts = _parts(layout)
        around = module.__name__, instead, route.key, route.select(*SCOPE), sorted(parts)
        key = f"{zlib.crc32(repr(around).encode()):x}"
        return _Page(key, html.Div(layout, id="view", key=key), parts, _sums(parts))

    def cell(self, asked: dict[str, Any] | None, search: str | None) -> dict[str, Any] | None:
        """Return in words what a cell of the heatmap is; see `pages.overview.cell` for what is `asked`."""
        try:
            route = Route.of("/", search)
            if not asked or route is None:
                return None
            route = msgspec.structs.replace(route, page="cell", key=msgspec.json.encode(asked).decode())
            return {**asked, "text": self._session.view(route).get("text", "")}
        except Exception as error:
            if self._session.errors.note("cell", error):
                _LOG.exception("cell %s", asked)
            return None


def build(session: SessionPages, *, server: Flask, poll_s: float = 1.0) -> dash.Dash:
    """Return the app on `server`; browsers ask it every `poll_s`."""
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
    app.index_string = app.index_string.replace("<html>", '<html lang="en">')
    refresher = Refresher(session)

    @app.callback(
        Output("page", "children"),
        Output(
            "answer", "data"
        ),  # not `set_props` here: of two answers that overtake each other it sets both
        Input("tick", "n_intervals"),
        Input("url", "pathname"),
        Input("url", "search"),
        State("seen", "data"),
    )
    def refresh(_: int, pathname: str | None, search: str | None, seen: Any) -> Any:
        return refresher.refresh(pathname, search, seen)

    @app.callback(
        Output("cell", "data"), Input("asked", "data"), State("url", "search"), prevent_initial_call=True
    )
    def cell(asked: dict[str, Any] | None, search: str | None) -> Any:
        return refresher.cell(asked, search)

    clientside: Any = app.clientside_callback

    def in_browser(name: str, *wiring: Any, at_once: bool = False) -> None:
        clientside(ClientsideFunction("traceml", name), *wiring, prevent_initial_call=not at_once)

    in_browser("apply", Output("seen", "data"), Input("answer", "data"))
    in_browser("open", Input("heat", "clickData"))
    in_browser("hover", Input("heat", "hoverData"))
    in_browser("zoomed", Input("heat", "relayoutData"))
    in_browser("whole", Input("heat-whole", "n_clicks"))
    in_browser("describe", Input("cell", "data"))
    in_browser("watch", Output("lost", "children"), Input("tick", "n_intervals"))
    in_browser("theme", Output("theme", "children"), Input("theme", "n_clicks"), at_once=True)
    paused = Output("tick", "disabled"), Output("pause", "children"), Output("paused", "children")
    in_browser("pause", *paused, Input("pause", "n_clicks"))
    in_browser("goto", Output("url", "pathname"), Input("goto", "n_submit"), State("goto", "value"))
    return app


def _parts(element: Any) -> Parts:
    """Return what a browser is sent of the parts and graphs in an element, by id."""
    if isinstance(element, Content):
        return {element.id: {"content": element.content}}
    if hasattr(element, "figure"):
        return {element.id: {"figure": element.figure}}
    inside = getattr(element, "children", element)
    inside = inside if isinstance(inside, (list, tuple)) else [inside] if inside is not element else []
    return {id: props for each in inside for id, props in _parts(each).items()}


def _known(seen: dict[str, Any]) -> dict[str, Any]:
    """Return the checksums that a browser sent."""
    sums = seen.get("sums")
    return sums if isinstance(sums, dict) else {}


def _sums(parts: Parts) -> dict[str, int]:
    return {id: zlib.crc32(to_json_plotly(props).encode()) for id, props in parts.items()}


def _without_repeats(props: dict[str, Any]) -> dict[str, Any]:
    """Leave the x that traces share with the first out of a figure; assets/app.js puts it back."""
    first, *rest = props.get("figure", {}).get("data") or [None]
    if not rest:
        return props
    rest = [{k: v for k, v in trace.items() if v is not first["x"]} for trace in rest]
    return {**props, "figure": {**props["figure"], "data": [first, *rest]}}


def _no_page(pathname: str | None) -> html.Div:
    overview = dcc.Link("Overview", href="/")
    return html.Div([html.H1("There is no such page"), html.P([f"{pathname} is none. ", overview])])
