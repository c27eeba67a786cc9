"""What a report says of how much a run got through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traceml_ray import text
from traceml_ray.reports.layout import Facts


def throughput_facts(summary: Mapping[str, Any]) -> Facts:
    """Return samples and tokens a second, the MFU, and how long the steps to come will take."""
    found = summary.get("throughput")  # older summaries have none
    if not found or not found["steps"]:
        return Facts()
    return Facts(("Throughput", _rates(found)), ("MFU", _mfu(found)), ("Time left", _left(found)))


def _rates(found: Mapping[str, Any]) -> str:
    known = [
        f"{text.number(found[f'{name}_per_s'])} {name}/s"
        for name in ("tokens", "samples")
        if found[f"{name}_per_s"] is not None
    ]
    if not known:
        return ""
    best = f"; the best 5 % of the steps take {text.percent(found['efficiency_pct'])} of the mean one's time"
    return f"{', '.join(known)} of all ranks{best}"


def _mfu(found: Mapping[str, Any]) -> str:
    """Return the MFU, or why FLOPs that were counted or told lead to none."""
    if found["mfu_pct"] is None:
        return f"not known: {found['why']['mfu']}" if found["step_flops"] else ""
    counted = f" in step {found['flops_step']:,}" if found["flops_step"] is not None else ""
    flops = f"{text.flops(found['step_flops'])} a step, {found['flops_from']}{counted}"
    device = f" {found['device']}" if found["device"] else " device"
    dtype = f" in {found['dtype']}" if found["dtype"] else ""
    peak = f"{text.number(found['peak_tflops'])} TFLOP/s{dtype} of {found['devices']} ×{device}"
    return f"{text.percent(found['mfu_pct'])} of the {peak}: {flops}"


def _left(found: Mapping[str, Any]) -> str:
    if found["eta_s"] is None:
        return ""
    return (
        f"{text.duration(found['eta_s'])} of {text.count(found['total_steps'], 'step')}, as the recent ones"
    )
