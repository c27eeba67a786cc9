"""
Anomalies of a node while a verdict names it. They are evidence with the verdict, never its cause.

A quantity is compared with the run's other nodes (or devices) at the same time. If there are none, or if all
ranks are slow together, it is compared with earlier values of the same node. A value that is equally high on
peers, or was earlier on the same node, is not an anomaly. Only throttling or critical errors of a device, and
exhausted memory, are always anomalies.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.thresholds import MACHINE
from traceml_ray.signals.nodes.quantities import GPU_LIMITED, NAN, NODE_LIMITED, Quantity
from traceml_ray.signals.nodes.records import GpuProcess, NodeSample, meaning

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
    The samples of one node, in bounded memory. When there is no room, every second sample of the older half
    is dropped: all newest samples are kept, older ones become sparser.
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


_MOST = 8
_NO_NODE: Float = np.empty((0, len(NODE_LIMITED)), np.float32)
_NO_GPU: Float = np.empty((0, len(GPU_LIMITED)), np.float32)


class Anomaly(msgspec.Struct, frozen=True, kw_only=True):
    """
    A value of a node, or of one of its devices, that differs from other nodes or from before.

    `kind` is the quantity (`signals.nodes.quantities`), `foreign_process` (bytes) or `xid` (its number).
    `value` is the median of the samples. `usual` is the median of the samples they were compared with; None:
    the value is always an anomaly.
    """

    kind: str
    """Name of the quantity, `foreign_process` or `xid`."""
    node: str
    """Label of the node."""
    device: int | None = None
    """Index of the device on the node; None: the anomaly is of the node itself."""
    value: float | None = None
    """Median of the samples, in the unit of the quantity; None: it has no value."""
    usual: float | None = None
    """Median of the samples it was compared with; None: the value is always an anomaly."""
    text: str
    """The anomaly in words."""


class Machine(NamedTuple):
    """
    A node of the run. `ranks` maps the pid of each of the session's rank processes on the node to its rank
    (None: a rank of another run). `named` are the ranks among them that the verdict names. `before` may be
    None if it is not needed.
    """

    name: str
    during: Excerpt
    before: Excerpt | None
    ranks: Mapping[int, int | None]
    named: frozenset[int]


def anomalies(machines: Sequence[Machine], *, all_nodes: bool = False) -> tuple[Anomaly, ...] | None:
    """
    Return the anomalies of the machines with named ranks, or of all machines (`all_nodes`), the gravest
    first, at most eight; None if there are too few samples. Machines without named ranks are the comparison.

    An anomaly must be present in most of the samples, at least eight; a critical error counts at once.
    """
    examined = [machine for machine in machines if all_nodes or machine.named]
    others = [] if all_nodes else [machine for machine in machines if not machine.named]
    peers = np.concatenate([_NO_NODE, *(other.during.node for other in others)])
    anomalies = [anomaly for machine in examined for anomaly in _critical(machine)]
    if not anomalies and max((len(machine.during.node) for machine in examined), default=0) < MACHINE.samples:
        return None
    for machine in examined:
        before = machine.before.node if machine.before else _NO_NODE
        usual, where = (peers, "other nodes") if len(peers) >= MACHINE.samples else (before, "before")
        for quantity, value, normal, sentence in _deviations(machine.during.node, usual, where, NODE_LIMITED):
            anomalies.append(_anomaly(machine, quantity.name, value, sentence, usual=normal))
        anomalies += _on_devices(machine, others, all_nodes=all_nodes)
    compared = [len(peers), *(len(machine.before.node) for machine in examined if machine.before)]
    if not anomalies and max(compared) < MACHINE.samples:
        return None
    return tuple(_merged(anomalies) if all_nodes else anomalies)[:_MOST]


def _anomaly(
    machine: Machine,
    kind: str,
    value: float | None,
    sentence: str,
    device: int | None = None,
    rank: int | None = None,
    usual: float | None = None,
) -> Anomaly:
    where = "" if device is None else f"GPU {device}{'' if rank is None else f' (rank {rank})'}: "
    return Anomaly(
        kind=kind, node=machine.name, device=device, value=value, usual=usual, text=where + sentence
    )


def _critical(machine: Machine) -> list[Anomaly]:
    """Return the critical errors of the node's devices, newest first, each error number once."""
    owners = _owners(machine)
    return [
        _anomaly(machine, "xid", xid, meaning(xid), device, owners.get(device))
        for device, xid in dict.fromkeys(reversed(machine.during.xids))
    ]


def _on_devices(machine: Machine, others: Sequence[Machine], *, all_nodes: bool) -> list[Anomaly]:
    """
    Return the anomalies of the named ranks' devices. If these are not known, examine every device of the
    node.
    """
    now, before, owners = machine.during, machine.before, _owners(machine)
    named = {device: rank for device, rank in owners.items() if all_nodes or rank in machine.named}
    named = named or dict.fromkeys(now.devices)
    elsewhere = [_of_ranks(other) for other in others]
    same_before = before is not None and before.devices == now.devices
    anomalies: list[Anomaly] = []
    for index, device in enumerate(now.devices):
        if device not in named:
            continue
        # Peers on the same node: devices of the run that are not named themselves.
        peers = [
            i
            for i, other in enumerate(now.devices)
            if (other in owners and other not in named if owners else other != device)
        ]
        usual = np.concatenate([now.gpus[:, peers].reshape(-1, len(GPU_LIMITED)), *elsewhere])
        where = "its peers"
        if all_nodes or len(usual) < MACHINE.samples:
            usual, where = (
                (before.gpus[:, index] if before is not None and same_before else _NO_GPU),
                "before",
            )
        for quantity, value, normal, sentence in _deviations(now.gpus[:, index], usual, where, GPU_LIMITED):
            anomalies.append(_anomaly(machine, quantity.name, value, sentence, device, named[device], normal))
    return anomalies + _foreign(machine, others, named)


