"""
Computes the throughput of a job: samples, tokens and FLOPs per second, and when it will be over.

It uses what the steps of rank processes were trained on, kept in bounded memory, and the peak performance of
devices as stated by their makers. Sources of the peaks: the data sheets "NVIDIA H100 Tensor Core GPU", "H200
Tensor Core GPU", "A100 Tensor Core GPU", "A30", "A10", "A40", "L4", "L40", "L40S", "RTX A6000", "V100", "T4",
"HGX B200" and "GB200 NVL72"; the whitepapers "NVIDIA Ampere GA102" (RTX 3090) and "Ada GPU architecture" (RTX
4090); AMD's of "Instinct MI250X", "MI300X" and "MI325X". If a sheet only has figures with sparsity, half of
these is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.roles import mixed
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_store import ALL
from traceml_ray.analysis.window import Bool, Float, Int64, missing_of, no_values
from traceml_ray.signals.throughput.records import StepWork

_Peaks = dict[str, float]


def _tensor(half: float, tf32: float | None = None, fp8: float | None = None, fp32: float = 0) -> _Peaks:
    named = {"bfloat16": half, "float16": half, "tf32": tf32, "float8": fp8, "float32": fp32}
    return {name: value for name, value in named.items() if value}


_H100 = _tensor(989.4, 494.7, 1978.9, 66.9)
_H100_NVL = _tensor(835.5, 417.5, 1670.5, 60)
_MI300 = _tensor(1307.4, 653.7, 2614.9, 163.4)
PEAKS: dict[str, _Peaks] = {
    "GB200": _tensor(2500, 1250, 5000, 80),
    "B200": _tensor(2250, 1125, 4500, 75),
    "H200 NVL": _H100_NVL,
    "H200": _H100,
    "GH200": _H100,
    "H100 NVL": _H100_NVL,
    "H100 PCIe": _tensor(756, 378, 1513, 51),
    "H100": _H100,
    "A100": _tensor(312, 156, None, 19.5),
    "A30": _tensor(165, 82, None, 10.3),
    "A10": _tensor(125, 62.5, None, 31.2),
    "A40": _tensor(149.7, 74.8, None, 37.4),
    "RTX A6000": _tensor(154.8, 77.4, None, 38.7),
    "L40S": _tensor(362, 183, 733, 91.6),
    "L40": _tensor(181, 90.5, 362, 90.5),
    "L4": _tensor(121, 60, 242.5, 30.3),
    "RTX 4090": _tensor(165.2, 82.6, 330.3, 82.6),
    "RTX 3090": _tensor(71, 35.6, None, 35.6),
    "V100 PCIe": {"float16": 112, "float32": 14},
    "V100": {"float16": 125, "float32": 15.7},
    "T4": {"float16": 65, "float32": 8.1},
    "MI325X": _MI300,
    "MI300X": _MI300,
    "MI250X": _tensor(191.5, None, None, 47.9),  # one of its two dies; each is a device
}
"""Peaks by name of the device and data type. A longer name precedes the names that it contains."""


_PARTS = {"MIG", "LAPTOP", "D", "GRID", "MAX"}
"""Words in names of devices that are a part of such a device, or a smaller model."""


def peak_tflops(device: str, dtype: str) -> float | None:
    """Return the peak of a device, by torch's name of it. None if it is not known."""
    words = re.split(r"[\s/-]+", device.upper())
    if _PARTS.intersection(words):
        return None
    name = next((name for name in PEAKS if f" {name.upper()} " in f" {' '.join(words)} "), None)
    return None if name is None else PEAKS[name].get("float8" if dtype.startswith("float8") else dtype)


MOST = 256
"""Largest number of pieces per rank process. Above it, neighbouring pieces are added up."""
_PROCESS, _FIRST, _LAST, _STEPS, _SAMPLES, _TOKENS = range(6)
AMOUNTS = ("samples", "tokens")
FACTS = ("flops", "job_flops", "flops_step", "dtype", "device", "device_id", "peak_tflops", "total_steps")


