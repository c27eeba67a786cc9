"""The profiles of a session, as pages link to them, list them and ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from dash import dcc, html

from traceml_ray import text
from traceml_ray.store import query
from traceml_ray.store.profiles import Profile, ProfileInfo, Profiles
from traceml_ray.views.run_state import RunState
from traceml_ray.wire.messages import OPTIONS, ProfileRequest

from .components import Content, aria
from .route import Route
from .session_cache import SessionCache

PATH = "/profiles"
"""URL of forms and downloads: `/profiles`, `/profiles/<id>/<file>`."""
TRACE, TABLE = "trace.json.gz", "operations.csv"
EVENT = "profile"
FIELDS = ("ranks", "steps", *OPTIONS)
"""Field names of the form."""
_MOST_RANKS = 8
"""Largest number of ranks preselected in the form when no rank is suspected."""


def newest_first(cache: SessionCache, run: RunState) -> list[ProfileInfo]:
    """
    Return the profiles of the session, the newest first. While it runs they are asked for when an event of
    the run says that there is another one.
    """
    announced = {event.data.get("profile") for event in run.events if event.kind == EVENT}
    if not announced and not cache.source.stored:
        return []

    def is_final(profiles: Profiles) -> bool:
        there = {info.profile.id: info.profile for info in profiles.done}
        explained = all(one.found or one.suspect is None for one in there.values())
        return announced <= there.keys() and explained

    listed = cache.ask(query.GetProfiles(), is_final)
    return [*reversed(listed.done)] if listed else []


def explains(cache: SessionCache, run: RunState, verdict: Mapping[str, Any], since: int) -> Profile | None:
    """Return the newest profile that explains why a rank is late in the episode from step `since` on."""
    for info in newest_first(cache, run) if verdict["rank"] is not None else ():
        one = info.profile
        first = -1 if one.first_step is None else one.first_step
        if one.run == run.id and one.suspect == verdict["rank"] and one.found and first >= since:
            return one
    return None


def link(profile: Profile, route: Route, shown: str = "") -> dcc.Link:
    """Return a link to the page of a profile."""
    return dcc.Link(shown or profile.id, href=route.to("profile", profile.id))


def ranks_of(profile: Profile) -> str:
    """Return whose traces there are: "ranks 1, 5"."""
    return text.ranks(rank.rank for rank in profile.captured) if profile.captured else "no rank"


def offered(run: RunState) -> str:
    """Return the ranks that are most likely wanted: the suspect and a median one, else all up to 8."""
    suspect = run.named["ranks"][:1]
    times = run.times
    if suspect and times and len(times.ranks) > 1:
        order = sorted(zip(times.busy_ms.tolist(), times.ranks, strict=True))
        others = [rank for _, rank in order if rank not in run.named["ranks"]]
        if others:
            return text.ranges([suspect[0], others[(len(others) - 1) // 2]]).replace(" ", "")
    return "all" if run.world <= _MOST_RANKS else f"0-{_MOST_RANKS - 1}"


def request_of(values: Mapping[str, Any]) -> ProfileRequest:
    """Return what a form or a URL asks for. Raises ValueError, which says what is wrong."""
    given: dict[str, Any] = {name: values.get(name) not in (None, "", "0") for name in OPTIONS}
    given |= {"ranks": str(values.get("ranks") or "all"), "run": values.get("run") or None}
    steps = str(values.get("steps") or "3").strip()
    if not (steps.isascii() and steps.isdecimal()):
        raise ValueError(f"{steps[:20]!r} is no number of steps")
    return ProfileRequest.checked({**given, "steps": int(steps[:9])})


def field(tag: str, **properties: Any) -> Content:
    """Return an element of a form. Dash has no element that a browser submits by itself."""
    return Content("", [tag, properties])


def session_of(route: Route) -> str:
    """Return the part of a URL that selects the session."""
    return f"?session={quote(name)}" if (name := route.get("session")) else ""


def file_link(profile: Profile, name: str, route: Route, shown: str) -> html.A:
    """Return a link that downloads a file of a profile."""
    saved = f"{profile.session}-{profile.id}-{name}"
    return html.A(shown, href=f"{PATH}/{quote(profile.id)}/{name}{session_of(route)}", download=saved)


def removal(profile: Profile, route: Route) -> html.Details:
    """Return a button that removes a profile, one click away from where it could be hit by chance."""
    button = html.Button("Remove it for good", className="chip")
    action = f"{PATH}/{quote(profile.id)}/remove{session_of(route)}"
    form = html.Form(button, action=action, method="post", **aria(label=f"Remove profile {profile.id}"))
    return html.Details([html.Summary("Remove this profile …"), form])
