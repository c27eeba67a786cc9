"""The samples of one node as numbers, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from traceml_ray.signals.nodes.quantities import GPU_LIMITED, NAN, NODE_LIMITED
from traceml_ray.signals.nodes.records import GpuProcess, NodeSample

Float = np.ndarray[Any, np.dtype[np.float32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]
Devices = Mapping[int, Sequence[GpuProcess]]
XID_LATE_NS = 2_000_000_000
"""Delay until a critical error is sampled, in ns. Its process may be gone by then."""


class Excerpt(NamedTuple):
    """Some samples of a node: `node` (n, NODE_LIMITED), `gpus` (n, devices, GPU_LIMITED), NaN: unknown."""

    node: Float
    gpus: Float
    devices: tuple[int, ...]
    processes: list[Devices]
    """Processes by device, for each sample that listed them."""
    xids: list[tuple[int, int]]
    """Critical errors as pairs (device, number)."""


Between = Callable[[Sequence[str], int, int], Mapping[str, Excerpt]]
"""Function that returns the samples of nodes (by id) between two times (ns since the epoch)."""


class Samples:
    """
    The samples of one node. When there is no room, every second one of the older half is dropped: the newest
    are all kept, older ones are further and further apart.
    """

    def __init__(self, size: int = 256) -> None:
        self._size = size
        self._last: NodeSample | None = None
        self._devices: tuple[int, ...] = ()
        self._t: Int64 = np.zeros(size, np.int64)
        self._values: Float = _rows(size, 0)
        self._processes: list[Devices | None] = []
        self._xids: deque[tuple[int, int, int]] = deque(maxlen=size)

    def add(self, sample: NodeSample) -> None:
        """Add a sample. If the devices change, earlier samples are discarded."""
        devices = tuple(gpu.index for gpu in sample.gpus or ())
        if sample.gpus is not None and devices != self._devices:
            self._devices = devices
            self._values, self._processes = _rows(self._size, len(devices)), []
        if len(self._processes) == self._size:
            old = self._size // 2
            kept = np.r_[0:old:2, old : self._size]
            self._t[: len(kept)], self._values[: len(kept)] = self._t[kept], self._values[kept]
            self._processes = [self._processes[index] for index in kept.tolist()]
        end = len(self._processes)
        seconds = 0.0 if self._last is None else (sample.t_ns - self._last.t_ns) / 1e9
        values = [quantity.value(sample, self._last, seconds) for quantity in NODE_LIMITED]
        values += [quantity.value(gpu) for gpu in sample.gpus or () for quantity in GPU_LIMITED]
        self._t[end] = sample.t_ns
        self._values[end] = NAN
        self._values[end, : len(values)] = values
        asked = {gpu.index: gpu.processes for gpu in sample.gpus or () if gpu.processes is not None}
        self._processes.append(asked or None)
        self._xids.extend((sample.t_ns, gpu.index, xid) for gpu in sample.gpus or () for xid in gpu.xid or ())
        self._last = sample

    def between(self, first_ns: int, last_ns: int) -> Excerpt:
        """Return copies of the samples from `first_ns` to `last_ns` (ns since the epoch)."""
        t = self._t[: len(self._processes)]
        indices = np.flatnonzero((t >= first_ns) & (t <= last_ns))
        values = self._values[indices]
        asked = [self._processes[i] for i in indices.tolist()]
        gpus = values[:, len(NODE_LIMITED) :].reshape(len(indices), len(self._devices), len(GPU_LIMITED))
        processes = [devices for devices in asked if devices]
        xids = [(gpu, xid) for t, gpu, xid in self._xids if first_ns <= t <= last_ns + XID_LATE_NS]
        return Excerpt(values[:, : len(NODE_LIMITED)], gpus, self._devices, processes, xids)


def _rows(n: int, devices: int) -> Float:
    return np.empty((n, len(NODE_LIMITED) + len(GPU_LIMITED) * devices), np.float32)
