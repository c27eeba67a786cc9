"""
A job of four gloo ranks in which one call of a collective goes wrong, or rank 0 only takes long.

    python collective_faults.py FAULT STEP

From step STEP on (0: before the first step) the fault FAULT happens. In a line that ends with `#!` and a
name a rank is while the job hangs.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

fault, fault_step = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
first, second = (dist.new_group(list(range(4))) for _ in range(2))
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
half = halves[rank // 2]
value = torch.ones(4)


class UnreadableError(Exception):
    """A batch that rank 1 cannot read."""


def average(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)  #! others


def read_batch() -> None:
    time.sleep(10_000)  #! missing


def gather_sizes() -> None:
    dist.all_gather([torch.ones(4) for _ in range(4)], torch.ones(4))  #! other_op


def average_longer() -> None:
    dist.all_reduce(torch.ones(8))  #! other_shape


def average_integers() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int64))  #! other_dtype


def both_groups() -> None:
    dist.all_reduce(value, group=first)  #! order_first
    dist.all_reduce(value, group=second)


def both_groups_reversed() -> None:
    dist.all_reduce(value, group=second)  #! other_order
    dist.all_reduce(value, group=first)


def validate(step: int) -> None:
    try:
        if rank == 1 and fault == "exception":
            raise UnreadableError(step)
        average(value)
    except UnreadableError:
        pass
    report()


def report() -> None:
    dist.all_gather([torch.ones(2) for _ in range(4)], torch.ones(2))  #! exception


def save() -> None:
    if rank == 0:
        dist.barrier()  #! rank_0_barrier


def average_half() -> None:
    if rank == 3:
        write_log()
    dist.all_reduce(value, group=half)  #! half


def write_log() -> None:
    time.sleep(10_000)  #! sub_group


def finish() -> None:
    dist.broadcast(value, 0)  #! one_behind


def average_in_rows() -> None:
    row = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).get_group("tp")
    if rank == 3:
        dist.broadcast(value, 2, group=row)  #! row
    else:
        dist.all_reduce(value, group=row)  #! row_others


def pass_on() -> None:
    dist.recv(value, (rank - 1) % 4)  #! ring
    dist.send(value, (rank + 1) % 4)


def receive() -> None:
    dist.recv(value, 0)  #! receive


def scatter_from(root: int) -> None:
    chunks = [torch.ones(4) for _ in range(4)] if rank == root else None
    dist.scatter(value, chunks, root)  #! other_root


def evaluate_beside() -> None:
    dist.all_reduce(torch.ones(2), group=first)  #! thread


def wait_for_evaluation() -> None:
    thread = threading.Thread(target=evaluate_beside)
    thread.start()
    thread.join()


def gather_losses() -> None:
    losses: list[object] = [None] * 4
    dist.all_gather_object(losses, {"loss": 1.0})  #! objects


def wait_with_a_time_limit() -> None:
    dist.monitored_barrier()  #! monitored


def step_over(batches: int) -> None:
    for _ in range(batches):
        model(torch.ones(2, 4)).square().mean().backward()  #! micro_batch
    average(value)


class Layers(nn.Module):
    """Three layers, of which one can be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, skipped: int | None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = layer(x)  #! layer
        return x


def train_sharded() -> None:
    from torch.distributed.fsdp import fully_shard  # takes a second, and no other job needs it

    sharded = Layers()
    mesh = init_device_mesh("cpu", (4,))
    for layer in (*sharded.layers, sharded):
        fully_shard(layer, mesh=mesh)
    for number in range(6):
        loss = sharded(torch.ones(2, 4), 1 if rank == 2 and number == 5 else None).sum()
        loss.backward()  #! sharded


def evaluate(seconds: int) -> None:
    """A batch each second."""
    for _ in range(seconds):
        time.sleep(1)
        model.module(torch.ones(2, 4))


def upload(seconds: int) -> None:
    copying = f"import time\nfor _ in range({10 * seconds}): time.sleep(0.1)"
    subprocess.run([sys.executable, "-c", copying], check=True)


def fail(step: int) -> None:
    """Have the fault."""
    if fault == "missing":
        read_batch() if rank == 2 else average(value)
    elif fault == "other_op":
        gather_sizes() if rank == 1 else average(value)
    elif fault == "other_shape":
        average_longer() if rank == 2 else average(value)
    elif fault == "other_dtype":
        average_integers() if rank == 2 else average(value)
    elif fault == "other_order":
        both_groups_reversed() if rank == 3 else both_groups()
    elif fault == "early_exit":
        sys.exit(0) if rank == 3 else average(value)
    elif fault == "exception":
        validate(step)
    elif fault == "rank_0_barrier":
        save()
        average(value)
    elif fault == "sub_group":
        average_half()
        dist.barrier()
    elif fault == "one_behind":
        for batch in range(4):
            if rank == 2 and batch == 1:
                continue
            average(value)
        finish()
    elif fault == "row":
        average_in_rows()
    elif fault == "ring":
        pass_on()
    elif fault == "receive":
        receive() if rank == 1 else average(value)
    elif fault == "other_root":
        scatter_from(1 if rank == 3 else 0)
        average(value)
    elif fault == "thread":
        average(value) if rank == 1 else wait_for_evaluation()
    elif fault == "objects":
        if rank == 1:
            gather_losses()
        average(value)
    elif fault == "monitored":
        read_batch() if rank == 2 else wait_with_a_time_limit()
    elif fault == "micro_batch":
        step_over(3 if rank == 1 else 4)
    elif fault == "layer":
        train_sharded()
    elif fault in ("evaluates", "uploads"):
        if rank == 0:
            evaluate(120) if fault == "evaluates" else upload(120)
        dist.barrier()


model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if fault_step == 0:
    fail(0)
for step in range(1, 100_000):
    time.sleep(0.02)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    average(value)
    if step == fault_step:
        fail(step)
