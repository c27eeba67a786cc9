"""What a verdict says about memory: how much is left, and what grew before a rank died of it."""

from __future__ import annotations

import signal
from collections.abc import Collection

import msgspec

from traceml_ray import text
from traceml_ray.analysis.labels import DEATHS
from traceml_ray.analysis.memory.limits import MEMORY, MemoryLimits
from traceml_ray.analysis.memory.sentences import COUNTERS, left_words
from traceml_ray.analysis.memory.shapes import Counter, Finding, Memory
from traceml_ray.analysis.verdict import Verdict

GROWTH = ("creep", "persistent_drift")
"""Kinds of findings that go on, with a forecast."""


def with_memory(verdict: Verdict, memory: Memory) -> Verdict:
    """Return `verdict` with what is to be said about memory; itself where that is nothing."""
    if verdict.label == "oom":
        said = cause(memory, verdict.ranks, verdict.node)
    elif verdict.exit_reason == signal.SIGKILL.name:  # it may be the kernel's, of memory that ran out
        said = _before(memory, verdict.ranks)
    else:
        said = "" if verdict.label in DEATHS else left(memory)
    return msgspec.structs.replace(verdict, why=f"{verdict.why} {said}") if said else verdict


def left(memory: Memory, limits: MemoryLimits = MEMORY) -> str:
    """
    Return "Rank 5: 41 steps (4.1 s) of memory left.", of the rank that has least, where memory runs out
    within an hour for sure; else "".
    """
    ends = sorted(
        (seconds, finding.rank, finding)
        for finding in memory.findings
        if finding.kind in GROWTH
        and finding.severity == "critical"
        and isinstance(seconds := finding.evidence["forecast_s"], float)
        and seconds <= limits.critical_s
    )
    if not ends:
        return ""
    seconds, rank, finding = ends[0]
    steps, ranks_of_host = (finding.evidence.get(name) for name in ("forecast_steps", "host_ranks"))
    much = left_words(seconds, steps if isinstance(steps, int) else None)
    if isinstance(ranks_of_host, int):
        others = len({finding.node for _, _, finding in ends} - {finding.node})
        also = f"; {text.count(others, 'other node')} not much more" if others else ""
        growing = text.count(ranks_of_host, "rank")
        return f"Node {finding.node}: {much} of host memory left, as {growing} grow{also}."
    others = len({rank for _, rank, _ in ends}) - 1
    also = f"; {text.count(others, 'other rank')} not much more" if others else ""
    return f"Rank {rank}: {much} of memory left{also}."


def cause(memory: Memory, dead: Collection[int], node: str | None) -> str:
    """
    Return what had grown before the ranks `dead` died of lack of memory: their own memory, or that of a rank
    of the same node; that nothing had, or "" where that is not known.
    """
    if own := _before(memory, dead):
        return own
    grown = [finding for finding in memory.findings if finding.kind in GROWTH]
    same = [finding for finding in grown if finding.node == node and finding.device is None]
    if same:
        return _grew(same[0], f"It was on the same node as rank {same[0].rank}, whose")
    samples = [row.samples for row in memory.ranks if row.rank in dead]
    if samples and max(samples) >= MEMORY.short_samples:
        return "Its memory had not grown up to its last sample: what it asked for after that was too much."
    return ""


def _before(memory: Memory, dead: Collection[int], limits: MemoryLimits = MEMORY) -> str:
    """Return what the memory of the ranks `dead` had done before their end; "" where it had not grown."""
    own = [finding for finding in memory.findings if finding.rank in dead]
    grown = [finding for finding in own if finding.kind in GROWTH]
    if grown:
        return _grew(grown[0], f"Rank {grown[0].rank}'s")
    rows = [row for row in memory.ranks if row.rank in dead]
    row = max(rows, key=lambda row: row.rise_bytes or 0, default=None)
    if row is not None and (row.rise_bytes or 0) >= limits.min_growth_bytes:
        what = COUNTERS["rss_bytes" if row.device is None else "allocated_bytes"]
        return f"Rank {row.rank}'s {what} was {text.size(row.rise_bytes)} above its usual level at the end."
    for incident in reversed(memory.incidents):
        if incident.rank in dead:
            what = f"{COUNTERS[incident.counter]} had grown by {text.size(incident.delta_bytes)}"
            return f"Rank {incident.rank}'s {what} above its own level."
    above = [finding for finding in own if finding.kind == "imbalance"]
    if above:
        return f"{above[0].why.removesuffix('.')}, before it ended."
    return ""


def _grew(finding: Finding, whose: str) -> str:
    counter: Counter = "rss_bytes" if finding.device is None else "allocated_bytes"
    if finding.kind == "persistent_drift":
        counter = "gap_bytes"
    evidence = finding.evidence
    per_step, grown, since = (evidence[name] for name in ("bytes_per_step", "grown_bytes", "from_step"))
    slope = f" {text.size(per_step)} a step," if isinstance(per_step, float) else ""
    step = f" since step {since:,}" if isinstance(since, int) else ""
    size = text.size(grown) if isinstance(grown, int) else text.NA
    return f"{whose} {COUNTERS[counter]} had grown by{slope} {size} in all{step}."
