"""Which backwards exchange gradients: a loss in chunks, or a part that DDP or FSDP does not own, need not."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from traceml_ray.agent.exchange import GradientExchange
from traceml_ray.agent.patch.patcher import Failed, Patcher

_REDUCES = (
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "foreach_reduce"),
    ("torch.distributed._composable.fsdp._fsdp_param_group", "foreach_reduce"),
    ("torch.distributed.fsdp._runtime_utils", "_reduce_grad"),
    ("torch.distributed.fsdp._runtime_utils", "_reduce_grad_no_shard"),
)
"""What `fully_shard` and FSDP call for each group of parameters whose gradients they exchange."""


class Exchanges:
    """Answers `GradientExchange.peers` at the end of each backward; never raises."""

    def __init__(self, exchange: GradientExchange, failed: Failed) -> None:
        self._exchange = exchange
        self._failed = failed
        self._ddp: list[tuple[weakref.ref[Any], list[int]]] = []
        self._reduces = self._known = 0
        self._patched: set[str] = set()

    def add_ddp(self, module: Any) -> None:
        """Ask for this DDP module at the end of a backward, too."""
        self._ddp = [*(known for known in self._ddp if known[0]() is not None), (weakref.ref(module), [])]

    def of_ddp(self) -> bool:
        """
        Return whether the backward that ends was one of DDP's: `no_sync` was not on.

        Once a step has had several, it is also asked whether gradients of DDP's parameters were made in it:
        the reducer notes the time of each.
        """
        exchanged = False
        try:
            for ref, before in self._ddp:
                module = ref()
                if module is None:
                    continue
                if not self._exchange.several:
                    exchanged |= bool(module.require_backward_grad_sync)
                    continue
                times = module.reducer.get_backward_stats()
                exchanged |= bool(module.require_backward_grad_sync) and times != before
                before[:] = times
        except Exception as error:
            self._failed("exchange", error)
            return True
        return exchanged

    def of_fsdp(self) -> bool:
        """Return whether gradients were reduced in the backward that ends; True while none ever were."""
        before, self._known = self._known, self._reduces
        return self._reduces != before or not self._reduces

    def patch_fsdp(self, patcher: Patcher) -> None:
        """Count the reductions of FSDP in those of its modules that have been imported; again for others."""
        from torch.compiler import is_compiling

        def make(original: Any) -> Any:
            def reduce(*args: Any, **kwargs: Any) -> Any:
                if not is_compiling():
                    self._reduces += 1
                return original(*args, **kwargs)

            return reduce

        for name, function in _REDUCES:
            place = f"{name}.{function}"
            if hasattr(sys.modules.get(name), function) and place not in self._patched:
                self._patched.add(place)
                patcher.replace(sys.modules[name], function, make)
