"""The shell of every page: navigation, session, verdict, and how recent and complete the data is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from dash import dcc, html

from traceml_ray import text
from traceml_ray.document.model import SIGNS
from traceml_ray.reports.headlines import (
    beside,
    cost,
    line_of,
    lost,
    named,
    part_of,
    sign_of,
    tone_of,
    unsaid,
    wasted,
)
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.views import page_of
from traceml_ray.store.profiles import Profile
from traceml_ray.store.results import LiveVerdict
from traceml_ray.store.summary_shape import Conclusion
from traceml_ray.text import natural
from traceml_ray.views.events import incident
from traceml_ray.views.findings import first_of, found_in
from traceml_ray.views.run_state import RunState
from traceml_ray.views.state import (
    BADGES,
    CurrentEpisode,
    began_text,
    coverage_text,
    session_facts,
    state_of,
    state_text,
    why_text,
)

from .elements import Content, aria, copying, dated, link, marked, part
from .pages import profiles
from .pages.node import evidence_link
from .route import Route
from .session_cache import SessionCache

PARTS = ("nav", "session", "verdict-strip", "problem")
_STORES = ("due", "answer", "seen", "asked", "sought", "wanted", "timezone")
_TABS = {
    "overview": "Overview",
    "ranks": "Ranks",
    "layers": "Layers",
    "memory": "Memory",
    "signals": "Signals",
    "profiles": "Profiles",
    "events": "Events",
    "sessions": "Sessions",
    "health": "Health",
}
_COPY_LINK = "Copy the link to this page with its session, run and selection, without the token"
_MAX_ALSO = 4
"""Largest number of findings listed in addition to the first one."""
_ICONS = {
    "good": ("#2f9e5b", "M8 1a7 7 0 1 0 .01 0zM7 11.5 3.8 8.3l1.3-1.3L7 8.9l4-4 1.3 1.3z"),
    "notice": ("#b8930a", "M8 1 15.5 15H.5zM8 4.6 3.4 13.4h9.2z"),
    "warning": ("#d9731a", "M8 1 15.5 15H.5z"),
    "critical": ("#d03b3b", "M8 0 16 8 8 16 0 8z"),
    "unsure": ("#8b939c", "M8 1a7 7 0 1 0 .01 0zM8 4a4 4 0 1 1-.01 0z"),
}
"""Icon of the browser tab, by tone: colour and SVG path."""
_SVG = "http://www.w3.org/2000/svg"


def data(cache: SessionCache, run: RunState | None) -> dict[str, Any]:
    """Return the header of all pages: session, run, state, verdict, findings and their cost."""
    state = state_of(cache, run)
    verdict = run.verdict if run else None
    findings = found_in(cache, run, state) if run else []
    began = None if run is None else incident(cache, run)
    return {
        "version": cache.version,
        "state": state,
        "state_text": state_text(cache, run, state),
        "session": _session_data(cache, run),
        "verdict": verdict,
        "first": None if run is None else first_of(run, findings),
        "findings": findings,
        "incident": began,
        "began": began_text(cache, run, verdict, began),
        "by_operation": _by_operation(cache, run, verdict, began),
        "coverage_text": coverage_text(cache, run, state),
        "step": run.last_step if run else None,
    }


def missing(cache: SessionCache, what: str, name: str, why: str, others: Iterable[str]) -> dict[str, Any]:
    """
    Return the header for a session or run (`what`) called `name` that cannot be read. It says `why`, and
    which `others` exist.
    """
    unknown = ("launcher", "strategy", "world_size", "nnodes", "gpus", "run", "restarted")
    return {
        "version": cache.version,
        "state": "missing",
        "state_text": f"{what.capitalize()} {name!r} cannot be read: {why}.",
        "session": {**dict.fromkeys(unknown), "id": name, "runs": []},
        "missing": what,
        "verdict": None,
        "first": None,
        "findings": [],
        "incident": None,
        "began": "",
        "by_operation": None,
        "coverage_text": "",
        "step": None,
        "others": sorted(others, key=natural),
    }


def _session_data(cache: SessionCache, run: RunState | None) -> dict[str, Any]:
    return {
        **session_facts(cache, run),
        "runs": [{name: getattr(entry, name) for name in ("id", "name", "status")} for entry in cache.runs],
    }


def _by_operation(
    cache: SessionCache,
    run: RunState | None,
    verdict: LiveVerdict | None,
    began: CurrentEpisode | None,
) -> Profile | None:
    """Return the profile that explains, by operation, why a rank is late."""
    if run is None or verdict is None or began is None:
        return None
    return profiles.explains(cache, run, verdict, began.episode.from_step)


def _lost(header: Mapping[str, Any]) -> str:
    """Return the cost of all named causes so far; "" if it is unknown."""
    verdict: LiveVerdict = header["verdict"]
    return lost(verdict) + " so far" * (header["state"] == "live") if verdict.lost_s else ""


def layout(poll_s: float) -> html.Div:
    """
    Return the elements around every page, with empty `parts`. Browsers send requests every
    `poll_s` seconds.
    """
    goto = {"id": "goto", "list": "places", "autoComplete": "off", "placeholder": "rank, node, step …"}
    bar = [
        dcc.Link("traceml-ray", href="/", className="brand"),
        Content("nav"),
        Content("session"),
        html.Label("Go to a rank, node or step", htmlFor="goto", className="unseen"),
        Content("", ["input", {**goto, "type": "text", "className": "goto"}]),
        html.Datalist(id="places"),
        html.Span(id="paused"),
        html.Button("Pause", id="pause", type="button"),
        html.Button("Theme", id="theme", type="button"),
    ]
    return html.Div(
        [
            html.A("Skip to the page", href="#page", className="skip"),
            html.Header(bar, className="bar"),
            Content("verdict-strip"),
            Content("problem"),
            html.Div(id="lost", className="problem", role="alert"),
            html.Main(id="page", tabIndex=-1),
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="tick", interval=max(250, round(1000 * poll_s))),
            dcc.Interval(id="clock", interval=1000),
            *(dcc.Store(id=name) for name in _STORES),
        ]
    )


def parts(header: Mapping[str, Any], route: Route) -> list[Content]:
    """Return the parts around every page: tabs, session, verdict, and the line about problems."""
    tabs = [link(label, route.to(page), "tab", on=_is_on(page, route)) for page, label in _TABS.items()]
    stale = header["state_text"] if header["state"] == "stale" else None
    return [
        part(html.Nav(tabs, id="nav", **aria(label="Pages"))),
        part(html.Div(_session(header, route), id="session")),
        part(_verdict(header, route)),
        problem(dated(stale) if stale else None),
    ]


def problem(sentence: Any) -> Content:
    """Return the line about problems below the verdict. None: an empty line."""
    return part(html.Div(sentence, id="problem", className="problem", role="alert"))


def tab(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a browser's tab shows: the verdict as title and icon."""
    first: Conclusion | None = header["first"]
    tone = first.tone if first else tone_of(None)[0]
    state = BADGES.get(header["state"], header["state"])
    headline = f"{sign_of(tone)} {first.headline}" if first else state
    return {
        "title": " · ".join((headline, str(header["session"]["id"] or "traceml-ray"))),
        "icon": icon(tone),
    }


