"""
The web app in Dash: the shell around every page, and one refresh a tick for whatever the URL is of.

A browser says what it has, by a checksum of each part of the page; the answer holds the parts that
differ. Pages compute nothing: `board.view` knows, `pages` say it.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import dash
from dash import ClientsideFunction, Input, Output, State, dcc, html
from flask import Flask
from plotly.io.json import to_json_plotly

from traceml_ray import text

from .board import Board
from .heat import HeatWire
from .light import light
from .pages import PAGES, Parts, start
from .place import WHAT, Place, is_number
from .strip import shell, strip

_LOG = logging.getLogger("traceml_ray.dash_app")
_CACHED = 32


class _Made(NamedTuple):
    """One page as of one version of the board."""

    key: str
    """Of the elements: while it stays, only what stands in them changes."""
    module: ModuleType
    view: dict[str, Any]
    parts: Parts
    sums: dict[str, int]


class Refresher:
    """Answers the browsers' refreshes from the board; pages are made once for all who look at them."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._heat = HeatWire()
        self._lock = threading.Lock()
        self._made: OrderedDict[Place, tuple[int, _Made]] = OrderedDict()

    def refresh(self, pathname: str | None, search: str | None, seen: Any) -> tuple[Any, dict[str, Any]]:
        """
        Return the page's elements where they change, and `{"seen", "page", "set", "heat", "marks"}`:
        `set` is `{id: props}`, `heat` what `HeatWire` says, `marks` what the heatmap points at.

        `seen` is what the last answer said, so that nothing is sent twice. What goes wrong is said
        in one line on the page and counted.
        """
        seen = seen if isinstance(seen, dict) else {}
        try:
            place = Place.of(pathname, search)
            if place is None:
                return _nowhere(pathname), {"seen": {}, "page": "", "set": {}}
            return self._answer(place, seen)
        except Exception as error:
            if self._board.errors.note("refresh", error):
                _LOG.exception("refresh of %s", pathname)
            told = f"This page could not be made ({type(error).__name__}); the next refresh tries again."
            return dash.no_update, {
                "seen": seen,
                "page": seen.get("page", ""),
                "set": {"problem": {"children": told}},
            }

    def _answer(self, place: Place, seen: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        header = self._board.view("header", **_selected(place, *WHAT))
        made = self._page(place, header)
        outer = lightened(strip(header, place))
        sums = {id: _sum(props) for id, props in outer.items()} | made.sums
        new = seen.get("page") != made.key
        known = seen.get("sums", {})
        changed = {id: props for id, props in outer.items() if known.get(id) != sums[id]}
        for id, props in made.parts.items():
            if new and "children" in props:
                changed[id] = {"children": props["children"]}  # the other properties come with the elements
            elif not new and known.get(id) != sums[id]:
                changed[id] = _sent(props)
        heat = made.view.get("heat")
        delta = None if heat is None or not len(heat["ranks"]) else self._heat.delta(heat, seen.get("heat"))
        known_heat = delta["id"] if delta else seen.get("heat")
        told = {"page": made.key, "sums": sums, "heat": known_heat}
        answer = {"seen": told, "page": made.key, "set": changed, "heat": delta, "marks": _marks(header)}
        return (_filled(made) if new else dash.no_update), answer

    def _page(self, place: Place, header: dict[str, Any]) -> _Made:
        with self._lock:
            known = self._made.get(place)
        if known is not None and known[0] == header["version"]:
            return known[1]
        module: ModuleType = (
            start if header["state"] == "empty" and place.page != "sessions" else PAGES[place.page]
        )
        view = header if module is start else self._board.view(place.page, **_selection(place))
        parts = lightened(module.parts(view, place))
        key = f"{module.__name__} {place.key} {_selected(place, *WHAT)} {_sum(sorted(parts))}"
        made = _Made(key, module, view, parts, {id: _sum(props) for id, props in parts.items()})
        with self._lock:
            self._made[place] = view["version"], made
            self._made.move_to_end(place)
            while len(self._made) > _CACHED:
                self._made.popitem(last=False)
        return made

    def cell(self, asked: dict[str, Any] | None, search: str | None) -> dict[str, Any] | None:
        """Return in words what a cell of the heatmap is; `asked` has its `rank`, `first` and `last` step."""
        try:
            place = Place.of("/", search)
            if not asked or place is None:
                return None
            found = self._board.view("cell", **asked, **_selected(place, *WHAT))
            return {**asked, "text": _cell_text(found)}
        except Exception as error:
            if self._board.errors.note("cell", error):
                _LOG.exception("cell %s", asked)
            return None


def build(board: Board, *, server: Flask, poll_s: float = 1.0) -> dash.Dash:
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
    app.layout = shell(poll_s)
    app.index_string = app.index_string.replace("<html>", '<html lang="en">')
    refresher = Refresher(board)

    @app.callback(
        Output("page", "children"),
        Output("answer", "data"),
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

    def in_browser(name: str, *wiring: Any) -> None:
        clientside(ClientsideFunction("traceml", name), *wiring, prevent_initial_call=True)

    in_browser("apply", Output("seen", "data"), Input("answer", "data"))
    in_browser("open", Input("heat", "clickData"))
    in_browser("hover", Input("heat", "hoverData"))
    in_browser("zoomed", Input("heat", "relayoutData"))
    in_browser("tell", Input("cell", "data"))
    return app


def _sent(props: dict[str, Any]) -> dict[str, Any]:
    """Leave the x that traces share with the first out of a figure; assets/app.js puts it back."""
    first, *rest = props.get("figure", {}).get("data") or [None]
    if not rest:
        return props
    rest = [{k: v for k, v in trace.items() if v is not first["x"]} for trace in rest]
    return {**props, "figure": {**props["figure"], "data": [first, *rest]}}


def _nowhere(pathname: str | None) -> html.Div:
    return html.Div(
        [html.H1("There is no such page"), html.P([f"{pathname} is none. ", dcc.Link("Overview", href="/")])]
    )


def _filled(made: _Made) -> Any:
    layout = made.module.layout(made.view)
    for id, props in made.parts.items():
        element = layout[id]
        for name, value in props.items():
            if name != "children":
                setattr(element, name, value)
    view: Any = html.Div(layout, id="view", key=made.key)
    setattr(view, "data-key", made.key)
    return view


def _selected(place: Place, *names: str) -> dict[str, str]:
    return {name: value for name, value in place.query if name in names}


def _selection(place: Place) -> dict[str, Any]:
    """Return the arguments of the board's view."""
    names = {"overview": ("stage", "span"), "events": ("kind", "rank", "node"), "sessions": ("a", "b")}
    chosen: dict[str, Any] = _selected(place, *WHAT, *names.get(place.page, ()))
    if place.page in ("node", "rank"):
        chosen[place.page] = int(place.key) if place.page == "rank" else place.key
    elif "rank" in chosen:
        chosen["rank"] = int(chosen["rank"]) if is_number(chosen["rank"]) else -1
    return chosen


def _marks(header: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the ranks and nodes that the heatmap points at."""
    verdict = header["verdict"] or {}
    named = {} if verdict.get("label") == "healthy" else verdict
    return {name: list(named.get(name) or ())[:8] for name in ("ranks", "nodes")}


def _cell_text(found: dict[str, Any]) -> str:
    if found["busy_ms"] is None:
        return "no row of this rank here"
    own = f"busy {text.ms(found['busy_ms'])}, the median rank {text.ms(found['median_ms'])}"
    far = sorted(found["stages"].items(), key=lambda each: -abs((each[1][0] or 0) - (each[1][1] or 0)))[:2]
    parts = [f"{text.words(name)} {text.ms(ms)} (median {text.ms(median)})" for name, (ms, median) in far]
    return "\n".join([own, *parts])


def lightened(parts: Parts) -> Parts:
    """Return the parts with what stands in them as plain data."""
    return {
        id: {name: light(value) if name == "children" else value for name, value in props.items()}
        for id, props in parts.items()
    }


def _sum(props: Any) -> int:
    return zlib.crc32(to_json_plotly(props).encode())
