"""
Measures the time of each layer in the steps selected for measurement.

Each moment belongs to one layer or to none. Time switches from one layer to the next at the call of a module,
at its return and, in a backward, at the gradient of its output. So the time of a layer excludes the layers
inside it, and the times add up.

Calls are seen by a wrapper of `Module.__call__`: no module is changed, and exceptions pass through. A
backward is seen by hooks on the nodes of the graph, which do not change the graph, outputs or gradients.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

from traceml_ray.agent.device import EVENT_SLOTS, DeviceApi
from traceml_ray.agent.patch.patcher import Failed, Patcher
from traceml_ray.signals.layers.table import LayerTable

MEASURED_BY = "_traceml_layers"
"""Attribute of a `Module.__call__` that replaces torch's own: the LayerCalls that it uses."""
_FEW = 4
"""Number of values of an output that are searched for a tensor."""


class MeasuredCalls(NamedTuple):
    """
    The measurements of one step with n layers. `times` holds n values of forward, n of backward, and the
    rest.
    """

    table: LayerTable
    times: list[int]
    calls: list[int]
    """Calls of each layer: n values of forward, n of backward."""
    outputs: list[int]
    """Output size of each layer in bytes: n values."""
    cost_ns: int
    """Time spent in our own code, which is not included in `times`."""
    marks: int
    owners: list[int]
    """On a device's clock: the layer to which the time from each event to the next belongs."""
    first_event: int
    """Number of the first of these events. If there are events, `times` is empty."""


