"""
Profiles by torch's profiler. The page of all profiles (`data`, `layout`) lists them, shows the one being
made, and has the form that requests one. The page of one profile (`one_data`, `one_layout`) shows what a rank
does more of than others, every operation of every rank, and the traces. Also what other pages show of
profiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from dash import dcc, html

from traceml_ray import text
from traceml_ray.document.model import Table, picked
from traceml_ray.launchers.control import so_far
from traceml_ray.reports.profiles import (
    OPERATIONS,
    RANKS,
    difference_tables,
    most_cost,
    profile_columns,
    reasons,
)
from traceml_ray.store import query
from traceml_ray.store.profiles import Profile, ProfileInfo, Profiles, RankProfile
from traceml_ray.store.results import LiveVerdict
from traceml_ray.traces.breakdown import MOST, Breakdown
from traceml_ray.traces.difference import MEDIAN, Difference
from traceml_ray.traces.key_averages import Operation
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import whole_number
from traceml_ray.wire.messages import MAX_PROFILE_STEPS, OPTIONS, ProfileRequest

from .. import listing
from ..elements import aria, facts, form_field, keys_of, link, marked, panel, part, table, trail
from ..route import Route
from ..session_cache import SessionCache

PATH = "/profiles"
"""URL of forms and downloads: `/profiles`, `/profiles/<id>/<file>`."""
TRACE, TABLE = "trace.json.gz", "operations.csv"
_EVENT = "profile"
FIELDS = ("ranks", "steps", *OPTIONS)
"""Field names of the form."""
_MOST_OFFERED = 8
"""Largest number of ranks preselected in the form when no rank is suspected."""


def newest_first(cache: SessionCache, run: RunState) -> list[ProfileInfo]:
    """
    Return the profiles of the session, the newest first. While it runs they are asked for once an event of
    the run announces another one.
    """
    announced = {event.data.get("profile") for event in run.events if event.kind == _EVENT}
    if not announced and not cache.source.stored:
        return []

    def is_final(profiles: Profiles) -> bool:
        there = {info.profile.id: info.profile for info in profiles.done}
        explained = all(one.found or one.suspect is None for one in there.values())
        return announced <= there.keys() and explained

    listed = cache.ask(query.GetProfiles(), is_final)
    return [*reversed(listed.done)] if listed else []


def explains(cache: SessionCache, run: RunState, verdict: LiveVerdict, since: int) -> Profile | None:
    """
    Return the newest profile that explains why the rank of the verdict is late, recorded from step `since`
    on.
    """
    for info in newest_first(cache, run) if verdict.rank is not None else ():
        one = info.profile
        first = -1 if one.first_step is None else one.first_step
        if one.run == run.id and one.suspect == verdict.rank and one.found and first >= since:
            return one
    return None


def profile_link(profile: Profile, route: Route, shown: str = "") -> dcc.Link:
    """Return a link to the page of a profile, with `shown` in place of its id."""
    return dcc.Link(shown or profile.id, href=route.to("profile", profile.id))


def _ranks_of(profile: Profile) -> str:
    """Return a text that names the ranks whose traces exist: "ranks 1, 5"."""
    return text.ranks(rank.rank for rank in profile.captured) if profile.captured else "no rank"


def _offered(run: RunState) -> str:
    """Return the ranks that are most likely wanted: the suspect and a median one, else all up to 8."""
    suspect = run.named["ranks"][:1]
    times = run.times
    if suspect and times and len(times.ranks) > 1:
        order = sorted(zip(times.busy_ms.tolist(), times.ranks, strict=True))
        others = [rank for _, rank in order if rank not in run.named["ranks"]]
        if others:
            return text.ranges([suspect[0], others[(len(others) - 1) // 2]]).replace(" ", "")
    return "all" if run.world <= _MOST_OFFERED else f"0-{_MOST_OFFERED - 1}"


def request_of(values: Mapping[str, Any]) -> ProfileRequest:
    """
    Return the request that the values of a form, or of a URL, ask for. Raises ValueError with what is
    wrong.
    """
    given: dict[str, Any] = {name: values.get(name) not in (None, "", "0") for name in OPTIONS}
    given |= {"ranks": str(values.get("ranks") or "all"), "run": values.get("run") or None}
    steps = str(values.get("steps") or "3").strip()
    if not (steps.isascii() and steps.isdecimal()):
        raise ValueError(f"{steps[:20]!r} is not a number of steps")
    return ProfileRequest.checked({**given, "steps": int(steps[:9])})


def _session_of(route: Route) -> str:
    """Return the part of a URL that selects the session."""
    return f"?session={quote(name)}" if (name := route.get("session")) else ""


def _file_link(profile: Profile, name: str, route: Route, shown: str) -> html.A:
    """Return a link that downloads a file of a profile."""
    saved = f"{profile.session}-{profile.id}-{name}"
    return html.A(shown, href=f"{PATH}/{quote(profile.id)}/{name}{_session_of(route)}", download=saved)


def _removal(profile: Profile, route: Route) -> html.Details:
    """Return a button that removes a profile, one click away from where it could be hit by chance."""
    button = html.Button("Remove it for good", className="chip")
    action = f"{PATH}/{quote(profile.id)}/remove{_session_of(route)}"
    form = html.Form(button, action=action, method="post", **aria(label=f"Remove profile {profile.id}"))
    return html.Details([html.Summary("Remove this profile …"), form])


_OPTION_WORDS = {
    "memory": "what each operation allocates",
    "stacks": "Python functions; makes steps several times longer",
    "shapes": "the shapes of its inputs",
}
_RANKS = r"\s*(all|[0-9]+(\s*-\s*[0-9]+)?(\s*,\s*[0-9]+(\s*-\s*[0-9]+)?)*)\s*"
"""Pattern for the form's field of ranks in the browser; the server parses the text itself."""
_MOST_LISTED = 100
_COSTS = (
    "start, stop, export: how long training stood still, on the rank where it was longest. a step: their sum "
    "for each recorded step."
)


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """
    Return the profiles of the session, and the one being made.

    In the URL `ranks`, `steps` and options fill the form; `asked` is the id of this browser's request.
    """
    answer = cache.ask(query.GetProfiles())
    wrong = ""
    try:
        request_of(dict(route.query))
    except ValueError as error:
        wrong = str(error)
    return {
        "done": [*reversed(answer.done)][:_MOST_LISTED] if answer else None,
        "now": answer.now if answer else None,
        "ranks": route.get("ranks") or _offered(run),
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
        body += [panel("Profile the next steps", part(_form(view, route)), part(now))]
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
        for name, what in _OPTION_WORDS.items()
    ]
    run = form_field("input", type="hidden", name="run", value=view["of_run"])
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
        action=PATH,
        method="post",
        **aria(label="Profile the next steps"),
    )


