"""A device simulated in real time, one in each rank. `planted.py` and the chaos suite compute on it."""

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
    """The simulated device of the tests, on the clock of this machine: hosts that wait for it really wait."""

    @property
    def now(self) -> int:
        """Return the CPU's time in ns. It is the same for all ranks of a machine."""
        return time.perf_counter_ns()

    @now.setter
    def now(self, _: int) -> None:
        """Ignore: time advances by itself."""

    def wait(self, ns: int) -> None:
        """Let the host do something else for `ns` ns."""
        time.sleep(ns / 1e9)

    def item(self) -> None:
        """Make the host wait for the current stream."""
        time.sleep(max(0, self.ends[self.stream] - self.now) / 1e9)


def measure(device: PlayedDevice) -> None:
    """Make the agent of this process read rows from `device`, as from a real device."""

    def consider(use: Any) -> None:
        use._recorder.exchange.couple(STREAMED)
        if not use._recorder.steps.rows.first:
            use.begin(device)

    DeviceUse._consider = consider  # type: ignore[method-assign]


def exchange_on(device: PlayedDevice, model: DistributedDataParallel) -> None:
    """Exchange gradients when the last rank's device has reached the exchange. Compute streams wait."""
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
