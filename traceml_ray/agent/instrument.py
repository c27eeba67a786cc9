"""
Zero-code marks: what is patched in torch, and how it is put back.

Every patch is one attribute replaced by a thin wrapper; each wrapper looks first whether torch is
compiling (then it is transparent, so `fullgraph=True` keeps its one graph), does its mark inside
its own `try`, and calls the original exactly once with the caller's own arguments. A patch that
cannot be applied is skipped and listed in `missing`; `remove()` restores everything.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable
from threading import get_ident
from typing import Any

from traceml_ray.agent import ray_data
from traceml_ray.agent.details import Details
from traceml_ray.agent.exchanges import Exchanges
from traceml_ray.agent.imports import forget, when_imported
from traceml_ray.agent.mark_log import (
    BACKWARD_BEGIN,
    BACKWARD_END,
    CLOSURE_BEGIN,
    COST,
    DATA_BEGIN,
    DATA_END,
    GRADIENTS_DONE,
    OPTIMIZER_BEGIN,
    OPTIMIZER_END,
    SCALER_BEGIN,
    SETTLE_AT,
    SYNCED_BACKWARD_END,
)
from traceml_ray.agent.parts import CHECKPOINT_MODULE, Parts
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.roots import Roots
from traceml_ray.errors import Errors
from traceml_ray.wire import INFERRED

FSDP_MODULE = "torch.distributed.fsdp"
FUNCTIONAL_MODULE = "torch.distributed._functional_collectives"
TENSOR_MODULE = "torch.distributed.tensor.parallel"
PIPELINE_MODULE = "torch.distributed.pipelining.stage"
COMPILE_MODULE = "torch._dynamo.eval_frame"
BACKWARD_ARGUMENTS = (
    "tensors",
    "grad_tensors",
    "retain_graph",
    "create_graph",
    "grad_variables",
    "inputs",
)


def _expect(function: Any, arguments: tuple[str, ...]) -> None:
    """Raise TypeError if `function` does not take `arguments` (spelled out: `*args` costs a µs a call)."""
    found = inspect.signature(function)
    try:
        found.bind(*arguments)
    except TypeError:
        raise TypeError(f"takes {found}, expected {', '.join(arguments)}") from None


class Instrumentation:
    """All patches of one process around one `Recorder`."""

    def __init__(self, recorder: Recorder, details: Details, *, debug: bool = False) -> None:
        self.recorder = recorder
        recorder.parts.details = details
        self.parts = Parts(recorder, details, self.failed)
        self.errors = Errors(debug=debug)
        """Exceptions swallowed, by place."""
        self.missing: dict[str, str] = {}
        """Patches that could not be applied, with the reason."""
        self.group: tuple[int, int] | None = None
        """With whom this rank exchanges gradients, see `wire.RankBatch`; of several groups the largest."""
        self._data_parallel = ""
        self._model_parallel: set[str] = set()
        self.roots = Roots(recorder, self.failed)
        self._learning = True
        self._ranked: Callable[[], None] | None = None
        self._undo: list[Callable[[], None]] = []
        self._exchanges = Exchanges(recorder, self.failed)

    def failed(self, place: str, error: BaseException) -> None:
        """Count an exception that is kept away from the training script (or raise it: debug)."""
        self.errors.swallow(place, error)

    @property
    def strategy(self) -> str:
        """How the job is known to be parallel: single, ddp, fsdp, fsdp2, ddp+tp, all_reduce (inferred), …"""
        inferred = self.parts.reduction + INFERRED if self.recorder.inferred else ""
        known = [self._data_parallel, inferred, *sorted(self._model_parallel)]
        return "+".join(filter(None, known)) or "single"

    # -- putting it in and taking it out ---------------------------------------------------------

    def install(self) -> None:
        """Patch torch, which must be imported; never raises."""
        for name, patch in (
            ("data", self._patch_data),
            ("backward", self._patch_backward),
            ("optimizer", self._patch_optimizer),
            ("grad_scaler", self._patch_grad_scaler),
            ("ddp", self._patch_ddp),
            ("forward", self._patch_parameters),
            ("checkpoint", lambda: self.parts.patch_save(self._replace)),
            ("collectives", lambda: self.parts.patch_collectives(self._replace)),
        ):
            self._try(name, patch)
        if self._ranked is not None:
            self._try("rank", self._patch_process_group)
        for name, module, patch in self._later():
            when_imported(module, functools.partial(self._try, name, patch))

    def _later(self) -> tuple[tuple[str, str, Callable[[], None]], ...]:
        """Return (name, module, patch) of what is patched once the script imports it."""
        return (
            ("fsdp", FSDP_MODULE, self._patch_fsdp),
            ("tp", TENSOR_MODULE, self._patch_tensor_parallel),
            ("pp", PIPELINE_MODULE, self._patch_pipeline),
            ("compile", COMPILE_MODULE, self._patch_compile),
            ("ray_data", ray_data.MODULE, lambda: ray_data.patch(self._replace, self.recorder, self.failed)),
            ("checkpoint", CHECKPOINT_MODULE, lambda: self.parts.patch_checkpoint(self._replace)),
            ("collectives", FUNCTIONAL_MODULE, lambda: self.parts.patch_functional(self._replace)),
        )

    def when_rank(self, then: Callable[[], None]) -> None:
        """Before `install`: have `then` called when this process joins a process group or takes a step."""
        self._ranked = then

    def _patch_process_group(self) -> None:
        import torch.distributed as dist

        if dist.is_available():
            joined = self._then("rank", lambda *_: self._is_rank())
            self._replace(dist, "init_process_group", joined)

    def _is_rank(self) -> None:
        then, self._ranked = self._ranked, None
        if then is not None:
            then()

    def remove(self) -> None:
        """Put everything back as it was; never raises, safe to call twice."""
        for _, module, _ in self._later():
            forget(module)
        undo, self._undo = self._undo, []
        for restore in reversed(undo):
            self._try("detach", restore)
        self._try("detach", self.roots.restore)
        self._try("detach", self.recorder.settle)
        self.recorder.ready = 0  # what still holds a wrapper of ours, a DataLoader's iterator, writes no more

    def _try(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self.missing[name] = f"{type(error).__name__}: {error}"[:200]
            if self.errors.debug:
                raise

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        stored = owner.__dict__.get(name, original)  # how it is bound: not all that is callable is a function
        wrapper: Any = functools.wraps(original)(make(original))
        with contextlib.suppress(TypeError, ValueError):  # not all look through wrappers: `getfullargspec`
            wrapper.__signature__ = inspect.signature(original)
        if isinstance(owner, types.ModuleType):  # where pickle finds the wrapper, and without us the original
            wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
        setattr(owner, name, wrapper)

        def restore() -> None:
            # Somebody may have wrapped our wrapper since: then theirs stays, and ours inside it is inert.
            if owner.__dict__.get(name) is wrapper:
                setattr(owner, name, stored)

        self._undo.append(restore)

    def _then(self, place: str, action: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any], Any]:
        """Return what makes a wrapper that calls the original, then `action(self or module, keywords)`."""

        def make(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                try:
                    action(args[0] if args else kwargs.get("module"), kwargs)
                except Exception as error:
                    self.failed(place, error)
                return result

            return call

        return make

    # -- data ------------------------------------------------------------------------------------

    def _patch_data(self) -> None:
        from torch.utils.data.dataloader import (
            DataLoader,
            _BaseDataLoaderIter,
            _SingleProcessDataLoaderIter,
        )

        recorder, failed = self.recorder, self.failed
        append, clock = recorder.log.append, recorder.clock
        data_begin, data_end = recorder.data_begin, recorder.data_end

        def make_next(original: Any) -> Any:
            def __next__(iterator: Any) -> Any:  # noqa: N807
                began = got = False
                try:
                    written = id(iterator) == recorder.iterator and get_ident() == recorder.ready
                    if written:
                        append(DATA_BEGIN)
                        append(clock())
                    else:
                        began = data_begin(iterator)
                except Exception as error:
                    failed("data", error)
                    written = False
                try:
                    item = original(iterator)
                    got = True
                    return item
                finally:
                    try:
                        if written and got:
                            append(DATA_END)
                            append(clock())
                        elif written or began:
                            data_end(got)
                    except Exception as error:
                        failed("data", error)

            return __next__

        def make_iter(original: Any) -> Any:
            def __iter__(loader: Any) -> Any:  # noqa: N807
                began = False
                try:
                    recorder.new_iterator()
                    began = data_begin(loader)
                except Exception as error:
                    failed("data", error)
                try:
                    iterator = original(loader)
                    if isinstance(iterator, _BaseDataLoaderIter):
                        iterator.__dict__["_traceml_loader"] = id(loader)
                    return iterator
                finally:
                    try:
                        if began:
                            data_end(True)
                    except Exception as error:
                        failed("data", error)

            return __iter__

        self._replace(_BaseDataLoaderIter, "__next__", make_next)
        self._replace(DataLoader, "__iter__", make_iter)
        collate = self._then("collate", lambda iterator, _: self.parts.patch_collate(iterator))
        self._replace(_SingleProcessDataLoaderIter, "__init__", collate)

    # -- backward --------------------------------------------------------------------------------

    def _patch_backward(self) -> None:
        import torch

        recorder, failed = self.recorder, self.failed
        backward_begin, backward_end = recorder.backward_begin, recorder.backward_end
        is_compiling = torch.compiler.is_dynamo_compiling
        tensor_type = torch.Tensor
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        log, append, clock = recorder.log, recorder.log.append, recorder.clock
        queued = True

        def gradients_done() -> None:
            append(GRADIENTS_DONE)
            append(clock())

        def first_gradient(_: Any) -> None:
            # The first gradient queues a callback of the autograd engine. DDP queues its own only when its
            # last bucket is ready, so ours runs first: own gradients are done, the exchange is not.
            nonlocal queued
            if queued or is_compiling():
                return
            queued = True
            try:
                queue_callback(gradients_done)
            except Exception as error:
                failed("backward", error)

        # A node takes over the hooks of the tensor that it is shown: this one's, so that the loss is left
        # alone. It is four times as fast as `register_hook`.
        carrier = torch.zeros(())
        carrier._backward_hooks = OrderedDict({0: first_gradient})

        def nodes(tensors: Any) -> list[Any]:
            roots = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
            found = [root.grad_fn for root in roots if isinstance(root, tensor_type)]
            return [node for node in found if node is not None]

        def make(original: Any) -> Any:
            _expect(original, BACKWARD_ARGUMENTS)

            def backward(
                tensors: Any,
                grad_tensors: Any = None,
                retain_graph: Any = None,
                create_graph: Any = False,
                grad_variables: Any = None,
                inputs: Any = None,
            ) -> Any:
                nonlocal queued
                if is_compiling():
                    return original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
                if type(tensors) is not tensor_type and hasattr(type(tensors), "__next__"):
                    tensors = tuple(tensors)  # it can be read only once, and what it raises is the user's
                written = began = ok = False
                handles: Any = ()
                try:
                    me = get_ident()
                    written = me == recorder.ready and len(log) < SETTLE_AT
                    if written:
                        append(BACKWARD_BEGIN)
                        append(clock())
                        recorder.ready = 0
                    else:
                        began = backward_begin()
                    if written or began:
                        queued = False
                        if retain_graph or create_graph:  # the graph stays: nothing of ours may pile up in it
                            handles = [node.register_prehook(first_gradient) for node in nodes(tensors)]
                        elif type(tensors) is tensor_type and tensors.grad_fn is not None:
                            tensors.grad_fn._register_hook_dict(carrier)
                        else:
                            for node in nodes(tensors):
                                node._register_hook_dict(carrier)
                except Exception as error:
                    failed("backward", error)
                try:
                    result = original(
                        tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
                    )
                    ok = True
                    return result
                finally:
                    queued = True
                    try:
                        for handle in handles:
                            handle.remove()
                        if written and ok:
                            peers = recorder.peers
                            append(BACKWARD_END if peers is None or not peers() else SYNCED_BACKWARD_END)
                            append(clock())
                            recorder.ready = me
                        elif written or began:
                            backward_end(ok)
                    except Exception as error:
                        failed("backward", error)

            return backward

        self._replace(torch.autograd, "backward", make)

    # -- optimizer -------------------------------------------------------------------------------

    def _patch_optimizer(self) -> None:
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        recorder, failed = self.recorder, self.failed
        append, clock = recorder.log.append, recorder.clock
        optimizer_begin, optimizer_end = recorder.optimizer_begin, recorder.optimizer_end
        is_compiling = torch.compiler.is_dynamo_compiling
        began = False

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            nonlocal began
            if is_compiling():
                return
            try:
                if self._learning:
                    self._learn(optimizer)
                closure = (len(args) > 1 or kwargs) and any(map(callable, (*args[1:], *kwargs.values())))
                began = get_ident() == recorder.ready
                if began:
                    append(CLOSURE_BEGIN if closure else OPTIMIZER_BEGIN)
                    append(clock())
                    if recorder.weigh:
                        append(COST)
                        append(clock())
                        recorder.weigh = False
                else:
                    began = optimizer_begin(bool(closure))
            except Exception as error:
                failed("optimizer", error)

        def after(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not began or is_compiling():
                return
            try:
                if get_ident() == recorder.ready:
                    append(OPTIMIZER_END)
                    append(clock())
                else:
                    optimizer_end(began)
            except Exception as error:
                failed("optimizer", error)

        for register, hook in (
            (register_optimizer_step_pre_hook, before),
            (register_optimizer_step_post_hook, after),
        ):
            self._undo.append(register(hook).remove)

    def _patch_grad_scaler(self) -> None:
        from torch.amp.grad_scaler import GradScaler

        recorder, failed = self.recorder, self.failed

        def make(original: Any) -> Any:
            def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    if not recorder.write(SCALER_BEGIN):
                        recorder.scaler_begin()  # an overflow skips the optimizer, the step has been one
                except Exception as error:
                    failed("grad_scaler", error)
                return original(scaler, optimizer, *args, **kwargs)

            return step

        self._replace(GradScaler, "step", make)

    # -- who is the root, and who are its peers ----------------------------------------------------

    def _patch_parameters(self) -> None:
        """
        Until the first optimizer step: see whose parameters are asked for, to know the root module.

        The wrapper stays beyond that: what was compiled with it would be compiled again without it.
        """
        import torch

        note, failed, is_compiling = self.roots.note_owner, self.failed, torch.compiler.is_dynamo_compiling

        def make(original: Any) -> Any:
            def named_parameters(module: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    if not is_compiling() and self._learning:
                        note(module)
                except Exception as error:
                    failed("forward", error)
                return original(module, *args, **kwargs)

            return named_parameters

        self._replace(torch.nn.Module, "named_parameters", make)

    def _learn(self, optimizer: Any) -> None:
        self._learning = False
        self._is_rank()
        if not len(self.roots):
            self.roots.learn(optimizer)

    def _patch_ddp(self) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        parts, is_compiling = self.parts, torch.compiler.is_compiling

        def make_sync_buffers(original: Any) -> Any:
            def _sync_buffers(ddp: Any) -> Any:
                began = not is_compiling() and parts.sync_begin()
                try:
                    return original(ddp)
                finally:
                    if began:
                        parts.sync_end()

            return _sync_buffers

        self._replace(DistributedDataParallel, "__init__", self._then("ddp", self._add_ddp))
        self._replace(DistributedDataParallel, "_sync_buffers", make_sync_buffers)

    def _add_ddp(self, ddp: Any, _: dict[str, Any]) -> None:
        """A DDP module: root, and its backward waits for peers unless `no_sync` is on."""
        self.roots.add(ddp)
        self._exchanges.add_ddp(ddp)
        self._data_parallel = "ddp"
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(ddp.process_group)
        self._note_group(min(ranks), len(ranks))
        if len(ranks) < 2:
            return
        if next(ddp.parameters()).is_cuda:
            # The exchange runs on the device: its waits are not on the CPU clock of these rows.
            self.recorder.coupled = True
        self.recorder.peers = self._exchanges.of_ddp

    def _note_group(self, first: int, size: int) -> None:
        if self.group is None or size > self.group[1]:
            self.group = first, size

    def _patch_compile(self) -> None:
        from torch._dynamo.eval_frame import OptimizedModule

        self.roots.mark_compiled(OptimizedModule)

    def _patch_fsdp(self) -> None:
        import torch.distributed.fsdp as fsdp

        if hasattr(fsdp, "fully_shard"):
            self._replace(fsdp, "fully_shard", self._then("fsdp", self._add_fsdp2))
        self._replace(fsdp.FullyShardedDataParallel, "__init__", self._then("fsdp", self._add_fsdp))
        self._exchanges.patch_fsdp(self._replace)

    def _add_fsdp2(self, modules: Any, said: dict[str, Any]) -> None:
        """Of a mesh of two dimensions all ranks exchange gradients; without a mesh, those of the job."""
        import torch
        import torch.distributed as dist

        mesh = said.get("mesh")
        if said.get("dp_mesh_dims") is None:  # else some of its dimensions are for something else
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
        """On the CPU every wait inside forward and backward is seen (see `Parts`); else it is on a stream."""
        self._data_parallel = strategy
        self.roots.add(module)
        if self.group is None or self.group[1] > 1:
            self.recorder.peers = self._exchanges.of_fsdp
            self.recorder.coupled = self.recorder.coupled or not on_cpu

    # -- who is coupled in another way -------------------------------------------------------------

    def _patch_tensor_parallel(self) -> None:
        import torch.distributed.tensor.parallel as parallel

        self._replace(parallel, "parallelize_module", self._then("tp", lambda *_: self._couple("tp")))

    def _patch_pipeline(self) -> None:
        from torch.distributed.pipelining.stage import _PipelineStageBase

        self._replace(_PipelineStageBase, "__init__", self._then("pp", lambda *_: self._couple("pp")))

    def _couple(self, strategy: str) -> None:
        self._model_parallel.add(strategy)
        self.recorder.coupled = True
