"""
Marks where a backward begins and ends, and where this rank's own gradients are done.

The first gradient queues a callback of the autograd engine. DDP queues its own callback only when its last
bucket is ready, so ours runs first: at that moment this rank's gradients are done and the exchange is not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import get_ident
from typing import Any

from traceml_ray.agent.mark_log import REPLAY_AT
from traceml_ray.agent.marks import BACKWARD_BEGIN, BACKWARD_END, GRADIENTS_DONE, SYNCED_BACKWARD_END
from traceml_ray.agent.patch.patcher import Failed, Patcher, expect
from traceml_ray.agent.recorder import Recorder

ARGUMENTS = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")


def patch(patcher: Patcher, recorder: Recorder) -> None:
    """Patch `torch.autograd.backward`, which `Tensor.backward` calls. Raises if this torch does not fit."""
    import torch

    expect(torch.autograd.backward, ARGUMENTS)
    gradients = _Gradients(recorder, patcher.failed)
    patcher.replace(torch.autograd, "backward", lambda original: _backward(original, recorder, gradients))


class _Gradients:
    """Marks the end of this rank's own gradients, once in each backward that is watched."""

    __slots__ = ("carrier", "failed", "first", "is_compiling", "queued", "tensor")

    def __init__(self, recorder: Recorder, failed: Failed) -> None:
        import torch

        self.failed = failed
        self.is_compiling, self.tensor = torch.compiler.is_dynamo_compiling, torch.Tensor
        self.queued = True
        """Whether the callback of this backward is queued, or no callback is needed."""
        self.first = self._first_gradient(recorder, torch.autograd.Variable._execution_engine.queue_callback)
        # A node takes over the hooks of the tensor that it is given. A tensor of ours is given, so that the
        # loss is not changed. This is four times as fast as `register_hook`.
        self.carrier = torch.zeros(())
        self.carrier._backward_hooks = OrderedDict({0: self.first})

    def _first_gradient(self, recorder: Recorder, queue_callback: Any) -> Callable[[Any], None]:
        append, clock, is_compiling = recorder.log.append, recorder.clock, self.is_compiling

        def stamp_with(stamp: Callable[[], int]) -> None:
            nonlocal clock
            clock = stamp

        recorder.follow(stamp_with)

        def gradients_done() -> None:
            append(GRADIENTS_DONE)
            append(clock())

        def first_gradient(_: Any) -> None:
            if self.queued or is_compiling():
                return
            self.queued = True
            try:
                queue_callback(gradients_done)
            except Exception as error:
                self.failed("backward", error)

        return first_gradient

    def watch(self, tensors: Any, graph_stays: bool) -> list[Any]:
        """
        Hook the roots of a backward. If the graph is kept, return the hooks; the caller must
        remove them.
        """
        roots = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        functions = [root.grad_fn for root in roots if isinstance(root, self.tensor)]
        nodes = [node for node in functions if node is not None]
        if graph_stays:  # none of our hooks may accumulate in the graph
            return [node.register_prehook(self.first) for node in nodes]
        for node in nodes:
            node._register_hook_dict(self.carrier)
        return []


def _backward(original: Any, recorder: Recorder, gradients: _Gradients) -> Any:
    log, append, clock, exchange = recorder.log, recorder.log.append, recorder.clock, recorder.exchange
    carrier, tensor, is_compiling = gradients.carrier, gradients.tensor, gradients.is_compiling

    def stamp_with(stamp: Callable[[], int]) -> None:
        nonlocal clock
        clock = stamp

    recorder.follow(stamp_with)

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: Any = None,
        create_graph: Any = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> Any:
        if is_compiling():
            return original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        if type(tensors) is not tensor and hasattr(type(tensors), "__next__"):
            # an iterator can be read only once, and its exceptions belong to the user
            tensors = tuple(tensors)
        written = began = ok = False
        hooks: Any = ()
        try:
            me = get_ident()
            if written := me == recorder.ready and len(log) < REPLAY_AT:
                append(BACKWARD_BEGIN)
                append(clock())
                recorder.ready = 0
            if began := written or recorder.backward_begin():
                gradients.queued = False
                if retain_graph or create_graph or type(tensors) is not tensor or tensors.grad_fn is None:
                    hooks = gradients.watch(tensors, retain_graph or create_graph)
                else:
                    tensors.grad_fn._register_hook_dict(carrier)
        except Exception as error:
            gradients.failed("backward", error)
        try:
            result = original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            ok = True
            return result
        finally:
            gradients.queued = True
            try:
                for hook in hooks:
                    hook.remove()
                if written and ok:
                    synced = exchange.peers is not None and exchange.peers()
                    append(SYNCED_BACKWARD_END if synced else BACKWARD_END)
                    append(clock())
                    recorder.ready = me
                elif began:
                    recorder.backward_end(ok)
            except Exception as error:
                gradients.failed("backward", error)

    return backward
