"""Times `torch.save` and `torch.distributed.checkpoint` as spans inside the stage that calls them."""

from __future__ import annotations

from typing import Any

from traceml_ray.agent.patch.patcher import Make, Patcher
from traceml_ray.agent.recorder import Spans

MODULE = "torch.distributed.checkpoint"
_FUNCTIONS = {"save": "checkpoint", "async_save": "checkpoint", "load": "checkpoint load"}
"""Functions that are timed. Of `async_save`, only the part that blocks the training thread is timed."""


def patch_save(patcher: Patcher, spans: Spans) -> None:
    """Time `torch.save`."""
    import torch

    patcher.replace(torch, "save", _timed("checkpoint", spans))


def patch(patcher: Patcher, spans: Spans) -> None:
    """Time `torch.distributed.checkpoint`, which must be imported."""
    import torch.distributed.checkpoint as checkpoint

    for function, name in _FUNCTIONS.items():
        if hasattr(checkpoint, function):
            patcher.replace(checkpoint, function, _timed(name, spans))


def _timed(name: str, spans: Spans) -> Make:
    from torch.compiler import is_dynamo_compiling

    def make(original: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            span = None if is_dynamo_compiling() else spans.begin(name)
            try:
                return original(*args, **kwargs)
            finally:
                if span is not None:
                    spans.end(span)

        return timed

    return make
