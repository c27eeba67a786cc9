"""Reads the samples of processes, nodes and devices from the session file."""

from __future__ import annotations

import bisect
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from traceml_ray.analysis.anomalies import XID_LATE_NS, Excerpt, Samples
from traceml_ray.analysis.node_clock import MAX_OFFSET_NS, NodeClock
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.nodes.quantities import GPU, NODE, stored
from traceml_ray.signals.nodes.records import GpuSample, NodeSample
from traceml_ray.store.reader import Reader
from traceml_ray.store.schema import legible
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready

_SAMPLE = NodeSample.__struct_fields__
_PROCESS = ", ".join(wire.ProcessSample.__struct_fields__)
_MEMORY = MemorySample.__struct_fields__
_MEASURED = _MEMORY[3:]
"""Measured fields of a memory sample. Time, step and device come before them."""
_UNKNOWN = -1
_READ_AT_ONCE = 20_000
_TICK_NS = 500_000_000
"""Approximate time between two memory samples, in ns."""
_NODE, _GPU = stored(NODE), stored(GPU)
_MOST_SAMPLES = 120
"""
Largest number of samples of a node that are read for its anomalies. Of a longer time, one sample in several
seconds is read.
"""
_LATE_NS = 10_000_000_000
"""Largest difference in arrival between samples of different nodes, in ns."""


@dataclass(frozen=True)
class MemoryColumns:
    """Memory samples of one rank process on one device, in order of time."""

    process: int
    """Id of the rank process."""
    device: int | None
    """Index of the device. None: the samples are of the host, of a process without a device."""
    t_ns: NDArray[np.int64]
    """Time of each sample: (n,) int64 ns, on the clock of its node."""
    step: NDArray[np.int64]
    """Step of each sample: (n,) int64; -1: not known."""
    columns: dict[str, NDArray[np.float64]]
    """
    Values by field of `MemorySample`: (n,) float64 each; NaN: not known. Fields without any known value are
    left out.
    """


