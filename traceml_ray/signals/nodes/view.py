"""Utilization of nodes and their devices, from all samples of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from traceml_ray.signals.view import Run, View
from traceml_ray.store.query import OfRun
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import System


class GetSystem(OfRun[System], frozen=True):
    """Median and peak of each quantity of each node and its devices over the whole session."""


class NodesView(View[System]):
    """
    See `View`. A report shows them with the ranks of each node (`reports.contents.nodes_table`). Pages and
    `/metrics` show the newest samples (`query.GetNodeSamples`), and a verdict shows the anomalies.
    """

    name = "system"
    question = GetSystem

    def answer(self, run: Run, asked: GetSystem) -> System:
        """Return median and peak of each quantity."""
        return System(nodes=_nodes(run.file))


def _nodes(file: SessionFile) -> list[dict[str, Any]]:
    blocks, hostnames = [], {node.node_id: node.hostname for node in file.cluster()}
    for node_id, columns in sorted(file.node_columns().items()):
        by_device: dict[int | None, dict[str, Any]] = {}
        for (device, name), values in columns.items():
            by_device.setdefault(device, {} if device is None else {"index": device})[name] = _spread(values)
        block = {"node_id": node_id, "hostname": hostnames.get(node_id), **by_device.pop(None, {})}
        blocks.append({**block, "gpus": list(by_device.values()) or None})
    return blocks


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    return {"median": float(np.median(values)), "peak": float(np.max(values))} if len(values) else None
