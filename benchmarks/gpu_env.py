"""Shared by the sections of `gpu.py`: the device, real or played, and a training on it."""

from __future__ import annotations

import json
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from traceml_ray.agent.device import DeviceApi
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.errors import Errors
from traceml_ray.settings import Settings
from traceml_ray.stages import (
    FLAG_DEVICE_CLOCK,
    N_STAGES,
)
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

MS = 1_000_000
STEPS = 60
_CYCLES = 100_000_000
FORWARD_MS, BACKWARD_MS, OPTIMIZER_MS = 4.0, 8.0, 2.0


def figure(what: str, value: str, budget: str = "", good: bool = True) -> None:
    """Print one row of the table. If it is not `good`, it is a failure."""
    print(json.dumps([what, value if good else f"FAILED: {value}", budget]), flush=True)


def unseen(what: str, why: str) -> None:
    """Print that something cannot be seen here: neither a failure nor a confirmation."""
    figure(what, f"NOT SEEN: {why}")


class Keeper:
    """A relay that keeps the batches it receives."""

    generation = 1

    def __init__(self) -> None:
        self.errors = Errors()
        self.taken: list[wire.RankBatch] = []

    def offer(self, data: bytes) -> bool:
        """Keep a batch."""
        self.taken.append(codec.decode(data, wire.RankBatch))
        return True

    def replies(self) -> list[bytes]:
        """Confirm the batches received so far."""
        if not self.taken:
            return []
        last = self.taken[-1]
        return [codec.encode(wire.RankReply(codec.VERSION, last.process_id, last.seq, last.seq))]

    def close(self) -> None:
        """Nothing to close."""


