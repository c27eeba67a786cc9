"""What to do about a verdict that names no rank because the ranks' devices have no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from traceml_ray import text
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.wire.messages import CLOSED, DEVICE_CLOCK

_SETTING = "TRACEML_DEVICE_CLOCK"
_TURN_ON = (
    f"Set {_SETTING}=1: then late ranks are named on CUDA as well, by the device's clock. By "
    "default it is not read in steps that are shorter than 40 ms."
)
_OTHERWISE = {"tp", "pp"}
"""Ranks that depend on each other in another way, with a device clock or without."""


def with_advice(verdict: Verdict, processes: Iterable[RankProcess]) -> Verdict:
    """
    Return `verdict`, that of CUDA ranks with how to have them judged, or why they are not; and with what it
    is not of, where device clocks have ended themselves.
    """
    all_processes = [*processes]
    verdict = msgspec.structs.replace(
        verdict, note="; ".join(filter(None, (verdict.note, _closed(all_processes))))
    )
    if verdict.label != "accounting_only":
        return verdict
    for process in all_processes:
        why = process.missing.get(DEVICE_CLOCK)
        if why and not _OTHERWISE & {*(process.strategy or "").split("+")}:
            advice = _TURN_ON if _SETTING in why else f"The device's clock is not read: {why}."
            return msgspec.structs.replace(verdict, next=f"{advice} {verdict.next}")
    return verdict


def _closed(processes: Sequence[RankProcess]) -> str:
    """Return which ranks' device clocks have ended themselves, the first with its step and reason; or ""."""
    closed = {
        process.identity.global_rank: why.removeprefix(CLOSED).strip()
        for process in processes
        if process.identity and (why := process.missing.get(DEVICE_CLOCK, "")).startswith(CLOSED)
    }
    if not closed:
        return ""
    rank = min(closed)
    step, _, why = closed[rank].partition(": ")
    others = f", and later or then that of {text.count(len(closed) - 1, 'other rank')}" * (len(closed) > 1)
    return (
        f"rank {rank}'s device clock closed at step {step}{others}: {why}. Steps from there on are not on "
        "the device's clock, so they are not compared with those that are"
    )
