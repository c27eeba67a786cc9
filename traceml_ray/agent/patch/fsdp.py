"""
Measures FSDP: waits for peers on a device, bytes gathered and reduced per step, bytes of unsharded
parameters, and memory allocated at the end of the root's forward.

The waits are those of the compute stream inside forward and backward, each between two marks. If marking
every wait costs too large a share of a step, only the waits of every 2nd, 4th, 8th, … step are marked. The
choice depends on the step number, so all ranks mark the same steps.

Traffic (FSDP2) is counted where `FSDPParamGroup` calls its collectives and changes its state, from the sizes
of their buffers. Counting gathers, allocates and waits for nothing, and keeps no model alive.

Memory is read from the counters of torch's allocator, in the first steps and then in one of many steps. No
statistic of the script is reset, so the peak is not always known: see `signals.memory.samplers`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter_ns
from types import ModuleType
from typing import Any, NamedTuple

from traceml_ray.agent.device import DeviceClock
from traceml_ray.agent.marks import BRACKET_BEGIN, SYNC_END
from traceml_ray.agent.patch.optimizer import remove_hook
from traceml_ray.agent.patch.patcher import Failed, Make, Patcher
from traceml_ray.agent.recorder import Recorder
from traceml_ray.signals.memory.samplers import Peak

_SHARD = "torch.distributed.fsdp._fully_shard"
_RUNTIME = "torch.distributed.fsdp._runtime_utils"
_WAITS = {
    "fsdp2": (
        (f"{_SHARD}._fsdp_param_group", "FSDPParamGroup", "wait_for_unshard"),
        (f"{_SHARD}._fsdp_param_group", "FSDPParamGroup", "post_backward"),
        (f"{_SHARD}._fsdp_state", "FSDPState", "_root_post_backward_final_callback"),
    ),
    "fsdp": (
        ("torch.distributed.fsdp.fully_sharded_data_parallel", "", "_pre_forward_unshard"),
        (_RUNTIME, "", "_pre_backward_hook"),
        (_RUNTIME, "", "_post_backward_final_callback"),
    ),
}
"""Functions in which the compute stream waits, by strategy. They are patched where they are called."""
_GATHERS = ("wait_for_unshard", "_pre_forward_unshard", "_pre_backward_hook")
"""
The functions in `_WAITS` that wait for parameters. The others wait for reductions of gradients (in FSDP1,
mostly).
"""
_WAITS_UNTIL = 64
"""Number of first steps in which every wait is marked."""
_MAX_SHARE = 0.002
"""
Largest cost of marking after the first steps, as a share of the median step. It limits how many steps are
marked.
"""
_MAX_PERIOD = 64


class ShardedWaits:
    """
    Marks the waits of FSDP in this process.

    Raises RuntimeError if this torch's FSDP lacks one of the functions; then nothing is patched.
    """

    def __init__(self, strategy: str, recorder: Recorder, device: DeviceClock, patcher: Patcher) -> None:
        self.period = 1
        """One step in `period` is marked."""
        self._recorder = recorder
        self._device = device
        self._failed = patcher.failed
        self._boundary = True
        """Whether an optimizer has taken a step since the last wait."""
        self._marking = False
        self._step = -1
        """Number of the step: counted from the first wait, later aligned with the numbers of rows."""
        self._marks = self._marked = 0
        """Number of waits that were marked, and number of steps in which they were marked."""
        self._compared = 0
        """Rows whose events are all from here on show what `_step` was set to."""
        self._patch(strategy, patcher)

    def _patch(self, strategy: str, patcher: Patcher) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        functions = []
        for name, cls, function in _WAITS[strategy]:
            owner = sys.modules.get(name)
            owner = getattr(owner, cls, None) if cls else owner
            if not hasattr(owner, function):
                raise RuntimeError(f"FSDP of torch {torch.__version__} has no {cls or name}.{function}")
            functions.append((owner, function))
        is_compiling, exchange = torch.compiler.is_dynamo_compiling, self._recorder.exchange

        def make(gathers: bool, original: Any) -> Any:
            def wait(*args: Any, **kwargs: Any) -> Any:
                if is_compiling():
                    return original(*args, **kwargs)
                began = self._begin(gathers)
                exchange.bracketed += 1
                try:
                    return original(*args, **kwargs)
                finally:
                    exchange.bracketed -= 1
                    if began:
                        self._end()

            return wait

        for owner, function in functions:
            patcher.replace(owner, function, functools.partial(make, function in _GATHERS))
        hook = register_optimizer_step_post_hook(self._stepped)
        patcher.when_restored(functools.partial(remove_hook, hook, self._recorder))

    # -- the training thread, and autograd's -----------------------------------------------------------

    def _stepped(self, *_: object) -> None:
        if self._recorder.ready:  # not inside a backward
            self._boundary = True

    def stop(self) -> None:
        """Mark nothing more."""
        self.period = 0

    def _begin(self, gathers: bool) -> bool:
        try:
            if not self.period:
                return False
            if self._boundary:
                self._boundary = False
                self._step += 1
                self._marking = self._step % self.period == 0
                self._marked += self._marking
            if self._marking:
                self._device.bracketing(gathers)
            if self._marking and self._recorder.bracket(BRACKET_BEGIN):
                self._marks += 1
                return True
        except Exception as error:
            self._failed("fsdp", error)
        return False

    def _end(self) -> None:
        try:
            self._recorder.bracket(SYNC_END)
        except Exception as error:
            self._failed("fsdp", error)

    # -- the agent's thread ------------------------------------------------------------------------

    def tick(self) -> None:
        """
        Choose which steps are marked, from the cost of marking. Compare the step number with
        those of rows.
        """
        device = self._device
        if self._marked < _WAITS_UNTIL or not device.median_ns:
            return
        cost = 2 * self._marks / self._marked * device.record_ns
        period = 1
        while cost / period > _MAX_SHARE * device.median_ns and period < _MAX_PERIOD:
            period *= 2
        step, first = device.last_sampled
        if period != self.period:
            self.period, self._compared = period, device.next
        elif first >= self._compared and (off := step % period):
            self._step += off
            self._compared = device.next


_PLACES = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")
"""Modules in which torch has FSDP2, the newer one first."""
_TRAFFIC = "fsdp: bytes"
_STATES = ("_to_unsharded", "_to_sharded", "_to_sharded_post_forward")
"""Methods that change the state of a group. FSDP2 changes it in no other way."""


def part_of_fsdp2(name: str) -> ModuleType | None:
    """Return a module of FSDP2 from whichever place this torch has it. None if it is not imported."""
    modules = (sys.modules.get(f"{place}.{name}") for place in _PLACES)
    return next(filter(None, modules), None)


def groups_of(modules: Iterable[Any]) -> Iterator[Any]:
    """
    Yield the parameter groups of modules that were given to `fully_shard`. Several modules may
    share a group.
    """
    states = part_of_fsdp2("_fsdp_state")
    known = {id(state): state for module in modules if (state := states._get_module_fsdp_state(module))}  # type: ignore[union-attr]
    for state in known.values():
        groups = getattr(state, "_fsdp_param_groups", None)
        yield from filter(None, [state._fsdp_param_group] if groups is None else groups)


class Moved(NamedTuple):
    """Sums over whole steps: bytes, and ns on the clock of the host."""

    steps: int = 0
    step_ns: int = 0
    gathers: int = 0
    gathered: int = 0
    reductions: int = 0
    reduced: int = 0
    all_reduced: int = 0
    peak: int = 0
    """Largest size of unsharded parameters at one time in any of the steps, in bytes."""
    unsharded_ns: int = 0
    byte_ns: int = 0
    """Bytes of unsharded parameters × ns."""


class ShardTraffic:
    """
    Counts what FSDP2 moves in this process. Used by the training thread, and by autograd's thread while the
    training thread waits for it.

    Args:
        recorder: says when a backward is over.
        failed: counts an exception that is kept away from the training script.
    """

    def __init__(self, recorder: Recorder, failed: Failed) -> None:
        self.closed = Moved()
        """
        Sums of the closed steps. The whole object is replaced when a step is over, so the agent's thread
        reads a consistent state.
        """
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        """The optimizers that have taken a step."""
        self._recorder = recorder
        self._failed = failed
        self._patched = self._counting_steps = False
        self._boundary = False
        """Whether an optimizer has taken a step since parameters were last gathered."""
        self._sizes: dict[int, int] = {}
        """
        Size of the unsharded parameters of each group at their last gather, in bytes, by id of
        the group.
        """
        self._held: dict[int, int] = {}
        """Bytes that each unsharded group holds in addition to its shards, by id of the group."""
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._now = 0
        """Sum of `_held`."""
        self._since = 0
        self._reset(0)

    def _reset(self, now: int) -> None:
        self._began = now
        self._gathers = self._gathered = self._reductions = self._reduced = self._all_reduced = 0
        self._now = sum(self._held.values())
        self._peak, self._unsharded_ns, self._byte_ns = self._now, 0, 0

    def patch(self, patcher: Patcher) -> None:
        """Wrap functions of FSDP2, which must be imported. Raises RuntimeError if this torch lacks one."""
        groups = part_of_fsdp2("_fsdp_param_group")
        if groups is None or self._patched:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        group = groups.FSDPParamGroup
        lacking = [name for name in ("foreach_all_gather", "foreach_reduce") if not hasattr(groups, name)]
        lacking += [f"FSDPParamGroup.{name}" for name in _STATES if not hasattr(group, name)]
        if lacking:
            raise RuntimeError(f"FSDP2 of this torch has no {', '.join(lacking)}")
        patcher.replace(groups, "foreach_reduce", self._counting(self._reducer))
        self._patched = True
        patcher.replace(groups, "foreach_all_gather", self._counting(lambda _: self._gather))
        for name in _STATES:
            patcher.replace(group, name, self._following(name == "_to_unsharded"))
        hook = register_optimizer_step_post_hook(self._stepped)
        patcher.when_restored(functools.partial(remove_hook, hook, self._recorder))

    def finish(self) -> None:
        """Close the last step if its optimizer has taken it. Call it when training is over."""
        if self._boundary:
            self._cut(perf_counter_ns())

    # -- the training thread, and autograd's -----------------------------------------------------------

    def _counting(self, count_of: Any) -> Make:
        """
        Return the function that makes a wrapper, which then calls `count_of(original)(args, keywords,
        result)`.
        """
        from torch.compiler import is_dynamo_compiling

        def make(original: Any) -> Any:
            count = count_of(original)

            def counted(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if not is_dynamo_compiling():
                    try:
                        count(args, kwargs, result)
                    except Exception as error:
                        self._failed(_TRAFFIC, error)
                return result

            return counted

        return make

    def _following(self, unsharded: bool) -> Make:
        """Return the function that makes the wrapper of a change of a group's state."""
        from torch.compiler import is_dynamo_compiling

        def make(original: Any) -> Any:
            def change(group: Any) -> Any:
                result = original(group)
                if not is_dynamo_compiling():
                    try:
                        self._hold(group, unsharded)
                    except Exception as error:
                        self._failed(_TRAFFIC, error)
                return result

            return change

        return make

    def _stepped(self, optimizer: Any, *_: object) -> None:
        try:
            if self._recorder.ready and self._began:  # not inside a backward
                self._boundary = True
                self.optimizers.add(optimizer)
        except Exception as error:
            self._failed(_TRAFFIC, error)

    def _gather(self, _args: Any, _keywords: Any, result: Any) -> None:
        if result is not None:
            if self._boundary or not self._began:
                self._begin()
            self._gathers += 1
            self._gathered += _size(result[0])

    def _reducer(self, original: Any) -> Any:
        """Return a function that counts a reduction. FSDP2 passes its groups as positional arguments."""
        names = list(inspect.signature(original).parameters)
        shards, replicas, wanted = map(
            names.index, ("reduce_scatter_group", "all_reduce_group", "all_reduce_grads")
        )

        def count(args: Any, keywords: Any, result: Any) -> None:
            if keywords:
                args = inspect.signature(original).bind(*args, **keywords).args
            among = 1 if args[shards] is None else args[shards].size()
            size = _reduced(result[0], args[0], among)
            if among > 1:  # in a group of one rank the data is only copied
                self._reductions += 1
                self._reduced += size
            if args[replicas] is not None and args[wanted] and args[replicas].size() > 1:
                self._all_reduced += size // among

        return count

    def _hold(self, group: Any, unsharded: bool) -> None:
        """Record what a group holds in addition to its shards from now on."""
        key = id(group)
        if unsharded:
            if self._boundary:
                self._begin()
            size = self._sizes.get(key) or self._know(key, group)
        elif key not in self._held:
            return
        else:
            size = _after_forward(group, self._sizes.get(key, 0))
        before = self._held.get(key, 0)
        if size == before:
            return
        self._spend(perf_counter_ns())
        if size:
            self._held[key] = size
        else:
            del self._held[key]
        self._now += size - before
        if self._now > self._peak:
            self._peak = self._now

    def _know(self, key: int, group: Any) -> int:
        """
        Return the size of a group's unsharded parameters in bytes. What is stored of a group is removed with
        the group.
        """
        self._begin()

        def gone(_: object) -> None:
            for known in (self._sizes, self._held, self._alive):
                known.pop(key, None)

        self._alive[key] = weakref.ref(group, gone)
        return self._sizes.setdefault(key, _whole(group))

    def _spend(self, now: int) -> None:
        if self._now:
            self._unsharded_ns += now - self._since
            self._byte_ns += self._now * (now - self._since)
        self._since = now

    def _begin(self) -> None:
        """Parameters are needed again. The first such call after an optimizer's step begins another step."""
        if self._boundary or not self._began:
            now = perf_counter_ns()
            if self._began:
                self._cut(now)
            self._since = self._began = now

    def _cut(self, now: int) -> None:
        """Close the step. The first step is not counted, because ranks still connect to each other."""
        self._spend(now)
        if self._counting_steps:
            self._add()
        self._boundary, self._counting_steps = False, True
        self._reset(now)

    def _add(self) -> None:
        before = self.closed
        self.closed = Moved(
            before.steps + 1,
            before.step_ns + self._since - self._began,
            before.gathers + self._gathers,
            before.gathered + self._gathered,
            before.reductions + self._reductions,
            before.reduced + self._reduced,
            before.all_reduced + self._all_reduced,
            max(before.peak, self._peak),
            before.unsharded_ns + self._unsharded_ns,
            before.byte_ns + self._byte_ns,
        )


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _reduced(returned: Any, parameters: Any, among: int) -> int:
    """
    Return the size of the input of a gradient reduction in bytes. Before torch 2.6 it is not returned but
    computed.
    """
    if hasattr(returned, "element_size"):
        return _size(returned)
    return sum(
        parameter.padded_sharded_param_size.numel()
        * among
        * (parameter.reduce_dtype or parameter.param_dtype or parameter.orig_dtype).itemsize
        for parameter in parameters
    )


