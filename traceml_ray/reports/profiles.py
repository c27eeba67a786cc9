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
    matching = [one for one in summary["profiles"] if one["suspect"] in verdict["ranks"] and one["found"]]
    if not matching:
        return []
    newest = max(matching, key=lambda one: (one["stage"] == verdict["stage"], one["time"]))
    return [*newest["found"], f"profile {newest['id']}, steps from {newest['first_step']:,} on"]


def profile_facts(summary: dict[str, Any]) -> Facts:
    """Return the part of the report that says which operations make the rank late."""
    sentences = by_operation(summary)
    return Facts(*zip(["Operation", *[""] * len(sentences)], sentences, strict=False))


def render_list(profiles: Profiles, folder: Path) -> str:
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
    lines = [] if profiles.now is None else [f"one is being made: {profiles.now.id}"]
    if not profiles.done:
        return "\n".join([f"no profiles in {folder}", *lines]) + "\n"
    return page([table("Profiles, the oldest first", columns, profiles.done), [f"in {folder}", *lines]])


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
    "Node ID": lambda operation: operation.node or operation.node_id or "",
    ">Rank": lambda operation: text.plain(operation.rank),
    "Name": lambda operation: operation.name,
    "Kind": lambda operation: operation.kind,
    "Input shapes": lambda operation: operation.input_shapes or "",
    ">Self CPU ms": lambda operation: _ms(operation.self_cpu_ms),
    ">CPU ms": lambda operation: _ms(operation.cpu_ms),
    ">Self device ms": lambda operation: _ms(operation.self_device_ms),
    ">Device ms": lambda operation: _ms(operation.device_ms),
    ">Self CPU memory": lambda operation: _size(operation.self_cpu_bytes),
    ">Self device memory": lambda operation: _size(operation.self_device_bytes),
    ">Calls": lambda operation: f"{operation.calls:,}",
}


def render_operations(title: str, operations: Sequence[Operation]) -> str:
    """Return a table of operations; columns of what was not recorded are left out."""
    return "\n".join(table(title, OPERATIONS, operations) or [f"{title}: none"]) + "\n"


def _more(value: float) -> str:
    return text.number(value, 3, sign=True)


COMPARED: Columns = {
    "Operation": lambda operation: operation.name,
    "Kind": lambda operation: operation.kind,
    ">More ms": lambda operation: _more(operation.more_ms),
    "On": lambda operation: "device" if operation.on_device else "",
    ">Self CPU ms": lambda operation: _ms(operation.self_cpu_ms),
    ">Others": lambda operation: _ms(operation.other_self_cpu_ms),
    ">Self device ms": lambda operation: _ms(operation.self_device_ms),
    "> Others": lambda operation: _ms(operation.other_self_device_ms),
    ">Calls": lambda operation: text.number(operation.calls),
    ">  Others": lambda operation: text.number(operation.other_calls),
}


def render_difference(difference: Difference, top: int = 15) -> str:
    """Return what one rank does more of than others: sentences, then the operations that explain most."""
    than = (
        text.ranks(difference.others)
        if len(difference.others) == 1
        else f"the median of {text.ranks(difference.others)}"
    )
    per = (
        f"per step, of {text.count(difference.steps, 'step')}" if difference.steps else "in all of the trace"
    )
    stage = f", `{difference.stage}` alone" if difference.stage else ""
    title = f"Rank {difference.rank} beside {than}, {per}{stage}:"
    waits = "Waiting for other ranks, or for a device (time that no work hides):"
    return page(
        [
            [one_sentence[0].upper() + one_sentence[1:] for one_sentence in difference.sentences],
            table(title, COMPARED, difference.operations[:top]),
            table(waits, COMPARED, difference.waits[:top]),
        ]
    )
