"""The newest spans and sizes of batches of every rank process, and samples of every node, in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from traceml_ray.analysis.anomalies import Excerpt, Samples
from traceml_ray.signals.experts.records import RouterTokens
from traceml_ray.signals.nodes.records import NodeSample
from traceml_ray.signals.throughput.records import StepSizes
from traceml_ray.wire import messages as wire

_SPANS = 1 << 17
_SIZES = 1 << 15
_NODES = 4096


class Recent:
    """Memory is bounded, however many rank processes and nodes there are."""

    def __init__(self) -> None:
        self._spans: dict[int, deque[wire.SpanSum]] = {}
        self._sizes: dict[int, deque[StepSizes]] = {}
        self._routers: dict[int, dict[int, RouterTokens]] = {}
        self._nodes: dict[str, Samples] = {}

    def add_span(self, process: int, span: wire.SpanSum) -> None:
        """Add a span; the newest 32 to 512 of a rank process are kept."""
        if process not in self._spans:
            self._spans[process] = deque(maxlen=min(512, max(32, _SPANS // (len(self._spans) + 1))))
        self._spans[process].append(span)

    def spans(self, process: int) -> list[wire.SpanSum]:
        """Return the newest spans of a rank process, oldest first."""
        return list(self._spans.get(process, ()))

    def add_sizes(self, process: int, sizes: StepSizes) -> None:
        """Add sizes of batches; the newest 8 to 64 of a rank process are kept."""
        if process not in self._sizes:
            self._sizes[process] = deque(maxlen=min(64, max(8, _SIZES // (len(self._sizes) + 1))))
        self._sizes[process].append(sizes)

    def sizes(self, process: int) -> list[StepSizes]:
        """Return the newest sizes of batches of a rank process, oldest first."""
        return list(self._sizes.get(process, ()))

    def add_tokens(self, process: int, tokens: RouterTokens) -> None:
        """Add the tokens of a router of a rank process, in place of those before."""
        self._routers.setdefault(process, {})[tokens.number] = tokens

    def tokens(self, process: int) -> list[RouterTokens]:
        """Return the newest tokens of each router of a rank process."""
        return list(self._routers.get(process, {}).values())

    def add_sample(self, node: str, sample: NodeSample) -> None:
        """Add a sample of a node (by id), see `Samples`; of more than 4,096 nodes, the first is forgotten."""
        if node not in self._nodes:
            self._nodes[node] = Samples()
            if len(self._nodes) > _NODES:
                del self._nodes[next(iter(self._nodes))]
        self._nodes[node].add(sample)

    def machines(self, nodes: Sequence[str], first_ns: int, last_ns: int) -> dict[str, Excerpt]:
        """Return what was sampled on those of `nodes` that are known, see `analysis.anomalies.Between`."""
        known = {node: self._nodes[node] for node in nodes if node in self._nodes}
        return {node: samples.between(first_ns, last_ns) for node, samples in known.items()}

    def keep(self, processes: set[int]) -> None:
        """Forget all other rank processes."""
        known: tuple[dict[int, Any], ...] = (self._spans, self._sizes, self._routers)
        for of_process in known:
            for process in of_process.keys() - processes:
                del of_process[process]
