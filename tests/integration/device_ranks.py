"""
Two ranks of real DDP whose device is played: run by `torch.distributed.run` with a folder as argument.

Kernels are put on the played device where the model computes; the exchange ends there when the last rank's
device has come to it. Each rank leaves, by case, its losses and weights and what its agent has sent, in
`<folder>/<rank>.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fake_device import CALLS, FakeDevice
from torch import Tensor, nn
from torch.autograd.variable import Variable

from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.agent.steps import STREAMED
from traceml_ray.errors import Errors
from traceml_ray.settings import Settings
from traceml_ray.stages import N_STAGES
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

MS = 1_000_000
STEPS = 24
FORWARD_MS, BACKWARD_MS, OPTIMIZER_MS, EXCHANGE_MS = 10, 20, 4, 4
FAULT_MS = 12
TRIED = 1, 7
"""Of the calls of a name, in which something happens; `make` is called once."""
agents: list[RankAgent] = []


class Wire:
    """A relay that keeps what it is given; after step 12 of a case it may be gone for a while."""

    generation = 1
    gone = False

    def __init__(self) -> None:
        self.errors = Errors()
        self.taken: list[wire.RankBatch] = []

    def offer(self, data: bytes) -> bool:
        if self.gone:
            return False
        self.taken.append(codec.decode(data, wire.RankBatch))
        return True

    def replies(self) -> list[bytes]:
        return []

    def close(self) -> None:
        pass


class Net(nn.Module):
    """Two layers that take their time on the device."""

    def __init__(self, device: FakeDevice, slow: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.device, self.slow = device, slow

    def forward(self, x: Tensor) -> Tensor:
        self.device.wait(3 * MS)
        self.device.launch((FORWARD_MS + FAULT_MS * (self.slow == "forward")) * MS)
        hidden = self.first(x).relu()
        hidden.register_hook(self._backward)
        return self.second(hidden).squeeze(-1)

    def _backward(self, _: Tensor) -> None:
        self.device.wait(4 * MS)
        self.device.launch((BACKWARD_MS + FAULT_MS * (self.slow == "backward")) * MS)


def exchange(device: FakeDevice, last: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a communication hook: the compute stream waits for the exchange where DDP does."""
    queue, reduce = Variable._execution_engine.queue_callback, last

    def hook(_: Any, bucket: Any) -> Any:
        arrival = torch.tensor([device.ends["default"]])
        reduce(arrival, dist.ReduceOp.MAX)
        queue(lambda: device.wait_for(int(arrival) + EXCHANGE_MS * MS))
        buffer = bucket.buffer()
        reduce(buffer, dist.ReduceOp.SUM)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer / dist.get_world_size())
        return done

    hook.__annotations__.clear()  # DDP compares them with classes, not with their names
    return hook


class Batches(torch.utils.data.Dataset[Tensor]):
    """They take their time on the host."""

    def __init__(self, device: FakeDevice, slow: str, steps: int = STEPS) -> None:
        self.device, self.slow, self.steps = device, slow, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Tensor:
        self.device.wait((46 if self.slow == "data" else 1) * MS)
        return torch.full((8,), float(index % 5))


