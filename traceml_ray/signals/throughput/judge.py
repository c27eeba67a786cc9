"""How much a job gets through: samples, tokens and FLOPs a second, and when it will be over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.roles import mixed
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_store import ALL
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


class ThroughputNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """
    How much a job gets through, over `steps` steps. What would be a guess is None, and `why` has the reason,
    by `samples`, `tokens` and `mfu`; by `steps` where there are none, and so nothing is known.
    """

    steps: int = 0
    steps_per_s: float | None = None
    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    """Tokens of all ranks in a step; padding counts."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_flops: float | None = None
    """FLOPs of the model in one step of all ranks."""
    flops_from: str | None = None
    """`counted` once, in step `flops_step`, or `told`."""
    flops_step: int | None = None
    peak_tflops: float | None = None
    """What all `devices` together can do, in 10¹² FLOPs a second."""
    devices: int | None = None
    device: str | None = None
    dtype: str | None = None
    mfu_pct: float | None = None
    """The share of `peak_tflops` that the model's FLOPs are."""
    efficiency_pct: float | None = None
    """The time of the fastest 5 % of the steps, as a share of that of the mean one."""
    total_steps: int | None = None
    eta_s: float | None = None
    """How long the steps to come will take."""
    why: dict[str, str] = {}


def _no_values() -> Float:
    return np.empty(0)


class Throughput(ThroughputNumbers, frozen=True, kw_only=True, eq=False):
    """The same, with that of each rank and by step."""

    ranks: list[int] = []
    rank_samples_per_s: Float = msgspec.field(default_factory=_no_values)
    """(R,), of each of `ranks`; NaN is not known."""
    rank_tokens_per_s: Float = msgspec.field(default_factory=_no_values)
    """(R,), of each of `ranks`; NaN is not known."""
    line_steps_per_s: Float = msgspec.field(default_factory=_no_values)
    """(C,), by step; empty where it is not known."""
    line_samples_per_s: Float = msgspec.field(default_factory=_no_values)
    """(C,), by step; empty where it is not known."""
    line_tokens_per_s: Float = msgspec.field(default_factory=_no_values)
    """(C,), by step; empty where it is not known."""
    line_mfu_pct: Float = msgspec.field(default_factory=_no_values)
    """(C,), by step; empty where it is not known."""