class SampleReader(Reader):
    """Reads samples. Samples of nodes do not belong to one run."""

    def process_samples(
        self, processes: Iterable[int], last: int, between: tuple[int, int] | None = None
    ) -> list[tuple[int, wire.ProcessSample]]:
        """
        Return `last` samples of each of `processes` (ids), each with its process id. They are the newest, or
        spread evenly over the time `between` (ns).
        """
        return [
            (process, wire.ProcessSample(*sample))
            for process in processes
            for sample in self._all(
                f"SELECT {_PROCESS} FROM process_sample WHERE id IN ({{}}) ORDER BY id".format(
                    ", ".join(map(str, self._rows("process_sample", "process", process, last, between)))
                )
            )
        ]

    def memory_rows(
        self, processes: Iterable[int], last: int, between: tuple[int, int] | None = None
    ) -> list[tuple[int, MemorySample]]:
        """
        Return `last` memory samples of each of `processes` (ids), of all devices of a process together,
        chosen as by `process_samples`. Times are on the aggregator's clock, as far as the node's clock is
        known.
        """
        picked = []
        for process in processes:
            clock = self._clock_of(process)
            between_there = between
            if clock is not None and between is not None:
                between_there = clock.of_node(between[0]), clock.of_node(between[1])
            ids = ", ".join(map(str, self._memory_ids(process, last, between_there)))
            query = f"SELECT {', '.join(_MEMORY)} FROM memory_sample WHERE id IN ({ids}) ORDER BY id"
            rows = self._all(query)
            with legible(self.path):
                times = [row[0] for row in rows]
                if clock is not None and rows:
                    times = clock.to_aggregator(np.array(times))[0].tolist()
                picked += [(process, MemorySample(t, *row[1:])) for t, row in zip(times, rows, strict=True)]
        return picked

    def _clock_of(self, process: int) -> NodeClock | None:
        """Return the clock of a rank process's node; None if it was not measured."""
        nodes = [node for (node,) in self._all("SELECT node_id FROM rank_process WHERE id = ?", process)]
        return next(iter(self.clocks(nodes).values()), None)

    def _memory_ids(self, process: int, last: int, between: tuple[int, int] | None) -> list[int]:
        where = "FROM memory_sample WHERE process = ?"
        if between is None:
            return [row for (row,) in self._all(f"SELECT id {where} ORDER BY id DESC LIMIT ?", process, last)]
        of_device = defaultdict(list)
        for row, device in self._all(
            f"SELECT id, device {where} AND t_ns BETWEEN ? AND ?", process, *between
        ):
            of_device[device].append(row)
        share = max(1, last // max(1, len(of_device)))
        return [row for rows in of_device.values() for row in rows[:: -max(1, -(-len(rows) // share))]]

    def memory_samples(
        self,
        processes: Iterable[int] | None = None,
        since: int = 0,
        fields: Sequence[str] = _MEASURED,
        most: int | None = None,
    ) -> tuple[list[MemoryColumns], int]:
        """
        Return all memory samples after cursor `since`, by rank process and device, and the new cursor.
        `processes` are the ids to read (None: all), `fields` the fields. A sample with all fields takes about
        3 µs. If there are more than `most` samples, some moments are selected, the same for all devices.

        Raises `SessionFileError` for values that no sampler can have sent.
        """
        end = self._top("memory_sample")
        where = "FROM memory_sample WHERE id > ? AND id <= ?"
        if processes is not None:
            where += f" AND process IN ({', '.join(str(int(process)) for process in processes)})"
        counts = ", ".join(f"count({name})" for name in _MEMORY)
        total, _, *known = self._all(f"SELECT count(*), {counts} {where}", since, end)[0]
        if most is not None and total > most:
            where += f" AND t_ns / {_TICK_NS} % {-(-total // most)} = 0"
            total, _, *known = self._all(f"SELECT count(*), {counts} {where}", since, end)[0]
        filled = dict(zip(_MEMORY[1:], known, strict=True))
        names = [name for name in fields if filled[name]]
        wanted = ["process", "t_ns"]
        for name in ("device", "step", *names):
            wanted.append(name if filled[name] == total else f"ifnull({name}, {_UNKNOWN})")
        with legible(self.path):
            query = f"SELECT {', '.join(wanted)} {where} ORDER BY id"
            return _by_device(self._integers(query, since, end, width=len(wanted)), names), end

    def _integers(self, query: str, *values: Any, width: int) -> NDArray[np.int64]:
        """Return rows of integers; raises TypeError for other values."""
        numbers = array("q")
        with self._reading(query, values) as cursor:
            while rows := cursor.fetchmany(_READ_AT_ONCE):
                numbers.extend(chain.from_iterable(rows))
        return (
            np.frombuffer(numbers, np.int64).reshape(-1, width) if numbers else np.empty((0, width), np.int64)
        )

    def clocks(self, nodes: Sequence[Any] | None = None) -> dict[str, NodeClock]:
        """
        Return the measured clocks of `nodes` (ids; None: all): node id → clock. Raises
        `SessionFileError`.
        """
        measured_by_node: dict[str, list[tuple[int, ...]]] = {}
        query, arguments = "SELECT node_id, t_ns, offset_ns, bound_ns FROM clock", nodes or ()
        if nodes is not None:
            query += f" WHERE node_id IN ({', '.join('?' * len(nodes))})"
        rows = self._all(f"{query} ORDER BY t_ns", *arguments)
        for node, *values in rows:
            measured_by_node.setdefault(node, []).append(tuple(values))
        with legible(self.path):
            return {str(node): _clock(measured) for node, measured in measured_by_node.items()}

    def node_samples(
        self, nodes: Iterable[str], last: int, between: tuple[int, int] | None = None
    ) -> list[tuple[str, NodeSample]]:
        """
        Return `last` samples of each of `nodes` (ids), each with its node id, chosen as
        by `process_samples`.
        """
        return [
            (node, sample)
            for node in nodes
            for _, _, sample in self._samples(
                f"id IN ({', '.join(map(str, self._rows('node_sample', 'node_id', node, last, between)))})"
            )
        ]

    def _rows(
        self, table: str, column: str, owner: Any, last: int, between: tuple[int, int] | None
    ) -> list[int]:
        """Return the ids of the selected samples of one node or process, in order."""
        where = f"FROM {table} WHERE {column} = ?"
        if between is None:
            ids = self._all(f"SELECT id {where} ORDER BY id DESC LIMIT ?", owner, last)[::-1]
        else:
            ids = self._all(f"SELECT id {where} AND t_ns BETWEEN ? AND ? ORDER BY id", owner, *between)
        every = max(1, -(-len(ids) // max(1, last)))
        return [row for (row,) in ids[::every]]  # from the first: they stay the same while others come

    def memory(self) -> dict[int, tuple[int | None, int | None]]:
        """Return the resident memory of each rank process: process id → (peak, last) in bytes."""
        rows = self._all(
            "SELECT p.process, m.peak, p.rss_bytes FROM process_sample p JOIN (SELECT max(id) AS id, "
            "max(rss_bytes) AS peak FROM process_sample GROUP BY process) m ON p.id = m.id"
        )
        return {process: (peak, last) for process, peak, last in rows}

    def allocated_peaks(self) -> dict[int, int]:
        """Return the largest allocation of torch's allocator in each rank process: process id → bytes."""
        return dict(
            self._all(
                "SELECT process, max(max(ifnull(peak_bytes, 0), ifnull(allocated_bytes, 0))) "
                "FROM memory_sample WHERE coalesce(peak_bytes, allocated_bytes) IS NOT NULL GROUP BY process"
            )
        )

    def node_columns(self) -> dict[str, dict[tuple[int | None, str], Sequence[float]]]:
        """
        Return the measured values of each node: node id → (device or None, quantity) → values. The quantities
        are those of `signals.nodes.quantities.stored`. Unknown values are left out.
        """
        by_node: dict[str, dict[int | None, list[array[float]]]] = {}
        last: dict[str, NodeSample] = {}
        for _, node, sample in self._samples("TRUE"):
            columns, before = by_node.setdefault(node, {}), last.get(node)
            seconds = (sample.t_ns - before.t_ns) / 1e9 if before else 0.0
            _append(columns, None, [quantity.value(sample, before, seconds) for quantity in _NODE])
            for gpu in sample.gpus or ():
                _append(columns, gpu.index, [quantity.value(gpu) for quantity in _GPU])
            last[node] = sample
        return {
            node: {
                (device, quantity.name): column
                for device, known in columns.items()
                for quantity, column in zip(_NODE if device is None else _GPU, known, strict=True)
            }
            for node, columns in by_node.items()
        }

    def machines(self, nodes: Sequence[str], first_ns: int, last_ns: int) -> dict[str, Excerpt]:
        """Return the samples of `nodes` from `first_ns` to `last_ns`, see `anomalies.Between`."""
        low = self._first_sample(first_ns - _LATE_NS)
        high = self._first_sample(last_ns + _LATE_NS)
        every = max(1, int((last_ns - first_ns) / 1e9 / _MOST_SAMPLES))
        every += every % 5 == 0  # every fifth sample has more in it than the others
        samples_of_node = {node: Samples() for node in nodes}
        marks = ", ".join("?" * len(nodes))
        where = "id >= ? AND id < ? AND t_ns BETWEEN ? AND ? AND (t_ns / 1000000000 % ? = 0"
        where += f" OR t_ns IN (SELECT t_ns FROM event WHERE kind = 'xid')) AND node_id IN ({marks})"
        span = first_ns, last_ns + XID_LATE_NS
        for _, node, sample in self._samples(where, low, high, *span, every, *nodes):
            samples_of_node[node].add(sample)
        return {node: samples.between(first_ns, last_ns) for node, samples in samples_of_node.items()}

    def _first_sample(self, t_ns: int) -> int:
        """
        Return the id of the first node sample at `t_ns` or later. Samples arrive in about the order of their
        times.
        """

        def at(sample: int) -> int:
            rows = self._all("SELECT t_ns FROM node_sample WHERE id >= ? ORDER BY id LIMIT 1", sample)
            return int(rows[0][0]) if rows else 1 << 62

        return bisect.bisect_left(range(self._top("node_sample") + 1), t_ns, key=at)

    def _samples(self, where: str, *values: Any) -> Iterator[tuple[int, str, NodeSample]]:
        """Yield (row id, node id, sample) of the node samples for which `where` (SQL) holds."""
        query = f"SELECT * FROM node_sample WHERE {where} ORDER BY id"
        gpus_index = _SAMPLE.index("gpus")
        for row, node, *sample in self._iterate(query, *values):
            sample[gpus_index] = _gpus.decode(sample[gpus_index]) if sample[gpus_index] else None
            yield row, node, NodeSample(*sample)


def _clock(measured: list[tuple[int, ...]]) -> NodeClock:
    """
    Return the clock from rows (t_ns, offset_ns, bound_ns). Raises TypeError, ValueError
    for other values.
    """
    t_ns, offset, bound = np.frombuffer(array("q", chain.from_iterable(measured)), np.int64).reshape(-1, 3).T
    if bound.min() < 0 or max(abs(int(offset.min())), int(offset.max()), int(bound.max())) > MAX_OFFSET_NS:
        raise ValueError("a clock that is further off than any")
    return NodeClock.of(t_ns.copy(), offset.copy(), bound.copy())


def _by_device(rows: NDArray[np.int64], names: list[str]) -> list[MemoryColumns]:
    """Split rows (process, t_ns, device, step, *names) by rank process and device. Raises ValueError."""
    if rows.size and rows[:, 2:].min() < _UNKNOWN:
        raise ValueError("a sample of memory below 0")
    process, t_ns, device = rows[:, 0], rows[:, 1], rows[:, 2]
    rows = rows[np.lexsort((t_ns, device, process))]
    starts = np.flatnonzero(np.any(rows[1:, [0, 2]] != rows[:-1, [0, 2]], axis=1)) + 1
    columns_of_devices = []
    for part in np.split(rows, starts) if len(rows) else ():
        measured = {name: part[:, index] for index, name in enumerate(names, 4)}
        columns = {
            name: np.where(values == _UNKNOWN, np.nan, values)
            for name, values in measured.items()
            if (values != _UNKNOWN).any()
        }
        owner, device_number = int(part[0, 0]), int(part[0, 2])
        steps = part[:, 1].copy(), part[:, 3].copy()
        columns_of_devices.append(
            MemoryColumns(owner, None if device_number == _UNKNOWN else device_number, *steps, columns)
        )
    return columns_of_devices


_gpus = msgspec.json.Decoder(ready(list[GpuSample]))


def _append(columns: dict[int | None, list[array[float]]], device: int | None, values: list[float]) -> None:
    """Append the known values to the columns of a device (None: of the node)."""
    known = columns.get(device)
    if known is None:
        known = columns[device] = [array("d") for _ in values]
    for column, value in zip(known, values, strict=True):
        if math.isfinite(value):
            column.append(value)
