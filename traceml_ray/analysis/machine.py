"""
What else is odd on a machine while a verdict names it: evidence beside the verdict, never its cause.

What is measured there is compared with the run's other nodes (or devices) at the same time; where there
are none, or where all ranks are slow together, with the same node before. What is so everywhere, or was
so before, is not odd; only a device that throttles or has critical errors, and memory that runs out, are
so of themselves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from traceml_ray.analysis.thresholds import MACHINE
from traceml_ray.analysis.xid import meaning
from traceml_ray.wire import SEGMENT_BITS, GpuProcess, GpuSample, NodeSample

Float = np.ndarray[Any, np.dtype[np.float32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]
Devices = Mapping[int, Sequence[GpuProcess]]

NODE = (
    "mem_used",
    "swap_in_bps",
    "psi_memory",
    "cpu_throttled",
    "cpu_pct",
    "psi_cpu",
    "load",
    "psi_io",
    "disk_bps",
    "net_bps",
)
GPU = ("thermal", "slowdown", "power_cap", "power", "clock_lack")
_THERMAL = {"sw_thermal_slowdown", "hw_thermal_slowdown"}
_SLOWDOWN = {"hw_slowdown", "hw_power_brake_slowdown"}
_IDLE_PCT = 10
_NAN = float("nan")
_MAX_ODD = 8
XID_LATE_NS = 2_000_000_000
"""What went wrong is in the sample after it, and a process may be gone by then."""


class Oddity(msgspec.Struct, frozen=True, kw_only=True):
    """
    Something about a node, or one device of it, that is not as elsewhere or as before.

    `value` is the median of what was measured, `usual` that of what it was compared with (None: odd
    whatever is usual). `kind` says in what: a column of NODE or GPU, `foreign_process` (bytes), or `xid`
    (its number).
    """

    kind: str
    node: str
    device: int | None = None
    value: float | None = None
    usual: float | None = None
    text: str


class Part(NamedTuple):
    """Some of a node's samples: `node` (n, NODE), `gpus` (n, devices, GPU), NaN where not known."""

    node: Float
    gpus: Float
    devices: tuple[int, ...]
    processes: list[Devices]
    """By device, of the samples that asked for them."""
    xids: list[tuple[int, int]]
    """(device, number) of the critical errors."""


Between = Callable[[Sequence[str], int, int], Mapping[str, Part]]
"""Returns what was sampled on nodes (by id) between two times (ns since the epoch)."""


class Machine(NamedTuple):
    """
    A node of the run. `ranks` are those of the session there by pid (None: of another run), `named`
    those of them that the verdict names. `before` may be None where it is not needed.
    """

    name: str
    during: Part
    before: Part | None
    ranks: Mapping[int, int | None]
    named: frozenset[int]