class LayerCalls:
    """
    The wrapper and hooks of one process. The training thread calls `begin` and `end`.

    Args:
        failed: counts errors. After an error the step counts as not measured.
        clock: the CPU's clock, in ns.
    """

    def __init__(self, failed: Failed, clock: Callable[[], int]) -> None:
        self.on = False
        """Whether this step is measured."""
        self.api: DeviceApi | None = None
        """The device whose clock is read. None: the CPU's clock is read."""
        self.next_event = self.free_event = self.first_event = 0
        """
        Number of the next event, of the first event that must not be recorded yet, and of the first event of
        the current or last measured step.
        """
        self.full = self.captured = self.broken = False
        """
        Why a step was not measured: it had more marks than there are events (`full`), it was captured into a
        graph (`captured`), or the device cannot be called any more (`broken`).
        """
        self._failed, self._clock = failed, clock
        self._table: LayerTable | None = None
        self._carriers: list[Any] = []
        self._n = 0
        self._thread = 0
        self._muted = False
        """Whether the current layer is measured as one: nothing inside it is measured separately."""

    def install(self, patcher: Patcher) -> None:
        """Wrap the calls of all modules. While no step is measured, this costs about 0.2 µs per call."""
        import torch

        self._tensor = torch.Tensor
        self._is_compiling = torch.compiler.is_dynamo_compiling
        jit: Any = torch.jit
        self._is_tracing: Callable[[], bool] = jit.is_tracing
        self._is_exporting = torch.compiler.is_compiling
        self._is_grad_enabled = torch.is_grad_enabled
        self._task_id: Callable[[], int] = torch._C._current_graph_task_id
        self._queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        patcher.replace(torch.nn.Module, "__call__", self._wrapped, counted=True)
        _leave_alone(*(method for method in vars(LayerCalls).values() if inspect.isfunction(method)))

    def use(self, table: LayerTable) -> None:
        """Measure these layers from the next step on. Call it only while no step is measured."""
        import torch

        carriers = []
        for to in (*range(len(table.layers)), -1):
            # A node takes over the hooks of the tensor that it is given, see `backward`.
            carrier = torch.zeros((), device="cpu")
            carrier._backward_hooks = OrderedDict({0: self._hook(table, to)})
            carriers.append(carrier)
        self._table, self._carriers, self._n = table, carriers, len(table.layers)

    # -- the training thread ---------------------------------------------------------------------

    def begin(self) -> None:
        """Start measuring."""
        n = self._n
        self._times, self._calls, self._outputs = [0] * (2 * n + 1), [0] * (2 * n), [0] * n
        self._owners: list[int] = []
        self.first_event = self.next_event
        self._seen: set[int] = set()
        """Sequence numbers of the nodes that have a hook."""
        self._tasks: list[tuple[int, int]] = []
        """
        Of each backward in progress: the backwards around it, and the layer that was measured
        when it began.
        """
        self._task = -1
        self._owner = 2 * n
        self._cost = self._marks = 0
        self._muted = self.full = self.captured = failed = False
        self._thread = get_ident()
        try:
            if self.api is not None:
                self._event(2 * n)
        except Exception as error:
            self.fail(error)
            failed = True
        self._last = self._clock()
        self.on = self._table is not None and not (self.full or self.captured or failed)

    def end(self) -> MeasuredCalls | None:
        """Stop measuring and return the measurements. None if something went wrong."""
        if self.on:
            self._to(2 * self._n, self._clock())
        if not self.on or self._table is None:
            return None
        self.on = False
        return MeasuredCalls(
            self._table,
            self._times if self.api is None else [],
            self._calls,
            self._outputs,
            self._cost,
            self._marks,
            self._owners,
            self.first_event,
        )

    def _wrapped(self, original: Any) -> Any:
        import torch

        is_compiling, calls = torch.compiler.is_dynamo_compiling, self
        torchs_own = original is getattr(torch.nn.Module, "_wrapped_call_impl", None)

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is that method
            if is_compiling():
                return original(self, *args, **kwargs)
            # Does what torch's own `__call__` does, so that a model as deep as Python's stack allows still
            # runs.
            inside = (self._compiled_call_impl or self._call_impl) if torchs_own else partial(original, self)
            before = calls.enter(self, args, kwargs) if calls.on else None
            if before is None:
                return inside(*args, **kwargs)
            output = None
            try:
                output = inside(*args, **kwargs)
                return output
            finally:
                calls.leave(before, output)

        _leave_alone(__call__)
        if torchs_own:
            setattr(__call__, MEASURED_BY, calls)
        return __call__

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
        """
        Record that a module is called. Returns (its number, the layer that was measured until now).

        Returns None for a call that does not count: a call of another thread, of an evaluation, or inside a
        layer that is measured as one. A call during `torch.jit.trace` or `torch.export` does not count
        either, because what we do with its tensors would be recorded in the graph.
        """
        try:
            table = self._table
            if table is None or self._muted or self._is_tracing() or self._is_exporting():
                return None
            index = table.by_id.get(id(module))
            if index is None:
                parts = module._modules  # scripted modules have no `get` here
                # the root is known without torch.compile's wrapper
                index = table.by_id.get(id(parts["_orig_mod"])) if "_orig_mod" in parts else None
                if index is None:
                    return None
                table.compile(index)
            now = self._clock()
            n = self._n
            if self._task_id() != -1:
                index += n
            elif get_ident() != self._thread:
                return None
            else:
                if self._tasks:  # a backward has raised
                    self._tasks.clear()
                    self._task, self._owner = -1, 2 * n
                if self._owner == 2 * n and not self._is_grad_enabled():
                    return None
            before = self._owner
            self._to(index, now)
            self._calls[index] += 1
            self._hook_input(before, args, kwargs)
            self._muted = index % n in table.closed
            self._resume(now)
            return index, before
        except Exception as error:
            self.fail(error)
            return None

    def leave(self, entered: tuple[int, int], output: Any) -> None:
        """Record that the call has returned `output`, or None if it raised."""
        try:
            self._muted = False
            if not self.on:
                return
            now = self._clock()
            index, before = entered
            self._to(before, now)
            tensor = self._first_tensor(output)
            if tensor is not None:
                node = tensor.grad_fn
                fresh = node is None or self._attach(node, index % self._n)
                if fresh and index < self._n:
                    self._outputs[index] += _bytes_of(tensor)
            self._resume(now)
        except Exception as error:
            self.fail(error)

    def _hook_input(self, before: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """
        Make the layer that was measured until this call also be measured in the backward when that reaches
        it.
        """
        tensor = self._first_tensor(args)
        if tensor is None and kwargs:
            tensor = self._first_tensor(kwargs)
        if tensor is not None and (node := tensor.grad_fn) is not None:
            n = self._n
            self._attach(node, n if before == 2 * n else before % n)

    def _attach(self, node: Any, carrier: int) -> bool:
        """Hook a node unless it has a hook already. Returns whether a hook was added."""
        number = node._sequence_nr()
        if number in self._seen:
            return False
        self._seen.add(number)
        node._register_hook_dict(self._carriers[carrier])
        return True

    def _first_tensor(self, value: Any) -> Any:
        tensor = self._tensor
        if isinstance(value, tensor):
            return value
        if isinstance(value, dict):
            value = [*value.values()][:_FEW]
        if isinstance(value, (tuple, list)):
            for item in value[:_FEW]:
                if isinstance(item, tensor):
                    return item
        return None

    # -- backward: the training thread, or autograd's thread while the training thread waits for it --------

    def _hook(self, table: LayerTable, layer: int) -> Callable[[Any], None]:
        """
        Return the hook for nodes at which the backward of a layer begins. -1: nodes outside of
        all layers.
        """

        def reached(_: Any) -> None:
            if self.on and self._table is table and not self._is_compiling():
                self._reached(self._n + layer if layer >= 0 else 2 * self._n)

        _leave_alone(reached)
        return reached

    def _reached(self, to: int) -> None:
        try:
            now = self._clock()
            task = self._task_id()
            if task != self._task:
                self._queue_callback(self._over)
                self._tasks.append((self._task, self._owner))
                self._task = task
            self._to(to, now)
            self._resume(now)
        except Exception as error:
            self.fail(error)

    def _over(self) -> None:
        """The backward is over: gradients are done, and what follows inside it is waiting for peers."""
        try:
            if self.on and self._tasks:
                now = self._clock()
                self._task, before = self._tasks.pop()
                self._to(before, now)
                self._resume(now)
        except Exception as error:
            self.fail(error)

    # -- where time switches from one layer to the next ----------------------------------------------------

    def _to(self, owner: int, now: int) -> None:
        self._marks += 1
        if self.api is None:
            self._times[self._owner] += now - self._last
            self._last = now
        else:
            self._event(owner)
        self._owner = owner

    def _resume(self, since: int) -> None:
        """Continue after our own code, which began at `since`."""
        self._last = self._clock()
        self._cost += self._last - since

    def _event(self, owner: int) -> None:
        assert self.api is not None
        if self.next_event >= self.free_event:
            self.full, self.on = True, False
        elif self.api.capturing():
            self.captured, self.on = True, False
        else:
            self.api.record(self.next_event % EVENT_SLOTS)
            self.next_event += 1
            self._owners.append(owner)

    def fail(self, error: BaseException) -> None:
        """Count an error. The step counts as not measured, and the device is not called any more."""
        self.on = False
        if self.api is not None:
            self.api, self.broken = None, True
        self._failed("layers", error)


def _leave_alone(*functions: Any) -> None:
    """Make torch.compile skip our functions where it inspects each function that is called."""
    import torch

    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        for function in functions:
            frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, default))
    elif hasattr(frames, "skip_code"):  # older versions
        for function in functions:
            frames.skip_code(function.__code__)


def _bytes_of(tensor: Any) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    elements = local.numel()
    return (
        elements * int(local.element_size()) if type(elements) is int else 0
    )  # otherwise it is symbolic and has no value
