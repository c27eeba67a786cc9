"""
Two ranks of real FSDP whose device is played: run by `torch.distributed.run` with a folder as argument.

What FSDP copies out of its collectives takes time on the device, where the compute stream waits for it.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from fake_device import FakeDevice
from integration.device_ranks import MS, Net, attached, rows_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

STEPS, DEAR_STEPS = 20, 100
"""So many where not every step is marked."""
COPY_MS = 1
REDUCE_MS = 6


def with_waits(device: FakeDevice) -> Callable[[], None]:
    """
    Have the device wait wherever FSDP copies what it has gathered, and at the end of a backward for what it
    reduces over replicas, on another stream (hybrid); return what undoes that.
    """
    copy_out, unshard = groups.foreach_all_gather_copy_out, _runtime_utils._unshard

    def after(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any) -> Any:
            device.launch(COPY_MS * MS)
            return original(*args)

        return wait

    groups.foreach_all_gather_copy_out, _runtime_utils._unshard = after(copy_out), after(unshard)
    reduce, ended = (
        dist.all_reduce,
        (groups.FSDPParamGroup.finalize_backward, _runtime_utils._finalize_params),
    )

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        device.ends["reduce"] = max(device.ends["reduce"], device.ends["default"]) + REDUCE_MS * MS
        return reduce(*args, **kwargs)

    def after_reduced(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any) -> Any:
            device.wait_for(device.ends["reduce"])
            return original(*args)

        return wait

    dist.all_reduce = all_reduce
    groups.FSDPParamGroup.finalize_backward, _runtime_utils._finalize_params = map(after_reduced, ended)

    def undo() -> None:
        groups.foreach_all_gather_copy_out, _runtime_utils._unshard = copy_out, unshard
        dist.all_reduce = reduce
        groups.FSDPParamGroup.finalize_backward, _runtime_utils._finalize_params = ended

    return undo


class WithLoss(Net):
    """It returns the loss, as most Transformers do: then FSDP ends the backward before our hook is there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


def sharded(device: FakeDevice, first: bool, hybrid: bool) -> nn.Module:
    """Three groups, by FSDP's first version or by its second; `hybrid`: replicated, too."""
    net: Any = (WithLoss if hybrid else Net)(device, "")
    if first:
        wrap = functools.partial(
            torch.distributed.fsdp.FullyShardedDataParallel, device_id=torch.device("cpu")
        )
        if hybrid:
            alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
            strategy = torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD
            wrap.keywords.update(process_group=(dist.group.WORLD, alone), sharding_strategy=strategy)
        net.first, net.second = wrap(net.first), wrap(net.second)
        return wrap(net)
    more: Any = {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))} if hybrid else {}
    for part in (net.first, net.second, net):
        torch.distributed.fsdp.fully_shard(part, **more)
    return net  # type: ignore[no-any-return]


def train(
    device: FakeDevice,
    steps: int,
    micro: int,
    after: Callable[[int], None],
    first: bool = False,
    hybrid: bool = False,
) -> list[float]:
    net = sharded(device, first, hybrid)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        for _ in range(micro):
            out = net(torch.full((4, 8), float(step % 5)))
            loss = out if hybrid else out.mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        device.item()
        after(step)
    return losses


def watched(device: FakeDevice, steps: int, micro: int, began: int, *kind: bool) -> dict[str, Any]:
    """The device's clock is read from step `began` on."""
    agent, relay = attached(device)

    def after(step: int) -> None:
        if step == began:
            agent.device.begin(device)
        if step % 2:
            agent.tick()

    losses = train(device, steps, micro, after, *kind)
    device.wait(1000 * MS)
    agent.tick()
    waited = agent.device.waited
    agent.instrumentation.remove()
    agent.tick(final=True)
    last = relay.taken[-1]
    rows = [row for batch in relay.taken for row in rows_of(batch)]
    result = {"losses": losses, "rows": rows, "missing": last.missing, "errors": last.errors}
    return {**result, "waited": waited}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for name, micro, takes_ns in (
        ("plain", 1, 0),
        ("accumulated", 2, 0),
        ("dear", 1, 20_000),
        ("first", 1, 0),
        ("hybrid", 1, 0),
        ("first hybrid", 1, 0),
    ):
        device = FakeDevice()
        device.record_takes_ns = lambda _, ns=takes_ns: ns  # type: ignore[misc]
        undo = with_waits(device)
        kind = "first" in name, "hybrid" in name
        steps = DEAR_STEPS if name == "dear" else STEPS
        results[name] = watched(device, steps, micro, 1 + rank, *kind)
        undo()
        results[name]["bare"] = train(FakeDevice(), steps, micro, lambda _: None, *kind)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
