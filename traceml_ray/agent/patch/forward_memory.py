"""
What is allocated on the device when the forward of FSDP2's root is over: its peak, before the backward's.

Read from what torch's allocator counts anyway, in the first steps and in one of many from there on. No
statistic of the script's is reset, so that the peak is not always known: see `signals.memory.samplers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traceml_ray.agent.patch.patcher import Failed, Patcher
from traceml_ray.agent.patch.shard_traffic import part_of_fsdp2
from traceml_ray.signals.memory.samplers import Peak

_PLACE = "fsdp: memory"
_END = "_register_pre_backward_hook"
"""
What the hook after a forward calls last. Not that hook itself: Dynamo, which passes over it, would trace a
wrapper, and break the graph there.
"""
_ALL_UNTIL = 8
"""Number of first forwards that are all read."""
_PERIOD = 64
"""Stride of the forwards that are read afterwards. Reading takes about 30 µs."""
Stat = dict[str, int]
"""torch's `allocated_bytes.all`: `current`, `peak`, `allocated`."""


def stat_of(device: Any) -> Stat | None:
    """Return what torch's allocator says of a device; None where it is none of CUDA's, or has another one."""
    import torch

    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    stat: Stat = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return stat


class ForwardMemory:
    """
    Reads the memory at both ends of the root's forward; the training thread's.

    Args:
        failed: counts an exception that is kept away from the training script.
        stat: reads the allocator of a device.
    """

    def __init__(self, failed: Failed, stat: Callable[[Any], Stat | None] = stat_of) -> None:
        self.after: int | None = None
        """Memory allocated at the end of the newest forward that was read, in bytes."""
        self.peak: int | None = None
        """Largest memory that was allocated in any forward that was read, in bytes."""
        self._failed = failed
        self._stat = stat
        self._forwards = 0
        self._began: Peak | None = None

    def patch(self, patcher: Patcher) -> None:
        """Wrap both ends, once FSDP2 is imported. Raises RuntimeError where this torch lacks one."""
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
        """Note what is allocated before the forward, where this one is read."""
        try:
            self._forwards += 1
            due = self._forwards <= _ALL_UNTIL or self._forwards % _PERIOD == 0
            if due and (stat := self._stat(device)) is not None:
                self._began = Peak()
                self._began.since(stat)
        except Exception as error:
            self._failed(_PLACE, error)

    def end(self, device: Any) -> None:
        """Note what is allocated after the forward that `begin` was called for."""
        try:
            began, self._began = self._began, None
            if began is None or (stat := self._stat(device)) is None:
                return
            self.after = stat["current"]
            if (peak := began.since(stat)) is not None:
                self.peak = max(peak, self.peak or 0)
        except Exception as error:
            self._failed(_PLACE, error)


def _is_root(state: Any) -> bool | None:
    """Return whether the forward under way is this state's; None: none is."""
    root = getattr(getattr(state, "_state_ctx", None), "iter_forward_root", None)
    return None if root is None else root is state