class Samples:
    """
    The samples of one node, as numbers. Bounded: when it is full, every second one of the older half
    goes, so that the newest stand side by side and the oldest ones ever thinner.
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
        """Add one; another number of devices than before begins anew."""
        devices = tuple(gpu.index for gpu in sample.gpus or ())
        if sample.gpus is not None and devices != self._devices:
            self._devices = devices
            self._values, self._processes = _rows(self._size, len(devices)), []
        if len(self._processes) == self._size:
            old = self._size // 2
            kept = np.r_[0:old:2, old : self._size]
            self._t[: len(kept)], self._values[: len(kept)] = self._t[kept], self._values[kept]
            self._processes = [self._processes[at] for at in kept.tolist()]
        end = len(self._processes)
        values = node_values(sample, self._last)
        for gpu in sample.gpus or ():
            values += gpu_values(gpu)
        self._t[end] = sample.t_ns
        self._values[end] = _NAN
        self._values[end, : len(values)] = values
        asked = {gpu.index: gpu.processes for gpu in sample.gpus or () if gpu.processes is not None}
        self._processes.append(asked or None)
        self._xids.extend((sample.t_ns, gpu.index, xid) for gpu in sample.gpus or () for xid in gpu.xid or ())
        self._last = sample

    def between(self, first_ns: int, last_ns: int) -> Part:
        """Return copies of what was sampled from `first_ns` to `last_ns` (ns since the epoch)."""
        t = self._t[: len(self._processes)]
        at = np.flatnonzero((t >= first_ns) & (t <= last_ns))
        values = self._values[at]
        asked = [self._processes[i] for i in at.tolist()]
        gpus = values[:, len(NODE) :].reshape(len(at), len(self._devices), len(GPU))
        processes = [devices for devices in asked if devices]
        xids = [(gpu, xid) for t, gpu, xid in self._xids if first_ns <= t <= last_ns + XID_LATE_NS]
        return Part(values[:, : len(NODE)], gpus, self._devices, processes, xids)


def _rows(n: int, devices: int) -> Float:
    return np.empty((n, len(NODE) + len(GPU) * devices), np.float32)


def node_values(now: NodeSample, before: NodeSample | None) -> list[float]:
    """Return what a sample says as NODE, rates since the sample `before`; NaN where that is not known."""
    seconds = 0.0 if before is None else (now.t_ns - before.t_ns) / 1e9

    def rate(*names: str) -> float:
        total = 0.0
        for name in names:
            old, new = getattr(before, name, None), getattr(now, name)
            if old is None or new is None or new < old or seconds <= 0:
                return _NAN
            total += new - old
        return total / seconds

    known = now.mem_used_bytes is not None and now.mem_total_bytes
    return [
        (now.mem_used_bytes or 0) / now.mem_total_bytes if known and now.mem_total_bytes else _NAN,
        rate("swap_in_bytes"),
        _number(now.psi_memory),
        rate("cpu_throttled_ns") / 1e9,
        _number(now.cpu_pct),
        _number(now.psi_cpu),
        now.load1 / now.cpu_count if now.load1 is not None and now.cpu_count else _NAN,
        _number(now.psi_io),
        rate("disk_read_bytes", "disk_write_bytes"),
        rate("net_rx_bytes", "net_tx_bytes"),
    ]


def per_second(t_ns: Sequence[int], counter: Sequence[float | None]) -> list[float | None]:
    """Return what a counter grew by in a second since the value before; None where that is not known."""
    rates: list[float | None] = []
    before: tuple[int, float] | None = None
    for t, value in zip(t_ns, counter, strict=True):
        known = value is not None and before is not None and value >= before[1] and t > before[0]
        rates.append(
            (value - before[1]) / ((t - before[0]) / 1e9) if known and value is not None and before else None
        )
        before = before if value is None else (t, value)
    return rates


def gpu_values(gpu: GpuSample) -> list[float]:
    """Return what a sample says of a device as GPU. An idle one's clock says nothing."""
    why = None if gpu.throttle is None else set(gpu.throttle)
    idle = "gpu_idle" in (why or ()) or (gpu.util_pct is not None and gpu.util_pct < _IDLE_PCT)
    return [
        *(
            _NAN if why is None else float(bool(why & reasons))
            for reasons in (_THERMAL, _SLOWDOWN, {"sw_power_cap"})
        ),
        gpu.power_w / gpu.power_limit_w if gpu.power_w is not None and gpu.power_limit_w else _NAN,
        _NAN if idle or gpu.sm_mhz is None or not gpu.sm_max_mhz else 1 - gpu.sm_mhz / gpu.sm_max_mhz,
    ]


def _number(value: float | None) -> float:
    return _NAN if value is None else value


def span(
    keys: Int64, rows: Int64, end_ns: int, from_step: int | None, to_step: int | None
) -> tuple[int, int] | None:
    """
    Return when a rank went through the steps `from_step` to `to_step` (ns since the epoch), None where it
    has no row of them. `keys` (n,) and `rows` (n, 6) in order; the newest had come by `end_ns`.

    Rows follow one another without a gap, so each one's time is told from those after it. Rows that were
    dropped, and the way of the last ones, make it that much later or earlier.
    """
    steps, took = keys >> SEGMENT_BITS, rows.sum(axis=1)
    ends = end_ns - (took.sum() - np.cumsum(took))
    inside = np.flatnonzero(
        (steps >= (from_step or 0)) & (steps <= (to_step if to_step is not None else 1 << 62))
    )
    if not len(inside):
        return None
    return int(ends[inside[0]] - took[inside[0]]), int(ends[inside[-1]])


