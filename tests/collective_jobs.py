"""
Small gloo jobs of four ranks whose collectives do not match, and healthy ones.

As a program it runs each job and writes torch's flight recorder of each rank: `tests/data/collectives`. A
rank that a mismatch kills leaves the record that it wrote last. Needs torch 2.10 or newer.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD, STEPS = 4, 4


class Mine(NamedTuple):
    """What a rank has."""

    rank: int
    gradients: torch.Tensor
    pair: dist.ProcessGroup | None
    """The group of ranks 0 and 1; None on other ranks."""
    odd: dist.ProcessGroup | None
    """The group of ranks 1 and 3; None on other ranks."""


def train(name: str, mine: Mine) -> None:
    """Run four steps of two collectives, and then what the job does."""
    for step in range(STEPS):
        dist.all_reduce(mine.gradients)
        if name == "one_behind" and mine.rank == 2 and step == 2:
            continue
        dist.all_reduce(mine.gradients)
    JOBS[name](mine)


def missing(mine: Mine) -> None:
    """Rank 2 reads something for ever."""
    if mine.rank == 2:
        time.sleep(600)
    dist.all_reduce(mine.gradients)


def other_operation(mine: Mine) -> None:
    if mine.rank == 1:
        dist.broadcast(mine.gradients, 0)
    else:
        dist.all_reduce(mine.gradients)


def other_size(mine: Mine) -> None:
    time.sleep(0 if mine.rank == 3 else 1)  # rank 3 dies when it receives more than it has room for
    dist.all_reduce(torch.ones(8 if mine.rank == 3 else 16))


def other_dtype(mine: Mine) -> None:
    time.sleep(0 if mine.rank != 3 else 1)
    dist.all_reduce(mine.gradients.double() if mine.rank == 3 else mine.gradients)


def other_order(mine: Mine) -> None:
    if mine.rank == 0:
        dist.all_reduce(mine.gradients, group=mine.pair)
        dist.all_reduce(mine.gradients)
    else:
        dist.all_reduce(mine.gradients)
        if mine.pair is not None:
            dist.all_reduce(mine.gradients, group=mine.pair)


def early_exit(mine: Mine) -> None:
    if mine.rank == 1:
        raise SystemExit(0)
    dist.all_reduce(mine.gradients)


def exception(mine: Mine) -> None:
    if mine.rank == 3:
        raise ValueError("no such sample")
    dist.all_reduce(mine.gradients)


def rank_zero_barrier(mine: Mine) -> None:
    if mine.rank == 0:
        dist.barrier()
    dist.all_reduce(mine.gradients)


def subgroup(mine: Mine) -> None:
    """Ranks 0 and 3 wait for rank 1 in their groups with it; rank 1 waits for them in the barrier."""
    if mine.rank in (0, 3):
        dist.all_reduce(mine.gradients, group=mine.pair if mine.rank == 0 else mine.odd)
    dist.barrier()


def one_behind(mine: Mine) -> None:
    dist.all_reduce(mine.gradients)


def healthy(mine: Mine) -> None:
    for group in (mine.pair, mine.odd):
        if group is not None:
            dist.all_reduce(mine.gradients[:8], group=group)
    dist.barrier()


def evaluates(mine: Mine) -> None:
    """Rank 0 evaluates while the others wait for it: healthy."""
    if mine.rank == 0:
        time.sleep(600)
    dist.barrier()


JOBS: dict[str, Callable[[Mine], None]] = {
    job.__name__: job
    for job in (
        *(missing, other_operation, other_size, other_dtype, other_order, early_exit, exception),
        *(rank_zero_barrier, subgroup, one_behind, healthy, evaluates),
    )
}


def main(rank: int, name: str, folder: str) -> None:
    """Run one rank of a job, and write its record every few ms."""
    store = dist.FileStore(f"{folder}/store", WORLD)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    pair, odd = dist.new_group([0, 1], group_desc="pair"), dist.new_group([1, 3], group_desc="odd")
    importlib.import_module("torch._inductor")  # the first record with lines would import it
    dist.monitored_barrier()
    mine = Mine(rank, torch.ones(16), pair if rank in (0, 1) else None, odd if rank in (1, 3) else None)
    threading.Thread(target=train, args=(name, mine), daemon=True).start()
    for _ in range(150):
        record = torch._C._distributed_c10d._dump_fr_trace(True, True, False)  # type: ignore[attr-defined]
        Path(folder, f"temporary{rank}").write_bytes(record)
        Path(folder, f"temporary{rank}").replace(f"{folder}/trace_rank_{rank}")
        time.sleep(0.02)
    Path(folder, f"written{rank}").touch()
    for _ in range(500):  # a rank that ends ends the calls of the others
        if len(list(Path(folder).glob("written*"))) == WORLD:
            break
        time.sleep(0.02)
    os._exit(0)


if __name__ == "__main__":
    for job in sys.argv[2:] or JOBS:
        place = Path(sys.argv[1], job)
        place.mkdir(parents=True, exist_ok=True)
        context = mp.spawn(main, args=(job, str(place)), nprocs=WORLD, join=False)
        for process in context.processes:
            process.join(60)
        for file in place.iterdir():
            if not file.name.startswith("trace_rank_"):
                file.unlink()