def _labelled(name: str, *properties: Mapping[str, Any]) -> html.Label:
    id = f"profile-{name.lower()}"
    given = {key: value for group in properties for key, value in group.items()}
    return html.Label([html.Span(name), form_field("input", id=id, **given)], htmlFor=id)


def _box(name: str, route: Route) -> Any:
    on = route.get(name) not in (None, "", "0")
    return form_field("input", id=f"profile-{name}", name=name, type="checkbox", value="1", defaultChecked=on)


def _cost(done: Sequence[ProfileInfo] | None) -> str:
    """Return a text about the cost of a profile in general, and of the newest one."""
    what = (
        "All these ranks record the same steps, which begin some seconds from now. torch's profiler makes "
        "these steps slower; when they are over, training stops while it collects what it has recorded and "
        "writes the trace."
    )
    newest = next((info.profile for info in done or () if info.profile.captured), None)
    if newest is None:
        return what
    took = [f"{name} {text.ms(most_cost(newest, name))}" for name in ("start", "stop", "export")]
    extent = f"{text.count(newest.n_steps, 'step')} of {_ranks_of(newest)}"
    return f"{what} Largest cost of the newest one ({extent}) on a rank: {', '.join(took)}."


def _now(view: Mapping[str, Any], route: Route) -> list[Any]:
    """Return the progress of the profile being made, and the result of the requested one."""
    asked, now, shown = route.get("asked"), view["now"], list[Any]()
    done = [info.profile for info in view["done"] or () if asked in info.profile.requests]
    if done and not done[0].captured:
        shown.append(html.P(f"Nothing was captured: {reasons(done[0])}.", className="sev critical"))
    elif done:
        shown.append(html.P(["The profile is ready: ", profile_link(done[0], route), "."]))
    elif asked and not (now and asked in now.requests):
        shown.append(html.P("Requested. It begins when the aggregator has reached all ranks."))
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
    empty = "None yet. A lasting straggler is profiled automatically."
    return table(Table("Profiles", columns, view["done"], note, empty), route)


