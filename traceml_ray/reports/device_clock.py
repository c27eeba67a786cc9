"""What to do about a verdict that names no rank because the ranks' devices have no clock."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.wire import DEVICE_CLOCK

_SETTING = "TRACEML_DEVICE_CLOCK"
_TURN_ON = (
    f"Set {_SETTING}=1: then late ranks are named on CUDA as well, by the device's clock. It is off by "
    "default until a real device has confirmed it."
)
_OTHERWISE = {"tp", "pp"}
"""Ranks that depend on each other in another way, with a device clock or without."""


def with_advice(verdict: Verdict, processes: Iterable[RankProcess]) -> Verdict:
    """Return `verdict`, that of CUDA ranks with how to have them judged, or why they are not."""
    if verdict.label != "accounting_only":
        return verdict
    for process in processes:
        why = process.missing.get(DEVICE_CLOCK)
        if why and not _OTHERWISE & {*(process.strategy or "").split("+")}:
            advice = _TURN_ON if _SETTING in why else f"The device's clock is not read: {why}."
            return msgspec.structs.replace(verdict, next=f"{advice} {verdict.next}")
    return verdict
