"""DDP and FSDP: which modules are roots, which backwards exchange gradients, and with whom."""

from __future__ import annotations

from typing import Any

from traceml_ray.agent.exchange import STREAMED
from traceml_ray.agent.patch.collectives import group_name
from traceml_ray.agent.patch.exchanges import Exchanges
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.patch.root_modules import RootModules
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.spans import Spans

FSDP_MODULE = "torch.distributed.fsdp"
REDUCTION = "all_reduce of gradients"
"""What DDP does in each backward, which is not timed: a span of no length, when the module is made."""


class DataParallel:
    """How gradients are exchanged in this process, as its DDP and FSDP modules show."""

    def __init__(self, recorder: Recorder, roots: RootModules, spans: Spans, patcher: Patcher) -> None:
        self.strategy = ""
        """ddp, fsdp or fsdp2; empty while there is no such module."""
        self.group: tuple[int, int] | None = None
        """With whom this rank exchanges gradients, see `wire.RankBatch`; of several groups the largest."""
        self._exchange = recorder.exchange
        self._roots = roots
        self._spans = spans
        self._patcher = patcher
        self._exchanges = Exchanges(recorder.exchange, patcher.failed)

    def patch_ddp(self) -> None:
        """Note DDP modules as they are made; their broadcast of buffers before a forward is a wait."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        spans, is_compiling = self._spans, torch.compiler.is_compiling

        def make_sync_buffers(original: Any) -> Any:
            def _sync_buffers(ddp: Any) -> Any:
                began = not is_compiling() and spans.sync_begin()
                try:
                    return original(ddp)
                finally:
                    if began:
                        spans.sync_end()

            return _sync_buffers

        patcher = self._patcher
        patcher.replace(DistributedDataParallel, "__init__", patcher.after("ddp", self._add_ddp))
        patcher.replace(DistributedDataParallel, "_sync_buffers", make_sync_buffers)

    def patch_fsdp(self) -> None:
        """Note modules that are given to `fully_shard` or FSDP, whose module has been imported."""
        import torch.distributed.fsdp as fsdp

        patcher = self._patcher
        if hasattr(fsdp, "fully_shard"):
            patcher.replace(fsdp, "fully_shard", patcher.after("fsdp", self._add_fsdp2))
        patcher.replace(fsdp.FullyShardedDataParallel, "__init__", patcher.after("fsdp", self._add_fsdp))
        self._exchanges.patch_fsdp(patcher)

    def _add_ddp(self, ddp: Any, _: dict[str, Any]) -> None:
        """A DDP module: root, and its backward waits for peers unless `no_sync` is on."""
        import torch.distributed as dist

        self._roots.add(ddp)
        self._exchanges.add_ddp(ddp)
        self.strategy = "ddp"
        ranks = dist.get_process_group_ranks(ddp.process_group)
        self._note_group(min(ranks), len(ranks))
        if len(ranks) < 2:
            return
        if next(ddp.parameters()).is_cuda:
            self._on_device(ddp)
        self._exchange.peers = self._exchanges.of_ddp
        self._note_reduction(ddp)

    def _note_reduction(self, ddp: Any) -> None:
        """Record that gradients are reduced from here on, in which group and how much."""
        size = sum(each.numel() * each.element_size() for each in ddp.parameters() if each.requires_grad)
        if (span := self._spans.begin(REDUCTION, group_name(ddp.process_group))) is not None:
            self._spans.end(span, size)

    def _add_fsdp2(self, modules: Any, keywords: dict[str, Any]) -> None:
        """Of a mesh of two dimensions all ranks exchange gradients; without a mesh, those of the job."""
        import torch
        import torch.distributed as dist

        mesh = keywords.get("mesh")
        if keywords.get("dp_mesh_dims") is None:  # else some of its dimensions are for something else
            ranks = list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()
            self._note_group(min(ranks), len(ranks))
        devices = getattr(torch, "accelerator", torch.cuda)
        on_cpu = mesh.device_type == "cpu" if mesh is not None else not devices.is_available()
        for module in modules if isinstance(modules, (list, tuple)) else (modules,):
            self._add_sharded("fsdp2", module, on_cpu)

    def _add_fsdp(self, module: Any, _: dict[str, Any]) -> None:
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(module.process_group)
        first, size = min(ranks), len(ranks)
        between = getattr(module, "_inter_node_pg", None)
        if between is not None:  # hybrid: a grid of ranks, of which this rank knows its row and its column
            column = dist.get_process_group_ranks(between)
            first, size = first + min(column) - dist.get_rank(), size * len(column)
        self._note_group(first, size)
        self._add_sharded("fsdp", module, module.compute_device.type == "cpu")

    def _add_sharded(self, strategy: str, module: Any, on_cpu: bool) -> None:
        """On the CPU `Collectives` sees every wait inside forward and backward; else it is on a stream."""
        self.strategy = strategy
        self._roots.add(module)
        if self.group is None or self.group[1] > 1:
            self._exchange.peers = self._exchanges.of_fsdp
            if not on_cpu:
                self._on_device(module)

    def _on_device(self, module: Any) -> None:
        """The exchange is on a device's streams; what `SyncBatchNorm` waits for has no marks at all."""
        import torch

        self._exchange.couple(STREAMED)
        if any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
            self._exchange.couple("SyncBatchNorm")

    def _note_group(self, first: int, size: int) -> None:
        if self.group is None or size > self.group[1]:
            self.group = first, size