class Real:
    """The CUDA device 0 of this machine."""

    name = "cuda"
    backend = "nccl"
    cuda = True
    tolerance = 0.05

    def __init__(self, lazy: bool = False) -> None:
        """With `lazy`, do nothing on the device yet: there may be none."""
        self.device = torch.device("cuda", 0)
        self._cycles = 0.0
        self._matrix: Tensor | None = None
        if not lazy:
            self._measure()

    def _measure(self) -> None:
        """Measure the number of cycles per ms, after the clocks of an idle device have risen."""
        torch.zeros(1, device=self.device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for attempt in range(40):
            before = self._cycles
            began.record()
            torch.cuda._sleep(_CYCLES)
            ended.record()
            torch.cuda.synchronize()
            self._cycles = _CYCLES / began.elapsed_time(ended)
            if attempt >= 10 and abs(self._cycles / before - 1) < 0.003:
                break

    clock = staticmethod(time.perf_counter_ns)

    def kernel(self, ms: float) -> None:
        """Keep the current stream busy for `ms` ms."""
        torch.cuda._sleep(int(ms * self._cycles))

    def host(self, ms: float) -> None:
        """Keep the host busy for `ms` ms."""
        end = time.perf_counter_ns() + ms * MS
        while time.perf_counter_ns() < end:
            pass

    def sync(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize()

    def visible(self) -> int:
        """Return how many devices this process may use."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def uuid(self) -> str:
        """Return the device's UUID as NVML writes it, without its prefix."""
        return str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-").lower()

    def hold(self, size: int) -> Tensor:
        """Return a tensor of `size` bytes on the device."""
        held = torch.ones(size, dtype=torch.uint8, device=self.device)
        self.sync()
        return held

    def seconds(self, seconds: int) -> int:
        """Return how long to run where a person would run for `seconds` seconds."""
        return seconds

    def heat(self) -> None:
        """Multiply matrices for some tens of ms."""
        if self._matrix is None:
            self._matrix = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)
        for _ in range(20):
            torch.mm(self._matrix, self._matrix)
        self.sync()

    def side(self, ms: float) -> Callable[[], None]:
        """Keep another stream busy. Return a function that makes the current stream wait for it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.kernel(ms)
        return lambda: torch.cuda.current_stream().wait_stream(stream)

    def api(self) -> DeviceApi:
        """Return the device API under test. Call it in a thread other than the script's."""
        from traceml_ray.agent.cuda import cuda_api

        return cuda_api(0)

    def start(self, agent: RankAgent) -> None:
        """Start the agent's thread, which finds the device by itself."""
        agent.start()

    def after(self, agent: RankAgent, step: int) -> None:
        """Leave reading to the agent's thread. It needs a moment after the first step."""
        if step == 1:
            time.sleep(0.5)

    def close(self, agent: RankAgent) -> None:
        """Send the remaining batches."""
        agent.close()


class Played:
    """The simulated device of the tests. It shows that these sections work."""

    name = "cpu"
    backend = "gloo"
    cuda = False
    tolerance = 0.01
    UUID = "8dd5cf6f-0000-4000-8000-00000000abcd"

    def __init__(self) -> None:
        import pynvml
        from fake_device import FakeDevice  # type: ignore[import-not-found]
        from played_nvml import Card, Library  # type: ignore[import-not-found]

        self.device = torch.device("cpu")
        self.fake = self.clock = FakeDevice()
        fields = dict.fromkeys((4, 138, 139, 197, 198), (3, 1))
        card = Card(processes=[(os.getpid(), 3 << 29)], fields=fields, uuid=f"GPU-{self.UUID}")
        pynvml._LoadNvmlLibrary = lambda: None
        pynvml._nvmlGetFunctionPointer = Library([card]).function

    def visible(self) -> int:
        """Return how many devices a process of this environment would have."""
        return int(os.environ.get("CUDA_VISIBLE_DEVICES") in ("0", f"GPU-{self.UUID}"))

    def uuid(self) -> str:
        """Return the UUID of the simulated card."""
        return self.UUID

    def hold(self, _: int) -> None:
        """Nothing to hold."""

    def seconds(self, _: int) -> int:
        """Return a short time: simulated work needs no waiting."""
        return 1

    def heat(self) -> None:
        """Launch something."""
        self.kernel(1)

    def kernel(self, ms: float) -> None:
        """Launch a kernel."""
        self.fake.launch(round(ms * MS))

    def host(self, ms: float) -> None:
        """Let time go by."""
        self.fake.wait(round(ms * MS))

    def sync(self) -> None:
        """Let the device come to its end."""
        self.fake.item()
        self.fake.wait(MS)

    def side(self, ms: float) -> Callable[[], None]:
        """Put work on another stream. Return a function that makes the current stream wait for it."""
        until = max(self.fake.ends[self.fake.stream], self.fake.now) + round(ms * MS)
        return lambda: self.fake.wait_for(until)

    def api(self) -> DeviceApi:
        """Return the played device."""
        api: DeviceApi = self.fake
        return api

    def start(self, agent: RankAgent) -> None:
        """Let the simulated host make the agent's marks."""
        agent.recorder.clock = self.fake
        agent.recorder.stamp_with(self.fake)
        agent.recorder.steps.forget(self.fake.now)

    def after(self, agent: RankAgent, step: int) -> None:
        """Do the work of the agent's thread."""
        if step == 1:
            agent.device.begin(self.fake)
        agent.tick()

    def close(self, agent: RankAgent) -> None:
        """Send the remaining batches."""
        agent.tick(final=True)


class Net(nn.Module):
    """Two layers between kernels of a known length."""

    def __init__(self, env: Any, added: dict[str, float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 1)
        self.env, self.added = env, added

    def forward(self, x: Tensor) -> Tensor:
        """Compute, and make backward compute for as long."""
        self.env.host(0.05)
        self.env.kernel(FORWARD_MS + self.added.get("forward", 0.0))
        hidden = self.first(x).relu()
        if hidden.requires_grad:
            hidden.register_hook(self._backward)
        return self.second(hidden).squeeze(-1)

    def _backward(self, _: Tensor) -> None:
        self.env.kernel(BACKWARD_MS + self.added.get("backward", 0.0))


class Batches(torch.utils.data.Dataset[Tensor]):
    """A data set whose samples take some time on the host."""

    def __init__(self, env: Any, ms: float) -> None:
        self.env, self.ms = env, ms

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Tensor:
        self.env.host(self.ms)
        return torch.full((16,), float(index % 5))


@contextmanager
def one_rank(backend: str) -> Iterator[None]:
    """Set up a job of one rank."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def train(
    env: Any,
    added: dict[str, float],
    after: Callable[[int], None],
    wrap: Callable[[nn.Module], nn.Module] = nn.Module.train,
    waits: str = "",
) -> list[float]:
    """Run STEPS steps. `waits`: where the host waits for the device. Return the losses."""
    model = wrap(Net(env, added).to(env.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step, batch in enumerate(torch.utils.data.DataLoader(Batches(env, 0.1 + added.get("data", 0.0)))):
        batch = batch.to(env.device, non_blocking=True)
        if "prepare" in added:
            env.kernel(added["prepare"])
        loss = model(batch).mean()
        loss.backward()
        env.kernel(OPTIMIZER_MS + added.get("post_sync", 0.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if waits == "step" or step % 8 == 7:
            env.sync()
        after(step)
    return [float(loss) for loss in losses]


def watched(env: Any, **options: Any) -> tuple[list[list[int]], RankAgent, list[float]]:
    """Train with an agent; return the rows on the device's clock."""
    relay = Keeper()
    settings = Settings(session="gpu", device_clock="1", interval=0.05)
    agent = RankAgent(settings, relay)  # type: ignore[arg-type]
    env.start(agent)
    agent.instrumentation.install()
    losses = train(env, options.pop("added", {}), lambda step: env.after(agent, step), **options)
    env.sync()
    agent.instrumentation.remove()
    env.close(agent)
    missing = relay.taken[-1].missing.get(wire.DEVICE_CLOCK)
    if missing:
        raise RuntimeError(missing)
    return rows_of(relay.taken), agent, losses


def rows_of(batches: list[wire.RankBatch]) -> list[list[int]]:
    """Return the rows on the device's clock, ns per stage."""
    rows = []
    for batch in batches:
        for i, flags in enumerate(batch.flags):
            row = struct.unpack_from(f"<{N_STAGES}q", batch.rows, 8 * N_STAGES * i)
            rows += [list(row)] * bool(flags & FLAG_DEVICE_CLOCK)
    return rows


def middle(rows: list[list[int]]) -> list[float]:
    """Return the median row, in ms, of all rows except the first."""
    if len(rows) < STEPS // 3:
        raise RuntimeError(f"{len(rows)} of {STEPS} rows are on the device's clock")
    return [statistics.median(row[stage] for row in rows[2:]) / MS for stage in range(N_STAGES)]
