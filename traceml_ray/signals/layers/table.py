"""
Determines which modules of a model are its layers: their names, the layers inside them, and
their sizes.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from traceml_ray.signals.layers.records import Region

MAX_MODULES = 1000
"""
Largest number of modules that are measured, nearest to the root. Time inside deeper modules counts for the
module that contains them.
"""
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
"""Attribute names under which a wrapper holds the wrapped module. Layer names omit them."""
_MAX_NAME, _MAX_KIND = 120, 60


class LayerEntry(NamedTuple):
    """One layer of the table."""

    name: str
    kind: str
    region: Region


class LayerTable:
    """
    The layers of some root modules, by number.

    Modules are held by id, parameters by weak references, so the table keeps nothing alive.

    Args:
        roots: the root modules. Several roots, as of a GAN, are distinguished by their classes.
        most: largest number of layers.
    """

    def __init__(self, roots: list[Any], most: int = MAX_MODULES) -> None:
        self.layers: list[LayerEntry] = []
        self.by_id: dict[int, int] = {}
        """Id of a layer's module → number of the layer."""
        self.closed: set[int] = set()
        """Layers inside which nothing is measured."""
        self.accelerated = False
        self._own: list[list[weakref.ref[Any]]] = []
        modules = list(_found(roots))
        for depth in sorted({entry.depth for entry in modules}, reverse=True):
            if len(modules) <= most:
                break
            modules = [entry for entry in modules if entry.depth < depth]
        for entry in modules:
            self.by_id[id(entry.module)] = len(self.layers)
            if entry.layer.region in ("compiled", "graph"):
                self.closed.add(len(self.layers))
            self.layers.append(entry.layer)
        self._divide(roots)
        self.parameter_bytes = self._bytes(lambda parameter: parameter)

    def _divide(self, roots: list[Any]) -> None:
        """Assign each parameter once, to the innermost layer that contains it."""
        self._own = [[] for _ in self.layers]
        seen: set[int] = set()
        for root in roots:
            waiting = [(root, self.by_id.get(id(root)))]
            while waiting:
                module, owner = waiting.pop()
                owner = self.by_id.get(id(module), owner)
                if id(module) in seen or owner is None:
                    continue
                seen.add(id(module))
                for parameter in list(module._parameters.values()):
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        self._own[owner].append(weakref.ref(parameter))
                        self.accelerated |= parameter.device.type not in ("cpu", "meta")
                waiting += [(inside, owner) for inside in module._modules.values() if inside is not None]

    def gradient_bytes(self) -> list[int | None]:
        """
        Return the size of the gradients of each layer on this rank, in bytes. None for a layer without
        gradients now.
        """
        return self._bytes(lambda parameter: parameter.grad)

    def _bytes(self, tensor_of: Callable[[Any], Any]) -> list[int | None]:
        sizes_of_layers: list[int | None] = []
        for parameters in self._own:
            sizes = [
                _size(tensor)
                for ref in parameters
                if (p := ref()) is not None and (tensor := tensor_of(p)) is not None
            ]
            sizes_of_layers.append(sum(sizes) if sizes or not parameters else None)
        return sizes_of_layers

    def compile(self, index: int) -> None:
        """Record that a layer is called through torch.compile."""
        self.layers[index] = self.layers[index]._replace(region="compiled")
        self.closed.add(index)

    def same(self, other: LayerTable) -> bool:
        """Return whether the layers are the same modules."""
        return self.by_id == other.by_id and self.layers == other.layers


class _Found(NamedTuple):
    module: Any
    layer: LayerEntry
    depth: int


def _found(roots: list[Any]) -> Iterator[_Found]:
    """
    Yield the layers of all roots, in the order of the model. Of FSDP modules, only those that are gathered as
    a whole.
    """
    taken: set[int] = set()
    tops: Counter[str] = Counter()
    for root in roots:
        sharded = any(_is_sharded(module) for module in list(root.modules()))
        top = _unwrapped(root)[-1].__class__.__name__ if len(roots) > 1 else ""
        tops[top] += 1
        waiting = [(root, f"{top} {tops[top]}" if tops[top] > 1 else top, 0)]
        while waiting:
            module, name, depth = waiting.pop()
            if id(module) in taken:
                continue
            chain = _unwrapped(module)
            taken.update(map(id, chain))
            region: Region = next((known_region for module in chain if (known_region := _region(module))), "")
            if depth == 0 or not sharded or any(map(_is_sharded, chain)):
                kind = type(chain[-1]).__name__.removeprefix("FSDP" * (region == "sharded"))[:_MAX_KIND]
                yield _Found(module, LayerEntry(name[-_MAX_NAME:], kind, region), depth)
            if region not in ("compiled", "graph"):
                inside = [
                    (child, module) for child, module in chain[-1]._modules.items() if module is not None
                ]
                waiting += [
                    (module, f"{name}.{child}".lstrip("."), depth + 1) for child, module in reversed(inside)
                ]


def _unwrapped(module: Any) -> list[Any]:
    """Return a module, the module that it wraps, the module that this one wraps, and so on."""
    chain = [module]
    while len(module._modules) == 1:
        ((name, inside),) = module._modules.items()
        if name not in _WRAPPERS or inside is None:
            break
        module = inside
        chain.append(module)
    return chain


def _region(module: Any) -> Region:
    if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
        return "compiled"
    forward = module.__dict__.get("forward")
    if forward is not None and getattr(forward, "__module__", None) == "torch.cuda.graphs":
        return "graph"
    return "sharded" if _is_sharded(module) else ""


def _is_sharded(module: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    return any(kind is not None and isinstance(module, kind) for kind in kinds)


def _size(tensor: Any) -> int:
    """Return the size of a tensor on this rank in bytes. Only its shape is read."""
    import torch

    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    return int(tensor.numel() * tensor.element_size())
