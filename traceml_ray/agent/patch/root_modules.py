"""
Finds the root module: the module whose call starts a step's forward.

A module given to DDP or FSDP is a root. Without them the root is the module that owns the optimizer's
parameters. The mark is on the *class* of that module and checks for the instance. The instance is not
changed, so a pickled, deep-copied or scripted model contains nothing of ours. Submodules of other classes
cost nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

from traceml_ray.agent.importlib_bootstrap import uncounted
from traceml_ray.agent.marks import EVAL_MODE_FORWARD_BEGIN, FORWARD_BEGIN, NO_GRAD_FORWARD_BEGIN
from traceml_ray.agent.patch.layer_calls import MEASURED_BY
from traceml_ray.agent.patch.patcher import Failed, Patcher
from traceml_ray.agent.recorder import Recorder

COMPILE_MODULE = "torch._dynamo.eval_frame"

_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")
"""Attributes that hold the wrapped module: of DDP and others, of `torch.compile`, and of FSDP."""


class _Ids(dict[int, weakref.ref[Any]]):
    """
    The roots by id, and everything else that a mark needs.

    This is all that a marked class references of ours. If the class is pickled by value, as a class of
    `__main__` is, an empty dict is pickled with it, and calls go straight to the original.
    """

    __slots__ = ("ours",)

    ours: tuple[Recorder, Callable[[int], None], Callable[[], int], Callable[[Any], bool], Failed]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


class RootModules:
    """The root modules of this process (usually one) and the classes that carry the mark."""

    def __init__(self, recorder: Recorder, failed: Failed) -> None:
        self.learning = True
        """
        Whether a root is still searched for: no root is known (any more), and no optimizer has taken a step
        since.
        """
        self._failed = failed
        self._ids = _Ids()
        self._recorder = recorder
        recorder.follow(self._stamp_with)
        self._classes: dict[Any, tuple[Any, Any]] = {}
        self._seen: deque[weakref.ref[Any]] = deque(maxlen=16)

    def _stamp_with(self, stamp: Callable[[], int]) -> None:
        recorder = self._recorder
        self._ids.ours = recorder, recorder.log.append, stamp, _inner_trains, self._failed

    def modules(self) -> list[Any]:
        """Return the roots that are still alive."""
        return [module for ref in self._ids.values() if (module := ref()) is not None]

    def add(self, module: Any) -> None:
        """Make `module` a root. Roots inside it are no longer roots."""
        module = getattr(module, "_orig_mod", module)  # the module that torch.compile wraps
        inside = {id(child) for child in module.modules()} - {id(module)}
        for key in inside & set(self._ids):
            del self._ids[key]
        if any(id(module) in {id(child) for child in root.modules()} for root in self.modules()):
            return
        key = id(module)
        self._ids[key] = weakref.ref(module, lambda _: self._gone(key))
        self._mark_class(type(module))

    def _gone(self, key: int) -> None:
        """
        Remove a root that was deleted. After the last one another model may follow, as in a hyperparameter
        search.
        """
        self._ids.pop(key, None)
        self.learning = self.learning or not self._ids

    def patch(self, patcher: Patcher) -> None:
        """
        Record which modules are asked for their parameters: one of them owns the parameters given to an
        optimizer.
        """
        import torch

        is_compiling = torch.compiler.is_dynamo_compiling

        def make(original: Any) -> Any:
            def named_parameters(module: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    if not is_compiling() and not (self._seen and self._seen[-1]() is module):
                        self._seen.append(weakref.ref(module))
                except Exception as error:
                    self._failed("forward", error)
                return original(module, *args, **kwargs)

            return named_parameters

        patcher.replace(torch.nn.Module, "named_parameters", make)

    def patch_compile(self) -> None:
        """Also mark calls of `torch.compile`'s wrapper: inside it the root's own call is compiled away."""
        from torch._dynamo.eval_frame import OptimizedModule

        self._mark_class(OptimizedModule, lambda module: id(module._orig_mod))

    def choose(self, optimizer: Any) -> None:
        """If no root is known, choose the smallest module that owns most of the optimizer's parameters."""
        self.learning = False
        if self._ids:
            return
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        best, best_score = None, (0, 0)
        for ref in [*self._seen]:  # each module is recorded again when its parameters are requested here
            module = ref()
            if module is None:
                continue
            parameter_ids = {id(p) for p in module.parameters()}
            score = (len(wanted & parameter_ids), -len(parameter_ids))
            if score[0] and score > best_score:
                best, best_score = module, score
        if best is not None:
            self.add(best)

    def restore(self) -> None:
        """Remove the mark from every class."""
        for cls, (original, marked) in self._classes.items():
            if cls.__dict__.get("__call__") is not marked:
                continue  # another library has replaced it since; its function stays
            if original is None:
                del cls.__call__
            else:
                cls.__call__ = original
        self._classes.clear()
        self._ids.clear()

    def _mark_class(self, cls: Any, root_id: Callable[[Any], int] = id) -> None:
        if cls in self._classes:
            return
        original = cls.__dict__.get("__call__")
        cls.__call__ = marked = _marked(cls, original, root_id, self._ids)
        self._classes[cls] = original, marked


def _inner_trains(module: Any) -> bool:
    """
    Return whether `module` is in eval mode while a module that it wraps is in training mode.

    Lightning puts the wrapper (DDP) into eval mode for a validation. Afterwards it sets only the inner module
    back to training mode.
    """
    while module is not None and not module.training:
        inside = module._modules
        module = next((inside[name] for name in _WRAPPED if name in inside), None)
    return module is not None


def _marked(cls: Any, original: Any, root_id: Callable[[Any], int], roots: _Ids) -> Any:
    """
    Return the `__call__` that marks calls of `roots`. It is not a method, whose `super` would
    hold its class.
    """
    import torch

    is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
    torchs_own = getattr(torch.nn.Module, "_wrapped_call_impl", None)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is that method
        if is_compiling():
            return (
                original(self, *args, **kwargs)
                if original is not None
                else super(cls, self).__call__(*args, **kwargs)
            )
        if root_id(self) in roots:
            recorder, append, clock, inner_trains, failed = roots.ours
            try:
                if not is_grad_enabled():
                    mark = NO_GRAD_FORWARD_BEGIN
                elif self.training or inner_trains(self):
                    mark = FORWARD_BEGIN
                else:
                    mark = EVAL_MODE_FORWARD_BEGIN
                if get_ident() == recorder.ready:
                    append(mark)
                    append(clock())
                else:
                    recorder.forward_begin(mark)
            except Exception as error:
                failed("forward", error)
        if original is not None:
            return original(self, *args, **kwargs)
        call = super(cls, self).__call__
        function = getattr(call, "__func__", call)
        # Our frame replaces torch's frame, or that of the wrapper that measures layers, so that a model as
        # deep as Python's stack allows still runs.
        if function is torchs_own:
            return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
        layers = getattr(function, MEASURED_BY, None)
        if layers is None:
            return call(*args, **kwargs)
        inside = self._compiled_call_impl or self._call_impl
        before = layers.enter(self, args, kwargs) if layers.on else None
        if before is None:
            return inside(*args, **kwargs)
        output = None
        try:
            output = inside(*args, **kwargs)
            return output
        finally:
            layers.leave(before, output)

    next_owner = next((cls_after for cls_after in cls.__mro__[1:] if "__call__" in cls_after.__dict__), None)
    if original is None and next_owner is torch.nn.Module:
        return __call__
    return uncounted(__call__ if original is None else functools.wraps(original)(__call__))
