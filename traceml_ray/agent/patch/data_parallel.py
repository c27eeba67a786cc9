"""
Patches DDP and FSDP: which modules are roots, which backwards exchange gradients, and with which ranks.

Not every backward exchanges gradients: a loss computed in chunks, or a part of the model outside DDP and
FSDP, may not.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from traceml_ray.agent.patch.collectives import group_name
from traceml_ray.agent.patch.fsdp import ForwardMemory, ShardTraffic, groups_of, part_of_fsdp2
from traceml_ray.agent.patch.patcher import Failed, Patcher
from traceml_ray.agent.patch.root_modules import RootModules
from traceml_ray.agent.recorder import Recorder, Spans
from traceml_ray.agent.steps import STREAMED, GradientExchange

_REDUCES = (
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "foreach_reduce"),
    ("torch.distributed._composable.fsdp._fsdp_param_group", "foreach_reduce"),
    ("torch.distributed.fsdp._runtime_utils", "_reduce_grad"),
    ("torch.distributed.fsdp._runtime_utils", "_reduce_grad_no_shard"),
)
"""Functions that `fully_shard` and FSDP call for each group of parameters whose gradients they exchange."""


class Exchanges:
    """Answers `GradientExchange.peers` at the end of each backward. Never raises."""

    def __init__(self, exchange: GradientExchange, failed: Failed) -> None:
        self._exchange = exchange
        self._failed = failed
        self._ddp: list[tuple[weakref.ref[Any], list[int]]] = []
        self._reduces = self._known = 0
        self._patched: set[str] = set()

    def add_ddp(self, module: Any) -> None:
        """Also check this DDP module at the end of each backward."""
        self._ddp = [*(known for known in self._ddp if known[0]() is not None), (weakref.ref(module), [])]

    def of_ddp(self) -> bool:
        """
        Return whether the backward that ends exchanged gradients of DDP, that is, without `no_sync`.

        Once a step has had several such backwards, this also checks whether the backward made gradients of
        DDP's parameters: the reducer records the time of each.
        """
        exchanged = False
        try:
            for ref, before in self._ddp:
                module = ref()
                if module is None:
                    continue
                if not self._exchange.several:
                    exchanged |= bool(module.require_backward_grad_sync)
                    continue
                times = module.reducer.get_backward_stats()
                exchanged |= bool(module.require_backward_grad_sync) and times != before
                before[:] = times
        except Exception as error:
            self._failed("exchange", error)
            return True
        return exchanged

    def of_fsdp(self) -> bool:
        """Return whether gradients were reduced in the backward that ends. True while none ever were."""
        before, self._known = self._known, self._reduces
        return self._reduces != before or not self._reduces

    def patch_fsdp(self, patcher: Patcher) -> None:
        """Count the reductions of FSDP in its imported modules. Call it again when others are imported."""
        from torch.compiler import is_compiling

        def make(original: Any) -> Any:
            def reduce(*args: Any, **kwargs: Any) -> Any:
                if not is_compiling():
                    self._reduces += 1
                return original(*args, **kwargs)

            return reduce

        for name, function in _REDUCES:
            place = f"{name}.{function}"
            if hasattr(sys.modules.get(name), function) and place not in self._patched:
                self._patched.add(place)
                patcher.replace(sys.modules[name], function, make)


FSDP_MODULE = "torch.distributed.fsdp"
COMPOSABLE_MODULE = "torch.distributed._composable.fsdp"
"""Where older versions of torch have `fully_shard`."""
DEEPSPEED_MODULE = "deepspeed.runtime.engine"
HYBRID = "hsdp"
"""Appended to the strategies fsdp and fsdp2: several ranks hold the same shard."""
REDUCTION = "all_reduce of gradients"
"""What DDP does in each backward. It is not timed: a span of length 0 is recorded when the module is made."""


class DataParallel:
    """How gradients are exchanged in this process, as its DDP and FSDP modules show."""

    def __init__(self, recorder: Recorder, roots: RootModules, spans: Spans, patcher: Patcher) -> None:
        self.strategy = ""
        """ddp, fsdp or fsdp2. Empty while there is no such module."""
        self.engine = ""
        """deepspeed if that wraps the model: it exchanges gradients with its own collectives."""
        self.hybrid = False
        """Whether several ranks hold the same shard (HSDP)."""
        self.traffic = ShardTraffic(recorder, patcher.failed)
        self.memory = ForwardMemory(patcher.failed)
        self.group: tuple[int, int] | None = None
        """
        The ranks with which this rank exchanges gradients, see `wire.RankBatch`. The largest of several
        groups.
        """
        self._exchange = recorder.exchange
        self._roots = roots
        self._spans = spans
        self._patcher = patcher
        self._exchanges = Exchanges(recorder.exchange, patcher.failed)
        self._sharded: list[weakref.ref[Any]] = []

    def sharded(self) -> list[Any]:
        """Return the modules that were given to `fully_shard` and are still alive."""
        return [module for ref in self._sharded if (module := ref()) is not None]

    def patch_ddp(self) -> None:
        """Record DDP modules when they are made. Their broadcast of buffers before a forward is a wait."""
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
        """Record modules that are given to `fully_shard` or FSDP, whose module must be imported."""
        import torch.distributed.fsdp as fsdp

        patcher = self._patcher
        patcher.replace(fsdp.FullyShardedDataParallel, "__init__", patcher.after("fsdp", self._add_fsdp))
        self._patch_fully_shard(fsdp)

    def _patch_fully_shard(self, module: Any) -> None:
        patcher = self._patcher
        if hasattr(module, "fully_shard"):
            patcher.replace(module, "fully_shard", patcher.after("fsdp", self._add_fsdp2))
        self._exchanges.patch_fsdp(patcher)
        patcher.apply("fsdp: bytes", lambda: self.traffic.patch(patcher))
        patcher.apply("fsdp: memory", lambda: self.memory.patch(patcher))

    def patch_composable(self) -> None:
        """Do the same for `fully_shard` of a torch before 2.6, whose module must be imported."""
        import torch.distributed._composable.fsdp as composable
        import torch.distributed.fsdp as fsdp

        if not hasattr(fsdp, "fully_shard"):
            self._patch_fully_shard(composable)

    def patch_deepspeed(self) -> None:
        """Record that a model is given to DeepSpeed, whose module must be imported."""

        def note(*_: object) -> None:
            self.engine = "deepspeed"

        engine = sys.modules[DEEPSPEED_MODULE].DeepSpeedEngine
        self._patcher.replace(engine, "__init__", self._patcher.after("deepspeed", note))

    def _add_ddp(self, ddp: Any, _: dict[str, Any]) -> None:
        """Add a DDP module: it is a root, and its backward waits for peers unless `no_sync` is on."""
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
        """Record that gradients are reduced from now on: in which group, and how many bytes."""
        size = sum(
            parameter.numel() * parameter.element_size()
            for parameter in ddp.parameters()
            if parameter.requires_grad
        )
        if (span := self._spans.begin(REDUCTION, group_name(ddp.process_group))) is not None:
            self._spans.end(span, size)

    def _add_fsdp2(self, modules: Any, keywords: dict[str, Any]) -> None:
        """
        Add a module given to `fully_shard`. In a mesh of two dimensions all its ranks exchange gradients;
        without a mesh, all ranks of the job do.
        """
        import torch
        import torch.distributed as dist

        mesh = keywords.get("mesh")
        if keywords.get("dp_mesh_dims") is None:  # otherwise some dimensions of the mesh have another purpose
            ranks = list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()
            self._note_group(min(ranks), len(ranks))
        devices = getattr(torch, "accelerator", torch.cuda)
        on_cpu = mesh.device_type == "cpu" if mesh is not None else not devices.is_available()
        self._add_modules([*modules] if isinstance(modules, (list, tuple)) else [modules], on_cpu)

    def find_sharded(self) -> None:
        """Record `FSDPModule`s made by a reference to `fully_shard` that was imported before us."""
        of_fsdp2 = part_of_fsdp2("_fully_shard") or part_of_fsdp2("fully_shard")
        if of_fsdp2 is None or self._sharded:
            return
        modules = [module for root in self._roots.modules() for module in root.modules()]
        sharded = [module for module in modules if isinstance(module, of_fsdp2.FSDPModule)]
        groups = [group for group in groups_of(sharded) if hasattr(group.mesh_info, "shard_mesh_size")]
        if groups:  # without groups the modules are only replicated
            self._add_modules(sharded, groups[0].device.type == "cpu")

    def _add_modules(self, modules: list[Any], on_cpu: bool) -> None:
        for module in modules:
            self._sharded.append(weakref.ref(module))
            self._add_sharded("fsdp2", module, on_cpu)
        infos = [group.mesh_info for group in groups_of(modules)]
        self.hybrid |= any(getattr(info, "replicate_mesh_size", 1) > 1 for info in infos)

    def _add_fsdp(self, module: Any, _: dict[str, Any]) -> None:
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(module.process_group)
        first, size = min(ranks), len(ranks)
        between = getattr(module, "_inter_node_pg", None)
        if between is not None:  # hybrid: the ranks form a grid, and this rank knows its row and its column
            column = dist.get_process_group_ranks(between)
            first, size = first + min(column) - dist.get_rank(), size * len(column)
        self._note_group(first, size)
        self.hybrid |= between is not None
        self._add_sharded("fsdp", module, module.compute_device.type == "cpu")

    def _add_sharded(self, strategy: str, module: Any, on_cpu: bool) -> None:
        """
        Add a sharded module. On the CPU `Collectives` sees every wait inside forward and backward; elsewhere
        the waits are on a stream.
        """
        self.strategy = strategy
        self._exchange.shard()
        self._roots.add(module)
        if self.group is None or self.group[1] > 1:
            self._exchange.peers = self._exchanges.of_fsdp
            if not on_cpu:
                self._on_device(module)

    def _on_device(self, module: Any) -> None:
        """
        Record that the exchange is on a device's streams. The waits of `SyncBatchNorm` have no
        marks at all.
        """
        import torch

        self._exchange.couple(STREAMED)
        if any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
            self._exchange.couple("SyncBatchNorm")

    def _note_group(self, first: int, size: int) -> None:
        if self.group is None or size > self.group[1]:
            self.group = first, size
