"""
A script whose rank 1 is late while there is a file `late` in the folder that it is given, and which ends once
there is a file `end`; and a process that is ended with its block.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = """
import os, sys, time, torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
rank, folder = dist.get_rank(), sys.argv[1]
batches = torch.utils.data.DataLoader([torch.ones(64)] * 100_000, batch_size=4)
for x in batches:
    time.sleep(0.02)
    if rank == 1 and os.path.exists(folder + "/late"):
        time.sleep(0.04)
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    end = torch.tensor(float(os.path.exists(folder + "/end")))
    dist.all_reduce(end)
    if end:
        break
dist.destroy_process_group()
"""


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
