"""
Measures how large each batch is: samples (dimension 0) and tokens (all elements of `input_ids`, padding
included).

A batch that states its own size is read by that (see "Batches that state their size" below). Where the size
would be a guess, it is unknown; the script can declare it with `traceml_ray.count`. Sizes are kept per step
and as sums until they are sent.

The first batch of a loader determines how its batches are read. The training thread then reads each later
batch in a fraction of a microsecond.

Batches that state their size: graphs (PyTorch Geometric, DGL), packed sequences, and other objects with a
`batch_size`. No package is imported: these objects are recognized by their attributes. An attribute is read
only where reading it computes nothing.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, itemgetter
from sys import byteorder
from typing import Any, NamedTuple

from traceml_ray.agent.marks import BATCHES
from traceml_ray.agent.rows import DataWaits
from traceml_ray.signals.throughput.records import MAX_SIZES, StepSizes

Size = Callable[[Any], int]
"""Returns the samples of an object of one kind."""
PLAIN = (str, bytes, int, float, bool, type(None))


class Attribute(str):
    """One step of the path to a part of a batch: an attribute, not a key."""

    __slots__ = ()


def fields_of(value: Any) -> list[Attribute]:
    """Return the fields of a dataclass; an empty list for other objects."""
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return []
    return [Attribute(field.name) for field in dataclasses.fields(value)]


def objects(value: Any, path: tuple[Any, ...], depth: int) -> Iterator[tuple[tuple[Any, ...], Size]]:
    """
    Yield each object that states its size, with the function that reads it. Searches lists, tuples and
    dataclasses.
    """
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
    """
    Return the function that reads the number of samples of `value`. None if `value` does not state it, or is
    a tensor.
    """
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


# -- PyTorch Geometric: `num_graphs` may search a tensor on a device for its largest number -----------


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
    """
    Return whether `value` has a `batch_size` number that is read without computing: seed nodes of a
    `NeighborLoader`.
    """
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
"""How deep a batch is searched for tensors, and the largest number of tensors that are considered."""
_BITS = 32
"""Number of bits for the number of samples. The number of tokens is above them."""
_HALF = (1 << _BITS) - 1
_TWO = BATCHES - 1 - (1 << _BITS)
"""Item that encodes 0 samples and 0 tokens. It differs from the item that says that both are unknown."""
Read = Callable[[Any], int]
_Tensors = list[tuple[tuple[Any, ...], tuple[int, ...]]]
"""Tensors of a batch: for each, the path of keys that leads to it, and its shape."""


def written(samples: int | None, tokens: int | None) -> int:
    """Encode the size of a batch as one item of the log of marks."""
    low = 0 if samples is None or not 0 <= samples < _HALF else samples + 1
    return BATCHES - (low | (0 if tokens is None else tokens + 1) << _BITS)


def understood(size: int) -> tuple[int | None, int | None]:
    """Decode an item written by `BATCHES`. Returns (samples, tokens); None is unknown."""
    samples, tokens = size & _HALF, size >> _BITS
    return samples - 1 if samples else None, tokens - 1 if tokens else None


class BatchSizes:
    """
    Reads the sizes of the batches of the loader that is being waited for. Only the training
    thread uses it.
    """

    __slots__ = ("_kind", "_read", "why")

    def __init__(self) -> None:
        self.why = ""
        """Why the batches of a loader have no known size; the newest such reason."""
        self.forget()

    def forget(self) -> None:
        """Forget how batches are read, because another loader follows."""
        self._kind: type | None = None
        self._read: Read = _unknown

    def mark(self, batch: Any) -> int:
        """Return the item to write to the log for `batch`. Raises nothing."""
        try:
            if type(batch) is self._kind:
                return self._read(batch)
        except Exception:  # this batch is built differently from the first one
            self._kind = None
        try:
            self._kind, self._read = type(batch), self._found(batch)
            return self._read(batch)
        except Exception as error:
            self.why, self._read = f"{type(error).__name__} in a batch", _unknown
            return UNKNOWN

    def _found(self, batch: Any) -> Read:
        """Return the function that reads batches built like this one."""
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
    """
    Yield the path and the shape of each tensor in `value` that has a dimension 0. Arrays and tables count as
    tensors.
    """
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
    """Return whether the tensors of a list look alike, so that each may be one sample."""
    shapes = {shape for _, shape in tensors}
    return len(shapes) == 1 < len(tensors) and (len(tensors) > 2 or len(tensors[0][1]) == 3)


def _next_tokens(batch: Any, tensors: _Tensors) -> _Tensors:
    """Return the tokens of a batch (tokens, targets) if both are integers of shape (batch, time)."""
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
    """Return whether `value` is a packed sequence of tokens (integers)."""
    data = getattr(value, "data", None) if isinstance(value, tuple) else None
    return data is not None and len(data.shape) == 1 and _is_whole(data)


def _is_whole(value: Any) -> bool:
    return str(value.dtype).removeprefix("torch.") in ("int64", "int32")


def _ragged(batch: Any) -> Read | None:
    """
    Return the function that reads sequences which are not collated into one tensor. None for
    other batches.
    """
    if isinstance(batch, Mapping):
        return _read_lists if _TOKENS in batch and _is_ragged(batch[_TOKENS]) else None
    samples = (
        isinstance(batch, (list, tuple)) and batch and all(isinstance(sample, Mapping) for sample in batch)
    )
    tokens = [sample.get(_TOKENS) for sample in batch[:_MOST]] if samples else ()
    return _read_samples if _is_ragged(tokens) else None


def _is_ragged(ids: Any) -> bool:
    """Return whether `ids` are sequences of tokens: lists of numbers, or tensors of one dimension."""
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
    """
    Return the function that reads batches whose tokens look like `ids`: (batch, time), or all samples in one
    row.
    """

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


ROOM = 4 * MAX_SIZES
"""Largest number of steps that are kept. Beyond it the oldest step is dropped and counted."""
_UNKNOWN = -1
_LARGEST = (1 << 63) - 1


class SizeLog:
    """
    Batch sizes per step of one process, in bounded memory. The caller holds the lock of the
    log of marks.
    """

    __slots__ = ("_entries", "lost")

    def __init__(self) -> None:
        self._entries: deque[tuple[int, int, int]] = deque(maxlen=ROOM)
        """(step, samples, tokens) of each step; -1 is unknown."""
        self.lost = 0
        """Number of steps whose sizes were dropped because nothing was sent for too long."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, step: int, samples: int | None, tokens: int | None) -> None:
        """Append the sizes of a step. Steps must be added in order."""
        self.lost += len(self._entries) == ROOM
        self._entries.append((step, _known(samples), _known(tokens)))

    def drain(self) -> list[tuple[int, int, int]]:
        """Return all entries, the oldest first, and clear the log."""
        entries = [*self._entries]
        self._entries.clear()
        return entries


