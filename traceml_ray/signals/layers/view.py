"""
The layers of a run: the question, the answer from the windows that its ranks have measured, and its
presentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from traceml_ray import text
from traceml_ray.analysis.thresholds import LayerLimits
from traceml_ray.document.drawing import icicle
from traceml_ray.document.model import Boxes, Column, Facts, Link, Section, Table
from traceml_ray.document.text import page
from traceml_ray.signals.finding import Finding, OnSteps, key_of, known
from traceml_ray.signals.layers.judge import Layer, LayerFinding, Layers, layers_of, of_windows
from traceml_ray.signals.layers.records import LAYERS
from traceml_ray.signals.view import Run, View
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess, process_labels


class GetLayers(OfRun[Layers], frozen=True):
    """
    Measurements of the layers: of all windows, or only of the request `asked` (its id).
    `ranks` may be empty.
    """

    asked: str = ""


NONE_LONGER = "No layer takes longer on one rank than on its peers."
NOTHING = (
    "No layer has been measured. `--deep`, `traceml_ray.start(deep=True)` or TRACEML_DEEP=1 measures the "
    "whole job; `traceml-ray layers SESSION --steps 20` measures some steps of a running one"
)
_WAITS = "waits for other ranks"
"""Used in the limits of times from which no rank can be named."""
_ROWS, _LINES = 20, 4
_NAME, _KIND = 26, 18
_REGIONS = {"compiled": "compiled", "graph": "CUDA graph", "sharded": "FSDP"}


def render_layers(layers: Layers) -> str:
    """Return all layers as text."""
    return page([layers_facts(layers), layers_table(layers, len(layers.layers))])


def layers_sentences(layers: Layers) -> list[str]:
    """Return sentences: which layers take longer on a rank, or that none does. Empty if that is not known."""
    sentences = [sentence(one.why) for one in layers.findings]
    return sentences or ([NONE_LONGER] if len(layers.ranks) > 1 and not _waits(layers) else [])


def layers_facts(layers: Layers, *, with_findings: bool = True) -> Facts:
    """
    Return facts about the layers: which ranks take longer in which layers (only `with_findings`), or that
    none does, and what was measured.
    """
    if not layers.ranks:
        return Facts()
    if layers.findings and not with_findings:
        return Facts(("Layers", about_layers(layers)), *(("", line) for line in layers.limits))
    sentences = [sentence(one.why) for one in layers.findings]
    none = NONE_LONGER if len(layers.ranks) > 1 else ""
    first, *others = sentences or [none if not _waits(layers) else ""]
    more = f"and {len(others) - _LINES} more" if len(others) > _LINES else ""
    first, *rest = list(filter(None, [first, *others[:_LINES], more, about_layers(layers), *layers.limits]))
    return Facts(("Layers", first), *(("", line) for line in rest))


def _waits(layers: Layers) -> bool:
    return any(_WAITS in limit for limit in layers.limits)


def sentence(why: str) -> str:
    """Return the reason of a finding as a complete sentence."""
    return f"{why[:1].upper()}{why[1:]}."


def about_layers(layers: Layers) -> str:
    """Return which steps were measured, on which clock, and what measuring costs."""
    every = f", one in {layers.every}" if (layers.every or 1) > 1 else ""
    return (
        f"Measured in {text.count(layers.steps, 'step')} of {text.ranks(layers.ranks)}{every}, on the "
        f"clock of the {layers.clock}; that costs {text.percent(layers.cost_pct)} of the time."
    )


def layers_table(layers: Layers, most: int = _ROWS) -> Table:
    """Return the layers that take longest, in the order of the model."""
    longest = sorted(layers.layers, key=_own, reverse=True)[:most]
    kept = {id(one) for one in longest}
    called = any(one.calls != 1 for one in longest)
    recomputed = any(one.recomputed for one in longest)
    columns = [
        Column("layer", lambda one: _tail(layer_name(one), _NAME)),
        Column("class", lambda one: _tail(one.kind, _KIND) + region_of(one)),
        *([Column("calls", lambda one: one.calls, "number")] if called else []),
        *([Column("again", lambda one: one.recomputed, "number")] if recomputed else []),
        Column("fwd ms", lambda one: one.forward_ms, "aligned"),
        Column("bwd ms", lambda one: one.backward_ms, "aligned"),
        Column("largest", lambda one: one.worst_ms, "known aligned"),
        Column("rank", lambda one: None if one.worst_ms is None else one.worst_rank, "known plain"),
        Column("outputs", lambda one: one.output_bytes or None, "known size"),
        Column("params", lambda one: one.parameter_bytes or None, "known size"),
        Column("grads", lambda one: one.gradient_bytes or None, "known size"),
    ]
    title = "Layers that take longest" if most < len(layers.layers) else "Layers"
    title += " (ms a step, without the layers inside; median of the ranks)"
    return Table(title, columns, [one for one in layers.layers if id(one) in kept])


def layer_name(one: Layer) -> str:
    """Return the displayed name of a layer. The root is "(model)"."""
    return one.name or "(model)"


def region_of(one: Layer) -> str:
    """Return why nothing is measured inside a layer, as " (compiled)". "" if something is."""
    return f" ({_REGIONS[one.region]})" if one.region else ""


def _tail(name: str, most: int) -> str:
    """Return the end of a name, which distinguishes it from others."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _own(one: Layer) -> float:
    return one.forward_ms + one.backward_ms