class PerStep(NamedTuple):
    """Mean work per step of each of some rank processes (R,). NaN is not known."""

    samples: Float
    tokens: Float


class WorkHistory:
    """The work of all rank processes of a session."""

    def __init__(self) -> None:
        self.facts: dict[int, dict[str, Any]] = {}
        """Process id → field → the last value that the process has reported."""
        self._table: Float = np.empty((0, 6))
        self._arrived: list[tuple[float, ...]] = []

    def add(self, process: int, work: StepWork) -> None:
        """Add a record of a rank process."""
        known = {name: value for name in FACTS if (value := getattr(work, name)) is not None}
        self.facts[process] = {**self.facts.get(process, {}), **known}
        if work.steps:
            amounts = (np.nan if value is None else float(value) for value in (work.samples, work.tokens))
            self._arrived.append((process, work.first_step, work.last_step, work.steps, *amounts))

    def per_step(self, processes: Sequence[int], first: int, last: int) -> PerStep:
        """
        Return the means over the steps `first` to `last` of rank processes. For a process without records of
        these steps, its newest earlier record counts.
        """
        table, ids = self._rows(), np.asarray(processes, dtype=float)
        inside = np.minimum(table[:, _LAST], last) - np.maximum(table[:, _FIRST], first) + 1
        share = np.clip(inside / (table[:, _LAST] - table[:, _FIRST] + 1), 0, None)
        order = np.argsort(ids)
        positions = np.searchsorted(ids[order], table[:, _PROCESS])
        used = np.flatnonzero((share > 0) & (np.append(ids[order], -1)[positions] == table[:, _PROCESS]))
        sums = np.zeros((len(ids), 3))
        np.add.at(sums, order[positions[used]], table[used, _STEPS:] * share[used, None])
        for place in np.flatnonzero(sums[:, 0] == 0):
            process_rows = table[(table[:, _PROCESS] == ids[place]) & (table[:, _FIRST] <= first)]
            sums[place] = process_rows[-1, _STEPS:] if len(process_rows) else np.nan
        return PerStep(sums[:, 1] / sums[:, 0], sums[:, 2] / sums[:, 0])

    def at(self, processes: Sequence[int], steps: Int64) -> PerStep:
        """
        Return the work of all of these rank processes together in each of `steps` (K,), which are ascending.
        NaN where one of them has no record.
        """
        table = self._rows()
        table = table[np.isin(table[:, _PROCESS], processes)]
        lasts = [process_rows[-1, _LAST] for process_rows in _by_process(table)]
        if len(lasts) < len(processes) or not len(lasts):
            return PerStep(np.full(len(steps), np.nan), np.full(len(steps), np.nan))
        where = np.minimum(steps, min(lasts))  # not all have reported the newest steps
        per_step = table[:, _SAMPLES:] / table[:, _STEPS, None]
        known = ~np.isnan(per_step)
        values = np.concatenate([np.where(known, per_step, 0), known], axis=1)
        total: Float = np.zeros((len(steps), 4))
        for column, side, sign in ((_FIRST, "right", 1), (_LAST, "left", -1)):
            order = np.argsort(table[:, column], kind="stable")
            sums = np.concatenate([np.zeros((1, 4)), np.cumsum(values[order], axis=0)])
            total += sign * sums[np.searchsorted(table[order, column], where, side)]  # type: ignore[call-overload]
        complete = np.rint(total[:, 2:]) == len(processes)
        return PerStep(*np.where(complete, total[:, :2], np.nan).T)

    def _rows(self) -> Float:
        """Return all pieces, by rank process and step."""
        if self._arrived:
            table = np.concatenate([self._table, np.array(self._arrived)])
            self._arrived = []
            table = table[np.lexsort((table[:, _FIRST], table[:, _PROCESS]))]
            if len(table) > MOST * len(np.unique(table[:, _PROCESS])):
                table = np.concatenate([_halved(process_rows) for process_rows in _by_process(table)])
            self._table = table
        return self._table


