"""Counts how many tokens the watched routers of a mixture of experts give to each expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.errors import sendable
from traceml_ray.signals.experts.records import MAX_EXPERTS, MAX_ROUTERS, RouterTokens

MAX_NAME_CHARS = 64
COUNTS_AT_ONCE = 2 * (MAX_EXPERTS + 2)
"""
Number of counts that are sent in one round. Many routers are sent in turns, so that they do not fill the
batches.
"""


class Routers:
    """
    Counts on the device that a router runs on. Nothing waits for the device: only counts that have arrived
    are read.
    """

    def __init__(self, patcher: Patcher) -> None:
        self._patcher = patcher
        self._counts: dict[str, Any] = {}
        """
        Name of a router that has run → int64 tensor on the host.

        Its first element counts indices below 0, its last element counts indices above the last expert.
        Between them is one count per expert.
        """
        self._names: dict[str, None] = {}
        """Names of the routers, in the order in which they began to be watched."""
        self._outside: dict[str, int] = {}
        self._turn: list[str] = []
        """Routers to send before any router is sent again."""

    def watch(self, module: Any, experts: int, name: str, chosen: Callable[[Any], Any] | None) -> None:
        """
        Count the experts that `module` chooses from now on. Raises ValueError if that cannot
        be counted.
        """
        if not 1 <= experts <= MAX_EXPERTS or len(self._names) >= MAX_ROUTERS:
            raise ValueError(f"1 to {MAX_EXPERTS} experts of at most {MAX_ROUTERS} routers are counted")
        name = sendable(name)[:MAX_NAME_CHARS]
        while name in self._names:
            name = f"{name}'"[-MAX_NAME_CHARS:]
        self._names[name] = None
        handle = module.register_forward_hook(self._hook(name, experts, chosen or _chosen))
        self._patcher.when_restored(handle.remove)

    def _hook(self, name: str, experts: int, chosen: Callable[[Any], Any]) -> Callable[..., None]:
        import torch

        sums: Any = None

        def count(module: Any, _: Any, output: Any) -> None:
            nonlocal sums
            if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
                return
            try:
                with torch.no_grad():
                    indices = chosen(output).detach().reshape(-1).long()
                    if sums is None:
                        size = experts + 2
                        sums = torch.zeros(size, dtype=torch.int64, device=indices.device)
                        on_host = sums.device.type == "cpu"
                        host = sums if on_host else torch.zeros(size, dtype=torch.int64, pin_memory=True)
                        self._counts[name] = host
                    # CUDA ends the process if an index is out of range, so indices are clamped.
                    places = indices.clamp(-1, experts).add_(1)
                    sums.scatter_add_(0, places, torch.ones_like(places))
                    if sums.device.type != "cpu":
                        self._counts[name].copy_(sums, non_blocking=True)
            except Exception as error:
                self._patcher.failed("router", error)

        return count

    def counts(self) -> dict[str, list[int]]:
        """Return the number of tokens of each expert so far, by router."""
        return {name: self._read(name) for name in [*self._counts]}

    @property
    def outside(self) -> int:
        """Number of indices that belong to no expert (below 0 or above the last one) at the last reading."""
        return sum(self._outside.values())

    def due(self, final: bool = False) -> list[RouterTokens]:
        """Return the counts of the routers that are due; at the end, of all routers."""
        if final:
            return [self._tokens(name) for name in [*self._counts]]
        due: list[RouterTokens] = []
        room = COUNTS_AT_ONCE
        self._turn = self._turn or [*self._counts]
        while self._turn:
            name = self._turn[0]
            room -= len(self._counts[name])
            if due and room < 0:
                break
            due.append(self._tokens(self._turn.pop(0)))
        return due

    def _tokens(self, name: str) -> RouterTokens:
        return RouterTokens([*self._names].index(name), name, self._read(name))

    def _read(self, name: str) -> list[int]:
        read: list[int] = self._counts[name].tolist()
        self._outside[name] = read[0] + read[-1]
        return read[1:-1]


def _chosen(output: Any) -> Any:
    """Return the indices of the chosen experts: the integer tensor in the output of a router."""
    import torch

    for item in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(item, torch.Tensor) and not (item.is_floating_point() or item.dtype == torch.bool):
            return item
    raise TypeError("the router returns no tensor of integers: pass the chosen experts (chosen=…)")
