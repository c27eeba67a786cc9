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
from typing import Any

import psutil

from traceml_ray.signals.check.records import Measure
from traceml_ray.signals.check.tasks import Exchange

SPARE_S = 15.0
"""Longest time in s that the two processes wait for each other."""
_FIRST_BYTES = 1 << 18
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 26
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
            Measure(name, "link", "B/s", [factor * value for value in values], like=backend)
            for name, (run, factor) in _RUN.items()
            for values in [_trials(run, device, task.seconds / len(_RUN))]
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


def _trials(run: Callable[[Any, list[Any]], None], device: Any, seconds: float) -> list[float]:
    """Return data of one process ÷ time (bytes/s) of each trial. Both processes make equally many trials."""
    import torch
    import torch.distributed as dist

    def once(size: int, calls: int = 1) -> float:
        data = torch.ones(size // 4, device=device)
        parts = [torch.empty_like(data) for _ in range(2)]
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            run(data, parts)
            data.fill_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls

    once(_FIRST_BYTES)  # connects
    one_s = min(once(_FIRST_BYTES) for _ in range(2))
    share_s = seconds / _TRIALS
    wanted = int(_FIRST_BYTES * share_s / one_s) // 4 * 4
    # Place 0 decides for both: two clocks would disagree.
    size = _agreed(min(max(wanted, _LEAST_BYTES), _MOST_BYTES), device)
    trial_s = once(size)
    calls = _agreed(min(max(1, int(share_s / trial_s)), 1000), device)
    trials = _agreed(min(max(_LEAST_TRIALS, int(seconds / (trial_s * calls))), _MOST_TRIALS), device)
    return [size / once(size, calls) for _ in range(trials)]


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
