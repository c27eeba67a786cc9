"""
The sentences that say why no rank is named, one for each condition under which ranks
cannot be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.roles import bubbles
from traceml_ray.analysis.window import Bool, Int64, Window
from traceml_ray.stages import FLAG_DEVICE_CLOCK, SEGMENT_BITS, STAGES, SYNC_WAIT

_ONLY = "only exposed time is reported."
COUPLED = (
    f"Collectives run inside forward and backward, so waiting cannot be separated from work there: {_ONLY}"
)
UNKNOWN = (
    "Nothing shows where these ranks exchange gradients, so waiting cannot be separated from work inside "
    f"forward and backward: {_ONLY}"
)
PIPELINE = f"These ranks are stages of a pipeline, and pipeline stages do different work: {_ONLY}"
TENSOR = (
    "Tensor-parallel collectives run inside forward and backward, so waiting cannot be separated from work "
    f"there: {_ONLY}"
)
_NO_REPLICA = "Each of these ranks holds another part of the model, and no other rank does the same work"
HIDDEN = (
    "Ranks are late in turn, and wait for each other inside forward and backward. Rows do not show whether "
    f"the lateness of one rank adds to that of another or is hidden behind it: {_ONLY}"
)
ON_DEVICE = (
    "Ranks wait for each other in {} on the device, and the clock of these rows does not include such waits: "
    + _ONLY
)
NO_SYNC = f"These ranks do not exchange gradients, so they do not wait for each other: {_ONLY}"

HOST_VARIES = (
    "Host-bound: the devices wait for their hosts, and one of the hosts is always last. The time of its "
    f"stages varies too much to say that it is slower than the others: {_ONLY}"
)
LEADS_UNKNOWN = (
    "A rank is late on its device, but it is not known how far the hosts were ahead of their devices. Its "
    f"host may hold it up by chance: {_ONLY}"
)


def missing_ranks(window: Window) -> str:
    gone = max(window.expected - len(window.ranks), 0)
    begin = ": " if len(window.missing) >= gone else ", the first of them "
    which = f"{begin}{text.ranks(window.missing)}" if window.missing else ""
    verb = "does" if gone == 1 else "do"
    return (
        f"{gone:,} of {text.count(window.expected, 'rank')} {verb} not report{which}. "
        "Too few ranks for a verdict."
    )


def not_aligned(steps: int, gaps: int) -> str:
    if not steps:
        return "No step has been reported by every rank yet."
    return (
        f"Only {steps:,} of {text.count(steps + gaps, 'step')} came from every rank: the rows do not line up."
    )


def absurd_row(window: Window, key: int, place: int) -> str:
    values = [int(value) for value in window.d[key, place]]
    stage = int(np.argmin(values)) if min(values) < 0 else int(np.argmax(values))
    step = int(window.keys[key]) >> SEGMENT_BITS
    who = text.ranks([int(window.ranks[place])])
    return (
        f"{who} ({window.nodes[place]}) reports an impossible duration in step {step:,}: "
        f"{values[stage]:,} ns in `{STAGES[stage]}`."
    )


def too_many(steps: int) -> str:
    return f"{steps:,} steps are too many for one window."


def mixed_clocks(window: Window) -> str:
    device = (window.flags & FLAG_DEVICE_CLOCK != 0).mean(axis=0) > 0.5
    on_cpu = [int(rank) for rank in window.ranks[~device]]
    which = f" (the CPU's: {text.ranks(on_cpu)})" if 0 < len(on_cpu) < len(device) else ""
    return (
        f"Some ranks measure with the device's clock and some with the CPU's{which}: "
        "their rows cannot be compared."
    )


def too_short(mean_ns: float, least_ns: int) -> str:
    return f"A step takes {text.ns(mean_ns)} on average; below {text.ns(least_ns)} timing is mostly noise."


def too_few(steps: int, needed: int, ended: bool) -> str:
    so_far = "" if ended else " so far"
    return f"{text.count(steps, 'step')} after warm-up{so_far}; a verdict needs {needed}."


def roles_differ(window: Window, alone: Bool) -> str:
    numbers = [int(rank) for rank in window.ranks[alone]]
    verb = "takes" if len(numbers) == 1 else "take"
    return f"{text.ranks(numbers)} {verb} no part in the gradient exchange, so roles differ: {_ONLY}"


def unsynced(window: Window, spread: float, together: Sequence[Int64]) -> str:
    differ = f"The ranks' elapsed times differ by {text.share(spread)}"
    if together:
        sets = text.listed([text.ranks(window.ranks[places].tolist()) for places in together])
        return f"{differ} between {sets}, so these groups do not wait for each other: {_ONLY}"
    return f"{differ}, so these ranks do not wait for each other: {_ONLY}"


def no_sync(evidence: Evidence, least: float) -> str:
    """
    Explain that no exchange was seen. Some stages look like waits, for more than `least` of the step, but are
    none.
    """
    waits_ns = float(evidence.rows.d[:, :, SYNC_WAIT].mean(axis=1).sum()) / len(evidence.window.starts)
    if waits_ns < least * evidence.mean_step_ns or None not in evidence.window.groups:
        return NO_SYNC
    return (
        f"These ranks wait for each other in collectives, {text.ns(waits_ns)} a step on average, but none of "
        f"these is known to be the exchange of gradients: {_ONLY}"
    )


def of_roles(evidence: Evidence, waited_ns: Int64) -> str:
    """
    Return why ranks that wait for ranks with other work cannot be compared; "" if their replicas can be
    compared.

    `waited_ns` (K, R) is the time that each rank waited for other roles on its way to each exchange.
    """
    window = evidence.window
    if not evidence.rows.synced.any():
        return _NO_REPLICA + _bubble(window) + f": {_ONLY}"
    return "" if waited_ns.any(axis=0).all() else dependence(window)


def _bubble(window: Window) -> str:
    """Describe which of the ranks waits longest for the others."""
    known = bubbles(window)
    if known is None:
        return ""
    most = int(np.argmax(known))
    who = text.ranks([int(window.ranks[most])])
    share, largest = text.share(float(known.mean())), text.share(float(known[most]))
    return f". They wait for each other for {share} of their time ({who} most, {largest})"


def unclear(window: Window) -> str:
    """Explain that ranks do not all wait for each other in what looked like the exchange."""
    return (
        f"These ranks wait for each other in {functions(window)}, but they do not leave it together in "
        f"every step, so it is not clear which rank waits for which: {_ONLY}"
    )


def functions(window: Window) -> str:
    """Return the functions in which the exchange of gradients appears to happen."""
    return text.listed([f"`{name}`" for name in window.inferred])


def dependence(window: Window) -> str:
    """Describe how the ranks depend on each other besides one exchange per step."""
    parts = {part for strategy in window.strategies for part in strategy.split("+")}
    if not parts:
        return UNKNOWN
    if window.inferred and not parts & {"pp", "tp"}:
        return ON_DEVICE.format(functions(window))
    return PIPELINE if "pp" in parts else TENSOR if "tp" in parts else COUPLED


def replay_misses(off: float) -> str:
    side = "more" if off > 0 else "less"
    return (
        f"Replaying the steps with one common exchange gives {text.share(abs(off))} {side} time than "
        f"was measured, so these ranks depend on each other in another way: {_ONLY}"
    )


def hosts_last(stage: int) -> str:
    """Explain that the hosts set the pace. `stage` is a stage in which a host's own time is not known."""
    return (
        "Host-bound: the devices wait for their hosts, and one of the hosts is always last. Whether it is "
        f"slower than the others is not known: they may wait for devices in `{STAGES[stage]}`, so {_ONLY}"
    )


def host_little(gain: float) -> str:
    """Explain that the rank whose host is last costs no more than a host that is last by chance."""
    return (
        "Host-bound: the devices wait for their hosts, and one of the hosts is always last. That costs "
        f"{text.share(gain)} of the step, too little to say that it is slower than the others: {_ONLY}"
    )
