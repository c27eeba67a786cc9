"""
Data about one machine: samples of a node and of its processes as series, its devices, which device a rank
uses, and how much memory its ranks use. Each series keeps only the newest samples, as many as a chart shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from traceml_ray.identity import RankIdentity
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.nodes.quantities import DEVICE_MEMORY, GPU, HOST_MEMORY, Quantity, series
from traceml_ray.store import query
from traceml_ray.store.results import EventRow

from .ranks import position
from .run_state import RunState
from .session_poll import SessionPoll
from .values import as_dict, by_rank, number, rounded

_SPARK = 120
"""Number of steps in the sparkline of a rank."""
SAMPLES = 170
"""Largest number of samples drawn in a chart."""
HELD = 5
"""
Number of samples over which a device counter is held, because NVML is queried for it in every fifth sample
only. This many more samples are requested than drawn, because a rate needs the samples before it. So when a
live chart advances, it gains points and its other points stay unchanged.
"""
_NEWEST = "allocated_bytes", "reserved_bytes", "rss_bytes", "limit_used_bytes", "limit_bytes"
_DEVICES = 16
"""Largest number of a process's devices whose newest memory samples are searched."""


def node_rank_rows(
    cache: SessionPoll, run: RunState, node: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """
    Return the ranks of a node (one of `ranks.nodes`), the rows of `tables.node_rank_columns`.

    `samples` are samples of the node. If they lack the processes of its GPUs, the GPU of a rank is None.
    """
    by_process = {run.ranks[rank].id: rank for rank in node["ranks"] if rank in run.ranks}
    latest = cache.ask(query.GetProcessSamples(tuple(by_process), last=1)) or []
    memory = {by_process[process]: sample.rss_bytes for process, sample in latest}
    devices = _device_memory(cache, by_process)
    ranks = sorted(by_process.values())
    median, idle = (by_rank(run.times, name) for name in ("busy_ms", "gpu_idle_pct"))
    busy = by_rank(cache.ask(query.GetBusy(run.id, tuple(ranks), _SPARK)), "busy_ms")
    dead = {death.rank: death for death in cache.deaths(run)}
    return [
        {
            **position(run, rank),
            "gpu": gpu_of(run.ranks[rank].identity, samples),
            "median_ms": number(median.get(rank)),
            "gpu_idle_pct": number(idle.get(rank)),
            "busy": rounded(busy.get(rank, ())),
            "rss_bytes": memory.get(rank),
            "device_memory": devices.get(rank),
            "death": dead.get(rank),
        }
        for rank in ranks
    ]


def _device_memory(cache: SessionPoll, ranks: Mapping[int, int]) -> dict[int, list[int]]:
    """Return, by rank, what torch last had allocated and reserved, summed over all devices."""
    samples_of_rank: dict[int, list[MemorySample]] = {}
    for process, sample in cache.ask(query.GetMemorySamples(tuple(ranks), last=_DEVICES)) or ():
        if sample.allocated_bytes is not None and sample.reserved_bytes is not None:
            samples_of_rank.setdefault(ranks[process], []).append(sample)
    newest = {
        rank: [sample for sample in samples if sample.t_ns == samples[-1].t_ns]
        for rank, samples in samples_of_rank.items()
    }
    both = "allocated_bytes", "reserved_bytes"
    return {
        rank: [sum(getattr(sample, name) for sample in samples) for name in both]
        for rank, samples in newest.items()
    }


def gpu_of(who: RankIdentity | None, samples: Sequence[Mapping[str, Any]]) -> int | None:
    """
    Return the index of the GPU on which a rank's process was last seen. None: unknown.

    `samples` are samples of its node, the newest last. Not every sample has the processes.
    """
    pid = who.pid if who else -1
    for sample in reversed(samples):
        for gpu in sample["gpus"] or ():
            if any(pid in (process["pid"], *process["parents"]) for process in gpu["processes"] or ()):
                return int(gpu["index"])
    return None


def samples_of(
    cache: SessionPoll, request: query.GetNodeSamples | query.GetProcessSamples | query.GetMemorySamples
) -> list[dict[str, Any]]:
    """Return the samples of one node or process, the newest last. Empty until the answer has arrived."""
    answers: Sequence[tuple[Any, Any]] = cache.ask(request) or ()
    return [as_dict(sample) for _, sample in answers]


def timed_series(samples: Sequence[Mapping[str, Any]], quantities: Sequence[Quantity]) -> dict[str, Any]:
    """
    Return the newest SAMPLES values of each quantity, by its name. `t_ns` holds the times of
    measurement.
    """
    return _newest({"t_ns": [sample["t_ns"] for sample in samples], **series(samples, quantities)})


def _newest(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values and values[-SAMPLES:] for name, values in columns.items()}


def gpu_series(
    node: str, samples: Sequence[Mapping[str, Any]], events: Iterable[EventRow]
) -> list[dict[str, Any]]:
    """
    Return the series of each GPU of a node, by name of the quantity, and the newest facts about the GPU.

    `xid` has the critical errors of the GPU (from `events`), the newest first. None: unknown.
    """
    by_device: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        for gpu in sample["gpus"] or ():
            by_device.setdefault(gpu["index"], []).append({**gpu, "t_ns": sample["t_ns"]})
    critical = [event.data for event in events if event.kind == "xid" and event.node_id == node]
    gpus = []
    for index, gpu_samples in sorted(by_device.items()):
        columns = series(gpu_samples, GPU)
        columns |= {quantity.name: _held(columns[quantity.name]) for quantity in GPU if quantity.counter}
        columns["ecc"] = _held([gpu["ecc_uncorrected"] for gpu in gpu_samples])
        columns["t_ns"] = [gpu["t_ns"] for gpu in gpu_samples]
        xids = [
            xid for event in reversed(critical) if event.get("gpu") == index and (xid := event.get("xid"))
        ]
        gpus.append(
            {
                **{name: gpu_samples[-1][name] for name in ("index", "name", "throttle")},
                **_newest(columns),
                "xid": xids or (None if gpu_samples[-1]["xid"] is None else []),
            }
        )
    return gpus


def _held(values: Sequence[Any] | None) -> list[Any] | None:
    """
    Return the values. Each is held for HELD samples if the following ones are unknown. None: there is no
    known value.
    """
    last, age, filled = None, 0, []
    for value in values or ():
        last, age = (last, age + 1) if value is None else (value, 0)
        filled.append(last if age < HELD else None)
    return filled if any(value is not None for value in filled) else None


def memory_series(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Return series and newest values of a process's memory, for each of its GPUs. Host memory is included with
    the first GPU. `samples` are samples of one process, the newest last.
    """
    by_device: dict[int | None, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_device.setdefault(sample["device"], []).append(sample)
    return [
        {
            **timed_series(samples, (*DEVICE_MEMORY, *HOST_MEMORY)),
            "device": device,
            "newest": {name: samples[-1][name] for name in _NEWEST},
        }
        for device, samples in sorted(by_device.items(), key=lambda item: -1 if item[0] is None else item[0])
    ]
