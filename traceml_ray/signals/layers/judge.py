"""
Compares the layers of a model across ranks: the time of each layer in a step, and layers that take longer on
one rank than on its peers.

Times are ms of a measured step; bytes are of one step. Unknown values are None (NaN in arrays).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.thresholds import LayerLimits
from traceml_ray.signals.layers.records import OTHERS, LayerSum, LayerWindow, Region

Float = np.ndarray[Any, np.dtype[np.float64]]
Phase = Literal["forward", "backward", "forward and backward"]
REST = "all other layers"
_SHOWN_RANKS = 16
_MAX_FINDINGS = 8
_FEW_RANKS = 8
"""From this number of ranks on, the median of all ranks replaces the median of the other ranks."""


class Layer(msgspec.Struct, frozen=True):
    """One layer: medians over the ranks. `forward_ms` and `backward_ms` exclude the layers inside it."""

    name: str
    """Name in `named_modules`. "" is the model itself."""
    kind: str
    """Class name. "" for the row that sums all layers that are not listed."""
    region: Region
    """
    Why nothing inside it is measured: `compiled`, replayed as a CUDA `graph`, or `sharded` by FSDP; "":
    it is.
    """
    parent: int | None
    """Index of the layer that contains it."""
    calls: float
    """Calls per step."""
    recomputed: float
    """Calls per step inside a backward. Their time is in `backward_ms`."""
    forward_ms: float
    """Time of its forward in a step (ms)."""
    backward_ms: float
    """Time of its backward in a step (ms), including recomputed forwards."""
    total_ms: float
    """Forward and backward, including the layers inside it."""
    share: float | None
    """`total_ms` as a share of the model's total."""
    output_bytes: int
    """Size of its outputs: an estimate of its activations. Like all sizes, the largest of the ranks."""
    parameter_bytes: int | None
    """Size of its own parameters on a rank, in bytes; None: not known."""
    gradient_bytes: int | None
    """Size of the gradients of these parameters, in bytes; None: not known."""
    worst_rank: int | None
    """Rank that takes longest in it, excluding the layers inside it. None if there is only one rank."""
    worst_ms: float | None
    """Forward and backward of `worst_rank` in it (ms). None if there is only one rank."""


class LayerFinding(msgspec.Struct, frozen=True):
    """
    A layer that takes longer on a rank than on its peers, or (`layer` None) a rank on which
    all layers do.
    """

    rank: int
    """Global rank on which it takes longer."""
    node: str | None
    """Label of the rank's node; None: not known."""
    layer: str | None
    """Name of the layer in `named_modules`; None: all layers of the rank."""
    kind: str
    """Class name of the layer; "" for all layers."""
    phase: Phase
    """Where it takes longer: forward, backward, or both."""
    excess_ms: float
    """
    How much longer it takes per step than on the peers (ms). For a single layer: beyond what makes all layers
    of the rank slower.
    """
    own_ms: float
    """Its time per step in `phase` on the rank (ms), including the layers inside it."""
    peers_ms: float
    """Median of the other ranks."""
    why: str
    """Explanation in one sentence for a person."""


class Layers(msgspec.Struct, frozen=True):
    """Measurements of the layers of a run. `ranks` is empty if nothing was measured."""

    ranks: list[int] = []
    """Ranks that have measured layers."""
    steps: int = 0
    """Number of measured steps, on the rank with the fewest."""
    first_step: int | None = None
    """First measured step of any rank; None: nothing was measured."""
    last_step: int | None = None
    """Last measured step of any rank; None: nothing was measured."""
    every: int | None = None
    """One step in `every` is measured. The largest value of the ranks."""
    cost_pct: float | None = None
    """Cost of measuring as a percentage of the time, on the rank with the highest cost."""
    clock: str | None = None
    """host or device."""
    model_ms: float | None = None
    """Time of all layers together, median of the ranks."""
    layers: list[Layer] = []
    """The layers, in the order of the model."""
    findings: list[LayerFinding] = []
    """Layers that take longer on one rank, the largest excess first; at most eight."""
    limits: list[str] = []
    """Sentences that say what these numbers do not show."""
    per_rank_ms: dict[int, list[float | None]] = {}
    """
    Rank → `forward_ms + backward_ms` of each of `layers`. Only of some ranks: first those with
    findings.
    """