def layer_columns(layers: Layers) -> list[Column]:
    """Return the columns of layers, by their index."""
    rows, named = layers.layers, {(one.layer, one.rank) for one in layers.findings}

    def value(name: str) -> Callable[[int], Any]:
        return lambda index: getattr(rows[index], name)

    def worst(index: int) -> str:
        return "warning" if (rows[index].name, rows[index].worst_rank) in named else ""

    again, several = any(row.recomputed for row in rows), len(layers.ranks) > 1
    return [
        Column("layer", lambda index: layer_name(rows[index]), "code"),
        Column("class", lambda index: f"{rows[index].kind}{region_of(rows[index])}"),
        Column("calls", value("calls"), "number"),
        *([Column("recomputed", value("recomputed"), "number")] if again else []),
        Column("forward", value("forward_ms"), "aligned"),
        Column("backward", value("backward_ms"), "aligned"),
        Column("with inside", value("total_ms"), "aligned"),
        Column("of model", value("share"), "share"),
        *([Column("largest", value("worst_ms"), "aligned", tone=worst)] if several else []),
        *([Column("on rank", value("worst_rank"), "plain", link=_worst_link(layers))] if several else []),
        Column("outputs", value("output_bytes"), "size"),
        Column("params", value("parameter_bytes"), "size"),
        Column("grads", value("gradient_bytes"), "size"),
    ]


def _worst_link(layers: Layers) -> Callable[[int], Link | None]:
    ranks = [row.worst_rank for row in layers.layers]
    return lambda index: None if (rank := ranks[index]) is None else ("rank", rank)


def layer_rank_columns(layers: Layers) -> list[Column]:
    """Return a column for each of some ranks: forward + backward of each layer, by its index."""
    named = {(one.layer, one.rank) for one in layers.findings}

    def of_rank(rank: int) -> Column:
        def tone(index: int) -> str:
            return "warning" if (layers.layers[index].name, rank) in named else ""

        return Column(f"rank {rank}", lambda index: layers.per_rank_ms[rank][index], "aligned", tone=tone)

    return [of_rank(rank) for rank in layers.per_rank_ms]


def all_layers_table(layers: Layers) -> Table:
    """Return all layers in the order of the model, by their index, with a column per rank."""
    columns = [*layer_columns(layers), *(layer_rank_columns(layers) if len(layers.ranks) > 1 else ())]
    named = {one.rank for one in layers.findings}
    ranks = sorted(layers.per_rank_ms, key=lambda rank: (rank in named, -rank))
    spare = *(f"rank {rank}" for rank in ranks), "grads", "params", "recomputed", "calls", "outputs", "class"
    return Table(
        "Each layer (ms a step, without those inside)",
        columns,
        range(len(layers.layers)),
        badness=lambda index: _own(layers.layers[index]),
        spare=(*spare, "of model", "with inside"),
    )


_LIMITS = LayerLimits()
_ASKED_RANKS = 32
"""Above this number of ranks, faces request layers of a running job only where layers alone are shown."""
_NEXT = "Look at what this rank does in that layer: its input, its device."
_ALL = "all layers"


class LayersView(View[Layers]):
    """See `View`."""

    name = "layers"
    question = GetLayers
    finds = MappingProxyType({})
    page = "layers"

    def answer(self, run: Run, asked: GetLayers) -> Layers:
        """Return the layers of all windows, or of those measured for the request `asked`."""
        windows = run.file.records_of(LAYERS, {process.id for process in run.ranks.values()})
        if not windows:
            return Layers()
        labels = process_labels(run.file.cluster(), run.ranks.values())
        by_rank = []
        for rank, process in run.ranks.items():
            rank_windows = [
                window for window in windows.get(process.id, ()) if asked.asked in ("", window.asked)
            ]
            if rank_windows:
                by_rank.append(of_windows(rank, labels.get(process.id), rank_windows))
        return layers_of(by_rank, _LIMITS)

    def findings(self, answer: Layers, steps: Sequence[Finding], verdict: OnSteps | None) -> list[Finding]:
        """Return the layers that take longer on one rank. Each may explain why that rank is late there."""
        return [_finding(one, answer, steps) for one in answer.findings]

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return max(30 s, 2 s × ranks): a rank takes the aggregator up to 18 ms. None above 32 ranks."""
        return max(30.0, 2.0 * world) if world <= _ASKED_RANKS else None

    def details(self, answer: Layers) -> Sequence[Section]:
        """Return a note that no layer takes longer on one rank, what was measured, and all layers."""
        if not answer.ranks:
            return [Section("model", [Facts(("", f"{NOTHING}."))], "Layers")]
        none = [] if answer.findings else layers_sentences(answer)
        about = [about_layers(answer), *answer.limits]
        return [Section("model", [Facts.listed("", [*none, *about]), all_layers_table(answer)], "Layers")]

    def sections(self, answer: Layers) -> Sequence[Section]:
        """Return which rank takes longer in which layer, and the layers that take longest."""
        facts, table = layers_facts(answer, with_findings=False), layers_table(answer)
        named = {one.layer for one in answer.findings}
        boxes = Boxes("Time of each layer with the layers inside it", icicle(answer.layers, named))
        return [Section("model", [facts, boxes], "Layers"), Section("tables", [table])]


def _finding(one: LayerFinding, layers: Layers, steps: Sequence[Finding]) -> Finding:
    late = (
        step_finding.key
        for step_finding in steps
        if one.rank in step_finding.ranks and any(s in one.phase for s in step_finding.stages)
    )
    return Finding(
        key=key_of("slow_layer", [one.rank], one.layer or _ALL, one.phase),
        signal="layers",
        label="slow_layer",
        severity="warning",
        ranks=(one.rank,),
        nodes=(one.node,) if one.node else (),
        what=one.layer or _ALL,
        from_step=layers.first_step,
        to_step=layers.last_step,
        why=f"{one.why[:1].upper()}{one.why[1:]}.",
        next=_NEXT,
        evidence=known(
            {name: getattr(one, name) for name in ("kind", "phase", "excess_ms", "own_ms", "peers_ms")}
        ),
        explains=next(late, None),
    )
