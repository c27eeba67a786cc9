"""
The sentences of findings about memory: one plain sentence, and what to do.

Also the sentences about memory in a verdict: how much is left, and what grew before a rank ran out of memory.
"""

from __future__ import annotations

import signal
from collections.abc import Collection

from traceml_ray import text
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.signals.memory.limits import MEMORY, MemoryLimits
from traceml_ray.signals.memory.shapes import Counter, Kind, Memory, MemoryFinding
from traceml_ray.signals.memory.shifts import Full, Shift, Spikes
from traceml_ray.signals.memory.tracks import Place
from traceml_ray.signals.memory.trend import Forecast, Ramp

COUNTERS: dict[Counter, str] = {
    "allocated_bytes": "allocated memory",
    "gap_bytes": "memory outside torch's allocator",
    "rss_bytes": "host memory",
}
NEXT: dict[Kind, list[str]] = {
    "persistent_drift": [
        "Look for process groups, CUDA graphs or library handles that are created repeatedly.",
        "Run with NCCL_DEBUG=INFO to see which communicators are made, and when.",
    ],
    "step_change": [
        "If it coincides with the first use of a library or a process group, plan for that much less memory.",
        "Otherwise look for another process on the device (nvidia-smi) and for allocations outside torch.",
    ],
    "transient_spike": [
        "Look at what runs then: validation, a checkpoint, a first batch of a new shape.",
    ],
    "fragmentation": [
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        "Keep the shapes of batches the same, or pad them to a few sizes.",
    ],
    "creep": [
        "Look for tensors that are kept from step to step: a list of losses without .item() or .detach(), "
        "hooks, a cache that grows.",
    ],
    "near_limit": [
        "Use a smaller batch, activation checkpointing, or shard optimizer states.",
    ],
    "imbalance": [
        "Look for memory that only this rank has: a checkpoint loaded to its device, gathered metrics, data.",
    ],
}
_NEXT_HOST = [
    "Look for Python objects that are kept from step to step: lists of results, a cache in the dataset.",
    "Datasets that hold Python lists grow in each DataLoader worker: use arrays or tensors instead.",
]
_NEXT_HOST_LIMIT = [
    "Use fewer DataLoader workers or a smaller prefetch_factor, or ask for more memory.",
]
_NEXT_HISTORY = "Run with TRACEML_MEMORY_HISTORY=1: the next bundle shows which lines allocated it."


def where(rank: int, node: str, device: int | None) -> str:
    """Return "Rank 5 (node-a, device 0)"."""
    about = ", ".join(filter(None, (node, "" if device is None else f"device {device}")))
    return f"Rank {rank} ({about})" if about else f"Rank {rank}"


def next_of(kind: Kind, device: int | None) -> list[str]:
    """Return what to do about a finding, one to three lines."""
    if device is None:
        return _NEXT_HOST if kind == "creep" else _NEXT_HOST_LIMIT if kind == "near_limit" else NEXT[kind]
    return [*NEXT[kind], _NEXT_HISTORY] if kind == "creep" else NEXT[kind]


def growing(rank: int, node: str, device: int | None, counter: Counter, ramp: Ramp) -> str:
    """Return the beginning of the sentence about a creep or a drift. `lasts` returns its end."""
    slope = text.size(ramp.recent, "/s")
    if ramp.slope_step is not None:
        slope = f"{text.size(ramp.slope_step * ramp.recent / ramp.slope)} a step"
    how = {"line": "", "slows": " of late, more and more slowly", "quickens": " of late, faster and faster"}
    since = "" if ramp.from_step is None else f" since step {ramp.from_step:,}"
    return (
        f"{where(rank, node, device)}: {COUNTERS[counter]} grows by {slope}{how[ramp.bend]}, "
        f"{text.size(ramp.grown)} in {text.duration(ramp.seconds)}{since}"
    )


def lasts(left: Forecast | None, upper_bound: bool, host: tuple[int, float] | None) -> str:
    """
    Return the end of that sentence: how long memory lasts.

    Args:
        left: the forecast. None: not known.
        upper_bound: whether less may be left than is known.
        host: (number of ranks of the host that grow, bytes per second by which they grow together).
    """
    if left is None:
        return "; how much is left is not known."
    rate = "at this rate"
    if host is not None:
        rate = (
            f"{text.count(host[0], 'rank')} of this host grow, by {text.size(host[1], '/s')} together: {rate}"
        )
    bound = "at least " if left.earliest else "at most " if upper_bound else ""
    return f"; {rate} {bound}{left_words(left.s, left.steps)} of memory left."


