"""One profile: what a rank does more of than others, every operation of every rank, and the traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dash import html

from traceml_ray import text
from traceml_ray.document.model import Table
from traceml_ray.reports.profiles import OPERATIONS, RANKS, difference_tables
from traceml_ray.store import query
from traceml_ray.store.profiles import Profile, ProfileInfo, RankProfile
from traceml_ray.traces.breakdown import MOST, Breakdown
from traceml_ray.traces.difference import MEDIAN, Difference
from traceml_ray.traces.key_averages import Operation
from traceml_ray.views import timezone
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import whole_number
from traceml_ray.wire.messages import OPTIONS

from .. import listing, profiles
from ..components import aria, facts, link, marked, panel, part, trail
from ..document import keys_of, table
from ..route import Route
from ..session_cache import SessionCache

_TOP = 15
"""Largest number of operations shown of a difference."""
_MOST_CHIPS = 16
_MORE = "What one rank does more of than others"
_PERFETTO = (
    "Open the trace of all ranks at ui.perfetto.dev (Open trace file): it is read in your browser and sent "
    "nowhere. All ranks are on one clock; arrows lead from the rank that came last to a collective to those "
    "that waited. Trace and CSV are made when they are asked for, which takes some seconds."
)


def data(cache: SessionCache, _run: RunState, route: Route) -> dict[str, Any]:
    """
    Return one profile. In the URL `of`, `beside` and `stage` choose what is compared, `kind` and the names of
    `listing` which operations are listed.
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
    """Return what is compared: what the URL says, else the suspect or the slowest rank with the median."""
    rank, beside = _sides(profile, made, route)
    stage = route.get("stage")
    return None if rank is None else made.difference(rank, beside, None if stage == "all" else stage)


def _sides(profile: Profile, made: Breakdown, route: Route) -> tuple[int | None, int | Literal["median"]]:
    ranks = {rank_times.rank for rank_times in made.ranks}
    rank, beside = whole_number(route.get("of")), whole_number(route.get("beside"))
    if rank not in ranks:
        rank = profile.suspect if profile.suspect in ranks else made.slowest()
    return rank, beside if beside in ranks and beside != rank and beside is not None else MEDIAN


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    info: ProfileInfo | None = view["info"]
    way = trail(route, ("profiles", route.to("profiles")), (route.key, None))
    if info is None:
        why = "There is no such profile: it has been removed." if view["known"] else "Not known yet."
        return html.Div([way, part(html.Div([html.H1("Profile"), html.P(why)], id="profile-missing"))])
    profile, made = info.profile, view["made"]
    title = f"Profile of {profiles.ranks_of(profile)}, {profile.extent}"
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
        f"asked for ({timezone.abbreviation()})": timezone.date(profile.time),
        "why": profile.why,
        "recorded also": ", ".join(more) or "nothing",
        **({"clocks agree within": text.ns(max(bounds))} if bounds else {}),
        "size": text.size(info.bytes),
    }


def _compared(view: Mapping[str, Any], route: Route) -> Any:
    """Return what one rank does more of than others, and the choice of both."""
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
        return [html.P("That was not recorded of both.", className="empty")]
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
    block = Table("Operations", columns, chosen.items, empty="No operation is like that.")
    rows = table(block, route, heads=heads)
    kinds = {f"all kinds {len(made.operations):,}": None} | {
        f"{kind} {n:,}": kind for kind, n in view["kinds"].items()
    }
    what = "Times in ms, of all calls of the recorded steps together; self: without the operations inside it."
    if made.n_operations > len(made.operations):
        what += f" The {MOST:,} longest of {made.n_operations:,}; the CSV file has all."
    body = [listing.chips(route, "kind", kinds, "Kind"), rows, listing.pages(chosen, route, "operation")]
    head = html.Div(
        [html.H2("Operations of all ranks"), listing.field(route, "operations")], className="title-row"
    )
    hint = part(html.P([what, *_problems(made)], id="profile-hint", className="hint"))
    return html.Section([head, hint, part(html.Div(body, id="profile-operations"))], className="panel")


def _problems(made: Breakdown) -> list[Any]:
    return [html.Span(f" ▲ {problem}.", className="sev warning") for problem in made.problems]


def _traces(info: ProfileInfo, route: Route) -> Any:
    """Return the ranks with their traces, the downloads, and the button that removes the profile."""
    profile = info.profile

    def download(rank: RankProfile) -> Any:
        return profiles.file_link(profile, rank.file, route, text.size(rank.total_bytes)) if rank.file else ""

    columns = [column for column in RANKS if column.name != "arrived"]
    block = Table("Ranks", columns, profile.ranks, empty=profile.error or "None.")
    shown: list[Any] = [table(block, route, cells={"trace": download})]
    if profile.captured:
        links = [
            profiles.file_link(profile, profiles.TRACE, route, "Trace of all ranks"),
            profiles.file_link(profile, profiles.TABLE, route, "All operations as CSV"),
        ]
        shown += [html.Div(links, className="links"), html.P(_PERFETTO, className="hint")]
    shown.append(profiles.removal(profile, route))
    return panel("Ranks and traces", part(html.Div(shown, id="profile-traces")))
