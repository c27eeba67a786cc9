"""Marks optimizer steps with torch's hooks for all optimizers, and the steps of `GradScaler`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

from traceml_ray.agent.marks import (
    CLOSURE_BEGIN,
    COST,
    OPTIMIZER_BEGIN,
    OPTIMIZER_END,
    OPTIMIZERS,
    SCALER_BEGIN,
)
from traceml_ray.agent.patch.patcher import Failed, Patcher
from traceml_ray.agent.patch.root_modules import RootModules
from traceml_ray.agent.recorder import Recorder

Hook = Callable[[Any, Any, Any], None]


def patch(
    patcher: Patcher, recorder: Recorder, roots: RootModules, first_step: Callable[[Any], None]
) -> None:
    """Hook all optimizers. `first_step(optimizer)` is called while `roots` is learning."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    before, after = _hooks(recorder, roots, first_step, patcher.failed)
    hook = register_optimizer_step_pre_hook(before)
    patcher.when_restored(partial(remove_hook, hook, recorder))
    hook = register_optimizer_step_post_hook(after)
    patcher.when_restored(partial(remove_hook, hook, recorder, partial(_at_step, recorder, patcher.failed)))


def remove_hook(hook: Any, recorder: Recorder, instead: Hook = lambda *_: None) -> None:
    """
    Remove a hook of all optimizers, given the handle that torch returned.

    A step iterates over torch's dict of hooks. If an entry is removed meanwhile, the step raises into the
    script; if an entry is replaced, it does not. So while another thread trains, `instead` replaces the hook.
    """
    trains = recorder.owner
    elsewhere = trains != get_ident() and any(thread.ident == trains for thread in threading.enumerate())
    hooks = hook.hooks_dict_ref()
    if not elsewhere:
        hook.remove()
    elif hooks is not None and hook.id in hooks:
        hooks[hook.id] = instead


def _at_step(recorder: Recorder, failed: Failed, *_: object) -> None:
    """Let the training thread end what only it can end, although this process is no longer watched."""
    try:
        if recorder.step_hook is not None:
            recorder.step_hook()
    except Exception as error:
        failed("optimizer", error)


def _hooks(
    recorder: Recorder, roots: RootModules, first_step: Callable[[Any], None], failed: Failed
) -> tuple[Hook, Hook]:
    import torch

    append, clock = recorder.log.append, recorder.clock
    is_compiling = torch.compiler.is_dynamo_compiling
    began = False
    newest = 0  # id of the optimizer that stepped last

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal began, newest
        if is_compiling():
            return
        try:
            if roots.learning:
                first_step(optimizer)
            closure = (len(args) > 1 or kwargs) and any(map(callable, (*args[1:], *kwargs.values())))
            began = get_ident() == recorder.ready
            if began:
                if (number := id(optimizer)) != newest:
                    newest = number
                    append(OPTIMIZERS - number)
                append(CLOSURE_BEGIN if closure else OPTIMIZER_BEGIN)
                append(clock())
                if recorder.weigh:
                    append(COST)
                    append(clock())
                    recorder.weigh = False
            else:
                began = recorder.optimizer_begin(bool(closure), id(optimizer))
                newest = id(optimizer) if began else newest
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
                recorder.optimizer_end(began)
            if recorder.step_hook is not None:
                recorder.step_hook()
        except Exception as error:
            failed("optimizer", error)

    return before, after


def patch_grad_scaler(patcher: Patcher, recorder: Recorder) -> None:
    """
    Mark the steps of `GradScaler`. After an overflow it skips the optimizer, but the step still counts as
    one.
    """
    from torch.amp.grad_scaler import GradScaler

    def make(original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if get_ident() == recorder.ready:
                    recorder.log.append(OPTIMIZERS - id(optimizer))
                if not recorder.write(SCALER_BEGIN):
                    recorder.scaler_begin(id(optimizer))
            except Exception as error:
                patcher.failed("grad_scaler", error)
            return original(scaler, optimizer, *args, **kwargs)

        return step

    patcher.replace(GradScaler, "step", make)