def _owners(machine: Machine) -> dict[int, int | None]:
    """Return the session's rank that computes on each device. A device may have several; one is returned."""
    owners: dict[int, int | None] = {}
    for devices in machine.during.processes[-2:]:
        for device, processes in devices.items():
            for process in processes:
                pid = _own(process, machine.ranks)
                if pid is None:
                    continue
                rank = machine.ranks[pid]
                if owners.get(device) is None or rank in machine.named:
                    owners[device] = rank
    return owners


def _own(process: GpuProcess, ranks: Mapping[int, int | None]) -> int | None:
    """Return the pid of the rank process that `process` is or descends from; None if there is none."""
    return next((pid for pid in (process.pid, *process.parents) if pid in ranks), None)


def _of_ranks(machine: Machine) -> Float:
    """
    Return the samples (n, GPU_LIMITED) of the devices that ranks are known to use. If no such device is
    known, return those of all devices.
    """
    owners, now = _owners(machine), machine.during
    used = [index for index, device in enumerate(now.devices) if not owners or device in owners]
    measured: Float = now.gpus[:, used].reshape(-1, len(GPU_LIMITED))
    return measured


def _deviations(
    values: Float, usual: Float, where: str, table: Sequence[Quantity]
) -> Iterator[tuple[Quantity, float, float | None, str]]:
    """
    Yield the quantities of `table` that are anomalous in `values` (n, table) compared with `usual` (m,
    table), one of each group: the quantity, its value, the usual value, and a sentence about `where`.
    """
    groups = set()
    for column, quantity in enumerate(table):
        level = _level(values[:, column], usual[:, column], quantity)
        if quantity.limit is None or level is None or quantity.limit.group in groups:
            continue
        groups.add(quantity.limit.group)
        value, normal = level
        write = quantity.unit.written or (lambda _: "not")
        against = "" if normal is None else f" ({where} {write(normal)})"
        yield quantity, value, normal, quantity.limit.text.format(write(value)) + against


def _level(values: Float, usual: Float, quantity: Quantity) -> tuple[float, float | None] | None:
    """Return the median and the usual level of `values`; None unless most samples are anomalous."""
    limit = quantity.limit
    values, usual = values[~np.isnan(values)], usual[~np.isnan(usual)]
    if limit is None or len(values) < MACHINE.samples:
        return None
    least, high, normal = limit.least, -np.inf, None
    if limit.more is not None:
        if len(usual) < MACHINE.samples:
            return None
        # "higher": of two kinds of peers the higher one is usual, not a value between that no one has.
        normal, high = np.quantile(usual, [0.5, MACHINE.usual_quantile], method="higher").tolist()
        least = max(least, normal + limit.more, normal * limit.times)
    above = (values >= least) & (values > high)
    return (float(np.median(values)), normal) if above.mean() >= MACHINE.often else None


def _foreign(machine: Machine, others: Sequence[Machine], named: Mapping[int, int | None]) -> list[Anomaly]:
    """
    Return the processes on the devices that belong to no rank of the session. Processes with a name that most
    other devices have too (a monitor) are left out.
    """
    elsewhere: Counter[str | None] = Counter()
    count = 0
    for other in (machine, *others):
        for device, foreign in _foreign_processes(other).items():
            if other is not machine or device not in named:
                count += 1
                elsewhere.update({process.name for process in foreign})
    return [
        _anomaly(machine, "foreign_process", process.mem_bytes, _foreign_text(process), device, named[device])
        for device, processes in sorted(_foreign_processes(machine).items())
        for process in processes
        if device in named and 2 * elsewhere[process.name] <= count
    ]


def _foreign_processes(machine: Machine) -> dict[int, list[GpuProcess]]:
    """
    Return, for each device, the processes that belong to no rank in most of its samples, in their last state.

    Empty if no process of a rank is seen on any device: then pids differ between the namespaces.
    """
    sampled = machine.during.processes
    if not _owners(machine) or len(sampled) < MACHINE.processes:
        return {}
    foreign: dict[int, list[GpuProcess]] = {}
    for device in machine.during.devices:
        seen: Counter[int] = Counter()
        last: dict[int, GpuProcess] = {}
        for devices in sampled:
            last.update({p.pid: p for p in devices.get(device, ()) if _own(p, machine.ranks) is None})
            seen.update({p.pid for p in devices.get(device, ())} & last.keys())
        foreign[device] = [last[pid] for pid in last if seen[pid] >= MACHINE.often * len(sampled)]
    return foreign


def _foreign_text(process: GpuProcess) -> str:
    name = f" ({process.name})" if process.name else ""
    holds = "" if process.mem_bytes is None else f" and holds {text.size(process.mem_bytes)}"
    return f"process {process.pid}{name} belongs to no rank{holds}"


def _merged(anomalies: Sequence[Anomaly]) -> list[Anomaly]:
    """Return the highest anomaly of each kind, with the number of other nodes that have that kind too."""
    kinds: dict[str, list[Anomaly]] = {}
    for anomaly in anomalies:
        kinds.setdefault(anomaly.kind, []).append(anomaly)
    merged = []
    for same in kinds.values():
        worst = max(same, key=lambda anomaly: anomaly.value or 0.0)
        more = len({anomaly.node for anomaly in same}) - 1
        also = f"; also on {text.count(more, 'more node')}" if more else ""
        merged.append(msgspec.structs.replace(worst, text=worst.text + also))
    return merged