def trained_since(keys: Int64, rows: Int64, end_ns: int, warmup: int) -> int:
    """
    Return since when (ns since the epoch) a rank was through the first `warmup` of its steps; `end_ns`
    where it is not. `keys`, `rows` and `end_ns` are as for `span`.
    """
    warm = span(keys, rows, end_ns, int(keys[0] >> SEGMENT_BITS) + warmup, None) if len(keys) else None
    return end_ns if warm is None else warm[0]


class _Look(NamedTuple):
    """One thing that is looked at. Of a group, the first that is odd is told."""

    kind: str
    group: str
    least: float
    more: float | None
    """Above what is usual; None: odd whatever that is."""
    text: str
    """With `{value}`, multiplied by `scale`."""
    scale: float = 1.0
    unit: str = "{:.0f}"
    times: float = 1.0


_PERCENT: dict[str, Any] = {"scale": 100.0, "unit": "{:.0f} %"}
_RATES: dict[str, Any] = {"scale": 1e-6, "unit": "{:.0f} MB/s", "times": MACHINE.bps_times}
_NODE_LOOKS = [
    _Look("mem_used", "memory", MACHINE.mem_used, None, "{} of the memory in use", **_PERCENT),
    _Look("swap_in_bps", "memory", *MACHINE.swap_in_bps, "swapping in {}", **_RATES),
    _Look("psi_memory", "memory", *MACHINE.psi_memory, "tasks wait for memory {} of the time", **_PERCENT),
    _Look(
        "cpu_throttled",
        "cpu",
        *MACHINE.cpu_throttled,
        "the container's CPU quota holds back {} cores",
        unit="{:.2f}",
    ),
    _Look("cpu_pct", "cpu", *MACHINE.cpu_pct, "CPU {} busy", unit="{:.0f} %"),
    _Look("psi_cpu", "cpu", *MACHINE.psi_cpu, "tasks wait for a CPU {} of the time", **_PERCENT),
    _Look("load", "cpu", *MACHINE.load, "load {} per core", unit="{:.1f}"),
    _Look("psi_io", "disk", *MACHINE.psi_io, "tasks wait for the disk {} of the time", **_PERCENT),
    _Look("disk_bps", "disk", *MACHINE.bps, "disk {}", **_RATES),
    _Look("net_bps", "net", *MACHINE.bps, "network {}", **_RATES),
]


_GPU_LOOKS = [
    _Look("thermal", "throttle", 0.5, None, "throttles: too hot"),
    _Look("slowdown", "throttle", 0.5, None, "throttles: hardware slowdown"),
    _Look("power_cap", "power", 0.5, MACHINE.power_cap, "held back by its power limit", unit=""),
    _Look("power", "power", *MACHINE.power, "power at {} of its limit", **_PERCENT),
    _Look("clock_lack", "clock", *MACHINE.clock_lack, "SM clock {} below its highest", **_PERCENT),
]


def oddities(machines: Sequence[Machine], *, everyone: bool = False) -> tuple[Oddity, ...]:
    """
    Return what is odd on the machines on which ranks are named, or on all of them (`everyone`), the
    gravest first, at most eight. Those on which no rank is named are what they are compared with.

    It takes most of the samples, and eight of them at least; of critical errors, one.
    """
    looked = [machine for machine in machines if everyone or machine.named]
    others = [] if everyone else [machine for machine in machines if not machine.named]
    found = [odd for machine in looked for odd in _critical(machine)]
    for machine in looked:
        peers = np.concatenate([_NO_NODE, *(other.during.node for other in others)])
        found += _on_node(machine, peers)
        found += _on_devices(machine, others, everyone=everyone)
    return tuple(_merged(found) if everyone else found)[:_MAX_ODD]


