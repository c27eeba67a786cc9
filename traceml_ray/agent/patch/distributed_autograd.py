"""
Steps of jobs on torch.distributed.rpc: a backward over several workers, and the optimizer that has each of
them update its own parameters. The worker that calls them is the one that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traceml_ray.agent.marks import FORWARD_BEGIN
from traceml_ray.agent.patch.patcher import Failed, Patcher
from traceml_ray.agent.recorder import Recorder

MODULE = "torch.distributed.autograd"
OPTIMIZER_MODULE = "torch.distributed.optim.optimizer"


def patch(patcher: Patcher, recorder: Recorder) -> None:
    """Mark the contexts, which begin with a forward, and the backwards of torch.distributed.autograd."""
    import torch.distributed.autograd as autograd

    if not autograd.is_available():
        return
    begin, end = recorder.backward_begin, recorder.backward_end
    patcher.replace(
        autograd, "backward", lambda original: _between(original, patcher.failed, "backward", begin, end)
    )
    patcher.replace(autograd.context, "__enter__", patcher.after("forward", lambda *_: _forward(recorder)))


def patch_optimizer(patcher: Patcher, recorder: Recorder) -> None:
    """Mark the steps of `DistributedOptimizer`, whose module has been imported."""
    from torch.distributed.optim.optimizer import DistributedOptimizer

    def end(_: bool) -> None:
        recorder.optimizer_end(True)
        if recorder.step_hook is not None:
            recorder.step_hook()

    begin = recorder.optimizer_begin
    patcher.replace(
        DistributedOptimizer,
        "step",
        lambda original: _between(original, patcher.failed, "optimizer", begin, end),
    )


def _forward(recorder: Recorder) -> None:
    recorder.forward_begin(FORWARD_BEGIN)


def _between(
    original: Any, failed: Failed, place: str, begin: Callable[[], bool], end: Callable[[bool], None]
) -> Any:
    """Return what calls `begin`, the original, and then `end` with whether that has returned."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        began = ok = False
        try:
            began = begin()
        except Exception as error:
            failed(place, error)
        try:
            result = original(*args, **kwargs)
            ok = True
            return result
        finally:
            try:
                if began:
                    end(ok)
            except Exception as error:
                failed(place, error)

    return marked
