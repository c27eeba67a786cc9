"""
Installs all patches of this process. They send marks to one `Recorder`; the script needs no change.

A patch that cannot be applied is skipped and listed in `missing`. `remove` restores everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from traceml_ray.agent.marks import MAX_NAME_CHARS
from traceml_ray.agent.patch import (
    backward,
    checkpoint,
    collectives,
    data_parallel,
    data_waits,
    optimizer,
    root_modules,
    rpc,
)
from traceml_ray.agent.patch.data_parallel import HYBRID
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Recorder, Spans
from traceml_ray.signals.experts.routers import Routers
from traceml_ray.stages import INFERRED
from traceml_ray.wire.messages import Placement


class Instrumentation:
    """
    All patches of one process.

    Args:
        recorder: receives the marks of the patches.
        patcher: applies and reverts the patches. Default: a patcher that counts the exceptions it suppresses.
        others: (module, name, patch) of what else is patched once the script imports the module.
    """

    def __init__(
        self,
        recorder: Recorder,
        patcher: Patcher | None = None,
        others: Sequence[tuple[str, str, Callable[[Patcher], None]]] = (),
    ) -> None:
        self.recorder, self._others = recorder, others
        self.patcher = patcher = patcher if patcher is not None else Patcher()
        self.errors, self.missing, self.failed = patcher.errors, patcher.missing, patcher.failed
        self.spans = Spans(recorder, self.failed)
        self.roots = root_modules.RootModules(recorder, self.failed)
        self.collectives = collectives.Collectives(recorder, self.spans, self.failed)
        self.data_parallel = data_parallel.DataParallel(recorder, self.roots, self.spans, patcher)
        self.model_parallel = collectives.ModelParallel(recorder.exchange, patcher)
        self.rpc = rpc.RpcCalls(self.failed)
        self.routers = Routers(patcher)
        self._is_rank: Callable[[], None] | None = None

    @property
    def strategy(self) -> str:
        """How the job is parallel, as detected: single, ddp, fsdp2+hsdp, ddp+tp, all_reduce (inferred), …"""
        inferred = self.collectives.reduction + INFERRED if self.recorder.exchange.inferred else ""
        self.model_parallel.look_again()
        parallel, others = self.data_parallel, sorted(self.model_parallel.strategies)
        known = [parallel.engine, parallel.strategy, HYBRID * parallel.hybrid, inferred, *others]
        return "+".join(filter(None, known)) or ("rpc" if self.rpc.worker else "single")

    @property
    def group(self) -> tuple[int, int] | None:
        """The ranks with which this rank exchanges gradients, see `wire.RankBatch`."""
        return self.data_parallel.group

    @property
    def placement(self) -> Placement | None:
        """Position of this rank in a job that is not only data parallel."""
        known, worker = self.model_parallel.placement, self.rpc.worker
        return replace(known or Placement(), worker=worker[:MAX_NAME_CHARS]) if worker else known

    def parallelism(self) -> dict[str, Any]:
        """Return what is known about how the job is parallel, as fields of `wire.RankBatch`."""
        return {"strategy": self.strategy, "group": self.group, "placement": self.placement}

    def when_rank(self, then: Callable[[], None]) -> None:
        """
        Before `install`: register `then`, which is called once this process joins a process group or takes a
        step.
        """
        self._is_rank = then

    def install(self) -> None:
        """Patch torch, which must be imported. Never raises."""
        for name, patch in self._patches():
            self.patcher.apply(name, patch)
        for module, name, patch in self._patches_of_imports():
            self.patcher.when_imported(module, name, patch)
        for module, name, other in self._others:
            self.patcher.when_imported(module, name, functools.partial(other, self.patcher))

    def remove(self) -> None:
        """Restore everything. Never raises; may be called twice."""
        self.patcher.restore()
        self.patcher.apply("detach", self.roots.restore)
        self.patcher.apply("detach", self.recorder.replay)
        self.recorder.stamp_with(self.recorder.clock)
        if self.recorder.device is not None:
            self.recorder.device.seal()
        # objects that still hold a wrapper of ours (a DataLoader's iterator) write no more marks
        self.recorder.ready = 0

    def _patches(self) -> tuple[tuple[str, Callable[[], None]], ...]:
        """Return (name, patch) of everything that is patched immediately."""
        patcher, recorder = self.patcher, self.recorder
        return (
            ("data", lambda: data_waits.patch_dataloader(patcher, recorder)),
            ("backward", lambda: backward.patch(patcher, recorder)),
            ("optimizer", lambda: optimizer.patch(patcher, recorder, self.roots, self._first_step)),
            ("grad_scaler", lambda: optimizer.patch_grad_scaler(patcher, recorder)),
            ("ddp", self.data_parallel.patch_ddp),
            ("forward", lambda: self.roots.patch(patcher)),
            ("checkpoint", lambda: checkpoint.patch_torch(patcher, self.spans, recorder)),
            ("collectives", lambda: self.collectives.patch(patcher)),
            ("rank", self._patch_process_group),
        )

    def _patches_of_imports(self) -> tuple[tuple[str, str, Callable[[], None]], ...]:
        """Return (module, name, patch) of everything that is patched once the script imports the module."""
        patcher = self.patcher
        return (
            (data_parallel.FSDP_MODULE, "fsdp", self.data_parallel.patch_fsdp),
            (data_parallel.DEEPSPEED_MODULE, "deepspeed", self.data_parallel.patch_deepspeed),
            (data_parallel.COMPOSABLE_MODULE, "fsdp", self.data_parallel.patch_composable),
            (collectives.MESH_MODULE, "mesh", self.model_parallel.patch_mesh),
            (collectives.TENSOR_MODULE, "tp", self.model_parallel.patch_tensor),
            (collectives.PIPELINE_MODULE, "pp", self.model_parallel.patch_pipeline),
            (root_modules.COMPILE_MODULE, "compile", self.roots.patch_compile),
            (
                data_waits.RAY_DATA_MODULE,
                "ray_data",
                lambda: data_waits.patch_ray_data(patcher, self.recorder),
            ),
            (
                rpc.AUTOGRAD_MODULE,
                "backward",
                lambda: rpc.patch_autograd(patcher, self.recorder),
            ),
            (
                rpc.OPTIMIZER_MODULE,
                "optimizer",
                lambda: rpc.patch_optimizer(patcher, self.recorder),
            ),
            (rpc.MODULE, "rpc", lambda: self.rpc.patch(patcher)),
            (
                checkpoint.MODULE,
                "checkpoint",
                lambda: checkpoint.patch(patcher, self.spans, self.recorder),
            ),
            (checkpoint.RAY_TRAIN, "checkpoint", lambda: checkpoint.patch_ray_train(patcher, self.spans)),
            *(
                (
                    module,
                    "checkpoint",
                    functools.partial(
                        checkpoint.patch_framework, patcher, self.spans, module, owner, functions
                    ),
                )
                for module, owner, functions in checkpoint.OF_FRAMEWORKS
            ),
            (
                collectives.FUNCTIONAL_MODULE,
                "collectives",
                lambda: self.collectives.patch_functional(patcher),
            ),
        )

    def _patch_process_group(self) -> None:
        if self._is_rank is not None:
            collectives.patch_process_group(self.patcher, self._note_rank)

    def _note_rank(self) -> None:
        then, self._is_rank = self._is_rank, None
        if then is not None:
            then()

    def _first_step(self, optimizer: Any) -> None:
        self.roots.choose(optimizer)
        self.data_parallel.find_sharded()
        self._note_rank()
