"""
The quantities measured of a node, of its devices, of a process and of its memory, one table each.

A table gives the source, unit, place on the node page, and anomaly limit of each quantity. Detection,
evidence, report, page and metrics use these tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from traceml_ray import text
from traceml_ray.analysis.thresholds import MACHINE
from traceml_ray.signals.nodes.records import GpuSample

NAN = math.nan
_IDLE_PCT = 10


class Unit(NamedTuple):
    """How a value is written in a sentence (None: a flag), on an axis and in Prometheus."""

    written: Callable[[float], str] | None
    axis: str = ""
    scale: float = 1.0
    """The axis shows the value times this."""
    metric: str = ""
    base: float = 1.0
    """The value times this is in Prometheus' base unit, `metric`."""


class Limit(NamedTuple):
    """
    Limit of an anomaly. A value is anomalous if it is at least `least`, and exceeds the usual value by `more`
    and by the factor `times` (`more` None: whatever is usual). Of a `group` only the first quantity is
    evidence. `text` has the value as `{}`.
    """

    group: str
    text: str
    least: float
    more: float | None = None
    times: float = 1.0


class Quantity(NamedTuple):
    """
    One quantity. Its value is the first of `fields` of a sample, as a share of the field `over` if there is
    one; or the rate of the sum of the `counter`s, times `factor`; or what `read` returns.

    Pages draw it as `line` in `chart`. All quantities of one chart have the same unit, which is the title of
    the axis.
    """

    name: str
    unit: Unit
    fields: tuple[str, ...] = ()
    limit: Limit | None = None
    over: str = ""
    counter: bool = False
    factor: float = 1.0
    read: Callable[[Any], float] | None = None
    chart: str = ""
    line: str = ""
    page_only: bool = False
    """Whether the summary omits it: it has the sum of several, or most samples lack the value."""

    @property
    def single(self) -> bool:
        """Return whether it is one field of the sample, or the rate of one."""
        return len(self.fields) == 1 and not self.over

    def value(self, now: Any, before: Any = None, seconds: float = 0.0) -> float:
        """
        Return the value in the sample `now`, taken `seconds` after the sample `before`. NaN if it is not
        known.
        """
        if self.read is not None:
            return self.read(now)
        if not self.counter:
            value = getattr(now, self.fields[0])
            if value is None or not self.over:
                return NAN if value is None else value
            whole = getattr(now, self.over)
            return value / whole if whole else NAN
        total = 0.0
        for field in self.fields:
            new, old = getattr(now, field), getattr(before, field, None)
            if new is None or old is None or new < old or seconds <= 0:
                return NAN
            total += new - old
        return total * self.factor / seconds


def _throttled(*reasons: str) -> Callable[[GpuSample], float]:
    known = frozenset(reasons)
    return lambda gpu: NAN if gpu.throttle is None else float(not known.isdisjoint(gpu.throttle))


def _clock_lack(gpu: GpuSample) -> float:
    """Return by which share the clock is below its maximum. The clock of an idle device is not meaningful."""
    idle = "gpu_idle" in (gpu.throttle or ()) or (gpu.util_pct is not None and gpu.util_pct < _IDLE_PCT)
    return NAN if idle or gpu.sm_mhz is None or not gpu.sm_max_mhz else 1 - gpu.sm_mhz / gpu.sm_max_mhz


_PERCENT = Unit(text.percent, "%", 1, "ratio", 0.01)
_SHARE = Unit(text.share, "%", 100, "ratio")
_BYTES = Unit(text.size, "GB", 1e-9, "bytes")
_RATE = Unit(lambda value: text.size(value, "/s"), "MB/s", 1e-6, "bytes")
_CORES = Unit(text.number, "cores", 1, "seconds", 1e-9)
_NUMBER, _FLAG = Unit(text.number), Unit(None)
_WATTS, _CELSIUS = Unit(text.number, "W", 1, "watts"), Unit(text.number, "°C", 1, "celsius")
_MHZ = Unit(text.number, "MHz", 1, "hertz", 1e6)
_USED, _INSTALLED, _WAITING = ("mem_used_bytes",), ("mem_total_bytes",), "Time with waiting tasks"