_TOP = 15
"""Largest number of operations shown of a difference."""
_MOST_CHIPS = 16
_MORE = "What one rank does more of than others"
_PERFETTO = (
    "Open the trace of all ranks at ui.perfetto.dev (Open trace file): it is read in your browser and sent "
    "nowhere. All ranks are on one clock; arrows lead from the rank that came last to a collective to those "
    "that waited. Trace and CSV are made when they are asked for, which takes some seconds."
)


def one_data(cache: SessionCache, _run: RunState, route: Route) -> dict[str, Any]:
    """
    Return the profile whose id is the key of `route`, compared and listed as the URL asks.

    `of`, `beside` and `stage` choose what is compared; `kind` and the names of `listing`, which operations
    are listed.
    """
    answer = cache.ask(query.GetProfiles())
    info = next((info for info in answer.done if info.profile.id == route.key), None) if answer else None
    made = cache.breakdowns.get(info) if info else None
    shown: dict[str, Any] = {"info": info, "known": answer is not None, "made": made}
    if info is None or not isinstance(made, Breakdown):
        return shown
    kind = route.get("kind")
    rows = [operation for operation in made.operations if kind in (None, operation.kind)]
    return {
        **shown,
        "difference": _difference(info.profile, made, route),
        "kinds": {
            name: sum(operation.kind == name for operation in made.operations) for name in _kinds(made)
        },
        "chosen": listing.choose(rows, route, _words, keys_of(OPERATIONS)),
    }


def _kinds(made: Breakdown) -> list[str]:
    return list(dict.fromkeys(operation.kind for operation in made.operations))


def _words(operation: Operation) -> str:
    rank = "" if operation.rank is None else f"rank {operation.rank}"
    return " ".join(
        filter(None, (operation.name, operation.kind, rank, operation.node, operation.input_shapes))
    )


def _difference(profile: Profile, made: Breakdown, route: Route) -> Difference | None:
    """Return what to compare: as in the URL, else the suspect or the slowest rank with the median rank."""
    rank, beside = _sides(profile, made, route)
    stage = route.get("stage")
    return None if rank is None else made.difference(rank, beside, None if stage == "all" else stage)


def _sides(profile: Profile, made: Breakdown, route: Route) -> tuple[int | None, int | Literal["median"]]:
    ranks = {rank_times.rank for rank_times in made.ranks}
    rank, beside = whole_number(route.get("of")), whole_number(route.get("beside"))
    if rank not in ranks:
        rank = profile.suspect if profile.suspect in ranks else made.slowest()
    return rank, beside if beside in ranks and beside != rank and beside is not None else MEDIAN


def one_layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    info: ProfileInfo | None = view["info"]
    way = trail(route, ("profiles", route.to("profiles")), (route.key, None))
    if info is None:
        why = "There is no such profile: it has been removed." if view["known"] else "Not known yet."
        return html.Div([way, part(html.Div([html.H1("Profile"), html.P(why)], id="profile-missing"))])
    profile, made = info.profile, view["made"]
    title = f"Profile of {_ranks_of(profile)}, {profile.extent}"
    body: list[Any] = [
        way,
        html.H1(title),
        facts("profile-facts", _facts(info)),
        *(
            [part(html.P(_explanation(profile), id="profile-found", className="callout"))]
            if profile.found
            else []
        ),
    ]
    if not isinstance(made, Breakdown):
        state = f"▲ Its traces cannot be read: {made}." if made else "Its traces are being read …"
        body.append(part(html.P(state, id="profile-state", role="status", className="panel")))
    else:
        body += [_compared(view, route)]
    body.append(_traces(info, route))
    return html.Div([*body, *([_operations(view, route)] if isinstance(made, Breakdown) else [])])


def _explanation(profile: Profile) -> list[Any]:
    sentences = (sentence[:1].upper() + sentence[1:] for sentence in profile.found)
    return [html.B("Why, by operation: "), *marked(" ".join(sentences))]


def _facts(info: ProfileInfo) -> dict[str, Any]:
    profile = info.profile
    more = [name for name in OPTIONS if getattr(profile, name)]
    bounds = [rank.clock_bound_ns for rank in profile.captured if rank.clock_bound_ns is not None]
    return {
        f"asked for ({text.zone()})": text.date(profile.time),
        "why": profile.why,
        "recorded also": ", ".join(more) or "nothing",
        **({"clocks agree within": text.ns(max(bounds))} if bounds else {}),
        "size": text.size(info.bytes),
    }


