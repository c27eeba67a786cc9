"""
The axis shared by all charts: which steps they show. Also the spine: an overview of the whole run with the
causes that were named.

In the URL, `from` and `to` are steps (`from=newest`: the newest steps). Without them, a finished run is shown
whole. A live run shows its newest steps, or as many as include the onset of the current verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from dash import dcc, html
from msgspec.structs import asdict

from traceml_ray import text
from traceml_ray.analysis.shapes import RunTimeline
from traceml_ray.analysis.step_stats import MAX_BINS
from traceml_ray.analysis.verdict_shapes import TimedEpisode
from traceml_ray.document import drawing, timezone
from traceml_ray.document.model import Column, Table
from traceml_ray.document.step_clock import StepClock
from traceml_ray.reports.headlines import current_episode, named, severity
from traceml_ray.store import query
from traceml_ray.views import figures
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import rounded, whole_number

from .charts import CLICKED, numbers
from .elements import aria, link, part, table
from .route import Route
from .session_cache import SessionCache

NEWEST = "newest"
_LANES, _ROWS = 4, 100
_TICKS = 120
_ROOM = 4
"""Context shown around an episode, as a share of its length."""
_COARSE_NS = 1 << 33
_DIGITS = 15
_LEAST = 20
"""Smallest number of steps shown."""


class Range(NamedTuple):
    """The range of steps to draw. `last` None: to the end. `newest`: as many steps as fit one by one."""

    first: int = 0
    last: int | None = None
    newest: bool = False

    def asked(self) -> dict[str, Any]:
        """Return the range in the form that questions use."""
        return {} if self.newest else {"first": self.first, "last": self.last}


def chosen(cache: SessionCache, run: RunState, route: Route) -> Range:
    """Return the range in the URL, else the page's default range."""
    first, last = (whole_number(route.get(name), _DIGITS) for name in ("from", "to"))
    if route.get("from") == NEWEST:
        return Range(newest=True)
    if first is not None or last is not None:
        return Range(first or 0, last if last is None else max(last, (first or 0) + 1))
    if cache.source.stored or cache.is_over:
        return Range()
    episode, newest = current_episode(run.verdict, run.episodes), run.last_step or 0
    if episode is None or newest - episode.from_step < MAX_BINS:
        return Range(newest=True)
    # A power of two, so that the range stays for a while and data is not requested anew at every tick.
    lead = 1 << max(0, (newest - episode.from_step).bit_length() - 3)
    return Range(max(0, episode.from_step - lead))


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """Return the spine of a run and the range shown. If there are no steps, there is no `first`."""
    timeline = cache.ask(query.GetTimeline(run.id))
    shown = chosen(cache, run, route)
    if timeline is None or not len(timeline.first):
        return {"range": shown, "first": ()}
    newest = int(timeline.last[-1])
    first = max(int(timeline.first[0]), newest + 1 - MAX_BINS if shown.newest else shown.first)
    last = newest if shown.last is None else min(newest, shown.last)
    episode = current_episode(run.verdict, run.episodes)
    return {
        **asdict(timeline),
        "range": shown,
        "between": (min(first, last), last),
        "lanes": _lanes(run.episodes),
        "onset": episode.from_step if episode else None,
        "ticks": _ticks(run, timeline),
    }


def _lanes(episodes: Sequence[TimedEpisode]) -> list[tuple[str, list[TimedEpisode]]]:
    """Return the named episodes by cause, the costliest first. The last lane has all other causes."""
    causes: dict[str, list[TimedEpisode]] = {}
    for episode in episodes:
        who = text.ranks(episode.ranks) if episode.ranks else text.words(episode.label)
        causes.setdefault(f"{who} {episode.stage or ''}".strip(), []).append(episode)
    lanes = [*causes.items()]
    if len(lanes) > _LANES:
        rest = [episode for _, episodes in lanes[_LANES - 1 :] for episode in episodes]
        lanes = [*lanes[: _LANES - 1], (text.count(len(lanes) - _LANES + 1, "other"), rest)]
    return lanes


def _ticks(run: RunState, timeline: RunTimeline) -> list[dict[str, Any]]:
    """Return the significant events, each with its step, determined by its time if necessary."""
    ticks = []
    for event in run.events:
        step = event.step
        if step is None and (t_ns := timeline.t_ns) is not None and event.t_ns >= t_ns[0]:
            step = int(np.interp(event.t_ns - t_ns[-1], t_ns - t_ns[-1], timeline.last))
        if event.message and step is not None:
            about = f"step {step:,}: {text.words(event.kind)}: {event.message.partition(chr(10))[0][:90]}"
            ticks.append({"step": step, "severity": severity(event.kind), "text": about})
    ticks.sort(key=lambda event: ("critical", "warning", "notice", "info").index(event["severity"]))
    return ticks[:_TICKS]


