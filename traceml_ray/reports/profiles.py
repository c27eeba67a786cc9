"""
Profiles as text: what was captured of whom, what it cost, and why some ranks have none.

Tables of what profiles hold, as a terminal shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.document.model import Column, Facts, Table
from traceml_ray.document.text import page
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
    return Facts.listed("Operation", sentences)


def render_list(profiles: Profiles, folder: Path) -> str:
    """Return the list of the profiles in `folder`."""
    columns = [
        Column("asked for (UTC)", lambda one: one.profile.time, "date"),
        Column("id", lambda one: one.profile.id),
        Column("ranks", lambda one: text.ranges(rank.rank for rank in one.profile.captured) or "none"),
        Column("steps", lambda one: one.profile.n_steps, "number"),
        Column("from", lambda one: one.profile.first_step, "number"),
        Column("size", lambda one: one.bytes, "size"),
        Column("why", lambda one: one.profile.why),
    ]
    lines = [] if profiles.now is None else [f"one is being made: {profiles.now.id}"]
    if not profiles.done:
        return "\n".join([f"no profiles in {folder}", *lines]) + "\n"
    return page([Table("Profiles, the oldest first", columns, profiles.done), [f"in {folder}", *lines]])


def render_profile(profile: Profile, path: Path) -> str:
    """Return what became of each rank of a profile."""
    columns = [
        Column("rank", lambda one: str(one.rank), "figures"),
        Column("node", lambda one: one.node or text.NA),
        Column("state", lambda one: one.state),
        Column("trace", lambda one: one.total_bytes, "size"),
        Column("start", lambda one: one.start_ms, "ms"),
        Column("stop", lambda one: one.stop_ms, "ms"),
        Column("export", lambda one: one.export_ms, "ms"),
        Column("why not", lambda one: one.reason or ""),
    ]
    title = f"Profile {profile.id}: {profile.extent}"
    lines = [f"nothing was captured: {profile.error}"] if profile.error else []
    return page([Table(title, columns, profile.ranks), [*lines, f"in {path}"]])


_OPERATIONS = [
    Column("Node ID", lambda operation: operation.node or operation.node_id or ""),
    Column("Rank", lambda operation: operation.rank, "plain"),
    Column("Name", lambda operation: operation.name),
    Column("Kind", lambda operation: operation.kind),
    Column("Input shapes", lambda operation: operation.input_shapes or ""),
    Column("Self CPU ms", lambda operation: operation.self_cpu_ms, "known three digits"),
    Column("CPU ms", lambda operation: operation.cpu_ms, "known three digits"),
    Column("Self device ms", lambda operation: operation.self_device_ms, "known three digits"),
    Column("Device ms", lambda operation: operation.device_ms, "known three digits"),
    Column("Self CPU memory", lambda operation: operation.self_cpu_bytes, "known size"),
    Column("Self device memory", lambda operation: operation.self_device_bytes, "known size"),
    Column("Calls", lambda operation: operation.calls, "plain"),
]


def render_operations(title: str, operations: Sequence[Operation]) -> str:
    """Return a table of operations; columns of what was not recorded are left out."""
    return page([Table(title, _OPERATIONS, operations) if operations else [f"{title}: none"]])


_COMPARED = [
    Column("Operation", lambda operation: operation.name),
    Column("Kind", lambda operation: operation.kind),
    Column("More ms", lambda operation: operation.more_ms, "more of three digits"),
    Column("On", lambda operation: "device" if operation.on_device else ""),
    Column("Self CPU ms", lambda operation: operation.self_cpu_ms, "known three digits"),
    Column("Others", lambda operation: operation.other_self_cpu_ms, "known three digits"),
    Column("Self device ms", lambda operation: operation.self_device_ms, "known three digits"),
    Column("Others", lambda operation: operation.other_self_device_ms, "known three digits"),
    Column("Calls", lambda operation: operation.calls, "number"),
    Column("Others", lambda operation: operation.other_calls, "number"),
]


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
            Table(title, _COMPARED, difference.operations[:top]),
            Table(waits, _COMPARED, difference.waits[:top]),
        ]
    )
