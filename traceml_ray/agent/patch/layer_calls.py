"""
Where the time of a step goes, layer by layer, in the steps that are measured.

Each moment belongs to one layer, or to none: a call of a module, its return and, in a backward, the gradient
of what it returned are where one ends and the next one begins. So times are without those of the layers
inside, and add up. A call is seen by a wrapper of `Module.__call__`: nothing is put on a module, and an
exception passes through. A backward is seen by hooks on the nodes of the graph, which leave graph, outputs
and gradients as they are.
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
"""Attribute of a `Module.__call__` that stands in for torch's own: the LayerCalls that it asks."""
_FEW = 4
"""Values of an output that are looked at for a tensor."""


class MeasuredCalls(NamedTuple):
    """What was measured in one step. Of n layers; `times` has n in forward, n in backward, and the rest."""

    table: LayerTable
    times: list[int]
    calls: list[int]
    """n in forward, n in backward."""
    outputs: list[int]
    """n, bytes."""
    cost_ns: int
    """Time in our own code, which is in none of `times`."""
    marks: int
    owners: list[int]
    """On a device's clock: the layer that the time from each event to the next belongs to."""
    first_event: int
    """Number of the first of these events. `times` is empty if there are any."""


class LayerCalls:
    """
    The wrapper and hooks of one process; `begin` and `end` are called by the thread that trains.

    Args:
        failed: counts what goes wrong; the step is then not measured.
        clock: the CPU's, in ns.
    """

    def __init__(self, failed: Failed, clock: Callable[[], int]) -> None:
        self.on = False
        """This step is measured."""
        self.api: DeviceApi | None = None
        """The device whose clock is read; None: the CPU's."""
        self.next_event = self.free_event = self.first_event = 0
        """
        The number of the next event, of the first one that may not be recorded yet, and of the first of the
        step that is measured, or was last.
        """
        self.full = self.captured = self.broken = False
        """
        Why a step was not measured: it had more marks than there are events, it was captured into a graph;
        the device cannot be asked any more.
        """
        self._failed, self._clock = failed, clock
        self._table: LayerTable | None = None
        self._carriers: list[Any] = []
        self._n = 0
        self._thread = 0
        self._muted = False
        """Inside a layer of which nothing more is measured."""

    def install(self, patcher: Patcher) -> None:
        """Wrap the calls of all modules; while no step is measured that costs a call some 0.2 µs."""
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
        """Measure these layers from the next step on; called while none is measured."""
        import torch

        carriers = []
        for to in (*range(len(table.layers)), -1):
            # A node takes over the hooks of the tensor that it is shown, see `backward`.
            carrier = torch.zeros((), device="cpu")
            carrier._backward_hooks = OrderedDict({0: self._hook(table, to)})
            carriers.append(carrier)
        self._table, self._carriers, self._n = table, carriers, len(table.layers)

    # -- the training thread ---------------------------------------------------------------------

    def begin(self) -> None:
        """Measure from here on."""
        n = self._n
        self._times, self._calls, self._outputs = [0] * (2 * n + 1), [0] * (2 * n), [0] * n
        self._owners: list[int] = []
        self.first_event = self.next_event
        self._seen: set[int] = set()
        """Sequence numbers of the nodes that have a hook."""
        self._tasks: list[tuple[int, int]] = []
        """Of the backwards that are under way, those around and who was measured when they began."""
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
        """Stop measuring; return what was found, None where something went wrong."""
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
            # What torch's own does, so that a model that is as deep as Python's stack allows still runs.
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
        Note that a module is called; return its number and who was measured until now, None for a call that
        does not count: of another thread, of an evaluation, inside of what is measured as one; or one
        that is written down, as `torch.jit.trace` and `torch.export` do: what we ask of its tensors would
        be, too.
        """
        try:
            table = self._table
            if table is None or self._muted or self._is_tracing() or self._is_exporting():
                return None
            index = table.by_id.get(id(module))
            if index is None:
                parts = module._modules  # without `get` where they are scripted
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
        """Note that the call has returned `output`, or (None) raised."""
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
        """Have what was measured until this call be measured in the backward, too, once that comes to it."""
        tensor = self._first_tensor(args)
        if tensor is None and kwargs:
            tensor = self._first_tensor(kwargs)
        if tensor is not None and (node := tensor.grad_fn) is not None:
            n = self._n
            self._attach(node, n if before == 2 * n else before % n)

    def _attach(self, node: Any, carrier: int) -> bool:
        """Hook a node, unless it is already; return whether it was not."""
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

    # -- backward: the training thread, or autograd's, for which it waits -----------------------------

    def _hook(self, table: LayerTable, layer: int) -> Callable[[Any], None]:
        """Return the hook of nodes at which the backward of a layer begins; -1: of what is in none."""

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
        """A backward is over: gradients are there, what follows inside it is waiting for peers."""
        try:
            if self.on and self._tasks:
                now = self._clock()
                self._task, before = self._tasks.pop()
                self._to(before, now)
                self._resume(now)
        except Exception as error:
            self.fail(error)

    # -- where one ends and the next one begins --------------------------------------------------------

    def _to(self, owner: int, now: int) -> None:
        self._marks += 1
        if self.api is None:
            self._times[self._owner] += now - self._last
            self._last = now
        else:
            self._event(owner)
        self._owner = owner

    def _resume(self, since: int) -> None:
        """Go on after our own code, which began at `since`."""
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
        """Count an error; the step is not measured, and no device is asked any more."""
        self.on = False
        if self.api is not None:
            self.api, self.broken = None, True
        self._failed("layers", error)


def _leave_alone(*functions: Any) -> None:
    """Have torch.compile compile nothing of ours where it looks at each function that is called."""
    import torch

    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        for function in functions:
            frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, default))
    elif hasattr(frames, "skip_code"):  # older ones
        for function in functions:
            frames.skip_code(function.__code__)


def _bytes_of(tensor: Any) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    elements = local.numel()
    return (
        elements * int(local.element_size()) if type(elements) is int else 0
    )  # else symbolic: not to be asked
