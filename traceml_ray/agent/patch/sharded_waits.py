"""
The waits of FSDP for its peers on a device, each between two marks.

They are waits of the compute stream, inside forward and backward. Where marking them costs too much of a
step, only those of one step in 2, 4, 8, … are marked, by the number of the step: so the ranks mark the same.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from traceml_ray.agent.device import DeviceClock
from traceml_ray.agent.marks import BRACKET_BEGIN, SYNC_END
from traceml_ray.agent.patch.optimizer import remove_hook
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Recorder

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
"""Functions in which the compute stream waits, by strategy. They are looked up where they are called."""
_GATHERS = ("wait_for_unshard", "_pre_forward_unshard", "_pre_backward_hook")
"""Those of them that wait for parameters; the others wait for reductions of gradients (FSDP1: mostly)."""
_ALL_UNTIL = 64
"""Number of first steps that are all marked."""
_MAX_SHARE = 0.002
"""
Largest cost of marking afterwards, as a share of the median step: as many steps are marked as
that allows.
"""
_MAX_PERIOD = 64


class ShardedWaits:
    """
    Marks the waits of FSDP in this process.

    Raises RuntimeError where this torch's FSDP has not all of the functions, and then patches nothing.
    """

    def __init__(self, strategy: str, recorder: Recorder, device: DeviceClock, patcher: Patcher) -> None:
        self.period = 1
        """One step in so many is marked."""
        self._recorder = recorder
        self._device = device
        self._failed = patcher.failed
        self._boundary = True
        """An optimizer has taken a step since the last wait."""
        self._marking = False
        self._step = -1
        """Steps since the first wait, as rows number them once the agent has compared."""
        self._marks = self._marked = 0
        """How many waits were marked, and in how many steps."""
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
        """Choose which steps are marked, by what it costs; compare with the numbers of rows."""
        device = self._device
        if self._marked < _ALL_UNTIL or not device.median_ns:
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
