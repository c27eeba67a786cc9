"""
Zero-code marks: what is patched in torch, and how it is put back.

Every patch is one attribute replaced by a thin wrapper; each wrapper looks first whether torch is
compiling (then it is transparent, so `fullgraph=True` keeps its one graph), does its mark inside
its own `try`, and calls the original exactly once with the caller's own arguments. A patch that
cannot be applied is skipped and listed in `missing`; `remove()` restores everything.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from traceml_ray.agent.details import Details
from traceml_ray.agent.imports import forget, when_imported
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.roots import Roots

FSDP_MODULE = "torch.distributed.fsdp"
COMPILE_MODULE = "torch._dynamo.eval_frame"


class Instrumentation:
    """All patches of one process around one `Recorder`."""

    def __init__(self, recorder: Recorder, details: Details, *, debug: bool = False) -> None:
        self.recorder = recorder
        self.details = details
        self.errors: dict[str, int] = {}
        """Exceptions swallowed, by place."""
        self.missing: dict[str, str] = {}
        """Patches that could not be applied, with the reason."""
        self.strategy = "single"
        self.roots = Roots(recorder.forward_begin, self.failed)
        self._debug = debug
        self._undo: list[Callable[[], None]] = []
        self._stop_learning: Callable[[], None] | None = None
        self._ddp: list[Any] = []

    def failed(self, place: str, error: BaseException) -> None:
        """Count an exception that is kept away from the training script (or raise it: debug)."""
        self.errors[place] = self.errors.get(place, 0) + 1
        if self._debug:
            raise error

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
            ("checkpoint", self._patch_save),
        ):
            self._try(name, patch)
        when_imported(FSDP_MODULE, lambda: self._try("fsdp", self._patch_fsdp))
        when_imported(COMPILE_MODULE, lambda: self._try("compile", self._patch_compile))

    def remove(self) -> None:
        """Put everything back as it was; never raises, safe to call twice."""
        forget(FSDP_MODULE)
        forget(COMPILE_MODULE)
        undo, self._undo = self._undo, []
        for restore in reversed(undo):
            self._try("detach", restore)
        self._try("detach", self.roots.restore)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.missing[name] = f"{type(error).__name__}: {error}"[:200]
            if self._debug:
                raise

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
        original = getattr(owner, name)
        wrapper = functools.wraps(original)(make(original))
        setattr(owner, name, wrapper)

        def restore() -> None:
            # Somebody may have wrapped our wrapper since: then theirs stays, and ours inside it is inert.
            if owner.__dict__.get(name) is wrapper:
                setattr(owner, name, original)

        self._undo.append(restore)
        return restore

    # -- data ------------------------------------------------------------------------------------

    def _patch_data(self) -> None:
        from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

        recorder, failed = self.recorder, self.failed
        data_begin, data_end = recorder.data_begin, recorder.data_end

        def make_next(original: Any) -> Any:
            def __next__(iterator: Any) -> Any:  # noqa: N807
                began = False
                try:
                    began = data_begin(iterator)
                except Exception as error:
                    failed("data", error)
                if not began:
                    return original(iterator)
                got = False
                try:
                    item = original(iterator)
                    got = True
                    return item
                finally:
                    try:
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

    # -- backward --------------------------------------------------------------------------------

    def _patch_backward(self) -> None:
        import torch

        recorder, failed = self.recorder, self.failed
        is_compiling = torch.compiler.is_compiling
        tensor_type = torch.Tensor
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback

        backward_begin, backward_end = recorder.backward_begin, recorder.backward_end
        queued = False

        def gradients_done() -> None:
            try:
                recorder.gradients_done()
            except Exception as error:
                failed("backward", error)

        def first_gradient(_: Any) -> None:
            # The first gradient queues a callback of the autograd engine. DDP queues its own only when its
            # last bucket is ready, so ours runs first: own gradients are done, the exchange is not.
            nonlocal queued
            if queued or not recorder.depth or is_compiling():
                return
            queued = True
            try:
                queue_callback(gradients_done)
            except Exception as error:
                failed("backward", error)

        first_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined] # saving a loss warns of no hook
        hooks = OrderedDict({0: first_gradient})

        def hook(tensors: Any) -> list[Any]:
            """Return what `unhook` wants. A lone loss is hooked without a handle: it is four times as fast."""
            if type(tensors) is tensor_type and tensors._backward_hooks is None and tensors.grad_fn is not None:
                tensors._backward_hooks = hooks
                tensors.grad_fn._register_hook_dict(tensors)
                return [tensors]
            roots = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
            return [
                root.register_hook(first_gradient)
                for root in roots
                if isinstance(root, tensor_type) and root.requires_grad
            ]

        def unhook(hooked: list[Any]) -> None:
            for item in hooked:
                if isinstance(item, tensor_type):
                    item._backward_hooks = None
                else:
                    item.remove()

        def make(original: Any) -> Any:
            def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal queued
                if is_compiling():
                    return original(tensors, *args, **kwargs)
                hooked: list[Any] = []
                began, outer = False, queued
                try:
                    began = backward_begin()
                    if began:
                        queued = False
                        if type(tensors) is not tensor_type and hasattr(tensors, "__next__"):
                            tensors = tuple(tensors)  # a generator can be read only once
                        hooked = hook(tensors)
                except Exception as error:
                    failed("backward", error)
                ok = False
                try:
                    result = original(tensors, *args, **kwargs)
                    ok = True
                    return result
                finally:
                    if began:
                        try:
                            backward_end(ok)
                            queued = outer
                            unhook(hooked)
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
        optimizer_begin, optimizer_end = recorder.optimizer_begin, recorder.optimizer_end
        is_compiling = torch.compiler.is_compiling
        began = 0

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            nonlocal began
            if is_compiling():
                return
            try:
                if self._stop_learning is not None:
                    self._learn(optimizer)
                began = optimizer_begin()
            except Exception as error:
                failed("optimizer", error)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_compiling():
                return
            try:
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
                    recorder.optimizer_begin()  # an overflow skips the optimizer, the step has been one
                except Exception as error:
                    failed("grad_scaler", error)
                return original(scaler, optimizer, *args, **kwargs)

            return step

        self._replace(GradScaler, "step", make)

    # -- who is the root, and who are its peers ----------------------------------------------------

    def _patch_parameters(self) -> None:
        """Until the first optimizer step: see whose parameters are asked for, to know the root module."""
        from torch.nn import Module

        note, failed = self.roots.note_owner, self.failed

        def make(original: Any) -> Any:
            def named_parameters(module: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    note(module)
                except Exception as error:
                    failed("forward", error)
                return original(module, *args, **kwargs)

            return named_parameters

        self._stop_learning = self._replace(Module, "named_parameters", make)

    def _learn(self, optimizer: Any) -> None:
        assert self._stop_learning is not None
        self._stop_learning()
        if not len(self.roots):
            self.roots.learn(optimizer)
        self._stop_learning = None

    def _patch_ddp(self) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        recorder, failed = self.recorder, self.failed
        is_compiling = torch.compiler.is_compiling

        def make_init(original: Any) -> Any:
            def __init__(ddp: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                original(ddp, *args, **kwargs)
                try:
                    self.add_ddp(ddp)
                except Exception as error:
                    failed("ddp", error)

            return __init__

        def make_sync_buffers(original: Any) -> Any:
            def _sync_buffers(ddp: Any) -> Any:
                if is_compiling():
                    return original(ddp)
                before = None
                try:
                    before = recorder.sync_begin()
                except Exception as error:
                    failed("ddp", error)
                try:
                    return original(ddp)
                finally:
                    try:
                        recorder.sync_end(before)
                    except Exception as error:
                        failed("ddp", error)

            return _sync_buffers

        self._replace(DistributedDataParallel, "__init__", make_init)
        self._replace(DistributedDataParallel, "_sync_buffers", make_sync_buffers)

    def add_ddp(self, ddp: Any) -> None:
        """A DDP module: root, and its backward waits for peers unless `no_sync` is on."""
        self.roots.add(ddp)
        self._ddp.append(weakref.ref(ddp))
        self.strategy = "ddp"
        import torch.distributed as dist

        if dist.get_world_size(ddp.process_group) < 2:
            return
        if next(ddp.parameters()).is_cuda:
            # The exchange runs on the device: its waits are not on the CPU clock of these rows.
            self.recorder.coupled = True
        self.recorder.peers = self._exchanges

    def _exchanges(self) -> bool:
        return any(
            module.require_backward_grad_sync for ref in self._ddp if (module := ref()) is not None
        )

    def _patch_compile(self) -> None:
        from torch._dynamo.eval_frame import OptimizedModule

        self.roots.mark_compiled(OptimizedModule)

    def _patch_fsdp(self) -> None:
        import torch.distributed.fsdp as fsdp

        failed = self.failed

        def coupled(module: Any, strategy: str) -> None:
            self.roots.add(module)
            self.strategy = strategy
            self.recorder.coupled = True
            self.recorder.peers = lambda: True

        def make_function(original: Any) -> Any:
            def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(module, *args, **kwargs)
                try:
                    coupled(module, "fsdp2")
                except Exception as error:
                    failed("fsdp", error)
                return result

            return fully_shard

        def make_init(original: Any) -> Any:
            def __init__(module: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                original(module, *args, **kwargs)
                try:
                    coupled(module, "fsdp")
                except Exception as error:
                    failed("fsdp", error)

            return __init__

        if hasattr(fsdp, "fully_shard"):
            self._replace(fsdp, "fully_shard", make_function)
        self._replace(fsdp.FullyShardedDataParallel, "__init__", make_init)

    # -- details -----------------------------------------------------------------------------------

    def _patch_save(self) -> None:
        import torch

        recorder, details, failed = self.recorder, self.details, self.failed

        def make(original: Any) -> Any:
            def save(*args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter_ns()
                try:
                    return original(*args, **kwargs)
                finally:
                    try:
                        if recorder.mine():
                            elapsed = time.perf_counter_ns() - began
                            details.add("checkpoint", recorder.stage, recorder.step, elapsed)
                    except Exception as error:
                        failed("checkpoint", error)

            return save

        self._replace(torch, "save", make)
