"""Tensor and pipeline parallelism: such ranks wait inside their layers, which no mark sees."""

from __future__ import annotations

from traceml_ray.agent.exchange import GradientExchange
from traceml_ray.agent.patch.patcher import Make, Patcher

TENSOR_MODULE = "torch.distributed.tensor.parallel"
PIPELINE_MODULE = "torch.distributed.pipelining.stage"


class ModelParallel:
    """Which of the two this process uses: `strategies` holds tp, pp."""

    def __init__(self, exchange: GradientExchange, patcher: Patcher) -> None:
        self.strategies: set[str] = set()
        self._exchange = exchange
        self._patcher = patcher

    def patch_tensor(self) -> None:
        """Note the use of `parallelize_module`, whose module has been imported."""
        import torch.distributed.tensor.parallel as parallel

        self._patcher.replace(parallel, "parallelize_module", self._noting("tp"))

    def patch_pipeline(self) -> None:
        """Note pipeline stages as they are made; their module has been imported."""
        from torch.distributed.pipelining.stage import _PipelineStageBase

        self._patcher.replace(_PipelineStageBase, "__init__", self._noting("pp"))

    def _noting(self, strategy: str) -> Make:
        def note(*_: object) -> None:
            self.strategies.add(strategy)
            self._exchange.couple(strategy)

        return self._patcher.after(strategy, note)
