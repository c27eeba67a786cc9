"""
All-reduce and all-gather between two processes, each on a node of its own.

The process groups have a store of their own, so nothing of the training job is used. Torch is imported when
it is needed.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import psutil

from traceml_ray.signals.check.cores import Waits
from traceml_ray.signals.check.records import Measure
from traceml_ray.signals.check.tasks import Exchange

SPARE_S = 15.0
"""Longest time in s that the two processes wait for each other."""
_CPU_BYTES, _GPU_BYTES = 1 << 22, 1 << 26
"""Data of each process in a call."""
_TRIALS = 12
"""Wanted number of trials of each kind of exchange."""
_LEAST_TRIALS, _MOST_TRIALS = 4, 64


def listen(address: str) -> Any:
    """Return a store that listens at a free port of `address` (`store.port`)."""
    return _store_type()(
        address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SPARE_S)
    )


def _store_type() -> Any:
    return importlib.import_module("torch.distributed").TCPStore


def exchange(store: Any, task: Exchange) -> list[Measure]:
    """
    Exchange data with the other process; return the measures of place 0, and [] of place 1.

    Args:
        store: result of `listen`, at place 0.
        task: where the two meet, and for how long; slow links take longer.

    Raises what torch raises, for example when the other process does not come within `SPARE_S`.
    """
    import torch
    import torch.distributed as dist

    if task.place != 0:
        wait = timedelta(seconds=SPARE_S)
        store = _store_type()(task.address, task.port, is_master=False, wait_for_workers=False, timeout=wait)
    _use_interface_to(task.address)
    device = torch.device("cuda:0" if task.gpu else "cpu")
    backend, limit = "nccl" if task.gpu else "gloo", timedelta(seconds=task.seconds + SPARE_S)
    dist.init_process_group(backend, store=store, rank=task.place, world_size=2, timeout=limit)
    try:
        measures = [
            Measure(name, "link", "B/s", [factor * value for value in trials.values], backend, trials.others)
            for name, (run, factor) in _RUN.items()
            for trials in [_trials(run, device, task.seconds / len(_RUN))]
        ]
        return measures if task.place == 0 else []
    finally:
        dist.destroy_process_group()


def _all_reduce(data: Any, _parts: list[Any]) -> None:
    import torch.distributed as dist

    dist.all_reduce(data)


def _all_gather(data: Any, parts: list[Any]) -> None:
    import torch.distributed as dist

    dist.all_gather(parts, data)


_RUN: dict[str, tuple[Callable[[Any, list[Any]], None], int]] = {
    "all_reduce": (_all_reduce, 1),
    "all_gather": (_all_gather, 2),
}
"""
Exchange of each of `pairs.OPERATIONS`, and its bytes as a multiple of the data of one process (algorithm
bandwidth as nccl-tests defines it).
"""


class ExchangeTrials(NamedTuple):
    """Trials of one operation."""

    values: list[float]
    """Data of one process ÷ time (bytes/s), without the time in which a process waited for a core."""
    others: list[float] | None
    """Share (0..1) of that time: of the process that waited longer. None: not known."""


def _trials(run: Callable[[Any, list[Any]], None], device: Any, seconds: float) -> ExchangeTrials:
    """Return trials of an operation. Both processes make equally many, of equal size."""
    import torch
    import torch.distributed as dist

    # One size for all pairs: the bandwidth depends on it.
    size, waits = (_GPU_BYTES if device.type == "cuda" else _CPU_BYTES), Waits()
    data = torch.ones(size // 4, device=device)
    parts = [torch.empty_like(data) for _ in range(2)]

    def trial(calls: int) -> tuple[float, float | None]:
        """Return the time of a call in s, and the share of it in which this process waited for a core."""
        dist.barrier()
        waits.restart()
        began = time.perf_counter()
        for _ in range(calls):
            run(data, parts)
            data.fill_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent, waited = time.perf_counter() - began, waits.longest_ns()
        return spent / calls, None if waited is None else min(waited * 1e-9 / spent, 0.99)

    trial(1)  # connects
    # Place 0 decides for both: two clocks would disagree.
    one_s = trial(1)[0]
    calls = _agreed(min(max(1, int(seconds / _TRIALS / one_s)), 1000), device)
    count = _agreed(min(max(_LEAST_TRIALS, int(seconds / (one_s * calls))), _MOST_TRIALS), device)
    trials = [trial(calls) for _ in range(count)]
    mine = [2.0 if share is None else share for _, share in trials]
    shares = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(shares, op=dist.ReduceOp.MAX)
    others: list[float] = shares.tolist()
    if max(others) > 1:  # one of the two processes does not know
        return ExchangeTrials([size / spent for spent, _ in trials], None)
    values = [size / (spent * (1 - share)) for (spent, _), share in zip(trials, others, strict=True)]
    return ExchangeTrials(values, others)


def _agreed(number: int, device: Any) -> int:
    """Return the number of place 0."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([number], dtype=torch.int64, device=device)
    dist.broadcast(value, 0)
    return int(value.item())


def _use_interface_to(address: str) -> None:
    """Have gloo use the interface with the route to `address`; it would look up this host's own name."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    family, _, _, _, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == mine for one in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return
