"""What torch's profiler recorded: the profiles there are, the one being made, and how to ask for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.document.model import Table, picked
from traceml_ray.launchers.profile_request import so_far
from traceml_ray.reports.profiles import RANKS, most_cost, profile_columns, reasons
from traceml_ray.store import query
from traceml_ray.store.profiles import ProfileInfo, RankProfile
from traceml_ray.views.run_state import RunState
from traceml_ray.wire.messages import MAX_PROFILE_STEPS

from .. import profiles
from ..components import aria, panel, part
from ..document import table
from ..route import Route
from ..session_cache import SessionCache

_MORE = {
    "memory": "what each operation allocates",
    "stacks": "Python functions; makes steps several times longer",
    "shapes": "the shapes of its inputs",
}
_RANKS = r"\s*(all|[0-9]+(\s*-\s*[0-9]+)?(\s*,\s*[0-9]+(\s*-\s*[0-9]+)?)*)\s*"
"""Pattern for the form's field of ranks in the browser; the server parses the text itself."""
_MOST = 100
_COSTS = (
    "start, stop, export: for how long training stood still, on the rank where that was longest; a step: all "
    "of it, for each step recorded."
)


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """
    Return the profiles of the session. In the URL `ranks`, `steps`, … fill the form, `asked` is the request
    that this browser has made.
    """
    answer = cache.ask(query.GetProfiles())
    wrong = ""
    try:
        profiles.request_of(dict(route.query))
    except ValueError as error:
        wrong = str(error)
    return {
        "done": [*reversed(answer.done)][:_MOST] if answer else None,
        "now": answer.now if answer else None,
        "ranks": route.get("ranks") or profiles.offered(run),
        "wrong": wrong,
        "names": {entry.id: entry.name for entry in cache.runs},
        "of_run": run.id,
    }


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    asks = view["state"] == "live" and not route.get("session")
    body: list[Any] = [html.H1("Profiles")]
    if asks:
        now = html.Div(_now(view, route), id="profile-now", **aria(live="polite"))
        body += [panel("Profile the steps to come", part(_form(view, route)), part(now))]
    rows = part(html.Div(_rows(view, route), id="profile-list"))
    return html.Div([*body, panel("Profiles of this session, the newest first", rows)])


def _form(view: Mapping[str, Any], route: Route) -> html.Form:
    """Return the form that asks for one."""
    wrong = html.P(["▲ ", view["wrong"]], className="sev critical", role="alert") if view["wrong"] else None
    hint = "all, or ranks and ranges of them: 0,4-7"
    fields = [
        _labelled(
            "Ranks",
            {"name": "ranks", "defaultValue": view["ranks"], "pattern": _RANKS, "maxLength": 1024},
            {"title": hint, "required": True, "className": "goto", "placeholder": "0,4-7", "type": "text"},
        ),
        _labelled(
            "Steps",
            {"name": "steps", "defaultValue": route.get("steps") or "3", "type": "number", "min": 1},
            {"max": MAX_PROFILE_STEPS, "required": True, "className": "goto short", "inputMode": "numeric"},
        ),
    ]
    more = [
        html.Label([_box(name, route), html.Span([html.B(name), f": {what}"])], htmlFor=f"profile-{name}")
        for name, what in _MORE.items()
    ]
    run = profiles.field("input", type="hidden", name="run", value=view["of_run"])
    return html.Form(
        [
            html.Div(fields, className="fields"),
            html.Fieldset([html.Legend("Record also"), *more], className="fields"),
            wrong,
            html.P(_cost(view["done"]), className="hint"),
            run,
            html.Button("Profile these steps"),
        ],
        id="profile-form",
        action=profiles.PATH,
        method="post",
        **aria(label="Profile the steps to come"),
    )


def _labelled(name: str, *properties: Mapping[str, Any]) -> html.Label:
    id = f"profile-{name.lower()}"
    given = {key: value for group in properties for key, value in group.items()}
    return html.Label([html.Span(name), profiles.field("input", id=id, **given)], htmlFor=id)


def _box(name: str, route: Route) -> Any:
    on = route.get(name) not in (None, "", "0")
    return profiles.field(
        "input", id=f"profile-{name}", name=name, type="checkbox", value="1", defaultChecked=on
    )


def _cost(done: Sequence[ProfileInfo] | None) -> str:
    """Return what a profile costs: what it is, and what the newest one has cost."""
    what = (
        "All these ranks record the same steps, which begin some seconds from now. torch's profiler makes "
        "these steps slower; when they are over, training stops while it collects what it has recorded and "
        "writes the trace."
    )
    newest = next((info.profile for info in done or () if info.profile.captured), None)
    if newest is None:
        return what
    took = [f"{name} {text.ms(most_cost(newest, name))}" for name in ("start", "stop", "export")]
    extent = f"{text.count(newest.n_steps, 'step')} of {profiles.ranks_of(newest)}"
    return f"{what} The newest one, of {extent}, cost a rank at most: {', '.join(took)}."


def _now(view: Mapping[str, Any], route: Route) -> list[Any]:
    """Return how far the profile is that is being made, and what became of the one that was asked for."""
    asked, now, shown = route.get("asked"), view["now"], list[Any]()
    done = [info.profile for info in view["done"] or () if asked in info.profile.requests]
    if done and not done[0].captured:
        shown.append(html.P(f"Nothing was captured: {reasons(done[0])}.", className="sev critical"))
    elif done:
        shown.append(html.P(["The profile is there: ", profiles.link(done[0], route), "."]))
    elif asked and not (now and asked in now.requests):
        shown.append(html.P("Asked for; it begins when the aggregator has told all ranks."))
    if now:
        phase, share = so_far(now)
        progress = f"{phase} {text.share(share)}" if share else phase
        heading = f"Profile {now.id} of {text.ranks(rank.rank for rank in now.ranks)}: {progress}"
        bar = html.Progress(value=str(round(share, 3)), max="1", **aria(label=f"Profile {now.id}"))
        shown += [html.P(heading), bar, _states(now.ranks, route)]
    return shown


def _states(ranks: Sequence[RankProfile], route: Route) -> Any:
    columns = picked(RANKS, "rank", "node", "state", "steps", "arrived", "why not")
    return table(Table("Ranks of the profile that is being made", columns, ranks), route)


def _rows(view: Mapping[str, Any], route: Route) -> Any:
    if view["done"] is None:
        return html.P("Not known while the aggregator does not answer.", className="empty")
    columns = [column for column in profile_columns(view["names"]) if column.name != "id"]
    note = _COSTS if view["done"] else ""
    empty = "None yet. A straggler that lasts is profiled without being asked."
    return table(Table("Profiles", columns, view["done"], note, empty), route)