def _critical(machine: Machine) -> list[Oddity]:
    """Return the critical errors of any device of the node, the last ones first, each number once."""
    owners = _owners(machine)
    found = []
    for device, xid in dict.fromkeys(reversed(machine.during.xids)):
        text = _device(device, owners.get(device)) + meaning(xid)
        found.append(Oddity(kind="xid", node=machine.name, device=device, value=xid, text=text))
    return found


def _device(device: int, rank: int | None) -> str:
    return f"GPU {device}" + (f" (rank {rank})" if rank is not None else "") + ": "


_NO_NODE: Float = np.empty((0, len(NODE)), np.float32)
_NO_GPU: Float = np.empty((0, len(GPU)), np.float32)


def _on_node(machine: Machine, peers: Float) -> list[Oddity]:
    usual, where = peers, "other nodes"
    if len(peers) < MACHINE.samples:
        usual, where = (machine.before.node if machine.before else _NO_NODE), "before"
    return _odd(machine.during.node, usual, _NODE_LOOKS, NODE, machine.name, None, "", where)


def _on_devices(machine: Machine, others: Sequence[Machine], *, everyone: bool) -> list[Oddity]:
    """Look at the devices of the named ranks; where those are not known, at every device of the node."""
    part = machine.during
    owners = _owners(machine)
    named = {device: rank for device, rank in owners.items() if everyone or rank in machine.named}
    if not named:
        named = dict.fromkeys(part.devices)
    elsewhere = [_of_ranks(other) for other in others]
    found: list[Oddity] = []
    for at, device in enumerate(part.devices):
        if device not in named:
            continue
        beside = [i for i, other in enumerate(part.devices) if _is_peer(other, device, owners, named)]
        usual = np.concatenate([part.gpus[:, beside].reshape(-1, len(GPU)), *elsewhere])
        where = "its peers"
        if everyone or len(usual) < MACHINE.samples:
            before = machine.before
            same = before is not None and before.devices == part.devices
            usual, where = (before.gpus[:, at] if before is not None and same else _NO_GPU), "before"
        what = _device(device, named[device])
        found += _odd(part.gpus[:, at], usual, _GPU_LOOKS, GPU, machine.name, device, what, where)
    return found + _foreign(machine, others, named)


def _is_peer(
    other: int, device: int, owners: Mapping[int, int | None], named: Mapping[int, int | None]
) -> bool:
    """Whether a device of the same node is one to compare with: one of the run's, and not blamed itself."""
    if owners:
        return other in owners and other not in named
    return other != device


def _owners(machine: Machine) -> dict[int, int | None]:
    """Return the rank that computes on each device, of those of the session; a device may have several."""
    owners: dict[int, int | None] = {}
    for devices in machine.during.processes[-2:]:
        for device, processes in devices.items():
            for process in processes:
                own = _own(process, machine.ranks)
                if own is None:
                    continue
                rank = machine.ranks[own]
                if owners.get(device) is None or rank in machine.named:
                    owners[device] = rank
    return owners


def _own(process: GpuProcess, ranks: Mapping[int, int | None]) -> int | None:
    """Return the pid of the rank that a process is, or descends from."""
    return next((pid for pid in (process.pid, *process.parents) if pid in ranks), None)


def _of_ranks(machine: Machine) -> Float:
    """Return what was measured on the devices (n, GPU) that ranks are known to use, else on all."""
    owners, part = _owners(machine), machine.during
    used = [at for at, device in enumerate(part.devices) if not owners or device in owners]
    found: Float = part.gpus[:, used].reshape(-1, len(GPU))
    return found


