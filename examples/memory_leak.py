"""
A small network trained on every rank, one of which leaks memory.

    python -m traceml_ray.launch --nproc-per-node 3 --session leak examples/memory_leak.py
    traceml-ray analyze traceml-sessions/leak

The leak is a common mistake: a list of losses for the log. `losses.append(loss)` keeps each step's graph
alive, with all that its forward has saved for the backward; `losses.append(loss.item())` keeps a number.
Here only the rank of `--leak-rank` makes the mistake, from step `--leak-from` on, and each such step leaves
`--leak-mb` behind. With a GPU it trains there. `--leak-rank -1` leaks nowhere.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

WIDTH = 256
LOSSES: list[Any] = []
"""Of every step, for the log."""


def network() -> nn.Module:
    """Return a small network; it saves its inputs for the backward."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


def train(args: argparse.Namespace, rank: int, device: torch.device) -> None:
    """Train for `args.steps` steps of at least `args.step_ms` each."""
    torch.manual_seed(rank)
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        rows = torch.randn(32, WIDTH, device=device)
        loss = F.mse_loss(model(rows).squeeze(1), rows.mean(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        leaks = rank == args.leak_rank and step >= args.leak_from
        LOSSES.append((loss, saved(args.leak_mb, device)) if leaks else loss.item())
        time.sleep(max(0.0, args.step_ms / 1000 - (time.perf_counter() - began)))
        if rank == 0 and step % args.log_every == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)


def saved(mb: float, device: torch.device) -> Tensor:
    """Return what stands for the activations of a larger network."""
    return torch.ones(int(mb * 1e6 / 4), device=device)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--step-ms", type=float, default=100, help="a step takes at least so long")
    add("--leak-rank", type=int, default=1, help="-1: none")
    add("--leak-mb", type=float, default=2, help="MB that a step leaves behind")
    add("--leak-from", type=int, default=60, help="first step that does")
    add("--log-every", type=int, default=50)
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train as one of torchrun's processes."""
    args = parse_arguments()
    if "RANK" not in os.environ:
        raise SystemExit("start it under a launcher: python -m traceml_ray.launch --nproc-per-node 3 …")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    has_gpu = device.type == "cuda" and int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    train(args, rank, device)
    dist.barrier()  # a gloo thread may still hold a tensor of the last exchange
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