def _compared(view: Mapping[str, Any], route: Route) -> Any:
    """Return what one rank does more of than the others, and links to choose both."""
    made, difference = view["made"], view["difference"]
    profile: Profile = view["info"].profile
    rank, beside = _sides(profile, made, route)
    if rank is None:
        alone = "Only one rank was captured: there is nothing to compare it with."
        return panel(_MORE, part(html.P(alone, id="profile-compared", className="empty")))
    ranks = [rank_times.rank for rank_times in made.ranks]
    others = {"the median of the others": None} | {
        f"rank {other}": str(other) for other in ranks if other != rank
    }
    chips = [
        _chips(route, "of", {f"rank {number}": str(number) for number in ranks}, "Rank", str(rank)),
        _chips(route, "beside", others, "Beside", None if beside == MEDIAN else str(beside)),
        _chips(
            route,
            "stage",
            {"all of the step": None} | {stage: stage for stage in made.stages()},
            "Stage",
            route.get("stage"),
        ),
    ]
    return panel(_MORE, part(html.Div([*chips, *_differing(difference, route)], id="profile-compared")))


def _chips(route: Route, name: str, values: Mapping[str, str | None], label: str, chosen: str | None) -> Any:
    """Return links to choices, `chosen` among them; of very many the first ones."""
    shown = dict([*values.items()][:_MOST_CHIPS])
    shown |= {label: value for label, value in values.items() if value == chosen}
    links = [
        link(label, route.here(**{name: value}), "chip", on=value == chosen) for label, value in shown.items()
    ]
    nav = html.Nav(links, className="chips", **aria(label=label))
    return html.Div([html.Span(label, **aria(hidden="true")), nav], className="choice")


def _differing(difference: Difference | None, route: Route) -> list[Any]:
    if difference is None:
        return [html.P("This was not recorded on both ranks.", className="empty")]
    sentences = [html.P(marked(sentence[:1].upper() + sentence[1:])) for sentence in difference.sentences]
    shown = difference_tables(difference, _TOP)
    return [
        html.Div(sentences, className="said"),
        *(
            part_of
            for block in shown
            if block.items
            for part_of in (html.H3(marked(block.title)), table(block, route))
        ),
    ]


def _operations(view: Mapping[str, Any], route: Route) -> Any:
    """Return the table of all operations of all ranks."""
    made, chosen = view["made"], view["chosen"]
    cells = [[column.cell(operation) for column in OPERATIONS] for operation in made.operations]
    columns = [column for column, *values in zip(OPERATIONS, *cells, strict=True) if any(values)]
    heads = listing.heads(columns, keys_of(columns), route)
    block = Table("Operations", columns, chosen.items, empty="No operation matches.")
    rows = table(block, route, heads=heads)
    kinds = {f"all kinds {len(made.operations):,}": None} | {
        f"{kind} {n:,}": kind for kind, n in view["kinds"].items()
    }
    what = "Times in ms, of all calls of the recorded steps together; self: without the operations inside it."
    if made.n_operations > len(made.operations):
        what += f" The {MOST:,} longest of {made.n_operations:,}; the CSV file has all."
    body = [listing.chips(route, "kind", kinds, "Kind"), rows, listing.pages(chosen, route, "operation")]
    head = html.Div([html.H2("Operations of all ranks"), listing.field("operations")], className="title-row")
    hint = part(html.P([what, *_problems(made)], id="profile-hint", className="hint"))
    return html.Section([head, hint, part(html.Div(body, id="profile-operations"))], className="panel")


def _problems(made: Breakdown) -> list[Any]:
    return [html.Span(f" ▲ {problem}.", className="sev warning") for problem in made.problems]


def _traces(info: ProfileInfo, route: Route) -> Any:
    """Return the ranks with their traces, the downloads, and the button that removes the profile."""
    profile = info.profile

    def download(rank: RankProfile) -> Any:
        return _file_link(profile, rank.file, route, text.size(rank.total_bytes)) if rank.file else ""

    columns = [column for column in RANKS if column.name != "arrived"]
    block = Table("Ranks", columns, profile.ranks, empty=profile.error or "None.")
    shown: list[Any] = [table(block, route, cells={"trace": download})]
    if profile.captured:
        links = [
            _file_link(profile, TRACE, route, "Trace of all ranks"),
            _file_link(profile, TABLE, route, "All operations as CSV"),
        ]
        shown += [html.Div(links, className="links"), html.P(_PERFETTO, className="hint")]
    shown.append(_removal(profile, route))
    return panel("Ranks and traces", part(html.Div(shown, id="profile-traces")))
