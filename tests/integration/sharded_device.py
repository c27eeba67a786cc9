"""
Two ranks of real FSDP whose device is played: run by `torch.distributed.run` with a folder as argument.

What FSDP copies out of its collectives takes time on the device, where the compute stream waits for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from fake_device import FakeDevice
from integration.device_ranks import MS, Net, Wire, told
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

from traceml_ray.agent.exchange import STREAMED
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.settings import Settings

STEPS = 100
COPY_MS = 1


def with_waits(device: FakeDevice) -> Callable[[], None]:
    """Have the device wait wherever FSDP copies what it has gathered; return what undoes that."""
    original = groups.foreach_all_gather_copy_out

    def copy_out(*args: Any) -> Any:
        device.launch(COPY_MS * MS)
        return original(*args)

    groups.foreach_all_gather_copy_out = copy_out

    def undo() -> None:
        groups.foreach_all_gather_copy_out = original

    return undo


def train(device: FakeDevice, micro: int, after: Callable[[int], None]) -> list[float]:
    net: nn.Module = Net(device, "")
    for part in (net.first, net.second, net):
        torch.distributed.fsdp.fully_shard(part)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        for _ in range(micro):
            loss = net(torch.full((4, 8), float(step % 5))).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        device.item()
        after(step)
    return losses


def watched(device: FakeDevice, micro: int, began: int) -> dict[str, Any]:
    """The device's clock is read from step `began` on."""
    relay = Wire()
    agent = RankAgent(Settings(session="s"), relay)  # type: ignore[arg-type]
    recorder = agent.recorder
    recorder.clock = device
    recorder.stamp_with(device)
    recorder.steps.forget(device.now)
    agent.instrumentation.install()
    recorder.exchange.couple(STREAMED)

    def after(step: int) -> None:
        if step == began:
            agent.device.begin(device)
        if step % 2:
            agent.tick()

    losses = train(device, micro, after)
    device.wait(1000 * MS)
    agent.instrumentation.remove()
    agent.tick(final=True)
    last = relay.taken[-1]
    rows = [row for batch in relay.taken for row in told(batch)]
    return {"losses": losses, "rows": rows, "missing": last.missing, "errors": last.errors}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name, micro, takes_ns in (("plain", 1, 0), ("accumulated", 2, 0), ("dear", 1, 20_000)):
        device = FakeDevice()
        device.record_takes_ns = lambda _, ns=takes_ns: ns  # type: ignore[misc]
        undo = with_waits(device)
        found[name] = watched(device, micro, 1 + rank)
        undo()
        found[name]["bare"] = train(FakeDevice(), micro, lambda _: None)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
