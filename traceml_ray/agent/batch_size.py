"""
How large a batch is, from its tensors: samples (dimension 0) and tokens (all that `input_ids` holds, padding
included); of a batch that says its size itself, from that (see `batch_objects`). Where that would be a guess
it is not known, and a script can tell it (`traceml_ray.count`).

What the batches of a loader look like is found out with the first one; each of the others is then read in a
fraction of a microsecond, by the training thread.

Batches that say how large they are: graphs (PyTorch Geometric, DGL), packed sequences, and others that have a
`batch_size` of their own. No package is imported: they are known by their attributes, which are read only
where that computes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import Any

from traceml_ray.agent.marks import BATCHES

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
        for index, part in enumerate(value[:8]):
            yield from objects(part, (*path, index), depth - 1)
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


UNKNOWN = BATCHES
_TOKENS = "input_ids"
_DEPTH, _MOST = 3, 64
"""How deep inside a batch tensors are looked for, and how many of them."""
_BITS = 32
"""Number of bits for the number of samples. The number of tokens is above them."""
_HALF = (1 << _BITS) - 1
_TWO = BATCHES - 1 - (1 << _BITS)
"""What no sample and no token are written as: that is more than that both are not known."""
Read = Callable[[Any], int]
_Tensors = list[tuple[tuple[Any, ...], tuple[int, ...]]]
"""Where the tensors of a batch are, as keys one after the other, and their shapes."""


def written(samples: int | None, tokens: int | None) -> int:
    """Return how the size of a batch stands in the log of marks."""
    low = 0 if samples is None or not 0 <= samples < _HALF else samples + 1
    return BATCHES - (low | (0 if tokens is None else tokens + 1) << _BITS)


def understood(size: int) -> tuple[int | None, int | None]:
    """Return (samples, tokens) of what `BATCHES` was written with."""
    samples, tokens = size & _HALF, size >> _BITS
    return samples - 1 if samples else None, tokens - 1 if tokens else None


class BatchSizes:
    """Of the loader that is waited for; the training thread's."""

    __slots__ = ("_kind", "_read", "why")

    def __init__(self) -> None:
        self.why = ""
        """Why the batches of a loader, the newest such, have no known size."""
        self.forget()

    def forget(self) -> None:
        """Another loader follows."""
        self._kind: type | None = None
        self._read: Read = _unknown

    def mark(self, batch: Any) -> int:
        """Return what to write down of a batch; raises nothing."""
        try:
            if type(batch) is self._kind:
                return self._read(batch)
        except Exception:  # it looks another way than the first one
            self._kind = None
        try:
            self._kind, self._read = type(batch), self._found(batch)
            return self._read(batch)
        except Exception as error:
            self.why, self._read = f"{type(error).__name__} in a batch", _unknown
            return UNKNOWN

    def _found(self, batch: Any) -> Read:
        """Return how batches that look like this one are read."""
        for path, size in objects(batch, (), 2):
            return _of_object(_getter(path), size, _packed_tokens(_getter(path)(batch)))
        if (lists := _ragged(batch)) is not None:
            return lists
        tensors = [*_tensors(batch, (), _DEPTH)][:_MOST]
        if not tensors:
            self.why = f"no tensor in a batch ({type(batch).__name__})"
            return _unknown
        named = [tensor for tensor in tensors if tensor[0] and tensor[0][-1] == _TOKENS]
        if isinstance(batch, (list, tuple)) and len(named) > 1:
            self.why = "several `input_ids` in a batch"
            return _unknown
        for path, _ in [*named, *_next_tokens(batch, tensors)]:
            return _of_tokens(_getter(path), _getter(path)(batch))
        if len({shape[0] for _, shape in tensors}) > 1:
            self.why = "the tensors of a batch differ in dimension 0"
            return _unknown
        if isinstance(batch, (list, tuple)) and _is_list_of_samples(tensors):
            self.why = "a list of tensors of one shape: samples, or parts of a batch"
            return _unknown
        return _of_samples(_getter(tensors[0][0]))


