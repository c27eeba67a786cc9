"""What is to be said about the memory of a run's ranks: from a session file, in the summary, and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.identity import RankFilter
from traceml_ray.reports.analyze import judged
from traceml_ray.reports.layout import Facts
from traceml_ray.reports.run_facts import RunFacts
from traceml_ray.signals.memory.recordings import merge
from traceml_ray.signals.memory.shapes import Memory
from traceml_ray.signals.memory.stored import recordings_of
from traceml_ray.store.session_file import SessionFile

_FINDINGS = 100
"""Of a summary."""


def memory_of(file: SessionFile) -> Memory:
    """Return what is to be said about the memory of the ranks of a file's run; empty without any sample."""
    run = file.run_id()
    recordings = [recording for recording in recordings_of(file) if recording.run == run]
    return judged(merge(recordings), RankFilter(), "medium") if recordings else Memory()


def memory_block(facts: RunFacts, memory: Memory) -> dict[str, Any]:
    """Return the memory of each rank's process, and what was `found` about it, for the summary."""
    resident, allocated = facts.session.memory(), facts.session.allocated_peaks()
    per_rank = {}
    for rank, process in facts.ranks.items():
        peak, last = resident.get(process.id, (None, None))
        per_rank[str(rank)] = {
            "rss_peak_bytes": peak,
            "rss_last_bytes": last,
            "allocated_peak_bytes": allocated.get(process.id),
        }
    shown: dict[str, Any] = msgspec.to_builtins(
        msgspec.structs.replace(memory, findings=memory.findings[:_FINDINGS])
    )
    kept = "first_cause", "collective_onset", "findings", "missing_ranks"
    return {"per_rank": per_rank, **{name: shown[name] for name in kept}}


def memory_facts(block: Mapping[str, Any]) -> Facts:
    """Return of which ranks nothing is known about memory, where something was found of others."""
    missing = block["missing_ranks"] if block["findings"] else ()
    return Facts(("Memory", f"There are no samples of {text.ranks(missing)}." if missing else ""))


def first_words(memory: Memory) -> Sequence[str]:
    """Return in sentences which rank's memory grew first, or that none did, and who is missing."""
    cause, onset = memory.first_cause, memory.collective_onset
    if cause is not None:
        sentences = [cause.why, *cause.next[:1]]
    elif onset is not None:
        sentences = [onset.why]
    elif memory.findings:
        sentences = [memory.findings[0].why, *memory.findings[0].next[:1]]
    else:
        sentences = ["No rank's memory has grown above its own level."]
    return [*sentences, *missing_words(memory)]


def missing_words(memory: Memory) -> Sequence[str]:
    """Return in a sentence of which ranks there are no samples; none where there are of all."""
    ranks = memory.missing_ranks
    return [f"There are no samples of {text.ranks(ranks)}."] if ranks else []