def train(
    device: FakeDevice, slow: str, after: Callable[[int], None] = lambda _: None, steps: int = STEPS
) -> list[float]:
    """Return the losses, and the weights in the end."""
    reduce = dist.all_reduce
    model = nn.parallel.DistributedDataParallel(Net(device, slow))
    model.register_comm_hook(None, exchange(device, getattr(reduce, "__wrapped__", reduce)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step, batch in enumerate(torch.utils.data.DataLoader(Batches(device, slow, steps))):
        loss = model(batch).mean()
        loss.backward()
        device.wait(MS)
        device.launch(OPTIMIZER_MS * MS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        dist.all_reduce(loss.detach().clone())  # a mean for the log
        after(step)
    return [*losses, *torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()]


def attached(device: FakeDevice) -> tuple[RankAgent, Wire]:
    """Return an agent whose rows are by the host's clock of `device` until it begins, and its relay."""
    relay = Wire()
    agent = RankAgent(Settings(session="s"), relay)  # type: ignore[arg-type]
    agents.append(agent)
    recorder = agent.recorder
    recorder.clock = device
    recorder.stamp_with(device)
    recorder.steps.forget(device.now)
    agent.instrumentation.install()
    recorder.exchange.couple(STREAMED)
    return agent, relay


def watched(device: FakeDevice, slow: str, also: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Train with an agent that reads the device's clock from the third step on; return what it has sent."""
    agent, relay = attached(device)

    def after(step: int) -> None:
        if step == 1:
            agent.guard("begin", lambda: agent.device.begin(device))
        if step % 4 == 3:
            agent.tick()
        also(step)

    results = train(device, slow, after)
    device.wait(10_000 * MS)
    agent.instrumentation.remove()
    calls = device.calls["record"]
    train(FakeDevice(), "", steps=3)
    assert device.calls["record"] == calls
    agent.tick(final=True)
    last = relay.taken[-1]
    rows = [row for batch in relay.taken for row in rows_of(batch)]
    books = {
        "missing": last.missing,
        "errors": last.errors,
        "produced": last.produced,
        "dropped": last.dropped,
    }
    return {"results": results, "rows": rows, "calls": dict(device.calls), **books}


def rows_of(batch: wire.RankBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch."""
    size, none = 8 * N_STAGES, bytes(3 * len(batch.flags))
    hosts, leads = batch.host_rows or batch.rows, batch.leads or none
    return [
        {
            "key": struct.unpack_from("<q", batch.keys, 8 * i)[0],
            "flags": batch.flags[i],
            "row": struct.unpack_from(f"<{N_STAGES}q", batch.rows, size * i),
            "host": struct.unpack_from(f"<{N_STAGES}q", hosts, size * i),
            "leads": tuple(leads[3 * i : 3 * i + 3]),
        }
        for i in range(len(batch.flags))
    ]


def failing(name: str, nth: int) -> FakeDevice:
    device = FakeDevice()
    device.fails = lambda called, count: called == name and count == nth
    return device


def capturing(nth: int) -> FakeDevice:
    device = FakeDevice()
    device.captures = lambda count: count % 60 == nth
    return device


def delayed() -> FakeDevice:
    device = FakeDevice()
    device.record_takes_ns = lambda count: 3 * MS if count % 5 == 0 else 0
    device.late_ns = lambda count: 0 if count % 3 else 20 * MS
    return device


def during(name: str, happens: Callable[[FakeDevice], None]) -> FakeDevice:
    """Return a device in some of whose calls of that name something happens."""
    device = FakeDevice()
    device.during = lambda called, count: happens(device) if called == name and count in TRIED else None
    return device


def delay(device: FakeDevice) -> None:
    device.wait(30 * MS)


def capture(device: FakeDevice) -> None:
    """The script begins to capture a graph, and goes on for some marks."""
    first = device.calls["capturing"]
    device.captures = lambda count: count - first < 9


def fork(device: FakeDevice) -> None:
    """A child of a DataLoader, say: it leaves the patches, as any child does, fetches, and ends."""
    child = forked()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            agents[-1].instrumentation.remove()
            asked = device.calls.total()
            list(torch.utils.data.DataLoader(Batches(FakeDevice(), "")))
            status = int(device.calls.total() != asked)
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def forked() -> int:
    """
    Fork; a child that Python holds up before its first line is killed, and another one made.

    Until Python 3.12 a child waits forever for the lock of the list of threads, where a native thread
    (gloo's) has held it when its parent forked: one time in some hundred here, with and without an agent.
    """
    while True:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"up")
            return 0
        came = select.select([read], [], [], 2)[0]
        os.close(read)
        os.close(write)
        if came:
            return child
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def gone(step: int) -> None:
    """The relay is killed, and comes anew."""
    Wire.gone = 8 < step < 18


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results: dict[str, Any] = {"bare": {"results": train(FakeDevice(), "")}}
    for slow in ("", "data", "forward", "backward"):
        results[f"slow {slow}"] = watched(FakeDevice(), slow if rank else "")
    for name in CALLS:
        for nth in (1, 2, 7, 40):
            results[f"error {name} {nth}"] = watched(failing(name, nth), "")
    for nth in range(6):
        results[f"capture {nth}"] = watched(capturing(nth * 10), "")
    results["delayed"] = watched(delayed(), "")
    for name in CALLS:
        for happens in (delay, capture, fork):
            results[f"{happens.__name__} in {name}"] = watched(during(name, happens), "")
    results["relay gone"] = watched(FakeDevice(), "", gone)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
