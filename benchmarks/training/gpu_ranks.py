"""DDP over gloo for `gpu.py`: both ranks use the one device, and rank 1 is slow in backward."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
slow = dist.get_rank() == 1
device = torch.device("cuda", 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        hidden.register_hook(lambda _: torch.cuda._sleep(30_000_000 if slow else 8_000_000))
        torch.cuda._sleep(8_000_000)
        return self.second(hidden)


model = nn.parallel.DistributedDataParallel(Net().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
end = time.monotonic() + float(os.environ.get("SECONDS", "25"))
batches = [torch.randn(256) for _ in range(64)]
over = torch.zeros(())
while not over:
    for batch in DataLoader(batches, batch_size=16):
        model(batch.to(device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    over = torch.tensor(float(time.monotonic() > end))
    dist.all_reduce(over, dist.ReduceOp.MAX)
dist.destroy_process_group()