def left_words(seconds: float, steps: int | None) -> str:
    """Return "41 steps (4.1 s)"."""
    if steps is None:
        return text.duration(seconds)
    return f"{text.count(steps, 'step')} ({text.duration(seconds)})"


def shifted(place: Place, counter: Counter, shift: Shift) -> str:
    """Return the sentence of a step that is held."""
    when = "" if shift.step is None else f" at step {shift.step:,}"
    if shift.took_s:
        when = f" in {text.duration(shift.took_s)}{when and f' from step {shift.step:,} on'}"
    return (
        f"{where(place.rank, place.node, place.device)}: {COUNTERS[counter]} rose once by "
        f"{text.size(shift.delta)}{when}, from {text.size(shift.level)}, and stayed there."
    )


def spiking(place: Place, counter: Counter, rises: Spikes) -> str:
    """Return the sentence of the spikes of a counter."""
    often = "once" if rises.count == 1 else f"{rises.count:,} times"
    return (
        f"{where(place.rank, place.node, place.device)}: {COUNTERS[counter]} rose for a short time {often} "
        f"(in {text.share(rises.samples / rises.of_samples)} of the samples), by up to "
        f"{text.size(rises.peak)}, and went back."
    )


def fragmented(place: Place, inactive: float, reserved: float) -> str:
    """Return the sentence of fragmentation."""
    return (
        f"{where(place.rank, place.node, place.device)}: {text.share(inactive / reserved)} of what torch's "
        f"allocator holds ({text.size(inactive)} of {text.size(reserved)}) is free, but in pieces of blocks "
        "in use."
    )


def near_limit(rank: int, node: str, device: int | None, full: Full) -> str:
    """Return the sentence of memory that is nearly full."""
    what = "of the host's limit" if device is None else "of the device's memory"
    sentence = (
        f"{where(rank, node, device)}: {text.share(full.used / full.total)} {what} is used "
        f"({text.size(full.used)} of {text.size(full.total)})"
    )
    if full.cached:
        sentence += f", {text.size(full.cached)} of that is free in torch's cache"
    return sentence + (
        "." if full.full_s is None else f"; at this rate it is full in {text.duration(full.full_s)}."
    )


GROWTH = ("creep", "persistent_drift")
"""Kinds of findings about continuing growth, which have a forecast."""


def cause_of_death(memory: Memory, verdict: Verdict) -> str:
    """Return what memory did before the death that `verdict` is about. "" if nothing is known."""
    if verdict.label == "oom":
        return cause(memory, verdict.ranks, verdict.node)
    if verdict.exit_reason == signal.SIGKILL.name:  # the kernel may have killed it because memory ran out
        return _before(memory, verdict.ranks)
    return ""


def cause(memory: Memory, dead: Collection[int], node: str | None) -> str:
    """
    Return what grew before the ranks `dead` ran out of memory: their own memory, or that of another rank of
    the same node. If nothing grew, says so; "" if that is not known.
    """
    if before := _before(memory, dead):
        return before
    grown = [finding for finding in memory.findings if finding.kind in GROWTH]
    same = [finding for finding in grown if finding.node == node and finding.device is None]
    if same:
        return _grew(same[0], f"It was on the same node as rank {same[0].rank}, whose")
    samples = [row.samples for row in memory.ranks if row.rank in dead]
    if samples and max(samples) >= MEMORY.short_samples:
        return "Its memory had not grown up to its last sample: the next allocation was too large."
    return ""


def _before(memory: Memory, dead: Collection[int], limits: MemoryLimits = MEMORY) -> str:
    """Return what the memory of the ranks `dead` did before their end. "" if it had not grown."""
    of_dead = [finding for finding in memory.findings if finding.rank in dead]
    grown = [finding for finding in of_dead if finding.kind in GROWTH]
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
    above = [finding for finding in of_dead if finding.kind == "imbalance"]
    if above:
        return f"{above[0].why.removesuffix('.')}, before it ended."
    return ""


def _grew(finding: MemoryFinding, whose: str) -> str:
    counter: Counter = "rss_bytes" if finding.device is None else "allocated_bytes"
    if finding.kind == "persistent_drift":
        counter = "gap_bytes"
    evidence = finding.evidence
    per_step, grown, since = (evidence[name] for name in ("bytes_per_step", "grown_bytes", "from_step"))
    slope = f" {text.size(per_step)} a step," if isinstance(per_step, float) else ""
    step = f" since step {since:,}" if isinstance(since, int) else ""
    size = text.size(grown) if isinstance(grown, int) else text.NA
    return f"{whose} {COUNTERS[counter]} had grown by{slope} {size} in all{step}."
