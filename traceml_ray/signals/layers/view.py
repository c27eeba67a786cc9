"""The layers of a run, from the windows that its ranks have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from traceml_ray.analysis.thresholds import LayerLimits
from traceml_ray.document.drawing import icicle
from traceml_ray.document.model import Boxes, Section
from traceml_ray.signals.finding import Finding, key_of, known
from traceml_ray.signals.layers.answer import GetLayers
from traceml_ray.signals.layers.judge import LayerFinding, Layers, layers_of, of_windows
from traceml_ray.signals.layers.records import LAYERS
from traceml_ray.signals.layers.sections import layers_block, layers_facts, layers_table
from traceml_ray.signals.view import Run, View
from traceml_ray.store.nodes import process_labels
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.wire.codec import ready

_LIMITS = LayerLimits()
_ASKED_RANKS = 32
"""While a larger job goes on, faces ask for its layers where they are wanted alone."""
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

    def findings(
        self, answer: Layers, steps: Sequence[Finding], verdict: Mapping[str, Any] | None
    ) -> list[Finding]:
        """Return the layers that take longer on one rank: each may explain why that rank is late there."""
        return [_finding(one, answer, steps) for one in answer.findings]

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 30 s, or 2 s for each rank: each takes the aggregator up to 18 ms."""
        return max(30.0, 2.0 * world) if world <= _ASKED_RANKS else None

    def block(self, answer: Layers) -> dict[str, Any]:
        """Return the layers as plain values."""
        return layers_block(answer)

    def of_block(self, block: Any) -> Layers:
        """Return the layers of a block; an older summary has none."""
        return msgspec.convert(block, ready(Layers), strict=False, str_keys=True) if block else Layers()

    def sections(self, answer: Layers) -> Sequence[Section]:
        """Return who takes longer in which layer, and the layers that take longest."""
        block = layers_block(answer)
        facts, table = layers_facts(block, with_findings=False), layers_table(block)
        named = {one.layer for one in answer.findings}
        boxes = Boxes("Time of each layer with the layers inside it", icicle(block["layers"], named))
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