def _odd(
    values: Float,
    usual: Float,
    looks: Sequence[_Look],
    columns: Sequence[str],
    node: str,
    device: int | None,
    what: str,
    where: str,
) -> list[Oddity]:
    """Return what is odd in `values` (n, columns) beside `usual` (m, columns), of each group once."""
    found: dict[str, Oddity] = {}
    for look in looks:
        column = columns.index(look.kind)
        level = _level(values[:, column], usual[:, column], look)
        if level is None or look.group in found:
            continue
        value, normal = level
        text = what + look.text.format(look.unit.format(look.scale * value))
        if normal is not None and look.unit:
            text += f" ({where} {look.unit.format(look.scale * normal)})"
        elif normal is not None:
            text += f" ({where} not)"
        found[look.group] = Oddity(
            kind=look.kind, node=node, device=device, value=value, usual=normal, text=text
        )
    return list(found.values())


def _level(values: Float, usual: Float, look: _Look) -> tuple[float, float | None] | None:
    """Return (median, what is usual) of values that are odd in most samples."""
    values, usual = values[~np.isnan(values)], usual[~np.isnan(usual)]
    if len(values) < MACHINE.samples:
        return None
    least, high, normal = look.least, -np.inf, None
    if look.more is not None:
        if len(usual) < MACHINE.samples:
            return None
        # "higher": of two kinds of peers the higher one is usual, not a value between that no one has.
        normal, high = np.quantile(usual, [0.5, MACHINE.usual_quantile], method="higher").tolist()
        least = max(least, normal + look.more, normal * look.times)
    odd = (values >= least) & (values > high)
    return (float(np.median(values)), normal) if odd.mean() >= MACHINE.often else None


def _foreign(machine: Machine, others: Sequence[Machine], named: Mapping[int, int | None]) -> list[Oddity]:
    """
    Return the processes on the devices that are no rank's of the session. Not those of a name that
    computes on most of the other devices too (a monitor).
    """
    elsewhere: Counter[str | None] = Counter()
    count = 0
    for other in (machine, *others):
        for device, found in _strangers(other).items():
            if other is not machine or device not in named:
                count += 1
                elsewhere.update({process.name for process in found})
    return [
        Oddity(
            kind="foreign_process",
            node=machine.name,
            device=device,
            value=process.mem_bytes,
            text=_stranger(device, named[device], process),
        )
        for device, found in sorted(_strangers(machine).items())
        for process in found
        if device in named and 2 * elsewhere[process.name] <= count
    ]


def _strangers(machine: Machine) -> dict[int, list[GpuProcess]]:
    """
    Return, for each device, the processes that are no rank's in most looks at it, as they were last.

    Nothing where no process of a rank is seen on any device: then pids are not the same here and there.
    """
    looks = machine.during.processes
    if not _owners(machine) or len(looks) < MACHINE.processes:
        return {}
    found: dict[int, list[GpuProcess]] = {}
    for device in machine.during.devices:
        seen: Counter[int] = Counter()
        last: dict[int, GpuProcess] = {}
        for devices in looks:
            last.update({p.pid: p for p in devices.get(device, ()) if _own(p, machine.ranks) is None})
            seen.update({p.pid for p in devices.get(device, ())} & last.keys())
        found[device] = [last[pid] for pid in last if seen[pid] >= MACHINE.often * len(looks)]
    return found


def _stranger(device: int, rank: int | None, process: GpuProcess) -> str:
    name = f" ({process.name})" if process.name else ""
    holds = "" if process.mem_bytes is None else f" and holds {process.mem_bytes / 2**30:.1f} GiB"
    return f"{_device(device, rank)}process {process.pid}{name} is no rank's{holds}"


def _merged(found: Sequence[Oddity]) -> list[Oddity]:
    """Return of each kind the highest, with the number of other nodes on which it is odd too."""
    kinds: dict[str, list[Oddity]] = {}
    for odd in found:
        kinds.setdefault(odd.kind, []).append(odd)
    merged = []
    for same in kinds.values():
        worst = max(same, key=lambda odd: odd.value or 0.0)
        more = len({odd.node for odd in same}) - 1
        also = f"; so too on {more} more node{'s' * (more > 1)}" if more else ""
        merged.append(msgspec.structs.replace(worst, text=worst.text + also))
    return merged