@dataclass(frozen=True)
class RankLayers:
    """The layers of one rank: arrays of n values."""

    rank: int
    node: str | None
    windows: Sequence[LayerWindow]
    sums: Sequence[LayerSum]
    """The newest record of each layer, for its name and sizes."""
    columns: dict[str, Float]
    """
    Values per step: calls, recomputed, forward, backward (ms); error: squared error of forward + backward,
    ms².
    """


def of_windows(rank: int, node: str | None, windows: Sequence[LayerWindow]) -> RankLayers:
    """
    Return the combined windows of a rank. A layer that is missing in some windows is averaged over the
    others.
    """
    by_layer: dict[tuple[str, bool], list[Any]] = {}
    for window in windows:
        for one in window.layers:
            known = by_layer.setdefault((one.name, one.kind == OTHERS), [one, np.zeros(6)])
            known[0] = one
            times = one.forward_ns / 1e6, one.backward_ns / 1e6, one.squares / 1e12
            known[1] += (window.steps, one.calls, one.recomputed, *times)
    sums = [one for one, _ in by_layer.values()]
    steps, calls, recomputed, forward, backward, squares = (
        np.array([totals for _, totals in by_layer.values()]).reshape(-1, 6).T
    )
    mean = (forward + backward) / steps
    spread = np.maximum(0.0, squares / steps - mean**2)
    return RankLayers(
        rank,
        node,
        windows,
        sums,
        {
            "calls": calls / steps,
            "recomputed": recomputed / steps,
            "forward": forward / steps,
            "backward": backward / steps,
            "error": spread / np.maximum(1.0, steps - 1),
        },
    )


def layers_of(ranks: Sequence[RankLayers], limits: LayerLimits) -> Layers:
    """Return the layers of all ranks, compared with each other."""
    ranks = [rank for rank in ranks if rank.sums]
    if not ranks:
        return Layers()
    table = _Table(ranks)
    windows = [window for rank in ranks for window in rank.windows]
    waits = any(window.waits for window in windows)
    findings = [] if waits else _findings(table, limits)
    total = np.nanmedian(np.nansum(table.own_ms, axis=1))
    return Layers(
        ranks=[rank.rank for rank in ranks],
        steps=min(sum(window.steps for window in rank.windows) for rank in ranks),
        first_step=min(window.first_step for window in windows),
        last_step=max(window.last_step for window in windows),
        every=max(rank.windows[-1].every for rank in ranks),
        cost_pct=max(_cost_pct(rank.windows) for rank in ranks),
        clock="device" if all(window.clock == "device" for window in windows) else "host",
        model_ms=float(total),
        layers=table.layers(float(total)),
        findings=findings,
        limits=_limits(windows, waits),
        per_rank_ms=table.some_ranks(findings),
    )


def _cost_pct(windows: Iterable[LayerWindow]) -> float:
    return 100 * sum(w.cost_ns for w in windows) / max(1, sum(w.spent_ns for w in windows))


def _limits(windows: Sequence[LayerWindow], waits: bool) -> list[str]:
    notes = []
    if waits:
        notes.append(
            "Times contain waits for other ranks, which exchange something inside the layers: the rank that "
            "takes longest may be one that waits, so no rank is named."
        )
    if any(window.accelerated and window.clock == "host" for window in windows):
        notes.append(
            "Times are measured on the host, which launches the work of the device. TRACEML_DEVICE_CLOCK=1 "
            "measures them on the device."
        )
    if others := max(window.others for window in windows):
        notes.append(f"The {text.count(others, 'layer')} with the least time are one row: {REST}.")
    regions = {one.region for window in windows for one in window.layers}
    for region, what in _REGIONS.items():
        if region in regions:
            notes.append(what)
    return notes


_REGIONS = {
    "compiled": "A part that torch.compile compiles is one layer: nothing inside it is seen.",
    "graph": "A part that a CUDA graph replays is one layer: nothing inside it is seen.",
    "sharded": "Under FSDP a layer is gathered as one; its time includes the wait for its parameters.",
}