def icon(tone: str) -> str:
    """Return the icon of a tab, a data URI: by form and by colour."""
    colour, path = _ICONS[tone]
    drawn = f"<path d='{path}' fill='{colour}'/>"
    return "data:image/svg+xml," + quote(f"<svg xmlns='{_SVG}' viewBox='0 0 16 16'>{drawn}</svg>")


def _is_on(page: str, route: Route) -> bool:
    above = {"node": "overview", "step": "overview", "rank": "ranks", "profile": "profiles"}
    return page == above.get(route.page, route.page)


def _session(header: Mapping[str, Any], route: Route) -> list[Any]:
    """Return name and size of the session, a menu of its runs if there are several, and a link to copy."""
    session = header["session"]
    if not session["id"]:
        return []
    ranks, nodes = session["world_size"], session["nnodes"]
    size = f"{text.count(ranks, 'rank')} on {text.count(nodes, 'node')}" if ranks and nodes else None
    facts = " · ".join(filter(None, (size, session["strategy"], session["launcher"])))
    shown: list[Any] = [html.Strong(session["id"]), html.Span(facts)]
    if route.get("session"):
        shown.append(dcc.Link("back to the dashboard's session", href="/"))
    if len(runs := session["runs"]) > 1:
        name = next((run["name"] for run in runs if run["id"] == session["run"]), text.NA)
        links = [
            dcc.Link(f"{run['name']} ({run['status']})", href=route.here(run=run["id"]))
            for run in reversed(runs)
        ]
        shown.append(html.Details([html.Summary(f"run {name}"), html.Div(links, className="menu")]))
    if header["state"] != "missing":
        shown.append(copying("Copy link", "{link}", _lasting(header, route), _COPY_LINK))
    return shown


