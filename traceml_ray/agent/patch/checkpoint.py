"""
Times checkpoints: `torch.save` and `torch.load`, `torch.distributed.checkpoint`, and the functions of
frameworks that write or read a checkpoint without these.

What blocks the training thread is a span inside the stage that calls it. What runs beside it
(`async_save`, or `torch.save` in another thread) has its begin and end recorded. A wait of the training
thread for what `async_save` returned is a span, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from traceml_ray.agent.marks import CHECKPOINT_SPAN, CHECKPOINT_WAIT_SPAN, EVALUATION_SPAN, RESTORE_SPAN
from traceml_ray.agent.patch.patcher import Make, Patcher
from traceml_ray.agent.recorder import Recorder, Spans

MODULE = "torch.distributed.checkpoint"
BESIDE = "checkpoint beside"
"""Name of a checkpoint that is written beside the training thread."""
_FUNCTIONS = {"save": CHECKPOINT_SPAN, "load": RESTORE_SPAN}
OF_FRAMEWORKS = (
    ("safetensors.torch", "", {"save_file": CHECKPOINT_SPAN, "save_model": CHECKPOINT_SPAN}),
    ("accelerate", "Accelerator", {"save_state": CHECKPOINT_SPAN, "load_state": RESTORE_SPAN}),
    *(
        of_lightning
        for package in ("lightning.pytorch", "pytorch_lightning")
        for of_lightning in (
            (f"{package}.trainer.trainer", "Trainer", {"save_checkpoint": CHECKPOINT_SPAN}),
            (f"{package}.loops.evaluation_loop", "_EvaluationLoop", {"run": EVALUATION_SPAN}),
            (
                f"{package}.trainer.connectors.checkpoint_connector",
                "_CheckpointConnector",
                {"restore_model": RESTORE_SPAN, "restore_training_state": RESTORE_SPAN},
            ),
        )
    ),
    (
        "transformers.trainer",
        "Trainer",
        {
            "_save_checkpoint": CHECKPOINT_SPAN,
            "_load_from_checkpoint": RESTORE_SPAN,
            "_load_optimizer_and_scheduler": RESTORE_SPAN,
            "evaluate": EVALUATION_SPAN,
        },
    ),
)
"""(module, class in it or "", function → span) of what frameworks save, load and evaluate with."""
_LOADS_IF: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], bool]] = {
    "restore_model": lambda args, _: bool(args[0]._loaded_checkpoint),
    "restore_training_state": lambda args, _: bool(args[0]._loaded_checkpoint),
    "_load_optimizer_and_scheduler": lambda args, named: (*args, *named.values())[1] is not None,
}
"""Functions that are called in any case → whether a call, with these arguments, loads a checkpoint."""
RAY_TRAIN = "ray.train"
_PROGRESS = (
    "epoch",
    "step",
    "global_step",
    "iteration",
    "last_epoch",
    "total_steps",
    "iter",
    "steps",
    "num_steps",
)
"""Names under which a checkpoint says how far training was."""
_STEPS = (
    *("global_step", "step", "steps", "num_steps", "steps_done", "iteration", "iter", "iter_num"),
    *("iterations", "current_step", "train_step", "completed_steps"),
)
"""Names under which a checkpoint says the number of its steps. The first one counts."""
_WAITS = "result", "exception"
"""Methods of a future that wait for it."""
_LOOK_AT, _DEPTH = 64, 2
"""Largest number of entries of a loaded mapping that are looked at, and how deep."""


def patch_torch(patcher: Patcher, spans: Spans, recorder: Recorder) -> None:
    """Time `torch.save`, and `torch.load` of a checkpoint."""
    import torch

    patcher.replace(torch, "save", _timed(CHECKPOINT_SPAN, spans, recorder))
    patcher.replace(torch, "load", _loads(recorder, patcher.failed))


def patch(patcher: Patcher, spans: Spans, recorder: Recorder) -> None:
    """Time `torch.distributed.checkpoint`, which must be imported."""
    import torch.distributed.checkpoint as checkpoint

    for function, name in _FUNCTIONS.items():
        if hasattr(checkpoint, function):
            patcher.replace(checkpoint, function, _timed(name, spans))
    if hasattr(checkpoint, "async_save"):
        patcher.replace(checkpoint, "async_save", _goes_on(spans, recorder, patcher.failed))


def patch_framework(
    patcher: Patcher, spans: Spans, module: str, owner: str, functions: Mapping[str, str]
) -> None:
    """Time `functions` of a framework's module, or of a class in it. The module must be imported."""
    import sys

    target = sys.modules[module]
    if owner:
        target = getattr(target, owner)
    for function, name in functions.items():
        if hasattr(target, function):
            loads = _LOADS_IF.get(function)
            patcher.replace(target, function, _timed(name, spans, counts=loads, failed=patcher.failed))


def patch_ray_train(patcher: Patcher, spans: Spans) -> None:
    """Time `ray.train.report` with a checkpoint. Without one it reports numbers only."""
    import ray.train

    def make(original: Any) -> Any:
        def report(*args: Any, **kwargs: Any) -> Any:
            saves = kwargs.get("checkpoint", args[1] if len(args) > 1 else None) is not None
            span = spans.begin(CHECKPOINT_SPAN) if saves else None
            try:
                return original(*args, **kwargs)
            finally:
                if span is not None:
                    spans.end(span)

        return report

    patcher.replace(ray.train, "report", make)


