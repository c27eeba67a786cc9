"""
What the monitor costs the run that it watches, compared with the budgets.

    python benchmarks/overhead.py [--quick] [--only PART] [--markdown]

    step    a step of 20 to 30 ms, the monitor attached and detached every few steps
    marks   time on the training thread, alone and under DDP
    agent   CPU of the agent's thread, bytes on the wire
    memory  one sample of the process's memory

`startup.py` measures the cost of a whole launch.

A small machine is noisy. So everything is measured in adjacent pairs, in random order, and the median of the
pairs counts. Nothing else should run meanwhile. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from figures import Figure, machine, publish_figures, table

from traceml_ray.agent import bootstrap
from traceml_ray.agent.channel import SocketChannel
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.errors import Errors
from traceml_ray.monitor.relay import RelayCore
from traceml_ray.settings import Settings
from traceml_ray.signals.memory.samplers import USS_S, HostMemory, MemorySampler
from traceml_ray.signals.output.tap import OutputTap
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import TracePart, TraceReply

EXAMPLES = Path(__file__).parents[1] / "examples"
STRETCH = 5
"""Number of steps between attaching and detaching."""
BLOCK = 100
"""Number of steps of the tiny model that are timed together."""
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


class Middle(NamedTuple):
    """A median and its bootstrap 95 % interval."""

    value: float
    low: float
    high: float


def medians(values: list[float], rounds: int = 2000) -> Any:
    """Return an array: the median of `values`, then those of `rounds` resamples of them (bootstrap)."""
    import numpy as np

    array = np.asarray(values)
    chosen = np.random.default_rng().choice(array, (rounds, len(array)))
    return np.concatenate([[np.median(array)], np.median(chosen, axis=1)])


def middle(values: Any) -> Middle:
    """Return the median from `medians`, with the interval of 95 % of the resamples."""
    import numpy as np

    low, high = np.percentile(values[1:], (2.5, 97.5))
    return Middle(float(values[0]), float(low), float(high))


# -- a relay of its own --------------------------------------------------------------------------


class Confirms:
    """An aggregator that confirms everything as stored. It is the transport and the sampler of the relay."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self._replies: list[bytes | Exception] = []
        self._parts: list[bytes | Exception] = []

    def ingest(self, data: bytes, commit: bool) -> bool:
        """Confirm a RelayBatch."""
        batch = codec.decode(data, wire.RelayBatch)
        self._replies.append(codec.encode(wire.RelayReply(codec.VERSION, batch.seq)))
        return True

    def finish(self, data: bytes) -> bool:
        """Refuse: this session does not end."""
        return False

    def send_part(self, data: bytes) -> bool:
        """Accept a part of a trace."""
        part = codec.decode(data, TracePart)
        more = part.offset + len(part.data) < part.total_bytes
        there = part.offset + len(part.data) if more else None
        self._parts.append(codec.encode(TraceReply(codec.VERSION, there)))
        return True

    def part_replies(self, timeout_s: float) -> list[bytes | Exception]:
        """Return how much of the trace has arrived."""
        replies, self._parts = self._parts, []
        return replies

    def poll(self) -> list[bytes | Exception]:
        """Return the confirmations."""
        replies, self._replies = self._replies, []
        return replies

    def stop(self) -> None:
        """Nothing to stop."""

    def latest(self) -> None:
        """Sample nothing."""


def serve(path: str) -> None:
    """Run as the relay at `path` until this process is ended."""
    node = wire.NodeIdentity("bench", socket.gethostname(), "127.0.0.1")
    confirms = Confirms()
    relay = RelayCore(Path(path), node, confirms, confirms, Settings())
    while True:
        relay.poll(0.25)


