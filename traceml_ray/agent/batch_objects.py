"""
Batches that say how large they are: graphs (PyTorch Geometric, DGL), packed sequences, and others that have a
`batch_size` of their own. No package is imported: they are known by their attributes, which are read only
where that computes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Size = Callable[[Any], int]
"""Returns the samples of an object of one kind."""
PLAIN = (str, bytes, int, float, bool, type(None))


class Attribute(str):
    """A step on the way to a part of a batch: an attribute, not a key."""

    __slots__ = ()


def fields_of(value: Any) -> list[Attribute]:
    """Return the fields of a dataclass, nothing of other objects."""
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return []
    return [Attribute(field.name) for field in dataclasses.fields(value)]


def objects(value: Any, path: tuple[Any, ...], depth: int) -> Iterator[tuple[tuple[Any, ...], Size]]:
    """Yield where objects are that say how large they are, and how; in lists, tuples and dataclasses."""
    size = size_of(value)
    if size is not None:
        yield path, size
    elif depth and isinstance(value, (list, tuple)):
        for at, part in enumerate(value[:8]):
            yield from objects(part, (*path, at), depth - 1)
    elif depth:
        for name in fields_of(value):
            yield from objects(getattr(value, name), (*path, name), depth - 1)


def size_of(value: Any) -> Size | None:
    """Return how to read the samples of an object that says them; None of others, and of tensors."""
    if isinstance(value, (Mapping, list, *PLAIN)) or getattr(value, "shape", None) is not None:
        return None
    if isinstance(value, tuple):
        if not hasattr(value, "batch_sizes"):
            return None
        return _packed if getattr(value, "sorted_indices", None) is None else _packed_unsorted
    for known, size in ((_has_graphs, _graphs), (_has_pointer, _by_pointer), (_has_nodes, _by_nodes)):
        if known(value):
            return size
    return _batch_size if _has_batch_size(value) else None


# -- PyTorch Geometric: `num_graphs` itself may look for the largest number in a tensor on a device ------


def _has_graphs(value: Any) -> bool:
    return type(getattr(value, "_num_graphs", None)) is int


def _graphs(value: Any) -> int:
    graphs: int = value._num_graphs
    return graphs


def _has_pointer(value: Any) -> bool:
    return hasattr(value, "_store") and len(getattr(getattr(value, "ptr", None), "shape", ())) == 1


def _by_pointer(value: Any) -> int:
    return int(value.ptr.shape[0]) - 1


# -- DGL: the nodes of each graph, by kind of node -----------------------------------------------------------


def _has_nodes(value: Any) -> bool:
    nodes = getattr(value, "__dict__", {}).get("_batch_num_nodes")
    return bool(nodes) and isinstance(nodes, dict) and hasattr(next(iter(nodes.values())), "shape")


def _by_nodes(value: Any) -> int:
    return int(next(iter(value._batch_num_nodes.values())).shape[0])


# -- others ------------------------------------------------------------------------------------------------


def _has_batch_size(value: Any) -> bool:
    """Whether it has a number of that name which nothing computes: seed nodes of a `NeighborLoader`."""
    return not hasattr(type(value), "batch_size") and type(getattr(value, "batch_size", None)) is int


def _batch_size(value: Any) -> int:
    size: int = value.batch_size
    return size


def _packed(value: Any) -> int:
    return int(value.batch_sizes[0])


def _packed_unsorted(value: Any) -> int:
    return int(value.sorted_indices.shape[0])