def _timed(
    name: str,
    spans: Spans,
    recorder: Recorder | None = None,
    counts: Callable[[Sequence[Any], Mapping[str, Any]], bool] | None = None,
    failed: Callable[[str, BaseException], None] | None = None,
) -> Make:
    """
    Time a function as a span. With a `recorder`, also record calls in other threads. With `counts`, only
    calls for which it returns True; what it raises is handed to `failed`.
    """
    from torch.compiler import is_dynamo_compiling

    def is_timed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        try:
            return counts is None or counts(args, kwargs)
        except Exception as error:
            if failed is not None:
                failed("checkpoint", error)
            return False

    def make(original: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not is_timed(args, kwargs):
                return original(*args, **kwargs)
            span = spans.begin(name)
            end = None if span is not None or recorder is None else _beside(spans, recorder)
            try:
                return original(*args, **kwargs)
            finally:
                if span is not None:
                    spans.end(span)
                elif end is not None:
                    end()

        return timed

    return make


def _beside(spans: Spans, recorder: Recorder) -> Callable[[], object] | None:
    """
    Begin a checkpoint in a thread that does not train. Return what ends it. None: this thread trains, or
    the call is part of a checkpoint that is recorded already.
    """
    if recorder.mine() or recorder.steps.times.runs_beside or spans.innermost == CHECKPOINT_SPAN:
        return None
    running: list[int] = []
    recorder.begin_beside(BESIDE, recorder.clock(), running)
    return lambda: recorder.end_beside(running)


def _goes_on(spans: Spans, recorder: Recorder, failed: Callable[[str, BaseException], None]) -> Make:
    """Time the part of `async_save` that blocks as a span, and record when the upload is over."""

    def make(original: Any) -> Any:
        def async_save(*args: Any, **kwargs: Any) -> Any:
            began, span = recorder.clock(), spans.begin(CHECKPOINT_SPAN)
            running: list[int] = []
            if span is not None:
                recorder.begin_beside(BESIDE, began, running)
            saved = None
            try:
                saved = original(*args, **kwargs)
                return saved
            finally:
                if span is not None:
                    spans.end(span)
                    _when_done(saved, lambda: recorder.end_beside(running), failed)
                    _watch(saved, spans, failed)

        return async_save

    return make


def _when_done(saved: Any, end: Callable[[], object], failed: Callable[[str, BaseException], None]) -> None:
    """Call `end` once the upload is over, from a thread of torch. `saved` is what `async_save` returned."""
    try:
        future = getattr(saved, "upload_completion", saved)  # newer versions return two futures
        if hasattr(future, "add_done_callback"):
            future.add_done_callback(lambda _: end())
        else:  # it failed, or nothing is known of its end
            end()
    except Exception as error:
        failed("checkpoint", error)


def _watch(saved: Any, spans: Spans, failed: Callable[[str, BaseException], None]) -> None:
    """
    Time waits for the futures in what `async_save` returned, until they are done. Only these objects are
    changed, and no longer than that.
    """
    try:
        for future in (getattr(saved, name, saved) for name in ("upload_completion", "staging_completion")):
            if isinstance(future, Future) and not future.done() and "result" not in vars(future):
                for name in _WAITS:
                    setattr(future, name, _waiting(getattr(future, name), future.done, spans))
                future.add_done_callback(_unwatch)
    except Exception as error:
        failed("checkpoint", error)


def _waiting(original: Callable[..., Any], done: Callable[[], bool], spans: Spans) -> Callable[..., Any]:
    """Return a method of a future that waits, timed as a span unless it is done."""

    def wait(*args: Any, **kwargs: Any) -> Any:
        span = None if done() else spans.begin(CHECKPOINT_WAIT_SPAN)
        try:
            return original(*args, **kwargs)
        finally:
            if span is not None:
                spans.end(span)

    return wait


def _unwatch(future: Future[Any]) -> None:
    for name in _WAITS:
        vars(future).pop(name, None)


def _loads(recorder: Recorder, failed: Callable[[str, BaseException], None]) -> Make:
    """Record how long `torch.load` took, if it loaded a checkpoint of a training run."""

    def make(original: Any) -> Any:
        def load(*args: Any, **kwargs: Any) -> Any:
            began = recorder.clock()
            loaded = original(*args, **kwargs)
            try:
                if recorder.mine() and is_checkpoint(loaded):
                    recorder.add_span_time(RESTORE_SPAN, began, recorder.clock(), steps_in(loaded))
            except Exception as error:
                failed("checkpoint", error)
            return loaded

        return load

    return make


def steps_in(loaded: Mapping[str, Any]) -> int | None:
    """Return the number of steps that a loaded checkpoint says it has; None: it says none."""
    inner = [
        value
        for _, value in zip(range(_LOOK_AT), loaded.values(), strict=False)
        if isinstance(value, Mapping) and "param_groups" not in value
    ]
    known = (one[name] for one in (loaded, *inner) for name in _STEPS if name in one)
    return next((steps for steps in known if type(steps) is int and 0 < steps < 1 << 62), None)


def is_checkpoint(loaded: Any, depth: int = _DEPTH) -> bool:
    """
    Return whether a loaded object is the state of a training run. Weights alone may be of a model that
    was trained elsewhere. So an optimizer's or a scheduler's state must be in it, or weights beside the
    number of steps or epochs.
    """
    if not isinstance(loaded, Mapping):
        return False
    if isinstance(loaded.get("param_groups"), list) or isinstance(loaded.get("_step_count"), int):
        return True
    inner = [
        value
        for _, value in zip(range(_LOOK_AT), loaded.values(), strict=False)
        if isinstance(value, Mapping)
    ]
    if inner and any(isinstance(loaded.get(name), int) for name in _PROGRESS):
        return True
    return depth > 0 and any(is_checkpoint(value, depth - 1) for value in inner)