@contextlib.contextmanager
def relay_process() -> Iterator[str]:
    """Run a relay in a separate process; yields the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        path = f"{folder}/relay.sock"
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(path,), daemon=True)
        process.start()
        try:
            until(lambda: Path(path).exists(), "the relay listens", 30)
            yield path
        finally:
            process.terminate()
            process.join()


def until(done: Callable[[], Any], what: str, seconds: float) -> Any:
    """Wait until `done()` is true and return it; RuntimeError after `seconds`."""
    end = time.monotonic() + seconds
    while not (result := done()):
        if time.monotonic() > end:
            raise RuntimeError(f"waited {seconds:g} s in vain until {what}")
        time.sleep(0.005)
    return result


# -- training loops ------------------------------------------------------------------------------


class Training:
    """A loop that can run a few steps at a time. The model is the root module of the loop."""

    def __init__(self, model: Any, loader: Any, loss: Callable[[Any, Any], Any], optimizer: Any) -> None:
        self.model = model
        self._loader = loader
        self._loss = loss
        self._optimizer = optimizer(model.parameters(), lr=1e-3)
        self._batches = iter(loader)
        gc.collect()
        gc.freeze()  # otherwise each collection in `settle_down` would scan all of torch

    def run(self, steps: int) -> None:
        """Train for `steps` steps."""
        for _ in range(steps):
            batch = next(self._batches, None)
            if batch is None:
                self._batches = iter(self._loader)
                batch = next(self._batches)
            self._loss(self.model, batch).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def seconds(self, steps: int) -> float:
        """Time `steps` steps."""
        began = time.perf_counter()
        self.run(steps)
        return time.perf_counter() - began


def settle_down(training: Training) -> None:
    """
    Collect garbage after patches were applied or removed, because that is not part of their cost.

    Patches are new objects when applied and garbage when removed, which moves collections into one stretch or
    the other. In stretches of 0.1 s that showed as 0.5 %.
    """
    gc.collect()
    training.run(2)


def gpt_training() -> Training:
    """Return the loop of the example, in one process, with steps of 20 to 30 ms."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    import train_gpt  # type: ignore[import-not-found]
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    text = train_gpt.read_corpus()
    for batch_size in itertools.count(4, 2):
        model = train_gpt.GPT(layers=3, heads=4, width=96, context=64)
        loader = DataLoader(train_gpt.Windows(text, 64), batch_size, shuffle=True)
        training = Training(model, loader, loss, torch.optim.AdamW)
        training.run(10)
        if statistics.median(training.seconds(1) for _ in range(20)) > 0.022:
            return training
    raise AssertionError