def time_of(spine: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """Return the times (ns since the epoch) of the range. None: the newest, or unknown."""
    shown = spine["range"]
    if shown.newest or not len(spine["first"]) or spine["t_ns"] is None:
        return None
    first, last = _times(spine, spine["between"])
    # Rounded to some seconds for a live run, so that the question stays the same for a while.
    return (first & -_COARSE_NS, None) if shown.last is None else (first, last)


def frame(spine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part that all charts of steps share: the range, and where the current verdict began."""
    if not len(spine["first"]):
        return {}
    first, last = spine["between"]
    onset = spine["onset"]
    shown = onset is not None and first <= onset <= last
    return figures.frame_of(_step_clock(spine), (first - 0.5, last + 0.5), onset - 0.5 if shown else None)


def _step_clock(spine: Mapping[str, Any]) -> StepClock | None:
    """Return when the steps of the run ended. None: unknown."""
    return StepClock.of(RunTimeline(**{name: spine[name] for name in RunTimeline.__struct_fields__}))


def clock(spine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same for charts over time, in ms since the epoch."""
    if not len(spine["first"]) or spine["t_ns"] is None:
        return {"between": None, "onset": None, "axis": "time"}
    between = spine["between"] if time_of(spine) else ()
    onset = () if spine["onset"] is None else (spine["onset"],)
    return {
        "between": [t_ns / 1e6 for t_ns in _times(spine, between)] or None,
        "onset": next((t_ns / 1e6 for t_ns in _times(spine, onset)), None),
        "axis": "time",
    }


def _times(spine: Mapping[str, Any], steps: Sequence[float]) -> list[int]:
    """Return when steps ended, in ns since the epoch."""
    end = int(spine["t_ns"][-1])
    times = np.interp(steps, spine["last"], spine["t_ns"] - end) if len(steps) else np.empty(0)
    return [end + int(t_ns) for t_ns in times]


def panel(view: Mapping[str, Any], route: Route) -> Any:
    """Return the spine: the step time, a lane for each cause, the events, and links to ranges."""
    spine = view["axis"]
    if not len(spine["first"]):
        return html.Div(id="no-axis")
    head = html.Div(
        [
            html.Span(_range_text(spine), id="range-text"),
            html.Nav(_links(spine, route), className="chips", **aria(label="Range of steps")),
        ],
        id="range",
        className="panel-head",
    )
    label = aria(label="Time of a step over the whole run; a drag chooses the range of all charts")
    figure, rows = _figure(spine), _table(spine, route) if route.get("table") == "spine" else None
    graph = dcc.Graph(id="spine", figure=figure, config=CLICKED)
    return html.Section(
        [
            part(head),
            html.Div(html.Div(graph, **aria(hidden="true")), className="graph spine", role="img", **label),
            part(html.Div(_tracks(spine, route), id="lanes", className="lanes")),
            numbers("spine", label["aria-label"], figure, route, rows),
        ],
        className="panel",
    )


def _table(spine: Mapping[str, Any], route: Route) -> Any:
    """Return the spine as numbers, the newest steps first."""
    columns = [
        Column("steps", lambda index: f"{spine['first'][index]:,}–{spine['last'][index]:,}"),
        Column("step", lambda index: spine["step_ms"][index], "ms"),
    ]
    newest = range(len(spine["first"]) - 1, -1, -1)[:_ROWS]
    return table(Table("Time of a step", columns, newest), route)


def _figure(spine: Mapping[str, Any]) -> figures.Figure:
    """Return the step time over the whole run, dimmed outside of the range."""
    ends = _ends(spine)
    low, high = (edge + by for edge, by in zip(spine["between"], (-0.5, 0.5), strict=True))
    dim = {
        "type": "rect",
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "fillcolor": "rgba(139,147,156,.22)",
        "line": {"width": 0},
    }
    edge = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": drawing.BLUE, "width": 2}}
    shapes = [{**dim, "x0": ends[0], "x1": low}, {**dim, "x0": high, "x1": ends[1]}]
    shapes += [{**edge, "x0": step, "x1": step} for step in (low, high)]
    middle = ((spine["first"] + spine["last"]) // 2).tolist()
    line = {"type": "scatter", "mode": "lines", "name": "step", "x": middle, "y": rounded(spine["step_ms"])}
    style = {"line": {"width": 1.2, "color": drawing.BLUE}, "hovertemplate": "%{y:,.1f} ms<extra></extra>"}
    step_clock = _step_clock(spine)
    ticks = figures.step_ticks(step_clock, ends) if step_clock else {}
    meta = {"axis": "step", "steps": spine["last"].tolist(), "t_ms": None}
    if spine["t_ns"] is not None:
        meta["t_ms"] = (spine["t_ns"] // 1_000_000).tolist()
    return figures.figure(
        [{**line, **style}],
        "",
        "ms",
        xaxis={"range": ends, "fixedrange": True, "nticks": 6, "hoverformat": " ,.0f", **ticks},
        yaxis={
            "nticks": 3,
            "fixedrange": True,
            **figures.scale(spine["step_ms"], "ms").get("yaxis", {}),
        },
        margin={**figures.MARGIN, "b": 36, "t": 6},
        dragmode="select",
        selectdirection="h",
        selections=[],
        shapes=shapes,
        meta=meta,
        revision="spine",
    )


def _ends(spine: Mapping[str, Any]) -> list[float]:
    return [float(spine["first"][0]) - 0.5, float(spine["last"][-1]) + 0.5]


def _range_text(spine: Mapping[str, Any]) -> str:
    first, last = spine["between"]
    every = int(spine["last"][-1])
    followed = " and on" if spine["range"].last is None and spine["range"].first else ""
    zone = f" · times in {timezone.name()}" if spine["t_ns"] is not None else ""
    return f"Steps {first:,}–{last:,}{followed} of {every:,}{zone}"


def _links(spine: Mapping[str, Any], route: Route) -> list[Any]:
    """Return links to other ranges: the keyboard's equivalent of the brush."""
    (first, last), begin, end = spine["between"], int(spine["first"][0]), int(spine["last"][-1])
    wide = max(_LEAST, last - first)
    shown, onset = spine["range"], spine["onset"]
    half = wide // 2

    def to(label: str, title: str, low: Any, high: int | None, on: bool = False) -> Any:
        high = None if high is None or high >= end else high
        href = route.here(**{"from": low if low == NEWEST else max(begin, low), "to": high})
        return link(label, href, "chip", on=on, title=title)

    links = [
        to("←", "Earlier", first - half, last - half if last - half > begin + 1 else begin + wide),
        to("→", "Later", min(first + half, max(begin, end - wide)), last + half),
        to("−", "Zoom out", first - half, last + half),
        to("+", "Zoom in", first + wide // 4, last - wide // 4),
        to("whole run", "All steps", begin, None, on=(first, last) == (begin, end)),
        to("newest", "The newest steps, as they come", NEWEST, None, on=shown.newest),
    ]
    if onset is not None:
        lead = max(_LEAST, (end - onset) // _ROOM)
        links.insert(
            4, to("since the onset", f"Since step {onset:,}, and some steps before it", onset - lead, None)
        )
    return links


def _tracks(spine: Mapping[str, Any], route: Route) -> list[Any]:
    """Return a lane for each cause, and one with the events."""
    rows = [
        _lane(name, [mark for episode in episodes for mark in _bar(episode, spine, route)])
        for name, episodes in spine["lanes"]
    ]
    ticks = [
        html.I(
            style=_bar_style(spine, tick["step"], tick["step"]),
            className=f"tick {tick['severity']}",
            title=tick["text"],
        )
        for tick in spine["ticks"]
    ]
    return [*rows, *([_lane("events", ticks)] if ticks else [])]


def _lane(name: str, marks: list[Any]) -> html.Div:
    return html.Div(
        [html.Span(name, title=name, className="lane-name"), html.Div(marks, className="track")],
        className="lane",
    )


def _bar(episode: TimedEpisode, spine: Mapping[str, Any], route: Route) -> list[Any]:
    """Return an episode as a mark, with a link to its steps that is always large enough to be clicked."""
    first, last = episode.from_step, episode.to_step
    around = max(_LEAST, (last - first) // _ROOM)
    until = None if episode.goes_on or last + around >= spine["last"][-1] else last + around
    lasted, cost = text.duration(episode.seconds), text.duration(episode.cost_s)
    about = f"{named(episode)}: steps {first:,}–{last:,}, {lasted}, cost {cost}"
    style = _bar_style(spine, first, spine["last"][-1] if episode.goes_on else last)
    href = route.here(**{"from": max(0, first - around), "to": until})
    inside = html.Span(about, className="unseen")
    return [
        html.I(style=style, className=f"bar-mark {severity(episode.label)}"),
        html.A(inside, href=href, className="bar-link", style=style, title=about),
    ]


def _bar_style(spine: Mapping[str, Any], first: int, last: int) -> dict[str, str]:
    """Return the CSS position of a range of steps in a track: `left` and `width` in %."""
    low, high = _ends(spine)
    left = 100 * (min(max(first, low), high) - low) / (high - low)
    width = 100 * (min(max(last + 1, low), high) - low) / (high - low) - left
    return {"left": f"{left:.2f}%", "width": f"{max(0, width):.2f}%"}