class _Table:
    """Ranks × layers. NaN where a rank does not have a layer."""

    def __init__(self, ranks: Sequence[RankLayers]) -> None:
        self.ranks = ranks
        longest = sorted(ranks, key=lambda rank: -len(rank.sums))
        self.sums = {(one.name, one.kind): one for rank in longest for one in rank.sums}
        positions = {key: index for index, key in enumerate(self.sums)}
        self.columns: dict[str, Float] = {}
        for name in ranks[0].columns:
            self.columns[name] = np.full((len(ranks), len(positions)), np.nan)
            for row, rank in enumerate(ranks):
                places = [positions[one.name, one.kind] for one in rank.sums]
                self.columns[name][row, places] = rank.columns[name]
        self.own_ms = self.columns["forward"] + self.columns["backward"]
        names = {one.name: index for index, one in enumerate(self.sums.values()) if one.kind != OTHERS}
        self.parents = [
            None if one.kind == OTHERS else _parent(one.name, names) for one in self.sums.values()
        ]

    def total(self, column: Float) -> Float:
        """Return a column in which each layer includes the layers inside it."""
        summed = column.copy()
        depths = [one.name.count(".") + bool(one.name) for one in self.sums.values()]
        for index in sorted(range(len(depths)), key=lambda index: -depths[index]):
            parent = self.parents[index]
            if parent is not None:
                summed[:, parent] = np.nansum([summed[:, parent], summed[:, index]], axis=0)
        return summed

    def layers(self, model_ms: float) -> list[Layer]:
        """Return the layers in the order of the model."""
        middle = {name: _median(column) for name, column in self.columns.items()}
        total = _median(self.total(self.own_ms))
        several = len(self.ranks) > 1
        layers = []
        for index, (key, parent) in enumerate(zip(self.sums, self.parents, strict=True)):
            own_ms = self.own_ms[:, index]
            worst = int(np.nanargmax(own_ms))
            sizes = [one for rank in self.ranks for one in rank.sums if (one.name, one.kind) == key]
            layers.append(
                Layer(
                    name=key[0] if key[1] != OTHERS else REST,
                    kind=key[1],
                    region=self.sums[key].region,
                    parent=parent,
                    calls=float(middle["calls"][index]),
                    recomputed=float(middle["recomputed"][index]),
                    forward_ms=float(middle["forward"][index]),
                    backward_ms=float(middle["backward"][index]),
                    total_ms=float(total[index]),
                    share=float(total[index]) / model_ms if model_ms else None,
                    output_bytes=max(one.output_bytes for one in sizes),
                    parameter_bytes=_largest(one.parameter_bytes for one in sizes),
                    gradient_bytes=_largest(one.gradient_bytes for one in sizes),
                    worst_rank=self.ranks[worst].rank if several else None,
                    worst_ms=float(own_ms[worst]) if several else None,
                )
            )
        return layers

    def some_ranks(self, findings: Sequence[LayerFinding]) -> dict[int, list[float | None]]:
        """Return the times of some ranks: first those with findings, then those that take longest."""
        named = {finding.rank for finding in findings}
        longest = np.nansum(self.own_ms, axis=1)
        order = sorted(range(len(self.ranks)), key=lambda r: (self.ranks[r].rank not in named, -longest[r]))
        kept = sorted(order[:_SHOWN_RANKS], key=lambda row: self.ranks[row].rank)
        return {self.ranks[r].rank: [None if v != v else float(v) for v in self.own_ms[r]] for r in kept}


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _median(rows: Float) -> Float:
    """Return the median of the known values of each column. NaN if none is known."""
    medians, known = np.full(rows.shape[1], np.nan), np.flatnonzero(~np.isnan(rows).all(axis=0))
    medians[known] = np.nanmedian(rows[:, known], axis=0)
    return medians


def _parent(name: str, names: dict[str, int]) -> int | None:
    """Return the index of the listed layer that contains a layer."""
    while name:
        name = name.rpartition(".")[0]
        if name in names:
            return names[name]
    return None


# -- which layer takes longer on one rank ----------------------------------------------------------------