def _whole(group: Any) -> int:
    """Return the size of a group's parameters in bytes as last gathered. Their storage may be freed."""
    return sum(_size(tensor) for parameter in group.fsdp_params for tensor in parameter.all_gather_outputs)


def _after_forward(group: Any, whole: int) -> int:
    """
    Return the bytes that a group keeps after forward. If it reshards to fewer ranks, that is part of the
    parameters.
    """
    if not getattr(group, "is_sharded_post_forward", False):
        return 0
    return whole // int(group.post_forward_mesh_info.shard_mesh_size)


_MEMORY = "fsdp: memory"
_END = "_register_pre_backward_hook"
"""
The last function that the hook after a forward calls. The hook itself is not wrapped: Dynamo skips it, but
would trace a wrapper of it and break the graph there.
"""
_ALL_UNTIL = 8
"""Number of first forwards in which memory is always read."""
_PERIOD = 64
"""Afterwards memory is read in one of this many forwards. Reading takes about 30 µs."""
Stat = dict[str, int]
"""torch's `allocated_bytes.all`: `current`, `peak`, `allocated`."""


def stat_of(device: Any) -> Stat | None:
    """
    Return the statistics of torch's allocator for a device. None if it is no CUDA device or uses another
    allocator.
    """
    import torch

    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    stat: Stat = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return stat