def _rate(name: str, fields: tuple[str, ...], text: str) -> Quantity:
    limit = Limit(name.partition("_")[0], text, *MACHINE.bps, MACHINE.bps_times)
    return Quantity(name, _RATE, fields, limit, counter=True)


def _drawn(name: str, chart: str, line: str = "") -> Quantity:
    """Return the rate of a counter of bytes that only the node page shows."""
    return Quantity(
        f"{name}_bps", _RATE, (f"{name}_bytes",), counter=True, chart=chart, line=line, page_only=True
    )


# fmt: off
NODE = (
    Quantity("mem_used", _SHARE, _USED, Limit("memory", "{} of the memory in use", MACHINE.mem_used),
             over="mem_total_bytes"),
    Quantity("swap_in_bps", _RATE, ("swap_in_bytes",), counter=True,
             limit=Limit("memory", "swapping in {}", *MACHINE.swap_in_bps, MACHINE.bps_times)),
    Quantity("psi_memory", _SHARE, ("psi_memory",), chart=_WAITING, line="for memory",
             limit=Limit("memory", "tasks wait for memory {} of the time", *MACHINE.psi_memory)),
    Quantity("cpu_throttled", _CORES, ("cpu_throttled_ns",), counter=True, factor=1e-9,
             limit=Limit("cpu", "the container's CPU quota holds back {} cores", *MACHINE.cpu_throttled)),
    Quantity("cpu_pct", _PERCENT, ("cpu_pct",), Limit("cpu", "CPU {} busy", *MACHINE.cpu_pct),
             chart="CPU", line="used"),
    Quantity("psi_cpu", _SHARE, ("psi_cpu",), chart=_WAITING, line="for a CPU",
             limit=Limit("cpu", "tasks wait for a CPU {} of the time", *MACHINE.psi_cpu)),
    Quantity("load", _NUMBER, ("load1",), Limit("cpu", "load {} per core", *MACHINE.load), over="cpu_count"),
    Quantity("psi_io", _SHARE, ("psi_io",), chart=_WAITING, line="for the disk",
             limit=Limit("disk", "tasks wait for the disk {} of the time", *MACHINE.psi_io)),
    _rate("disk_bps", ("disk_read_bytes", "disk_write_bytes"), "disk {}"),
    _rate("net_bps", ("net_rx_bytes", "net_tx_bytes"), "network {}"),
    Quantity("load1", _NUMBER, ("load1",)),
    Quantity("mem_used_bytes", _BYTES, _USED, chart="Memory", line="used"),
    Quantity("mem_total_bytes", _BYTES, _INSTALLED, chart="Memory", line="installed"),
    _drawn("disk_read", "Disk", "read"),
    _drawn("disk_write", "Disk", "written"),
    _drawn("net_rx", "Network", "received"),
    _drawn("net_tx", "Network", "sent"),
)
GPU = (
    Quantity("thermal", _FLAG, read=_throttled("sw_thermal_slowdown", "hw_thermal_slowdown"),
             limit=Limit("throttle", "throttles: too hot", 0.5)),
    Quantity("slowdown", _FLAG, read=_throttled("hw_slowdown", "hw_power_brake_slowdown"),
             limit=Limit("throttle", "throttles: hardware slowdown", 0.5)),
    Quantity("power_cap", _FLAG, read=_throttled("sw_power_cap"),
             limit=Limit("power", "held back by its power limit", 0.5, MACHINE.power_cap)),
    Quantity("power", _SHARE, ("power_w",), Limit("power", "power at {} of its limit", *MACHINE.power),
             over="power_limit_w"),
    Quantity("clock_lack", _SHARE, read=_clock_lack,
             limit=Limit("clock", "SM clock {} below its highest", *MACHINE.clock_lack)),
    Quantity("util_pct", _PERCENT, ("util_pct",), chart="GPU utilisation"),
    Quantity("mem_used_bytes", _BYTES, _USED, chart="GPU memory"),
    Quantity("mem_total_bytes", _BYTES, _INSTALLED),
    Quantity("power_w", _WATTS, ("power_w",), chart="GPU power"),
    Quantity("power_limit_w", _WATTS, ("power_limit_w",), page_only=True),
    Quantity("temperature_c", _CELSIUS, ("temperature_c",), chart="GPU temperature"),
    Quantity("sm_mhz", _MHZ, ("sm_mhz",), chart="GPU clock"),
    _drawn("pcie_tx", "PCIe sent"),
    _drawn("pcie_rx", "PCIe received"),
    _drawn("nvlink_tx", "NVLink sent"),
    _drawn("nvlink_rx", "NVLink received"),
)
PROCESS = (
    Quantity("rss_bytes", _BYTES, ("rss_bytes",), chart="Memory (RSS)"),
    Quantity("cpu_pct", _PERCENT._replace(axis="% of a core"), ("cpu_pct",), chart="CPU"),
    Quantity("threads", _NUMBER._replace(axis="threads"), ("threads",), chart="Threads"),
    _drawn("read", "Read from disk"),
    _drawn("write", "Written to disk"),
)
_OF_GPU, _OF_HOST = "Memory of the GPU", "Host memory and its limit"
DEVICE_MEMORY = (
    Quantity("allocated_bytes", _BYTES, ("allocated_bytes",), chart=_OF_GPU, line="allocated"),
    Quantity("reserved_bytes", _BYTES, ("reserved_bytes",), chart=_OF_GPU, line="reserved"),
    Quantity("process_bytes", _BYTES, ("process_bytes",), chart=_OF_GPU, line="of the process"),
    Quantity("device_used_bytes", _BYTES, ("device_used_bytes",), chart=_OF_GPU, line="used in all"),
    Quantity("device_total_bytes", _BYTES, ("device_total_bytes",), chart=_OF_GPU, line="installed"),
)
HOST_MEMORY = (
    Quantity("limit_used_bytes", _BYTES, ("limit_used_bytes",), chart=_OF_HOST, line="used"),
    Quantity("limit_bytes", _BYTES, ("limit_bytes",), chart=_OF_HOST, line="limit"),
)
# fmt: on
NODE_LIMITED, GPU_LIMITED = (tuple(row for row in table if row.limit) for table in (NODE, GPU))