def _tensors(
    value: Any, path: tuple[Any, ...], depth: int
) -> Iterator[tuple[tuple[Any, ...], tuple[int, ...]]]:
    """Yield where tensors with a dimension 0 are in `value`, and their shapes; arrays and tables count."""
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, Mapping):
        if len(shape):
            yield path, tuple(shape)
    elif depth and isinstance(value, Mapping):
        for key in [*value.keys()][:_MOST]:
            yield from _tensors(value[key], (*path, key), depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for index, part in enumerate(value[:_MOST]):
            yield from _tensors(part, (*path, index), depth - 1)
    elif depth:
        for name in fields_of(value):
            yield from _tensors(getattr(value, name), (*path, name), depth - 1)


def _is_list_of_samples(tensors: _Tensors) -> bool:
    """Return whether nothing tells the tensors of a list apart, which may be one sample each."""
    shapes = {shape for _, shape in tensors}
    return len(shapes) == 1 < len(tensors) and (len(tensors) > 2 or len(tensors[0][1]) == 3)


def _next_tokens(batch: Any, tensors: _Tensors) -> _Tensors:
    """Return the tokens of a batch (tokens, targets), both of integers, (batch, time)."""
    if not isinstance(batch, (list, tuple)) or not len(tensors) == len(batch) == 2 or len(tensors[0][0]) > 1:
        return []
    same = tensors[0][1] == tensors[1][1] and len(tensors[0][1]) == 2
    return tensors[:1] if same and all(map(_is_whole, batch)) else []


def _getter(path: tuple[Any, ...]) -> Callable[[Any], Any]:
    if not path:
        return _itself
    if len(path) == 1:
        return attrgetter(path[0]) if isinstance(path[0], Attribute) else itemgetter(path[0])

    def get(batch: Any) -> Any:
        for key in path:
            batch = getattr(batch, key) if type(key) is Attribute else batch[key]
        return batch

    return get


def _itself(batch: Any) -> Any:
    return batch


def _unknown(_: Any) -> int:
    return UNKNOWN


def _of_object(get: Callable[[Any], Any], size: Size, tokens: bool) -> Read:
    def read(batch: Any) -> int:
        return BATCHES - (size(get(batch)) + 1)

    def read_packed(batch: Any) -> int:
        packed = get(batch)
        return written(size(packed), int(packed.data.shape[0]))

    return read_packed if tokens else read


def _packed_tokens(value: Any) -> bool:
    """Return whether this is a packed sequence of tokens: integers."""
    data = getattr(value, "data", None) if isinstance(value, tuple) else None
    return data is not None and len(data.shape) == 1 and _is_whole(data)


def _is_whole(value: Any) -> bool:
    return str(value.dtype).removeprefix("torch.") in ("int64", "int32")


def _ragged(batch: Any) -> Read | None:
    """Return how to read sequences that nobody has put into one tensor; None of other batches."""
    if isinstance(batch, Mapping):
        return _read_lists if _TOKENS in batch and _is_ragged(batch[_TOKENS]) else None
    samples = (
        isinstance(batch, (list, tuple)) and batch and all(isinstance(sample, Mapping) for sample in batch)
    )
    tokens = [sample.get(_TOKENS) for sample in batch[:_MOST]] if samples else ()
    return _read_samples if _is_ragged(tokens) else None


def _is_ragged(ids: Any) -> bool:
    """Return whether these are sequences of tokens: lists of numbers, or tensors of one dimension."""
    if not (isinstance(ids, (list, tuple)) and ids):
        return False
    first = ids[0]
    if isinstance(first, (list, tuple)):
        return all(type(token) is int for token in first[:1])
    return len(getattr(first, "shape", ())) == 1 and _is_whole(first)


def _read_lists(batch: Any) -> int:
    ids = batch[_TOKENS]
    return written(len(ids), sum(map(len, ids)))


def _read_samples(batch: Any) -> int:
    return written(len(batch), sum(len(sample[_TOKENS]) for sample in batch))


def _of_samples(get: Callable[[Any], Any]) -> Read:
    def read(batch: Any) -> int:
        samples: int = get(batch).shape[0]
        return BATCHES - (samples + 1)

    return read


def _of_tokens(get: Callable[[Any], Any], ids: Any) -> Read:
    """Return how to read batches whose tokens are like `ids`: (batch, time), or of all samples in a row."""

    def read(batch: Any) -> int:
        ids = get(batch)
        samples: int = ids.shape[0]
        tokens: int = ids.numel()
        return _TWO - samples - (tokens << _BITS)

    def read_array(batch: Any) -> int:
        ids = get(batch)
        tokens: int = math.prod(ids.shape)
        return _TWO - int(ids.shape[0]) - (tokens << _BITS)

    def read_nested(batch: Any) -> int:
        ids = get(batch)
        return written(int(ids.shape[0]), int(ids.values().shape[0]))

    def read_flat(batch: Any) -> int:
        tokens: int = math.prod(get(batch).shape)
        return BATCHES - (tokens + 1 << _BITS)

    if getattr(ids, "is_nested", False):
        return read_nested
    if len(ids.shape) == 1:
        return read_flat
    return read if hasattr(ids, "numel") else read_array