def tiny_training(wrap: Callable[[Any], Any] = lambda model: model) -> Training:
    """Return a loop whose step takes 0.1 ms, so that a microsecond is visible."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    loader = DataLoader(TensorDataset(torch.randn(50_000, 64)), batch_size=2)
    return Training(wrap(model), loader, lambda model, batch: model(batch[0]).mean(), torch.optim.SGD)


# -- the parts -----------------------------------------------------------------------------------


def measure_step(quick: bool) -> list[Figure]:
    """
    Measure the share of a step that the whole monitor takes.

    The agent exists all the time; its patches are applied and removed. Its polls are not driven by the clock:
    then they would fall into detached stretches, or into too few stretches to affect a median. Instead, every
    third attached stretch begins with a poll, and its cost is weighted as one poll a second.
    """
    training = gpt_training()
    ratios: dict[bool, list[float]] = {True: [], False: []}
    bare = []
    with relay_process() as path:
        agent = RankAgent(Settings(session="bench"), SocketChannel(path))
        due = threading.Semaphore(0)

        def rounds() -> None:
            while True:
                due.acquire()
                agent.tick()

        threading.Thread(target=rounds, daemon=True).start()
        due.release()  # the first poll connects and looks everything up
        for pair in range(12 if quick else 600):
            taken, with_round = {}, pair % 3 == 0
            for attached in random.sample((True, False), 2):
                if attached:
                    agent.instrumentation.install()
                    agent.instrumentation.roots.add(training.model)
                settle_down(training)
                if attached and with_round:
                    due.release()
                taken[attached] = training.seconds(STRETCH)
                if attached:
                    agent.instrumentation.remove()
            ratios[with_round].append(100 * (taken[True] / taken[False] - 1))
            bare.append(taken[False])
        check(agent.instrumentation)
        agent.channel.close()
    stretch = statistics.median(bare)
    often = stretch / agent.settings.interval
    marks, rounds_too = medians(ratios[False]), medians(ratios[True])
    share = middle(marks + often * (rounds_too - marks))
    return [
        Figure("step", "step without monitor", f"{stretch / STRETCH * 1e3:.1f} ms"),
        Figure("step", f"added, median of {len(bare)} pairs", f"{share.value:+.2f} %", "≤ 0.2 %"),
        Figure("step", "its 95 % interval", f"{share.low:+.2f} … {share.high:+.2f} %", "within ± 0.5 %"),
        Figure("step", "of that the marks", f"{marks[0]:+.2f} %"),
    ]


def check(instrumentation: Instrumentation) -> None:
    """Raise RuntimeError if errors were swallowed or parts left out: then too little was measured."""
    if instrumentation.errors or instrumentation.missing:
        raise RuntimeError(f"not all there: {instrumentation.errors} {instrumentation.missing}")


def measure_marks(quick: bool) -> list[Figure]:
    """Measure what the patched functions add to a step with all six stages."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    blocks = 20 if quick else 600
    empty = empty_call_us()
    figures = [Figure("marks", "an empty Python call here", f"{1e3 * empty:.0f} ns")]
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        for what, wrap in (("", lambda model: model), (" (DDP)", DistributedDataParallel)):
            training = tiny_training(wrap)
            cost, bare = marks_us(training, blocks)
            figures += [
                Figure("marks", f"step without monitor{what}", f"{bare:.0f} µs"),
                Figure(
                    "marks",
                    f"added a step{what}",
                    f"{cost.value:.1f} µs ({cost.low:.1f} … {cost.high:.1f})",
                    "≤ 10 µs",
                ),
                Figure("marks", f"that is, in empty calls{what}", f"{cost.value / empty:.0f}"),
            ]
        dist.destroy_process_group()
    training = tiny_training()
    for patch, marks in PATCHES.items():
        cost, _ = marks_us(training, max(20, blocks // 4), patch)
        figures.append(Figure("marks", f"of that {patch}", f"{cost.value:.1f} µs for {marks} marks"))
    return figures


PATCHES = {"data": 3, "forward": 1, "backward": 3, "optimizer": 2}
"""The patches, and the number of marks each makes per step. The forward patch is on the root module."""


class Without(Patcher):
    """All patches except one."""

    left_out = ""

    def apply(self, name: str, patch: Callable[[], object]) -> None:
        """Apply a patch, unless it is the one to leave out."""
        if name != self.left_out:
            super().apply(name, patch)


def empty_call_us() -> float:
    """Time the call of a function that does nothing."""

    def empty() -> None:
        pass

    return 1e6 * min(timeit.repeat(empty, number=100_000, repeat=9)) / 100_000


def marks_us(training: Training, blocks: int, patch: str = "") -> tuple[Middle, float]:
    """
    Compare medians of blocks with and without patches. Return the µs added per step, and the µs of a step
    without.

    With the name of a `patch`, compare blocks with all patches and blocks with all patches except this one.
    """
    ring = StepRing(4 * BLOCK)
    recorder = Recorder(ring)
    if hasattr(training.model, "require_backward_grad_sync"):  # one rank has no peers: pretend that it has
        recorder.exchange.peers = lambda: bool(training.model.require_backward_grad_sync)
    patcher = Without()
    instrumentation = Instrumentation(recorder, patcher)
    training.run(4 * BLOCK)
    added, bare = [], []
    for _ in range(blocks):
        taken = {}
        for attached in random.sample((True, False), 2):
            patcher.left_out = "" if attached else patch
            if attached or patch:
                instrumentation.install()
                if attached or patch != "forward":
                    instrumentation.roots.add(training.model)
            settle_down(training)
            training.run(BLOCK)  # its specialised code, which new attributes of classes have undone
            taken[attached] = statistics.median(training.seconds(1) for _ in range(BLOCK))
            instrumentation.remove()
            rows = len(ring.drain(4 * BLOCK)[2])
            if attached and rows < BLOCK:
                raise RuntimeError(f"{rows} rows of {BLOCK} steps")
        added.append((taken[True] - taken[False]) * 1e6)
        bare.append(taken[False] * 1e6)
    check(instrumentation)
    return middle(medians(added)), statistics.median(bare)


class Tap:
    """The agent's channel, which also records what passes through it."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self.sent: list[bytes] = []

    def offer(self, data: bytes) -> bool:
        """Record what the channel accepts."""
        taken = self._channel.offer(data)
        if taken:
            self.sent.append(data)
        return taken

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on to the channel."""
        return getattr(self._channel, name)


def measure_agent(quick: bool) -> list[Figure]:
    """Measure an agent started as in a rank, next to loops of a given step time."""
    os.environ.update(RANK)
    figures = []
    training = tiny_training()
    for rate in (10, 40):
        with relay_process() as path:
            agent = bootstrap.start(Settings(session="bench"), channel=SocketChannel(path))
            assert agent is not None
            tap = Tap(agent.channel)  # type: ignore[arg-type]
            agent.channel = tap
            agent.instrumentation.roots.add(training.model)
            end = time.monotonic() + (3.5 if quick else 20.5)
            while time.monotonic() < end:
                training.run(1)
                time.sleep(1 / rate)
            check(agent.instrumentation)
            bootstrap.stop()
        # The first poll sends the identity and runs in a cold process; the last one is the end.
        batches = [codec.decode(data, wire.RankBatch) for data in tap.sent][1:-1]
        first, last = batches[0], batches[-1]
        begun, done = first.overhead, last.overhead
        assert begun is not None
        assert done is not None
        seconds = (done.agent_wall_ns - begun.agent_wall_ns) / 1e9
        steps = last.produced - first.produced
        cpu = (done.agent_cpu_ns - begun.agent_cpu_ns) / 1e9 / seconds
        sent = done.sent_bytes - begun.sent_bytes
        rate_label = f"at {rate} steps/s"
        figures += [
            Figure("agent", f"CPU {rate_label}", f"{100 * cpu:.2f} % of a core", "≤ 0.5 %"),
            Figure("agent", f"a step and rank {rate_label}", f"{sent / steps:.0f} B", "≤ 128 B"),
            Figure(
                "agent",
                f"a second and rank {rate_label}",
                f"{sent / seconds / 1e3:.2f} kB",
                "≤ 2 kB" * (rate == 10),
            ),
        ]
    return figures


def measure_memory(quick: bool) -> list[Figure]:
    """Measure a memory sample as the agent takes it in each poll, and the counts it makes now and then."""
    sampler, number = MemorySampler(), 200 if quick else 2000
    sampler.sample(0, 0)
    if sampler.missing:
        raise RuntimeError(f"not all there: {sampler.missing}")
    uss = HostMemory().uss
    cost = (
        1e6 * statistics.median(timeit.repeat(lambda: sampler.sample(0, 0), number=number, repeat=9)) / number
    )
    rare = 1e3 * statistics.median(timeit.repeat(uss, number=5, repeat=9)) / 5
    return [
        Figure("memory", "a sample, each second", f"{cost:.0f} µs", "≤ 100 µs"),
        Figure("memory", f"its count of unshared bytes, every {USS_S:g} s", f"{rare:.1f} ms"),
    ]


def measure_output(quick: bool) -> list[Figure]:
    """Measure a `print` of one line, line-buffered as on a terminal, with and without the tap."""
    number, pairs = 2_000 if quick else 20_000, 9 if quick else 41
    spent: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.NamedTemporaryFile("w", buffering=1) as file:
        before, sys.stdout = sys.stdout, file.file  # type: ignore[assignment]
        try:
            for tapped in [True, False] * pairs:
                tap = OutputTap(40 * tapped, Errors(), {})
                tap.install()
                took = timeit.timeit(lambda: print("step 1204 loss 0.3453"), number=number)
                spent[tapped].append(1e6 * took / number)
                tap.remove()
        finally:
            sys.stdout = before
    plain = statistics.median(spent[False])
    added = statistics.median(one - other for one, other in zip(spent[True], spent[False], strict=True))
    return [
        Figure("output", "a printed line without monitor", f"{plain:.2f} µs"),
        Figure("output", f"added, median of {pairs} pairs", f"{added:.2f} µs", "≤ 1 µs"),
    ]


# -- the table -----------------------------------------------------------------------------------

PARTS = {
    "step": measure_step,
    "marks": measure_marks,
    "agent": measure_agent,
    "memory": measure_memory,
    "output": measure_output,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a short run of one minute, as a check of the benchmark"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--markdown", action="store_true", help="print the section for RESULTS.md")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    where = machine()
    figures = []
    for name in args.only or PARTS:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        figures += PARTS[name](args.quick)
    print(where, table(figures, args.markdown), sep="\n\n")
    publish_figures("overhead", figures)


if __name__ == "__main__":
    main()
