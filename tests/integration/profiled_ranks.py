"""
A DDP job (gloo) whose ranks record themselves with torch's profiler: two steps, with more copies on rank 1.

Arguments: the folder to write to, and a free port. Each rank writes `rank-N.json.gz`, and its edges of steps.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

RANKS, WARM_UP, STEPS, COPIES = 3, 2, 2, 12


def train(rank: int, folder: Path, port: str) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = iter(torch.utils.data.DataLoader(torch.randn(100, 256), batch_size=8))
    large = torch.randn(8_000_000)

    def step() -> None:
        inputs = next(loader)
        if rank == 1:
            for _ in range(COPIES):
                large.clone()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    edges = [time.time_ns()]
    recorder = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with recorder:
        for _ in range(STEPS):
            step()
            edges.append(time.time_ns())
    recorder.export_chrome_trace(str(folder / f"rank-{rank}.json.gz"))
    (folder / f"edges-{rank}").write_text(json.dumps(edges))
    dist.destroy_process_group()


if __name__ == "__main__":
    children = []
    for number in range(RANKS):  # forked, since an import of torch takes seconds
        children.append(os.fork())
        if children[-1] == 0:
            train(number, Path(sys.argv[1]), sys.argv[2])
            os._exit(0)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))