def _findings(table: _Table, limits: LayerLimits) -> list[LayerFinding]:
    """Return the layers that take longer on a rank than on its peers, the largest excess first."""
    enough = [sum(window.steps for window in rank.windows) >= limits.steps for rank in table.ranks]
    if sum(enough) < 2:
        return []
    own_ms, total, error = table.own_ms, table.total(table.own_ms), table.total(table.columns["error"])
    findings = []
    for row, rank in enumerate(table.ranks):
        others = np.array(enough)
        if len(table.ranks) < _FEW_RANKS:
            others[row] = False
        if not enough[row] or not others.any():
            continue
        slower = _slower_by(own_ms[row], _median(own_ms[others]))
        peers = _median(total[others])
        excess = total[row] - slower * peers
        scatter = 1.4826 * _median(np.abs(total[others] - peers))
        noise = np.sqrt(error[row] + _median(error[others]) + scatter**2)
        model = float(np.nansum(_median(own_ms[others])))
        least = np.maximum(limits.least_ms, np.maximum(limits.of_layer * peers, limits.of_model * model))
        stands_out = (excess >= least) & (excess > limits.errors * noise)
        for index in _deepest(table, stands_out, excess):
            findings.append(_finding(table, row, index, others, float(excess[index])))
        top = [index for index, parent in enumerate(table.parents) if parent is None]
        sure = limits.errors * float(np.sqrt(np.nansum(noise[top] ** 2)))
        if slower >= limits.slower and (slower - 1) * model > max(limits.least_ms, sure):
            findings.append(_all_layers(rank, slower, model))
    return sorted(findings, key=lambda finding: -finding.excess_ms)[:_MAX_FINDINGS]


def _slower_by(rank_ms: Float, peers: Float) -> float:
    """
    Return the factor by which a rank is slower than its peers in all layers; 1 if it is not.

    Half of the layers, and the layers that take half of the time, are slower by at least this factor.
    """
    large = np.flatnonzero((peers > 0.01 * np.nansum(peers)) & ~np.isnan(rank_ms))
    if len(large) < 3:
        return 1.0
    ratios, order = rank_ms[large] / peers[large], np.argsort(rank_ms[large] / peers[large])
    spent = np.cumsum(peers[large][order])
    of_time = ratios[order][np.searchsorted(spent, spent[-1] / 2)]
    return max(1.0, float(min(np.median(ratios), of_time)))


def _deepest(table: _Table, stands_out: np.ndarray[Any, Any], excess: Float) -> list[int]:
    """
    Return the layers that stand out, without layers whose excess is mostly that of layers inside them. The
    model itself is excluded.
    """
    inside = np.zeros(len(excess))
    for index in np.flatnonzero(stands_out):
        parent = table.parents[index]
        while parent is not None and not stands_out[parent]:
            parent = table.parents[parent]
        if parent is not None:
            inside[parent] += excess[index]
    names = [one.name for one in table.sums.values()]
    return [
        int(index)
        for index in np.flatnonzero(stands_out)
        if names[index] and inside[index] < 0.7 * excess[index]
    ]


def _finding(table: _Table, row: int, index: int, others: Any, excess: float) -> LayerFinding:
    one, rank = [*table.sums.values()][index], table.ranks[row]
    parts = {}
    for name in ("forward", "backward"):
        column = table.total(table.columns[name])[:, index]
        parts[name] = float(column[row]), float(np.nanmedian(column[others]))
    more = {name: rank_ms - peers for name, (rank_ms, peers) in parts.items()}
    phase: Phase = "forward and backward"
    if more["forward"] > 0.8 * sum(more.values()):
        phase = "forward"
    elif more["backward"] > 0.8 * sum(more.values()):
        phase = "backward"
    chosen = [parts[phase]] if phase in parts else [*parts.values()]
    own_ms, peers_ms = sum(rank_ms for rank_ms, _ in chosen), sum(peers for _, peers in chosen)
    where = f" ({rank.node})" if rank.node else ""
    why = (
        f"layer {one.name} ({one.kind}) takes {text.ms(excess)} longer on rank {rank.rank}{where}: "
        f"{text.ms(own_ms)} in {phase}, where the median of its peers is {text.ms(peers_ms)}"
    )
    return LayerFinding(rank.rank, rank.node, one.name, one.kind, phase, excess, own_ms, peers_ms, why)


def _all_layers(rank: RankLayers, slower: float, peers_ms: float) -> LayerFinding:
    where = f" ({rank.node})" if rank.node else ""
    own_ms = slower * peers_ms
    why = (
        f"all layers take longer on rank {rank.rank}{where}, {text.times(slower)} as long as on its peers "
        f"({text.ms(own_ms)} instead of {text.ms(peers_ms)} a step): the rank or its machine is slow"
    )
    excess = own_ms - peers_ms
    return LayerFinding(rank.rank, rank.node, None, "", "forward and backward", excess, own_ms, peers_ms, why)
