"""
Training loops of every shape, for the tests of the agent: each is a function of a `Job`.

Run by `torch.distributed.run` with a folder as argument, this file goes through all of them and
leaves the rows of each in `<folder>/<loop>.<rank>.json`.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.stages import N_STAGES, SEGMENT_BITS

STEPS = 8
WIDTH = 16
SLOW_S = 0.015


class Pause:
    """
    The planted sleep: `SLOW_S`, or, up to four times that, as long as the step before took without it. On a
    machine that is busy with other things each stage takes a part of that longer or shorter, by chance.
    """

    def __init__(self) -> None:
        self._seconds = SLOW_S
        self._slept = 0.0
        self._stepped: float | None = None

    def __call__(self, share: float = 1.0) -> None:
        began = time.monotonic()
        time.sleep(share * self._seconds)
        self._slept += time.monotonic() - began

    def step(self) -> None:
        """A step is over."""
        now = time.monotonic()
        if self._stepped is not None:
            self._seconds = min(max(SLOW_S, now - self._stepped - self._slept), 4 * SLOW_S)
        self._stepped, self._slept = now, 0.0


class Slow:
    """Takes its time when it is pickled."""

    def __reduce__(self) -> Any:
        time.sleep(SLOW_S)
        return dict, ()


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int, slow_s: float = 0.0, pause: Pause | None = None) -> None:
        self.count, self.slow_s, self.pause = count, slow_s, pause

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if self.slow_s:
            time.sleep(self.slow_s)
        if self.pause is not None:
            self.pause(0.5)  # two make a batch
        return torch.full((WIDTH,), float(index % 7))


class Net(nn.Module):
    """Two layers; `slow` names where it sleeps in each step."""

    def __init__(self, slow: str = "", buffer: bool = False, pause: Pause | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.slow, self.pause = slow, pause or Pause()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        if buffer:
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.slow == "forward" and self.training:
            self.pause()
        hidden = self.first(x).relu()
        if self.slow == "backward" and hidden.requires_grad:
            hidden.register_hook(lambda _: self.pause())
        return self.second(hidden).squeeze(-1)


class Job:
    """One process of a loop: who it is, what is slow in it, and the marks it makes."""

    def __init__(self, slow: str = "", rank: int = 0, world: int = 1) -> None:
        self.slow, self.rank, self.world = slow, rank, world
        self.pause = Pause()
        self.nets: list[nn.Module] = []
        self.ring = StepRing(1024)
        self.recorder = Recorder(self.ring)
        self.instrumentation = Instrumentation(self.recorder, Patcher(debug=True))

    def model(self, **options: object) -> nn.Module:
        net = Net(self.slow, bool(options.pop("buffer", False)), self.pause)
        self.nets.append(net)
        if self.world == 1:
            return net
        return nn.parallel.DistributedDataParallel(net, **options)  # type: ignore[arg-type]

    def bare(self) -> nn.Module:
        self.nets.append(Net(self.slow, pause=self.pause))
        return self.nets[-1]

    def loader(self, count: int = STEPS, **options: object) -> DataLoader[Tensor]:
        options = {"batch_size": 2, **options}
        numbers = Numbers(count * 2, pause=self.pause if self.slow == "data" else None)
        return DataLoader(numbers, **options)  # type: ignore[arg-type]

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        if self.slow == "optimizer":
            self.pause()
        optimizer.step()
        optimizer.zero_grad()
        self.pause.step()

    def rows(self) -> list[dict[str, object]]:
        _, keys, flags, rows = self.ring.drain(10_000)
        return [
            {
                "step": key >> SEGMENT_BITS,
                "segment": key & 255,
                "flags": flags[i],
                "row": struct.unpack_from(f"<{N_STAGES}q", rows, 8 * N_STAGES * i),
            }
            for i in range(len(flags))
            for key in struct.unpack_from("<q", keys, 8 * i)
        ]


def plain(job: Job, **model_options: object) -> None:
    model = job.model(**model_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in job.loader():
        model(batch).mean().backward()
        job.finish(optimizer)


def buffers(job: Job) -> None:
    plain(job, buffer=True)


def unused_parameters(job: Job) -> None:
    plain(job, find_unused_parameters=True)


def static_graph(job: Job) -> None:
    plain(job, static_graph=True)


def bucket_view(job: Job) -> None:
    plain(job, gradient_as_bucket_view=True)


def accumulation(job: Job) -> None:
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(job.loader(3 * STEPS)):
        if number % 3 < 2 and isinstance(model, nn.parallel.DistributedDataParallel):
            with model.no_sync():
                model(batch).mean().backward()
        else:
            model(batch).mean().backward()
        if number % 3 == 2:
            job.finish(optimizer)


def two_optimizers(job: Job) -> None:
    model = job.model()
    halves = list(model.parameters())
    optimizers = [torch.optim.SGD(halves[:2], lr=0.01), torch.optim.AdamW(halves[2:])]
    for batch in job.loader():
        model(batch).mean().backward()
        job.finish(optimizers[0])
        optimizers[1].step()
        optimizers[1].zero_grad()


def scaler(job: Job) -> None:
    """GradScaler on CPU; every third step overflows and skips the optimizer."""
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, batch in enumerate(job.loader()):
        loss = model(batch).mean() * (float("inf") if number % 3 == 2 else 1.0)
        scaler.scale(loss).backward()
        if job.slow == "optimizer":
            time.sleep(SLOW_S)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def skipped(job: Job) -> None:
    """A hand-made scaler: some steps simply call no optimizer."""
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(job.loader()):
        model(batch).mean().backward()
        if number % 3 == 2:
            if job.slow == "optimizer":
                time.sleep(SLOW_S)
            optimizer.zero_grad()
        else:
            job.finish(optimizer)


def custom_iterator(job: Job) -> None:
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def batches() -> Iterator[Tensor]:
        for _ in range(STEPS):
            if job.slow == "data":
                time.sleep(SLOW_S)
            yield torch.ones(2, WIDTH)

    for batch in batches():
        model(batch).mean().backward()
        job.finish(optimizer)


def evaluation(job: Job) -> None:
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    validation = DataLoader(Numbers(8, 0.001), batch_size=2)
    for number, batch in enumerate(job.loader()):
        if number % 2 == 0:
            model.eval()
            with torch.no_grad():
                for other in validation:
                    model(other)
            model.train()
        model(batch).mean().backward()
        job.finish(optimizer)


def lightning(job: Job, accumulate: int = 1) -> None:
    """
    As Lightning's automatic optimisation goes: forward and backward run inside `optimizer.step(closure)`, and
    validation leaves the wrapper in eval mode.
    """
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    validation = DataLoader(Numbers(8, 0.001), batch_size=2)
    for number, batch in enumerate(job.loader(accumulate * STEPS), 1):
        last = number % accumulate == 0

        def closure(batch: Tensor = batch, last: bool = last) -> Tensor:
            loss = model(batch).mean()
            if last:
                optimizer.zero_grad()
            loss.backward()
            if last and job.slow == "optimizer":
                time.sleep(SLOW_S)
            return loss

        if last:
            optimizer.step(closure)
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            with model.no_sync():
                closure()
        else:
            closure()
        if number % (2 * accumulate) == 0:
            modes = [(module, module.training) for module in job.nets[-1].modules()]
            model.eval()
            with torch.inference_mode():
                for other in validation:
                    model(other)
            for module, training in modes:
                module.training = training


def lightning_accumulation(job: Job) -> None:
    lightning(job, accumulate=3)


def fork_workers(job: Job) -> None:
    _with_workers(job, "fork")


def spawn_workers(job: Job) -> None:
    _with_workers(job, "spawn")


def _with_workers(job: Job, method: str) -> None:
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in job.loader(num_workers=1, multiprocessing_context=method, prefetch_factor=1):
        model(batch).mean().backward()
        job.finish(optimizer)


def several_roots(job: Job) -> None:
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in job.loader():
        out = model(batch)
        torch.autograd.backward([out[0], torch.ones(()), out[1:].sum()][::2])
        job.finish(optimizer)


def non_reentrant_checkpoint(job: Job) -> None:
    _checkpointed(job, reentrant=False)


def reentrant_checkpoint(job: Job) -> None:
    _checkpointed(job, reentrant=True)


def _checkpointed(job: Job, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entry, self.inner = nn.Linear(WIDTH, WIDTH), Net(job.slow)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.entry(x), use_reentrant=reentrant)  # type: ignore[no-any-return]

    outer = Outer()
    job.nets.append(outer)
    model = outer if job.world == 1 else nn.parallel.DistributedDataParallel(outer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in job.loader():
        model(batch).mean().backward()
        job.finish(optimizer)


def gan(job: Job) -> None:
    maker, judge = job.model(), job.model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (maker, judge)]
    for batch in job.loader():
        judge(batch).mean().backward()
        job.finish(optimizers[1])
        fake = maker(batch)
        (-judge(fake[:, None].expand(-1, WIDTH))).mean().backward()
        job.finish(optimizers[0])


def lbfgs(job: Job) -> None:
    model = job.model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for batch in job.loader():

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def autograd_grad(job: Job) -> None:
    model = job.bare()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in job.loader():
        parameters = list(model.parameters())
        for parameter, grad in zip(
            parameters, torch.autograd.grad(model(batch).mean(), parameters), strict=True
        ):
            parameter.grad = grad
        job.finish(optimizer)


def direct_forward(job: Job) -> None:
    model = job.bare()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in job.loader():
        model.forward(batch).mean().backward()
        job.finish(optimizer)


def optimizer_in_backward(job: Job) -> None:
    model = job.model()
    for parameter in model.parameters():
        one = torch.optim.SGD([parameter], lr=0.01)
        parameter.register_post_accumulate_grad_hook(lambda _, one=one: one.step())  # type: ignore[misc]
    for batch in job.loader():
        model(batch).mean().backward()
        for parameter in model.parameters():
            parameter.grad = None


def in_a_thread(job: Job) -> None:
    thread = threading.Thread(target=plain, args=(job,))
    thread.start()
    thread.join()


def compiled_model(job: Job) -> None:
    net = job.model()
    # DDP itself cannot be compiled into one graph.
    model = torch.compile(net, fullgraph=job.world == 1, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in job.loader():
        model(batch).mean().backward()
        job.finish(optimizer)


def compiled_inside(job: Job) -> None:
    """DDP around the compiled module."""
    net = torch.compile(job.bare(), fullgraph=True, backend="eager")
    model = net if job.world == 1 else nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in job.loader():
        model(batch).mean().backward()
        job.finish(optimizer)


ATTRIBUTED: dict[str, Callable[[Job], None]] = {
    loop.__name__: loop
    for loop in (
        plain,
        accumulation,
        two_optimizers,
        scaler,
        skipped,
        custom_iterator,
        evaluation,
        lightning,
        lightning_accumulation,
        fork_workers,
        spawn_workers,
        several_roots,
        unused_parameters,
        static_graph,
        bucket_view,
        buffers,
        non_reentrant_checkpoint,
        in_a_thread,
    )
}
"""Loops whose slow stage must be found."""

UNBROKEN: dict[str, Callable[[Job], None]] = {
    loop.__name__: loop
    for loop in (
        gan,
        lbfgs,
        autograd_grad,
        direct_forward,
        optimizer_in_backward,
        reentrant_checkpoint,
        compiled_model,
        compiled_inside,
    )
}
"""Loops that must run as they do without us, and about which nothing untrue may be said."""


def run(name: str, slow: str = "", rank: int = 0, world: int = 1, *, watched: bool = True) -> Job:
    """Run one loop, instrumented or not."""
    job = Job(slow, rank, world)
    if watched:
        job.instrumentation.install()
    try:
        (ATTRIBUTED | UNBROKEN)[name](job)
    finally:
        job.instrumentation.remove()
    return job


def main(folder: Path) -> None:
    """Run every loop on this rank, with rank 1 slow in one stage after another."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name in ATTRIBUTED | UNBROKEN:
        if name == "spawn_workers":
            continue
        for slow in ("data", "forward", "backward", "optimizer") if name in ATTRIBUTED else ("data",):
            torch.distributed.barrier()
            job = run(name, slow if rank == 1 else "", rank, world)
            result = {"rows": job.rows(), "errors": job.instrumentation.errors}
            (folder / f"{name}.{slow}.{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
