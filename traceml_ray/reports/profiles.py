"""
Profiles as text: the captured ranks, the cost, and why some ranks have no trace.

Also the tables of the contents of profiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from traceml_ray import text
from traceml_ray.document.model import Column, Facts, Link, Table, picked
from traceml_ray.document.text import page
from traceml_ray.store.profiles import Profile, ProfileInfo, Profiles, RankProfile, profiles_of
from traceml_ray.store.summary_shape import ProfileFound, Summary
from traceml_ray.traces.difference import Compared, Difference
from traceml_ray.traces.key_averages import Operation


def profiles_block(folder: Path, run: str | None) -> list[ProfileFound]:
    """Return the profiles of a run for the summary. Profiles without a captured rank are left out."""
    return [
        ProfileFound(
            **{name: getattr(one, name) for name in _LISTED}, ranks=[rank.rank for rank in one.captured]
        )
        for one in (stored.profile for stored in profiles_of(folder))
        if one.captured and one.run == run
    ]


_LISTED = [name for name in ProfileFound.__struct_fields__ if name != "ranks"]


def by_operation(summary: Summary) -> list[str]:
    """
    Return what a profile has found about a rank that the verdict names. A profile of the verdict's stage is
    preferred.
    """
    verdict = summary.verdict
    matching = [one for one in summary.profiles if one.suspect in verdict.ranks and one.found]
    if not matching:
        return []
    newest = max(matching, key=lambda one: (one.stage == verdict.stage, one.time))
    return [*newest.found, f"profile {newest.id}, steps from {newest.first_step:,} on"]


def profile_facts(summary: Summary) -> Facts:
    """Return the part of the report that names the operations that make the rank late."""
    sentences = by_operation(summary)
    return Facts.listed("Operation", sentences)


def profile_columns(runs: Mapping[str, str]) -> list[Column]:
    """Return the columns of a table of `ProfileInfo`s. `runs`: id → name of each run of the session."""
    return [
        Column(
            "asked for",
            lambda info: info.profile.time,
            "date",
            link=lambda info: ("profile", info.profile.id),
        ),
        Column("id", lambda info: info.profile.id),
        *(
            [Column("run", lambda info: runs.get(info.profile.run, info.profile.run))]
            if len(runs) > 1
            else []
        ),
        Column("ranks", lambda info: text.ranges(rank.rank for rank in info.profile.captured) or "none"),
        Column("from step", lambda info: info.profile.first_step, "number", link=_first_step),
        Column("steps", lambda info: info.profile.n_steps, "count"),
        Column("size", lambda info: info.bytes, "size"),
        *(Column(name, partial(_cost, name), "known ms") for name in ("start", "stop", "export")),
        Column("a step", lambda info: step_cost(info.profile), "known ms"),
        Column("why", lambda info: info.profile.why, "sentence"),
        Column("without a trace", lambda info: reasons(info.profile)),
    ]


def _first_step(info: ProfileInfo) -> Link | None:
    step = info.profile.first_step
    return None if step is None else ("step", step)


def _cost(what: str, info: ProfileInfo) -> float | None:
    return most_cost(info.profile, what)


def most_cost(profile: Profile, what: str) -> float | None:
    """Return the time of starting, stopping or exporting on the rank where it took longest, ms."""
    return max(filter(None, (getattr(rank, f"{what}_ms") for rank in profile.captured)), default=None)


def step_cost(profile: Profile) -> float | None:
    """Return the cost per recorded step on the rank where it was largest, ms."""
    costs = [
        sum(filter(None, (rank.start_ms, rank.stop_ms, rank.export_ms))) / len(rank.steps)
        for rank in profile.captured
        if rank.steps and rank.stop_ms is not None
    ]
    return max(costs, default=None)


def reasons(profile: Profile) -> str:
    """Return why ranks have no trace: "rank 1: it ended". Ranks with the same reason are listed together."""
    lacking: dict[str, list[int]] = {}
    for rank in profile.ranks:
        if rank.state != "captured":
            lacking.setdefault(rank.reason or rank.state, []).append(rank.rank)
    parts = [f"{text.ranks(ranks)}: {why}" for why, ranks in lacking.items()]
    return "; ".join(filter(None, [profile.error or "", *parts]))


def render_list(profiles: Profiles, folder: Path) -> str:
    """Return the list of the profiles in `folder`."""
    columns = picked(profile_columns({}), "asked for", "id", "ranks", "steps", "from step", "size", "why")
    lines = [] if profiles.now is None else [f"one is being made: {profiles.now.id}"]
    if not profiles.done:
        return "\n".join([f"no profiles in {folder}", *lines]) + "\n"
    return page([Table("Profiles, the oldest first", columns, profiles.done), [f"in {folder}", *lines]])


def _arrived(one: RankProfile) -> str:
    return f"{text.size(one.bytes)} of {text.size(one.total_bytes)}" if one.total_bytes else ""


RANKS = [
    Column("rank", lambda one: one.rank, "figures", link=lambda one: ("rank", one.rank)),
    Column("node", lambda one: one.node or one.hostname or text.NA),
    Column("state", lambda one: one.state),
    Column("steps", lambda one: len(one.steps), "count"),
    Column(
        "from",
        lambda one: one.steps[0].step if one.steps else None,
        "known plain",
        link=lambda one: _step(one),
    ),
    Column("arrived", _arrived, "figures"),
    Column("trace", lambda one: one.total_bytes, "known size"),
    Column("start", lambda one: one.start_ms, "known ms"),
    Column("stop", lambda one: one.stop_ms, "known ms"),
    Column("export", lambda one: one.export_ms, "known ms"),
    Column("why not", lambda one: one.reason),
]
"""Columns of the ranks of a profile."""


def _step(one: RankProfile) -> Link | None:
    return ("step", one.steps[0].step) if one.steps else None


def render_profile(profile: Profile, path: Path) -> str:
    """Return the result of a profile on each rank as text."""
    names = "rank", "node", "state", "trace", "start", "stop", "export", "why not"
    title = f"Profile {profile.id}: {profile.extent}"
    lines = [f"nothing was captured: {profile.error}"] if profile.error else []
    return page([Table(title, picked(RANKS, *names), profile.ranks), [*lines, f"in {path}"]])


def _rank_of(one: Operation) -> Link | None:
    return None if one.rank is None else ("rank", one.rank)


OPERATIONS = [
    Column("node", lambda one: one.node or one.node_id),
    Column("rank", lambda one: one.rank, "plain", link=_rank_of),
    Column("operation", lambda one: one.name, "code"),
    Column("kind", lambda one: one.kind),
    Column("inputs", lambda one: one.input_shapes),
    Column("self CPU ms", lambda one: one.self_cpu_ms, "known three digits"),
    Column("CPU ms", lambda one: one.cpu_ms, "known three digits"),
    Column("self device ms", lambda one: one.self_device_ms, "known three digits"),
    Column("device ms", lambda one: one.device_ms, "known three digits"),
    Column("self CPU memory", lambda one: one.self_cpu_bytes, "known size"),
    Column("self device memory", lambda one: one.self_device_bytes, "known size"),
    Column("calls", lambda one: one.calls, "count"),
]
"""Columns of operations; self: without the operations inside it."""


def render_operations(title: str, operations: Sequence[Operation]) -> str:
    """Return a table of operations. Columns of values that were not recorded are left out."""
    return page([Table(title, OPERATIONS, operations) if operations else [f"{title}: none"]])


def compared_columns(difference: Difference, rows: Sequence[Compared]) -> list[Column]:
    """
    Return the columns for the operations that one rank does more of than others. Columns of the device are
    left out if there was none.
    """
    others = f"rank {difference.others[0]}" if len(difference.others) == 1 else "median"
    device = any(one.self_device_ms is not None for one in rows)
    of_device = [
        Column("self device ms", lambda one: one.self_device_ms, "known three digits"),
        Column(others, lambda one: one.other_self_device_ms, "known three digits"),
    ]
    return [
        Column("operation", lambda one: one.name, "code"),
        Column("kind", lambda one: one.kind),
        Column("more ms", lambda one: one.more_ms, "more of three digits"),
        *([Column("on", lambda one: "device" if one.on_device else "CPU")] if device else []),
        Column("self CPU ms", lambda one: one.self_cpu_ms, "known three digits"),
        Column(others, lambda one: one.other_self_cpu_ms, "known three digits"),
        *(of_device if device else ()),
        Column("calls", lambda one: one.calls, "number"),
        Column(others, lambda one: one.other_calls, "number"),
    ]


def difference_tables(difference: Difference, top: int) -> list[Table]:
    """Return the operations that explain most of a difference, and those in which the rank waits."""
    others = text.ranks(difference.others)
    than = others if len(difference.others) == 1 else f"the median of {others}"
    per = (
        f"per step, of {text.count(difference.steps, 'step')}" if difference.steps else "in all of the trace"
    )
    stage = f", `{difference.stage}` alone" if difference.stage else ""
    titles = {
        f"Rank {difference.rank} compared with {than}, {per}{stage}:": difference.operations,
        "Waiting for other ranks, or for a device (time that no work hides):": difference.waits,
    }
    return [
        Table(title, compared_columns(difference, rows[:top]), rows[:top], empty="Nothing.")
        for title, rows in titles.items()
    ]


def render_difference(difference: Difference, top: int = 15) -> str:
    """
    Return what one rank does more of than others, as text: sentences, then the operations
    that explain most.
    """
    sentences = [sentence[0].upper() + sentence[1:] for sentence in difference.sentences]
    return page([sentences, *difference_tables(difference, top)])
