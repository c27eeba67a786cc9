"""How much a job gets through: samples, tokens and FLOPs a second, and when it will be over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.kept_steps import ALL
from traceml_ray.analysis.roles import mixed
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.window import Bool, Float, missing_of
from traceml_ray.signals.throughput.history import AMOUNTS, WorkHistory
from traceml_ray.signals.throughput.peaks import peak_tflops

_IDEAL = 0.05
"""The share of the steps that are what the run itself could do at best."""
_RECENT, _FEW = 0.25, 200
"""Steps to come take as long as this share of those so far, or as so many of them, evaluations included."""
_SAME = 0.01
"""By how much more one role may have had than another, which has the same samples."""
_LINE = 300
"""Columns of what is drawn."""
_SHARED = ("tp", "pp", "cp")
"""Parts of a strategy in which several ranks have the same samples."""
NUMBERS = (
    *("steps_per_s", "samples_per_step", "tokens_per_step", "samples_per_s", "tokens_per_s", "step_flops"),
    *("peak_tflops", "mfu_pct", "efficiency_pct", "total_steps", "eta_s"),
)


def throughput(
    history: StepHistory,
    work: WorkHistory,
    processes: Mapping[int, int],
    world: int,
    *,
    whole: bool,
    over: bool,
    missing: Mapping[str, str],
) -> dict[str, Any]:
    """
    Return the numbers, see `step_shapes.Throughput`; what is not known is None, and `why` says why.

    Args:
        history: the steps of the run.
        work: what its rank processes were trained on.
        processes: the rank process of each rank.
        world: how many ranks the job has.
        whole: over all steps, not the newest.
        over: the run is over: nothing is to come.
        missing: why ranks know less.
    """
    newest = None if whole else history.limits.window_steps
    stats, ranks = history.stats(newest), history.ranks
    found: dict[str, Any] = {**dict.fromkeys(NUMBERS), "steps": 0, "ranks": ranks, "why": {}, **_NO_LINE}
    found |= {f"rank_{name}_per_s": np.full(len(ranks), np.nan) for name in AMOUNTS}
    found |= {"device": None, "devices": None, "dtype": None, "flops_from": None, "flops_step": None}
    step_s = float(stats.exposed.sum()) / 1e3 if stats is not None else 0.0
    own = [processes[rank] for rank in ranks if rank in processes]
    if stats is None or not step_s or len(own) < len(ranks):
        return {**found, "why": {"steps": _no_steps(history, world, over)}}
    found |= {"steps": stats.steps, "steps_per_s": 1 / step_s}
    found["efficiency_pct"] = min(100.0, 100 * stats.step(_IDEAL)[0] / 1e3 / step_s)
    per_step = work.per_step(own, *stats.between)
    counted: dict[str, Any] = {}
    for name, amount in zip(AMOUNTS, per_step, strict=True):
        found[f"rank_{name}_per_s"] = amount / step_s
        counted[name] = _counted(name, amount, history, world, missing)
        if isinstance(counted[name], str):
            found["why"][name] = counted[name]
        else:
            total = float(amount[counted[name]].sum())
            found |= {f"{name}_per_step": total, f"{name}_per_s": total / step_s}
    facts = {rank: work.facts.get(processes[rank], {}) for rank in ranks}
    found |= _flops(facts, history, world, step_s, found["why"], missing)
    found["total_steps"] = steps = _most(each.get("total_steps") for each in facts.values())
    found["eta_s"] = None if over or steps is None else _left_s(history, steps)
    own_of = {name: np.array(own)[of].tolist() for name, of in counted.items() if not isinstance(of, str)}
    return found | _line(history, work, own_of, whole, found)


def _no_steps(history: StepHistory, world: int, over: bool) -> str:
    """Return why nothing is known."""
    yet, reported = "" if over else " yet", history.reported()
    if not reported:
        return f"no rank has reported a step{yet}"
    if silent := missing_of(world, sorted(reported)):
        return f"{text.ranks(silent)} of {world} did not report{yet}"
    return f"the ranks have not closed two steps together{yet}"


_NO_LINE: dict[str, Any] = {
    name: np.empty(0)
    for name in ("line_steps_per_s", "line_samples_per_s", "line_tokens_per_s", "line_mfu_pct")
}


def _counted(
    name: str, amount: Float, history: StepHistory, world: int, missing: Mapping[str, str]
) -> Bool | str:
    """
    Return the ranks (R,) whose samples add up to those of the job, or why that is not known. Ranks of one
    replica of the model have the same samples, as far as they have any: those of one role are added up.
    """
    if silent := missing_of(world, history.ranks):
        return f"{text.ranks(silent)} of {world} did not report"
    who = [history.who[rank] for rank in history.ranks]
    shared = {part for each in who for part in (each.strategy or "").split("+")} & {*_SHARED}
    if not shared and len({each.role for each in who}) < 2:
        return _lacking(name, amount, history.ranks, missing) or np.ones(len(who), bool)
    if None in (roles := [each.role for each in who]):
        return f"ranks of one replica of the model have the same samples ({', '.join(sorted(shared))})"
    if names := {both for role in roles if role and (both := mixed(role))}:
        return (
            f"not known which ranks have the same samples: `{min(names)}` of the device mesh is of both kinds"
        )
    of_role = [np.array([own == role for own in roles]) for role in dict.fromkeys(roles)]
    sums = np.array([amount[role].sum() for role in of_role])
    if np.isnan(sums).all():
        return _lacking(name, amount, history.ranks, missing) or ""
    if np.nanmax(sums) > (1 + _SAME) * np.nanmin(sums):
        return "ranks of one replica of the model have had different batches"
    return of_role[int(np.nanargmax(sums))]


def _lacking(name: str, amount: Float, ranks: Sequence[int], missing: Mapping[str, str]) -> str | None:
    """Return why an amount is not known of all ranks, None where it is."""
    unknown = [rank for rank, value in zip(ranks, amount, strict=True) if np.isnan(value)]
    if not unknown:
        return None
    who = "" if len(unknown) == len(ranks) else f"{text.ranks(unknown)}: "
    usual = "no batch with `input_ids` was seen" if name == "tokens" else "no batch of a loader was seen"
    return f"{who}{missing.get('samples') or usual}; traceml_ray.count({name}=…) tells it"


def _flops(
    facts: Mapping[int, Mapping[str, Any]],
    history: StepHistory,
    world: int,
    step_s: float,
    why: dict[str, str],
    missing: Mapping[str, str],
) -> dict[str, Any]:
    """Return the FLOPs of a step, what the devices could do, and the share of it."""
    found: dict[str, Any] = {}
    told = _same(facts, "job_flops")
    counted = [each["flops"] for each in facts.values() if each.get("flops")]
    if told is not None:
        found |= {"step_flops": float(told), "flops_from": "told"}
    elif len(counted) == world:
        found |= {"step_flops": float(sum(counted)), "flops_from": "counted"}
        found["flops_step"] = _same(facts, "flops_step")
    else:
        some = f"counted on {len(counted)} of {world} ranks" if counted else ""
        why["mfu"] = (
            missing.get("flops") or some or "FLOPs are counted with --flops, or told with --model-flops"
        )
    found |= {"device": _same(facts, "device"), "dtype": _same(facts, "dtype")}
    devices = {(history.who[rank].node, each.get("device_id") or rank) for rank, each in facts.items()}
    found["devices"] = len(devices)
    peak = _peak(facts)
    if isinstance(peak, str):
        why.setdefault("mfu", peak)
    elif len(facts) == world:
        found["peak_tflops"] = peak * len(devices)
        if "step_flops" in found:
            found["mfu_pct"] = 100 * found["step_flops"] / step_s / (found["peak_tflops"] * 1e12)
    return found


def _peak(facts: Mapping[int, Mapping[str, Any]]) -> float | str:
    """Return what one device can do, or why that is not known."""
    if (given := _same(facts, "peak_tflops")) is not None:
        return float(given)
    device, dtype = _same(facts, "device"), _same(facts, "dtype")
    tell = "--device-peak-tflops tells it"
    if device is None:
        return f"the ranks' devices are not known, or not all the same; {tell}"
    if dtype is None:
        return f"not known what the step is computed with (--flops shows it), so no peak; {tell}"
    known = peak_tflops(device, dtype)
    return f"the peak of {device} in {dtype} is not known; {tell}" if known is None else known


def _same(facts: Mapping[int, Mapping[str, Any]], name: str) -> Any:
    """Return what all ranks that say it say, None where they differ."""
    said = {each[name] for each in facts.values() if each.get(name) is not None}
    return said.pop() if len(said) == 1 else None


def _left_s(history: StepHistory, total: int) -> float:
    """Return how long the steps to come will take, as the recent ones did."""
    line = history.timeline(history.ranks[0])
    done = line.last - line.first + 1
    recent = max(_FEW, int(_RECENT * float(done.sum())))
    last_at = np.searchsorted(-np.cumsum(done[::-1])[::-1], -recent, "right") - 1
    at = max(int(last_at), 0)
    each_s = float(line.took[at:].sum()) / 1e9 / max(1, int(done[at:].sum()))
    return max(0, total - int(line.last[-1]) - 1) * each_s


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _line(
    history: StepHistory,
    work: WorkHistory,
    counted: Mapping[str, Sequence[int]],
    whole: bool,
    found: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the same by step, for drawing; `counted`: the rank processes whose samples and tokens add up."""
    _, last, ms = history.step_means(ALL if whole else None, _LINE)
    per_s = np.where(ms > 0, 1e3 / np.where(ms > 0, ms, 1), np.nan)
    line = {"line_steps_per_s": per_s}
    for name, processes in counted.items():
        line[f"line_{name}_per_s"] = getattr(work.at(processes, last), name) * per_s
    if found["mfu_pct"] is not None:
        line["line_mfu_pct"] = found["mfu_pct"] / found["steps_per_s"] * per_s
    return line