def throughput(
    history: StepHistory,
    work: WorkHistory,
    processes: Mapping[int, int],
    world: int,
    *,
    whole: bool,
    over: bool,
    missing: Mapping[str, str],
) -> Throughput:
    """
    Return the numbers; what is not known is None, and `why` says why.

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
    numbers: dict[str, Any] = {"ranks": ranks, "why": {}}
    numbers |= {f"rank_{name}_per_s": np.full(len(ranks), np.nan) for name in AMOUNTS}
    step_s = float(stats.exposed.sum()) / 1e3 if stats is not None else 0.0
    counted_processes = [processes[rank] for rank in ranks if rank in processes]
    if stats is None or not step_s or len(counted_processes) < len(ranks):
        return Throughput(**{**numbers, "why": {"steps": _no_steps(history, world, over)}})
    numbers |= {"steps": stats.steps, "steps_per_s": 1 / step_s}
    numbers["efficiency_pct"] = min(100.0, 100 * stats.step(_IDEAL)[0] / 1e3 / step_s)
    per_step = work.per_step(counted_processes, *stats.between)
    counted: dict[str, Any] = {}
    for name, amount in zip(AMOUNTS, per_step, strict=True):
        numbers[f"rank_{name}_per_s"] = amount / step_s
        counted[name] = _counted(name, amount, history, world, missing)
        if isinstance(counted[name], str):
            numbers["why"][name] = counted[name]
        else:
            total = float(amount[counted[name]].sum())
            numbers |= {f"{name}_per_step": total, f"{name}_per_s": total / step_s}
    facts = {rank: work.facts.get(processes[rank], {}) for rank in ranks}
    numbers |= _flops(facts, history, world, step_s, numbers["why"], missing)
    numbers["total_steps"] = steps = _most(work.get("total_steps") for work in facts.values())
    numbers["eta_s"] = None if over or steps is None else _left_s(history, steps)
    own_of = {
        name: np.array(counted_processes)[places].tolist()
        for name, places in counted.items()
        if not isinstance(places, str)
    }
    return Throughput(**numbers, **_line(history, work, own_of, whole, numbers))


def _no_steps(history: StepHistory, world: int, over: bool) -> str:
    """Return why nothing is known."""
    yet, reported = "" if over else " yet", history.reported()
    if not reported:
        return f"no rank has reported a step{yet}"
    if silent := missing_of(world, sorted(reported)):
        return f"{text.ranks(silent)} of {world} did not report{yet}"
    return f"the ranks have not closed two steps together{yet}"


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
    shared = {part for rank_meta in who for part in (rank_meta.strategy or "").split("+")} & {*_SHARED}
    if not shared and len({rank_meta.role for rank_meta in who}) < 2:
        return _lacking(name, amount, history.ranks, missing) or np.ones(len(who), bool)
    if None in (roles := [rank_meta.role for rank_meta in who]):
        return f"ranks of one replica of the model have the same samples ({', '.join(sorted(shared))})"
    if names := {both for role in roles if role and (both := mixed(role))}:
        return (
            f"not known which ranks have the same samples: `{min(names)}` of the device mesh is of both kinds"
        )
    of_role = [np.array([role_there == role for role_there in roles]) for role in dict.fromkeys(roles)]
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
    flops: dict[str, Any] = {}
    declared = _same(facts, "job_flops")
    counted = [work["flops"] for work in facts.values() if work.get("flops")]
    if declared is not None:
        flops |= {"step_flops": float(declared), "flops_from": "told"}
    elif len(counted) == world:
        flops |= {"step_flops": float(sum(counted)), "flops_from": "counted"}
        flops["flops_step"] = _same(facts, "flops_step")
    else:
        some = f"counted on {len(counted)} of {world} ranks" if counted else ""
        why["mfu"] = (
            missing.get("flops") or some or "FLOPs are counted with --flops, or told with --model-flops"
        )
    flops |= {"device": _same(facts, "device"), "dtype": _same(facts, "dtype")}
    devices = {(history.who[rank].node, work.get("device_id") or rank) for rank, work in facts.items()}
    flops["devices"] = len(devices)
    peak = _peak(facts)
    if isinstance(peak, str):
        why.setdefault("mfu", peak)
    elif len(facts) == world:
        flops["peak_tflops"] = peak * len(devices)
        if "step_flops" in flops:
            flops["mfu_pct"] = 100 * flops["step_flops"] / step_s / (flops["peak_tflops"] * 1e12)
    return flops


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
    values = {work[name] for work in facts.values() if work.get(name) is not None}
    return values.pop() if len(values) == 1 else None


def _left_s(history: StepHistory, total: int) -> float:
    """Return how long the steps to come will take, as the recent ones did."""
    line = history.timeline(history.ranks[0])
    done = line.last - line.first + 1
    recent = max(_FEW, int(_RECENT * float(done.sum())))
    last_at = np.searchsorted(-np.cumsum(done[::-1])[::-1], -recent, "right") - 1
    begin = max(int(last_at), 0)
    each_s = float(line.took[begin:].sum()) / 1e9 / max(1, int(done[begin:].sum()))
    return max(0, total - int(line.last[-1]) - 1) * each_s


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _line(
    history: StepHistory,
    work: WorkHistory,
    counted: Mapping[str, Sequence[int]],
    whole: bool,
    numbers: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the same by step, for drawing; `counted`: the rank processes whose samples and tokens add up."""
    _, last, ms = history.step_means(ALL if whole else None, _LINE)
    per_s = np.where(ms > 0, 1e3 / np.where(ms > 0, ms, 1), np.nan)
    line = {"line_steps_per_s": per_s}
    for name, processes in counted.items():
        line[f"line_{name}_per_s"] = getattr(work.at(processes, last), name) * per_s
    if numbers.get("mfu_pct") is not None:
        line["line_mfu_pct"] = numbers["mfu_pct"] / numbers["steps_per_s"] * per_s
    return line
