"""A device that is played in real time, one in each rank; `planted.py` and the chaos suite compute on it."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from fake_device import FakeDevice  # type: ignore[import-not-found]

from traceml_ray.agent.device_use import DeviceUse
from traceml_ray.agent.steps import STREAMED

EXCHANGE_NS = 1_000_000


class PlayedDevice(FakeDevice):  # type: ignore[misc]
    """The device of the tests, on the clock of this machine: hosts that wait for it do wait."""

    @property
    def now(self) -> int:
        """The CPU's time, ns; that of all ranks of a machine."""
        return time.perf_counter_ns()

    @now.setter
    def now(self, _: int) -> None:
        """Time goes by itself."""

    def wait(self, ns: int) -> None:
        """The host does something else."""
        time.sleep(ns / 1e9)

    def item(self) -> None:
        """Have the host wait for the current stream."""
        time.sleep(max(0, self.ends[self.stream] - self.now) / 1e9)


def measure(device: PlayedDevice) -> None:
    """Have the agent of this process take its rows from `device`, as it takes those of a real one."""

    def consider(use: Any) -> None:
        use._recorder.exchange.couple(STREAMED)
        if not use._recorder.steps.rows.first:
            use.begin(device)

    DeviceUse._consider = consider  # type: ignore[method-assign]


def exchange_on(device: PlayedDevice, model: DistributedDataParallel) -> None:
    """Have gradients exchanged when the last rank's device has come to it; compute streams wait."""
    reduce = inspect.unwrap(dist.all_reduce)
    queue = Variable._execution_engine.queue_callback

    def hook(_: Any, bucket: Any) -> Any:
        arrival = torch.tensor([max(device.ends[device.stream], device.now)])
        joined = reduce(arrival, dist.ReduceOp.MAX, async_op=True).get_future()
        summed = reduce(bucket.buffer(), async_op=True).get_future()

        def wait() -> None:
            joined.wait()
            device.wait_for(int(arrival) + EXCHANGE_NS)

        queue(wait)
        mean: Callable[[Any], Any] = lambda done: done.value()[0] / dist.get_world_size()  # noqa: E731
        return summed.then(mean)

    hook.__annotations__.clear()  # DDP compares them with classes, not with their names
    model.register_comm_hook(None, hook)  # type: ignore[arg-type]
