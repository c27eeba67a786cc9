"""Profiles as text: what was captured of whom, what it cost, and why some ranks have none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.reports.layout import Columns, Facts, page, table
from traceml_ray.store.profiles import Profile, Profiles, profiles_of


def profiles_block(folder: Path, run: str | None) -> list[dict[str, Any]]:
    """Return the profiles of a run as the summary lists them, without those where nothing was captured."""
    fields = (
        "id",
        "time",
        "why",
        "by_itself",
        "first_step",
        "n_steps",
        "suspect",
        "median",
        "stage",
        "found",
    )
    return [
        {name: getattr(one, name) for name in fields} | {"ranks": [rank.rank for rank in one.captured]}
        for one in (stored.profile for stored in profiles_of(folder))
        if one.captured and one.run == run
    ]


def by_operation(summary: Mapping[str, Any]) -> list[str]:
    """Return what a profile has found of a rank that the verdict names, of its stage if one has."""
    verdict = summary["verdict"]
    found = [one for one in summary["profiles"] if one["suspect"] in verdict["ranks"] and one["found"]]
    if not found:
        return []
    newest = max(found, key=lambda one: (one["stage"] == verdict["stage"], one["time"]))
    return [*newest["found"], f"profile {newest['id']}, steps from {newest['first_step']:,} on"]


def profile_facts(summary: dict[str, Any]) -> Facts:
    """Return the part of the report that says which operations make the rank late."""
    found = by_operation(summary)
    return Facts(*zip(["Operation", *[""] * len(found)], found, strict=False))


def render_list(found: Profiles, folder: Path) -> str:
    """Return the list of the profiles in `folder`."""
    columns: Columns = {
        "asked for (UTC)": lambda one: text.date(one.profile.time),
        "id": lambda one: one.profile.id,
        "ranks": lambda one: text.ranges(rank.rank for rank in one.profile.captured) or "none",
        ">steps": lambda one: text.number(one.profile.n_steps),
        ">from": lambda one: text.number(one.profile.first_step),
        ">size": lambda one: text.size(one.bytes),
        "why": lambda one: one.profile.why,
    }
    lines = [] if found.now is None else [f"one is being made: {found.now.id}"]
    if not found.done:
        return "\n".join([f"no profiles in {folder}", *lines]) + "\n"
    return page([table("Profiles, the oldest first", columns, found.done), [f"in {folder}", *lines]])


def render_profile(profile: Profile, path: Path) -> str:
    """Return what became of each rank of a profile."""
    columns: Columns = {
        ">rank": lambda one: str(one.rank),
        "node": lambda one: one.node or text.NA,
        "state": lambda one: one.state,
        ">trace": lambda one: text.size(one.total_bytes),
        ">start": lambda one: text.ms(one.start_ms),
        ">stop": lambda one: text.ms(one.stop_ms),
        ">export": lambda one: text.ms(one.export_ms),
        "why not": lambda one: one.reason or "",
    }
    title = f"Profile {profile.id}: {profile.extent}"
    lines = [f"nothing was captured: {profile.error}"] if profile.error else []
    return page([table(title, columns, profile.ranks), [*lines, f"in {path}"]])