def _by_process(table: Float) -> Iterable[Float]:
    return np.split(table, np.flatnonzero(np.diff(table[:, _PROCESS])) + 1) if len(table) else ()


def _halved(process_rows: Float) -> Float:
    """
    Return the pieces of a rank process, with neighbouring pieces joined in pairs. The newest pieces stay
    separate.
    """
    if len(process_rows) < 4:
        return process_rows
    old = process_rows[: len(process_rows) // 4 * 2]
    one, other = old[::2], old[1::2]
    both = one + other
    both[:, [_PROCESS, _FIRST]], both[:, _LAST] = one[:, [_PROCESS, _FIRST]], other[:, _LAST]
    return np.concatenate([both, process_rows[len(old) :]])


_IDEAL = 0.05
"""Share of the steps, the fastest ones, that show the best speed of the run itself."""
_RECENT, _FEW = 0.25, 200
"""
Future steps take as long as the last steps so far: this share of them, or at least this number, evaluations
included.
"""
_SAME = 0.01
"""Largest relative difference of samples between roles that have the same samples."""
_LINE = 300
"""Number of columns of a line that is drawn."""
_SHARED = ("tp", "pp", "cp")
"""Parts of a strategy in which several ranks process the same samples."""


class ThroughputNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """
    Throughput of a job over `steps` steps.

    A value that would be a guess is None. `why` has the reason, by `samples`, `tokens` and `mfu`; by `steps`
    if there are no steps, and so nothing is known.
    """

    steps: int = 0
    """Number of steps that the numbers cover; 0: nothing is known."""
    steps_per_s: float | None = None
    """Steps per second."""
    samples_per_step: float | None = None
    """Samples of all ranks in a step."""
    tokens_per_step: float | None = None
    """Tokens of all ranks in a step, including padding."""
    samples_per_s: float | None = None
    """Samples of all ranks per second."""
    tokens_per_s: float | None = None
    """Tokens of all ranks per second, including padding."""
    step_flops: float | None = None
    """FLOPs of the model in one step of all ranks."""
    flops_from: str | None = None
    """`counted` once in step `flops_step`, or `told` by the script."""
    flops_step: int | None = None
    """
    Step in which the FLOPs were counted; it took longer. None: they were not counted, or not in the same
    step.
    """
    peak_tflops: float | None = None
    """Peak of all `devices` together, in 10¹² FLOPs per second."""
    devices: int | None = None
    """Number of devices of the job."""
    device: str | None = None
    """Name of the devices (`cpu` without one); None: not known, or not the same on all ranks."""
    dtype: str | None = None
    """Data type of most FLOPs; None: not known, or not the same on all ranks."""
    mfu_pct: float | None = None
    """The model's FLOPs as a percentage of `peak_tflops`."""
    efficiency_pct: float | None = None
    """Time of the fastest 5 % of the steps ÷ time of the mean step, in %."""
    total_steps: int | None = None
    """Number of steps of the whole run, as the script or its framework tells it."""
    eta_s: float | None = None
    """Time that the remaining steps will take."""
    why: dict[str, str] = {}
    """Reason for each unknown value, by `samples`, `tokens`, `mfu` or `steps`."""


class ThroughputStatistics(ThroughputNumbers, frozen=True, kw_only=True):
    """Throughput of the job in a summary. Ranks are keys as text."""

    per_rank_samples_per_s: dict[str, float | None]
    """Rank → its samples per second."""
    per_rank_tokens_per_s: dict[str, float | None]
    """Rank → its tokens per second, including padding."""


class Throughput(ThroughputNumbers, frozen=True, kw_only=True, eq=False):
    """Throughput of the job, also per rank and by step."""

    ranks: list[int] = []
    """Ranks that have reported steps: R numbers, ascending."""
    rank_samples_per_s: Float = msgspec.field(default_factory=no_values)
    """(R,), of each of `ranks`; NaN is not known."""
    rank_tokens_per_s: Float = msgspec.field(default_factory=no_values)
    """(R,), of each of `ranks`; NaN is not known."""
    line_steps_per_s: Float = msgspec.field(default_factory=no_values)
    """(C,), by step; empty where it is not known."""
    line_samples_per_s: Float = msgspec.field(default_factory=no_values)
    """(C,), by step; empty where it is not known."""
    line_tokens_per_s: Float = msgspec.field(default_factory=no_values)
    """(C,), by step; empty where it is not known."""
    line_mfu_pct: Float = msgspec.field(default_factory=no_values)
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
    Return the throughput. An unknown value is None, and `why` has the reason.

    Args:
        history: the steps of the run.
        work: what its rank processes were trained on.
        processes: the rank process of each rank.
        world: number of ranks of the job.
        whole: use all steps instead of the newest.
        over: the run is over, so no steps remain.
        missing: reasons why ranks know less.
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
    numbers["total_steps"], numbers["eta_s"] = time_left(history, work, processes, over)
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
    replica of the model process the same samples, if any, so the ranks of one role are added up.
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
    """Return why an amount is not known for all ranks. None if it is."""
    unknown = [rank for rank, value in zip(ranks, amount, strict=True) if np.isnan(value)]
    if not unknown:
        return None
    who = "" if len(unknown) == len(ranks) else f"{text.ranks(unknown)}: "
    usual = "no batch with `input_ids` was seen" if name == "tokens" else "no batch of a loader was seen"
    return f"{who}{missing.get('samples') or usual}; set it with traceml_ray.count({name}=…)"


def _flops(
    facts: Mapping[int, Mapping[str, Any]],
    history: StepHistory,
    world: int,
    step_s: float,
    why: dict[str, str],
    missing: Mapping[str, str],
) -> dict[str, Any]:
    """Return the FLOPs of a step, the peak of the devices, and the achieved share."""
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
            missing.get("flops") or some or "count FLOPs with --flops, or set them with --model-flops"
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
    """Return the peak of one device, or why it is not known."""
    if (given := _same(facts, "peak_tflops")) is not None:
        return float(given)
    device, dtype = _same(facts, "device"), _same(facts, "dtype")
    tell = "set it with --peak-tflops"
    if device is None:
        return f"the ranks' devices are not known, or not all the same; {tell}"
    if dtype is None:
        return (
            "the data type of the computation is not known (--flops shows it), so the peak is not known; "
            f"{tell}"
        )
    known = peak_tflops(device, dtype)
    return f"the peak of {device} in {dtype} is not known; {tell}" if known is None else known


def _same(facts: Mapping[int, Mapping[str, Any]], name: str) -> Any:
    """Return the value that all ranks which report it agree on. None if they differ."""
    values = {work[name] for work in facts.values() if work.get(name) is not None}
    return values.pop() if len(values) == 1 else None


def time_left(
    history: StepHistory | None, work: WorkHistory, processes: Mapping[int, int], over: bool
) -> tuple[int | None, float | None]:
    """
    Return the number of steps of the whole run, and the time in s that the remaining steps will take. None:
    not known, or the run is over.

    Args:
        history: the steps of the run; None: it has none.
        work: what its rank processes were trained on.
        processes: the rank process of each rank.
        over: whether the run is over.
    """
    steps = _most(work.facts.get(process, {}).get("total_steps") for process in processes.values())
    if over or steps is None or history is None or not history.ranks:
        return steps, None
    return steps, _left_s(history, steps)


def _left_s(history: StepHistory, total: int) -> float:
    """Return the time that the remaining steps will take, from the recent steps."""
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
    """
    Return the throughput by step, for drawing. `counted`: the rank processes whose samples and
    tokens add up.
    """
    _, last, ms = history.step_means(ALL if whole else None, _LINE)
    per_s = np.where(ms > 0, 1e3 / np.where(ms > 0, ms, 1), np.nan)
    line = {"line_steps_per_s": per_s}
    for name, processes in counted.items():
        line[f"line_{name}_per_s"] = getattr(work.at(processes, last), name) * per_s
    if numbers.get("mfu_pct") is not None:
        line["line_mfu_pct"] = numbers["mfu_pct"] / numbers["steps_per_s"] * per_s
    return line
