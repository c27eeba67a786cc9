"""The layers of a run, from the windows that its ranks have measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from traceml_ray.analysis.thresholds import LayerLimits
from traceml_ray.document.drawing import icicle
from traceml_ray.document.model import Boxes, Section
from traceml_ray.signals.layers.answer import GetLayers
from traceml_ray.signals.layers.judge import Layers, layers_of, of_windows
from traceml_ray.signals.layers.records import LAYERS
from traceml_ray.signals.layers.sections import layers_block, layers_facts, layers_table
from traceml_ray.signals.view import Run, View
from traceml_ray.store.nodes import process_labels
from traceml_ray.wire.codec import ready

_LIMITS = LayerLimits()


class LayersView(View[Layers]):
    """See `View`."""

    name = "layers"
    question = GetLayers

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
