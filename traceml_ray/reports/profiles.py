"""
Profiles as text: what was captured of whom, what it cost, and why some ranks have none.

Tables of what profiles hold, as a terminal shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.reports.layout import Columns, Facts, page, table
from traceml_ray.store.profiles import Profile, Profiles, profiles_of
from traceml_ray.traces.difference import Difference
from traceml_ray.traces.key_averages import Operation


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


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else text.size(nbytes)


def _ms(value: float | None) -> str:
    return "" if value is None else text.number(value, 3)


OPERATIONS: Columns = {
    "Node ID": lambda each: each.node or each.node_id or "",
    ">Rank": lambda each: text.plain(each.rank),
    "Name": lambda each: each.name,
    "Kind": lambda each: each.kind,
    "Input shapes": lambda each: each.input_shapes or "",
    ">Self CPU ms": lambda each: _ms(each.self_cpu_ms),
    ">CPU ms": lambda each: _ms(each.cpu_ms),
    ">Self device ms": lambda each: _ms(each.self_device_ms),
    ">Device ms": lambda each: _ms(each.device_ms),
    ">Self CPU memory": lambda each: _size(each.self_cpu_bytes),
    ">Self device memory": lambda each: _size(each.self_device_bytes),
    ">Calls": lambda each: f"{each.calls:,}",
}


def render_operations(title: str, operations: Sequence[Operation]) -> str:
    """Return a table of operations; columns of what was not recorded are left out."""
    return "\n".join(table(title, OPERATIONS, operations) or [f"{title}: none"]) + "\n"


def _more(value: float) -> str:
    return text.number(value, 3, sign=True)


COMPARED: Columns = {
    "Operation": lambda each: each.name,
    "Kind": lambda each: each.kind,
    ">More ms": lambda each: _more(each.more_ms),
    "On": lambda each: "device" if each.on_device else "",
    ">Self CPU ms": lambda each: _ms(each.self_cpu_ms),
    ">Others": lambda each: _ms(each.other_self_cpu_ms),
    ">Self device ms": lambda each: _ms(each.self_device_ms),
    "> Others": lambda each: _ms(each.other_self_device_ms),
    ">Calls": lambda each: text.number(each.calls),
    ">  Others": lambda each: text.number(each.other_calls),
}


def render_difference(found: Difference, top: int = 15) -> str:
    """Return what one rank does more of than others: sentences, then the operations that explain most."""
    than = text.ranks(found.others) if len(found.others) == 1 else f"the median of {text.ranks(found.others)}"
    per = f"per step, of {text.count(found.steps, 'step')}" if found.steps else "in all of the trace"
    stage = f", `{found.stage}` alone" if found.stage else ""
    title = f"Rank {found.rank} beside {than}, {per}{stage}:"
    waits = "Waiting for other ranks, or for a device (time that no work hides):"
    return page(
        [
            [each[0].upper() + each[1:] for each in found.sentences],
            table(title, COMPARED, found.operations[:top]),
            table(waits, COMPARED, found.waits[:top]),
        ]
    )
