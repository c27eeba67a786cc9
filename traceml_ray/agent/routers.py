"""How many tokens the routers of a mixture of experts give to each expert, where they are watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traceml_ray.agent.patch.patcher import Patcher

MAX_ROUTERS, MAX_EXPERTS, MAX_NAME_CHARS = 64, 512, 64


class Routers:
    """Counts on the device that a router runs on. Nothing waits for that: what has arrived is read."""

    def __init__(self, patcher: Patcher) -> None:
        self._patcher = patcher
        self._counts: dict[str, Any] = {}
        """By name: an int64 tensor (experts,) on the host."""

    def watch(self, module: Any, experts: int, name: str, chosen: Callable[[Any], Any] | None) -> None:
        """Count what `module` chooses from here on. Raises ValueError for what cannot be counted."""
        if not 1 <= experts <= MAX_EXPERTS or len(self._counts) >= MAX_ROUTERS:
            raise ValueError(f"1 to {MAX_EXPERTS} experts of at most {MAX_ROUTERS} routers are counted")
        name = name[:MAX_NAME_CHARS]
        while name in self._counts:
            name = f"{name}'"[-MAX_NAME_CHARS:]
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
                        sums = torch.zeros(experts, dtype=torch.int64, device=indices.device)
                        on_host = sums.device.type == "cpu"
                        host = sums if on_host else torch.zeros(experts, dtype=torch.int64, pin_memory=True)
                        self._counts[name] = host
                    sums.scatter_add_(0, indices, torch.ones_like(indices))
                    if sums.device.type != "cpu":
                        self._counts[name].copy_(sums, non_blocking=True)
            except Exception as error:
                self._patcher.failed("router", error)

        return count

    def counts(self) -> dict[str, list[int]]:
        """Return how many tokens each expert had so far, by router."""
        return {name: counts.tolist() for name, counts in [*self._counts.items()]}


def _chosen(output: Any) -> Any:
    """Return the indices of the chosen experts: the tensor of integers in what a router returns."""
    import torch

    for each in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(each, torch.Tensor) and not (each.is_floating_point() or each.dtype == torch.bool):
            return each
    raise TypeError("the router returns no tensor of integers: say which experts it chose (chosen=…)")
