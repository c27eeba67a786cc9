"""
The manifest of an incident, `manifest.json` of its bundle: which ranks are concerned, when and why. Also the
stacks in the bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec import to_builtins
from msgspec.structs import asdict

from traceml_ray import __version__
from traceml_ray.analysis.window import missing_of
from traceml_ray.document.model import Column, Link, Table, picked
from traceml_ray.document.text import page
from traceml_ray.reports.deaths import Death, culprits, headline
from traceml_ray.reports.run_facts import RunFacts, alike, deaths_of, moment, ranks_block
from traceml_ray.signals.output.view import REPORTED_LINES, outputs_of
from traceml_ray.store.bundles import FOLDER, REASONS, BundleCause, Manifest, Reason, bundles_of
from traceml_ray.store.results import BundleInfo, EventRow

_STACKS_NS = 60_000_000_000
"""
Largest age of stacks before the first cause, in ns. Older ones do not belong to the incident. A hang is
noticed late.
"""


def reason_of(death: Death) -> Reason:
    """Return the death of a rank as the reason of a bundle."""
    if death.out_of_memory:
        return "oom"
    return "exception" if death.message or (death.exit_code or -1) > 0 else "killed"


def manifest_of(
    facts: RunFacts, causes: Sequence[BundleCause], session: str, settings: Mapping[str, str]
) -> Manifest:
    """
    Return the manifest of an incident with one or more `causes`, with the facts known now.

    Args:
        facts: facts of the causes' run.
        causes: causes in order of arrival.
        session: name of the session.
        settings: settings of the session that differ from the defaults.
    """
    all_deaths = facts.deaths if any(cause.fatal for cause in causes) else []
    head = _of_death(facts, all_deaths) if all_deaths else _of_cause(facts, causes)
    t_ns = min(cause.t_ns for cause in causes)
    named = facts.processes_of([] if head["rank"] is None else [head["rank"]], all_deaths)
    printed = outputs_of(facts.session, named, REPORTED_LINES)
    return Manifest(
        session=session,
        run=facts.run.get("id"),
        time=cast("str", moment(t_ns)),
        t_ns=t_ns,
        output=printed,
        causes=list(causes),
        deaths=[asdict(death) for death in deaths_of(facts)] if all_deaths else [],
        ranks=to_builtins(ranks_block(facts, all_deaths)),
        silent_ranks=missing_of(facts.world_size, facts.ranks),
        environment=alike(facts, lambda process: process.environment),
        memory_from=alike(facts, lambda process: process.memory_from),
        settings=dict(settings),
        traceml_ray=__version__,
        files={},
        **head,
    )


def _of_death(facts: RunFacts, all_deaths: list[Death]) -> dict[str, Any]:
    """Return the fields of a manifest that describe the first death."""
    death = culprits(all_deaths)[0]
    why = headline(all_deaths, lambda one: facts.node_of(one.rank), facts.ranks, facts.world_size).why
    return {
        "reason": reason_of(death),
        "why": why,
        "rank": death.rank,
        "node": facts.node_of(death.rank),
        "step": death.last_step,
        "stage": death.stage,
        "exception": death.message or None,
        "traceback": death.traceback,
    }


def _of_cause(facts: RunFacts, causes: Sequence[BundleCause]) -> dict[str, Any]:
    """Return the fields of a manifest that describe the most important cause."""
    cause = min(causes, key=lambda cause: REASONS.index(cause.reason))
    return {
        "reason": cause.reason,
        "why": cause.why,
        "rank": cause.rank,
        "node": None if cause.rank is None else facts.node_of(cause.rank),
        "step": cause.step,
        "stage": cause.stage,
        "exception": cause.error,
        "traceback": cause.traceback,
    }


def stacks_of(facts: RunFacts, t_ns: int) -> str:
    """Return the newest stacks of each rank since shortly before `t_ns`, as text; "" if there are none."""
    newest: dict[int, EventRow] = {}
    for event in facts.events:
        if event.kind == "stacks" and event.t_ns > t_ns - _STACKS_NS and event.rank is not None:
            newest[event.rank] = event
    parts = []
    for rank, event in sorted(newest.items()):
        where = facts.node_of(rank)
        title = f"rank {rank}{f' ({where})' if where else ''}, {moment(event.t_ns)}"
        state = event.data.get("state")
        parts.append("\n".join([title, "=" * len(title), *[f"{state}"] * bool(state), event.message]))
    return "\n\n".join(parts) + "\n" if parts else ""


def bundle_infos(folder: Path) -> list[BundleInfo]:
    """Return the bundles in a session folder, the oldest first."""
    return [
        BundleInfo(
            name=bundle.path.name,
            path=str(bundle.path),
            bytes=sum(bundle.files.values()),
            files=bundle.files,
            requests=[cause.request for cause in bundle.manifest.causes if cause.request is not None],
            reason=bundle.manifest.reason,
            time=bundle.manifest.time,
            why=bundle.manifest.why,
            run=bundle.manifest.run,
            rank=bundle.manifest.rank,
            node=bundle.manifest.node,
            step=bundle.manifest.step,
        )
        for bundle in bundles_of(folder)
    ]


BUNDLES = [
    Column("began", lambda one: one.time, "date"),
    Column("reason", lambda one: one.reason),
    Column("rank", lambda one: one.rank, "known plain", link=lambda one: _linked("rank", one.rank)),
    Column("step", lambda one: one.step, "known plain", link=lambda one: _linked("step", one.step)),
    Column("why", lambda one: one.why, "sentence"),
    Column("size", lambda one: one.bytes, "size"),
    Column("folder", lambda one: one.name),
]


def _linked(page_of: str, number: int | None) -> Link | None:
    return None if number is None else (page_of, number)


def render_bundles(bundles: Sequence[BundleInfo], folder: Path) -> str:
    """Return the list of bundles as text."""
    columns = picked(BUNDLES, "began", "reason", "why", "size", "folder")
    if not bundles:
        return f"no bundles in {folder / FOLDER}\n"
    return page([Table("Bundles, the oldest first", columns, bundles), [f"in {folder / FOLDER}"]])