def _lasting(header: Mapping[str, Any], route: Route) -> str:
    """Return the link to the present selection that works for another person."""
    session = header["session"]
    return route.lasting(route.get("session") or session["id"], session["run"])


def _verdict(header: Mapping[str, Any], route: Route) -> html.Section:
    """Return the verdict, its cost, and how recent and complete the data is."""
    verdict, state, compact = header["verdict"], header["state"], route.page != "overview"
    tone = header["first"].tone if header["first"] else tone_of(None)[0]
    began = header["began"]
    step = "" if header["step"] is None else f"step {header['step']:,}"
    coverage = " · ".join(filter(None, (header["coverage_text"], step)))
    fresh = [
        html.Span(BADGES.get(state, state), id="state-badge", className=f"badge {state}"),
        html.Div(coverage, id="coverage"),
        html.Div(dated(header["state_text"]) if verdict and state != "stale" else None, id="state-text"),
    ]
    return html.Section(
        [
            html.Div(sign_of(tone), className="sign", **aria(hidden="true")),
            html.Div(_sentences(header, began, route), className="sentences"),
            html.Div(_cost(header) if verdict else None, id="verdict-cost", className="cost"),
            html.Div(fresh, className="fresh"),
            html.Div(_actions(header, route, began), id="verdict-about", className="chips"),
        ],
        id="verdict-strip",
        className=f"verdict tone-{tone}" + " compact" * compact + " stale" * (state == "stale"),
        **aria(label="Verdict"),
    )


def _sentences(header: Mapping[str, Any], began: str, route: Route) -> list[Any]:
    """Return headline, reason, advice and beginning of the verdict. Without a verdict: the state."""
    verdict, first = header["verdict"], header["first"]
    headline, _, why = header["state_text"].partition(". ")
    following, steps = "", None
    if verdict and first:
        headline, why, following = first.headline, first.why, first.next
        of_steps = why_text(verdict, header["incident"])
        if first.subject == "steps":
            why = of_steps
        else:
            steps = [html.B("Steps "), *marked(f"{named(verdict)}. {of_steps}")]
    to_do = html.P([html.B("Next "), *marked(following)] if following else None, id="verdict-next")
    others = _others(header)
    listed = [_beside(one, route) for one in others[:_MAX_ALSO]]
    if len(others) > _MAX_ALSO:
        left = text.count(len(others) - _MAX_ALSO, "more finding")
        listed.append(html.P(f"and {left}", className="also"))
    operation = html.P(_operation(header["by_operation"], route), id="verdict-operation")
    return [
        html.Div(
            html.Strong(dated(headline[:1].upper() + headline[1:]), id="verdict-headline"),
            **aria(live="polite", atomic="true"),
        ),
        html.P(marked(why[:1].upper() + why[1:]), id="verdict-why"),
        # What to do is said before another verdict begins.
        *([to_do, html.P(steps, id="verdict-steps"), operation] if steps else [operation, to_do]),
        html.Div(listed, id="verdict-also"),
        html.P(marked(began), id="verdict-since"),
        html.P(header["session"]["restarted"] or None, id="verdict-restarts"),
    ]


def _operation(profile: Profile | None, route: Route) -> list[Any] | None:
    """Return the operation that makes a rank late, and a link to the profile that shows it."""
    if profile is None:
        return None
    to_profile = profiles.profile_link(profile, route, "Profile")
    return [html.B("By operation "), *marked(profile.found[0]), " ", to_profile]