def stored(table: Sequence[Quantity]) -> list[Quantity]:
    """
    Return the quantities of a table that the summary contains. A ratio of two contained quantities is
    omitted.
    """
    return [
        quantity for quantity in table if quantity.fields and not quantity.over and not quantity.page_only
    ]


def charts(table: Sequence[Quantity]) -> dict[str, list[Quantity]]:
    """Return the quantities of a table that are drawn, by chart."""
    by_chart: dict[str, list[Quantity]] = {}
    for quantity in table:
        if quantity.chart:
            by_chart.setdefault(quantity.chart, []).append(quantity)
    return by_chart


def series(samples: Sequence[Mapping[str, Any]], table: Sequence[Quantity]) -> dict[str, list[Any] | None]:
    """Return the fields and rates of `table` in stored samples. None where nothing was ever measured."""
    t_ns, known = [sample["t_ns"] for sample in samples], {}
    for quantity in table:
        if quantity.single:
            values = [sample[quantity.fields[0]] for sample in samples]
            values = per_second(t_ns, values) if quantity.counter else values
            known[quantity.name] = values if any(value is not None for value in values) else None
    return known


def per_second(t_ns: Sequence[int], counter: Sequence[float | None]) -> list[float | None]:
    """Return the growth of a counter per second since the value before. None where that is not known."""
    rates: list[float | None] = []
    before: tuple[int, float] | None = None
    for t, value in zip(t_ns, counter, strict=True):
        rate = None
        if value is not None:
            if before is not None and value >= before[1] and t > before[0]:
                rate = (value - before[1]) / ((t - before[0]) / 1e9)
            before = t, value
        rates.append(rate)
    return rates