def packed(entries: list[tuple[int, int, int]]) -> list[StepSizes]:
    """
    Return the entries of `SizeLog.drain` in the form in which they are sent. Steps without a batch are
    unknown.
    """
    pieces: list[list[tuple[int, int, int]]] = []
    for entry in entries:
        if not pieces or not 0 < entry[0] - pieces[-1][0][0] < MAX_SIZES:
            pieces.append([])
        pieces[-1].append(entry)
    return [_piece(piece) for piece in pieces]


def _piece(entries: list[tuple[int, int, int]]) -> StepSizes:
    first, last = entries[0][0], entries[-1][0]
    steps = last - first + 1
    values = array("q", [_UNKNOWN]) * (2 * steps)
    for step, samples, tokens in entries:
        values[step - first], values[steps + step - first] = samples, tokens
    if byteorder == "big":
        values.byteswap()
    return StepSizes(first, last, zlib.compress(values.tobytes(), 1))


def _known(size: int | None) -> int:
    return size if size is not None and 0 <= size <= _LARGEST else _UNKNOWN


class Counted(NamedTuple):
    """Sums over the `steps` steps from `first` to `last`. None is unknown."""

    first: int
    last: int
    steps: int
    batches: int
    samples: int | None
    tokens: int | None


Sizes = tuple[int, int | None, int | None]
"""(number of batches, their samples, their tokens)."""
_NONE: Sizes = 0, 0, 0


class WorkSums:
    """
    Sums of batches and their sizes in one process. The caller holds the lock of the log.

    A batch counts for the first backward that follows it.
    """

    __slots__ = ("_data", "_declared", "_now", "_step", "_sum", "_waiting", "sizes")

    def __init__(self, data: DataWaits) -> None:
        self._data = data
        self.sizes = SizeLog()
        self._step = 0
        self._now = _NONE
        self._declared: tuple[int | None, int | None] = None, None
        """(samples, tokens) that the script has declared for the open step."""
        self._sum: Counted | None = None
        self._waiting: dict[int, Sizes] = {}
        """Batches of each loader that no backward has followed yet."""

    def batch(self, size: int) -> None:
        """Add the size of the batch that was waited for last. `size`: see `marks.BATCHES`."""
        if not self._data.depth:  # otherwise the batch is of a loader inside another loader
            loader = self._data.loader
            self._waiting[loader] = _added(self._waiting.get(loader, _NONE), (1, *understood(size)))

    def commit(self, step: int) -> None:
        """
        Assign the waiting batches at a backward. Batches of loaders that feed training (see `DataWaits`)
        count for `step`. Batches of other loaders are discarded.
        """
        self._data.commit()
        self._go_to(step)
        for loader in self._data.training:
            if (sizes := self._waiting.pop(loader, None)) is not None:
                self._now = _added(self._now, sizes)
        self._waiting.clear()

    def declare(self, step: int, samples: int | None, tokens: int | None) -> None:
        """Add samples and tokens that the script declares for `step`."""
        self._go_to(step)
        before = self._declared
        self._declared = _sum_declared(before[0], samples), _sum_declared(before[1], tokens)

    def drain(self, step: int) -> Counted | None:
        """Return the sums of the steps before `step`. None if there are no such steps."""
        if step > self._step:
            self._go_to(step)
        counted, self._sum = self._sum, None
        return counted

    def _go_to(self, step: int) -> None:
        """Close the open step and add it to the sums if `step` is another one."""
        if step == self._step:
            return
        (batches, samples, tokens), declared, last = self._now, self._declared, self._step
        self._now, self._declared, self._step = _NONE, (None, None), step
        if not batches and declared == (None, None):
            return
        counted = Counted(
            last,
            last,
            1,
            batches,
            declared[0] if declared[0] is not None else samples if batches else None,
            declared[1] if declared[1] is not None else tokens if batches else None,
        )
        self.sizes.add(last, counted.samples, counted.tokens)
        before = self._sum
        self._sum = counted if before is None else _joined(before, counted)


def _sum_declared(before: int | None, more: int | None) -> int | None:
    return before if more is None else (before or 0) + more


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _added(one: Sizes, other: Sizes) -> Sizes:
    return one[0] + other[0], _plus(one[1], other[1]), _plus(one[2], other[2])


def _joined(one: Counted, other: Counted) -> Counted:
    return Counted(
        one.first,
        other.last,
        one.steps + other.steps,
        one.batches + other.batches,
        _plus(one.samples, other.samples),
        _plus(one.tokens, other.tokens),
    )