class ForwardMemory:
    """
    Reads the allocated memory at the begin and the end of the root's forward. Only the training thread uses
    it.

    Args:
        failed: counts an exception that is kept away from the training script.
        stat: reads the allocator of a device.
    """

    def __init__(self, failed: Failed, stat: Callable[[Any], Stat | None] = stat_of) -> None:
        self.after: int | None = None
        """Memory allocated at the end of the newest forward that was read, in bytes."""
        self.peak: int | None = None
        """Largest memory allocated during any forward that was read, in bytes."""
        self._failed = failed
        self._stat = stat
        self._forwards = 0
        self._began: Peak | None = None

    def patch(self, patcher: Patcher) -> None:
        """
        Wrap the begin and the end of the forward. FSDP2 must be imported. Raises RuntimeError if this torch
        lacks one of the functions.
        """
        import torch

        states = part_of_fsdp2("_fsdp_state")
        if states is None:
            return
        state, is_compiling = states.FSDPState, torch.compiler.is_compiling
        if not (hasattr(state, "_root_pre_forward") and hasattr(state, _END)):
            raise RuntimeError(f"FSDP2 of this torch has no _root_pre_forward or {_END}")

        def make_begin(original: Any) -> Any:
            def begin(wrapped_self: Any, *args: Any, **kwargs: Any) -> Any:
                inside = not is_compiling() and _is_root(wrapped_self) is None
                result = original(wrapped_self, *args, **kwargs)
                if inside and _is_root(wrapped_self) and torch.is_grad_enabled():
                    self.begin(getattr(wrapped_self, "_device", None))
                return result

            return begin

        def make_end(original: Any) -> Any:
            def end(wrapped_self: Any, *args: Any, **kwargs: Any) -> Any:
                root = not is_compiling() and self._began is not None and _is_root(wrapped_self)
                result = original(wrapped_self, *args, **kwargs)
                if root:
                    self.end(getattr(wrapped_self, "_device", None))
                return result

            return end

        patcher.replace(state, "_root_pre_forward", make_begin)
        patcher.replace(state, _END, make_end)

    def begin(self, device: Any) -> None:
        """Record the allocated memory before the forward, if this forward is one that is read."""
        try:
            self._forwards += 1
            due = self._forwards <= _ALL_UNTIL or self._forwards % _PERIOD == 0
            if due and (stat := self._stat(device)) is not None:
                self._began = Peak()
                self._began.since(stat)
        except Exception as error:
            self._failed(_MEMORY, error)

    def end(self, device: Any) -> None:
        """Record the allocated memory after the forward for which `begin` was called."""
        try:
            began, self._began = self._began, None
            if began is None or (stat := self._stat(device)) is None:
                return
            self.after = stat["current"]
            if (peak := began.since(stat)) is not None:
                self.peak = max(peak, self.peak or 0)
        except Exception as error:
            self._failed(_MEMORY, error)


def _is_root(state: Any) -> bool | None:
    """Return whether the running forward is of this state's root. None if no forward is running."""
    root = getattr(getattr(state, "_state_ctx", None), "iter_forward_root", None)
    return None if root is None else root is state