def _beside(one: Finding, route: Route) -> html.P:
    """
    Return another finding: ranks, cost, reason (if it may explain another finding), and a link to
    its page.
    """
    parts = [html.B("Also "), *marked(f"{SIGNS[one.severity]} {line_of(one)}")]
    if one.explains is not None:
        parts += [". ", *marked(one.why)]
    if (page := page_of(one.signal)) is not None:
        parts += [" ", dcc.Link(_TABS[page], href=route.to(page))]
    return html.P(parts, className="also")


def _others(header: Mapping[str, Any]) -> list[Finding]:
    """Return the other findings. Anomalies of nodes are left out, because they have their own links."""
    every = beside(header["findings"], header["first"].key if header["first"] else None)
    return [one for one in every if one.signal != "nodes"]


def _actions(header: Mapping[str, Any], route: Route, began: str) -> list[Any]:
    """Return the links below a verdict, to its evidence and its rank, and the button that copies it."""
    verdict, incident, first = header["verdict"], header["incident"], header["first"]
    if not verdict or not first or first.tone == "good":
        return []
    view = _lasting(header, route)
    why, following = f"Why: {first.why}", f"Next: {first.next}"
    steps = "" if first.subject == "steps" else f"Steps: {named(verdict)}: {verdict.why}"
    spent = f"Cost: {cost(incident.episode, header['session']['gpus'])}." if incident else ""
    of_profile = header["by_operation"]
    operation = f"By operation: {of_profile.found[0]}" if of_profile else ""
    others = "\n".join(f"Also: {line_of(one)}" for one in _others(header))
    every = (first.headline, began, spent, why, steps, operation, following, others, "{link}")
    copied = "\n".join(map(text.with_clocks, filter(None, every)))
    chips: list[Any] = [evidence_link(anomaly, route) for anomaly in verdict.machine or ()]
    if first.rank is not None:
        chips.append(link(f"Open rank {first.rank}", route.to("rank", first.rank), "chip"))
    listed = header["findings"]
    rest = {one.key for one in unsaid(listed)}
    evidence = [one.signal for one in listed if one.key not in rest]
    for page in dict.fromkeys(map(page_of, (first.subject, *evidence))):
        if page is not None:
            chips.append(link(f"Open {_TABS[page].lower()}", route.to(page), "chip"))
    return [*chips, copying("Copy as text", copied, view)]


def _range(cost_pct: Sequence[float] | None) -> str:
    """Return the range of the cost in most windows, if it is larger than a rounding error."""
    if cost_pct is None or cost_pct[1] - cost_pct[0] < 1:
        return ""
    return f" ({text.number(cost_pct[0], 0)}–{text.number(cost_pct[1], 0)})"


def _cost(header: Mapping[str, Any]) -> list[Any]:
    """
    Return the cost of the named cause and how certain it is, with the cause's name if it is not
    the headline.
    """
    verdict, lines = header["verdict"], list[Any]()
    incident, gpus = header["incident"], bool(header["session"]["gpus"])
    is_headline = header["first"] is None or header["first"].subject == "steps"
    if verdict.cost_pct and verdict.label != "healthy":
        lines += [
            html.Span(text.percent(verdict.cost_pct), className="value"),
            html.Span(f"{part_of(verdict)}{_range(verdict.cost_range_pct)}", className="unit"),
        ]
        if incident:
            lines.append(html.Div(cost(incident.episode, gpus)))
        if hours := verdict.rank_hours_per_hour:
            lines.append(html.Div(f"≈ {wasted(hours, gpus)}"))
    if (spent := _lost(header)) and not (incident and incident.alone):
        lines.append(html.Div(f"all causes: {spent}" if incident else spent))
    sure = [f"confidence {verdict.confidence}"] if verdict.confidence else []
    sure += ["comes and goes"] if verdict.pattern == "transient" else ["chronic"] if verdict.chronic else []
    if not is_headline:
        lines = [html.Div(f"{named(verdict)}:"), *lines] if lines else []
        sure = sure if lines else []
    return [*lines, html.Div(", ".join(sure))] if lines or sure else []
