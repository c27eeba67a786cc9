"""
Rows of ranks that queue work on a simulated device: what events at the marks would show.

Each rank has a host program, a bounded launch queue, a compute stream and a communication stream. A kernel
runs when the host has launched it and the stream is free. A bucket is exchanged when the last rank has
reached it. It slows the compute stream down from the moment when the rank's own communication kernel begins
to wait for it. All of this is max-plus algebra, computed for many windows of one job at once, with arrays of
shape (faults × seeds, ranks) in ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from traceml_ray.analysis.window import Window
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_DEVICE_CLOCK,
    FORWARD,
    POST_SYNC,
    PREPARE,
    SEGMENT_BITS,
    SYNC_WAIT,
)

LOCAL = 5
WARM = 40
"""Number of steps until the launch queues are as full as they get. No window contains these steps."""
SYNC_MS = 0.02
"""Shortest wait of the host for its device, in ms."""
FULL_MS = 0.05
LATE_MS, LATE_SHARE = 0.1, 0.05
"""A host is late if its lead is below the larger of these: LATE_MS, and LATE_SHARE of its median row."""


class Fault(NamedTuple):
    """
    A slowdown of `rank`: its `host` or `device` is slower in `stages`, by `ms` per step in each and by
    `times`.
    """

    rank: int
    where: str
    stages: tuple[int, ...]
    ms: float = 0.0
    times: float = 1.0


@dataclass(frozen=True)
class Job:
    """
    A job. `host` and `device` have the ms of (post_sync, data, prepare, forward, backward), and `kernels` the
    number of kernels of each. There is one exchange of `exchange_ms` in `buckets`.

    `slots`: size of the launch queue; events may take places in it or not. `waits`: where the host waits for
    its device: `loss` (before backward), `end` (after the optimizer), `scaler` (before the optimizer), `copy`
    (a blocking copy in prepare). `micro`: number of accumulated micro-batches. Noise applies to whole stages,
    as a share. In a share `tails` of the steps, a stage is `tail_times` as long. `spread`: lasting difference
    between ranks. `memory`: correlation of a host's noise from step to step.
    """

    host: tuple[float, ...] = (1, 1, 0, 3, 4)
    device: tuple[float, ...] = (4, 0, 0, 10, 20)
    kernels: tuple[int, ...] = (2, 0, 1, 5, 10)
    exchange_ms: float = 4.0
    buckets: int = 1
    ranks: int = 2
    slots: int = 196
    events_too: bool = True
    waits: frozenset[str] = frozenset()
    micro: int = 1
    contention: float = 0.15
    device_noise: float = 0.0
    host_noise: float = 0.0
    tails: float = 0.0
    tail_times: float = 4.0
    spread: float = 0.0
    memory: float = 0.0
    launch_ms: float = 0.0
    """Time that an idle stream takes to begin launched work, in ms."""
    syncs: int = 1
    """
    Number of micro-batches, evenly spread, that are followed by an exchange. Each gives one row
    (segment).
    """
    layers: int = 0
    """
    FSDP: number of layers whose parameters are gathered before the layer's forward and backward. Their
    gradients are reduced after backward. Each wait has marks. A third of the exchange belongs to each kind of
    collective.
    """
    sampled: int = 1
    """One step in every `sampled` steps has marks at its waits, and a row on the device's clock."""

    def holding(self, steps: float) -> Job:
        """Return the job with a launch queue that holds `steps` steps."""
        a_step = self.kernels[POST_SYNC] + self.micro * (sum(self.kernels[1:]) + 6 * self.events_too)
        return replace(self, slots=max(1, round(steps * a_step)))


class Marks(NamedTuple):
    """
    All marks, shape (steps, marks, windows, ranks): times at which host and device made them, and
    their cost.
    """

    host: np.ndarray
    device: np.ndarray
    took: np.ndarray
    stages: tuple[int, ...]
    """Stage that each mark closes."""


@dataclass
class _Streams:
    """The state of the streams of all ranks (W, R)."""

    job: Job
    shape: tuple[int, int]
    host: np.ndarray = field(init=False)
    compute: np.ndarray = field(init=False)
    exchange: np.ndarray = field(init=False)
    gather: np.ndarray = field(init=False)
    queue: deque[np.ndarray] = field(init=False)
    spins: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Times from which and until which the exchange of each bucket of this backward is on the device."""

    def __post_init__(self) -> None:
        self.host, self.compute, self.exchange, self.gather = (np.zeros(self.shape) for _ in range(4))
        self.queue = deque([np.zeros(self.shape)] * self.job.slots, maxlen=self.job.slots)

    def launch(self, work: np.ndarray) -> None:
        """The host waits for a place in the queue. The kernel runs when all kernels before it have run."""
        self.host = np.maximum(self.host, self.queue[0])
        start = np.maximum(self.host + self.job.launch_ms, self.compute)
        self.queue.append(start)
        self.compute = self._run(start, work)

    def _run(self, now: np.ndarray, work: np.ndarray) -> np.ndarray:
        """
        Return the end of a kernel that begins at `now`. It is slower while an exchange is on the
        device.
        """
        rate = 1 - self.job.contention
        for begin, end in self.spins:
            alone = np.minimum(work, np.maximum(begin - now, 0))
            now, work = now + alone, work - alone
            slow = np.minimum(work, np.maximum(end - now, 0) * rate)
            now, work = now + slow / rate, work - slow
        return now + work

    def mark(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """
        Record an event. Return the time on the host, the time on the device, and how long
        recording takes.
        """
        made = self.host
        if self.job.events_too:
            self.host = np.maximum(self.host, self.queue[0])
        self.compute = np.maximum(self.host + self.job.launch_ms, self.compute)
        if self.job.events_too:
            self.queue.append(self.compute)
        return made, self.compute, self.host - made

    def wait(self) -> None:
        self.host = np.maximum(self.host, self.compute) + SYNC_MS * (self.job.launch_ms > 0)

    def copy(self, work: np.ndarray) -> None:
        """The host waits until the copy is done."""
        self.host = self.compute = np.maximum(self.host, self.compute) + work

    def bucket(self, work: np.ndarray) -> None:
        """All ranks exchange the bucket when the last rank has reached it."""
        self.exchange = self.together(np.maximum(self.compute, self.exchange), work)

    def gathered(self, free: np.ndarray, work: np.ndarray) -> np.ndarray:
        """Return when the parameters of the next layer are there, gathered from `free` on."""
        self.gather = self.together(np.maximum(free, self.gather), work)
        return self.gather

    def together(self, since: np.ndarray, work: np.ndarray) -> np.ndarray:
        """Return the end of a collective that each rank can begin at `since`."""
        joins = np.maximum(self.host, since)
        done = joins.max(axis=1, keepdims=True) + work
        self.spins.append((joins, np.broadcast_to(done, joins.shape)))
        return self.spins[-1][1]

    def join(self) -> None:
        """The compute stream waits for all buckets."""
        self.compute = np.maximum(self.compute, self.exchange)
        self.spins.clear()


def marks_of(
    job: Job, faults: Sequence[Fault | None] = (None,), seeds: int = 1, steps: int = 50, seed: int = 0
) -> Marks:
    """Run `steps` steps of `job` with each of `faults`, `seeds` times each. All faults see the same noise."""
    rng = np.random.default_rng(seed)
    streams = _Streams(job, (len(faults) * seeds, job.ranks))
    noise = _noise(job, seeds, rng)
    all_marks: list[list[tuple[np.ndarray, ...]]] = []
    stages: list[int] = []
    for _ in range(WARM + steps):
        host, device, exchange = next(noise)
        host = _with(job, host, faults, "host")
        device = _with(job, device, faults, "device")
        made, stages = [], []
        for stage, mark in _step(job, streams, host, device, np.tile(exchange, (len(faults), 1))):
            made.append(mark)
            stages.append(stage)
        all_marks.append(made)
    kept = all_marks[WARM - 1 :]
    host_at, device_at, took = (
        np.array([[mark[column] for mark in made] for made in kept]) for column in range(3)
    )
    marks = Marks(host_at, device_at, took, tuple(stages))
    return marks if job.syncs == 1 else _by_segment(marks, job.syncs)


def _by_segment(marks: Marks, syncs: int) -> Marks:
    """
    Return marks of steps as marks of their segments. For the first step, only its last segment is
    returned.
    """
    per_sync = len(marks.stages) // syncs
    times = (
        times_of_marks.reshape(-1, per_sync, *times_of_marks.shape[2:])[syncs - 1 :]
        for times_of_marks in marks[:3]
    )
    return Marks(*times, marks.stages[:per_sync])


def _step(
    job: Job, streams: _Streams, host: np.ndarray, device: np.ndarray, exchange: np.ndarray
) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
    """Run one step of all ranks. Yields each mark with the stage that it closes."""

    def work(stage: int, after: int = 0, parts: int = 1) -> None:
        n = -(-job.kernels[stage] // parts)
        for layer in range(n):
            streams.host = streams.host + host[stage] / n / parts
            streams.launch(device[stage] / n / parts)
            if after and (layer + 1) * job.buckets // n > layer * job.buckets // n:
                streams.bucket(exchange / job.buckets)
        if not n:
            streams.host = streams.host + host[stage]

    if "scaler" in job.waits:
        streams.wait()
    work(POST_SYNC)
    if "end" in job.waits:
        streams.wait()
    for batch in range(job.micro):
        if batch:
            streams.host = streams.host + host[POST_SYNC] * 0.02
        yield POST_SYNC, streams.mark()
        work(DATA)
        yield DATA, streams.mark()
        if "copy" in job.waits:
            streams.host = streams.host + host[PREPARE]
            streams.copy(device[PREPARE])
        else:
            work(PREPARE)
        yield PREPARE, streams.mark()
        if job.layers:
            yield from _sharded(job, streams, work, exchange / job.syncs)
            continue
        work(FORWARD)
        if "loss" in job.waits:
            streams.wait()
        yield FORWARD, streams.mark()
        synced = (batch + 1) % (job.micro // job.syncs) == 0
        work(BACKWARD, after=synced)
        yield BACKWARD, streams.mark()
        if synced:
            streams.join()
        yield SYNC_WAIT, streams.mark()


def _sharded(
    job: Job, streams: _Streams, work: Callable[..., None], exchange: np.ndarray
) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
    """
    Forward and backward in which layers wait for their parameters, and for the reduction before
    the last one.
    """
    layers, exchange_ms = job.layers, exchange / (3 * job.layers)

    def waiting(stage: int, until: np.ndarray) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
        yield stage, streams.mark()
        streams.compute = np.maximum(streams.compute, until)
        yield SYNC_WAIT, streams.mark()

    ends = [streams.compute] * 2
    for _ in range(layers):
        yield from waiting(FORWARD, streams.gathered(ends[-2], exchange_ms))
        work(FORWARD, parts=layers)
        ends.append(streams.compute)
    if "loss" in job.waits:
        streams.wait()
    yield FORWARD, streams.mark()
    there = streams.gathered(ends[-2], exchange_ms)
    for layer in range(layers):
        yield from waiting(BACKWARD, there)
        if layer < layers - 1:
            there = streams.gathered(ends[-1], exchange_ms)
        work(BACKWARD, parts=layers)
        ends.append(streams.compute)
        before = streams.exchange
        streams.bucket(exchange_ms)
        yield from waiting(BACKWARD, before)
    yield BACKWARD, streams.mark()
    streams.join()
    yield SYNC_WAIT, streams.mark()


def _noise(
    job: Job, seeds: int, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the times of hosts (5, N, R), devices (5, N, R) and exchange (N, 1) in each step."""
    shape = (LOCAL, seeds, job.ranks)
    lasting = 1 + job.spread * rng.standard_normal((2, 1, seeds, job.ranks))
    host, device = (np.array(values, float)[:, None, None] / 1 for values in (job.host, job.device))
    share = np.ones((LOCAL, 1, 1))
    share[1:] /= job.micro
    before = np.zeros(shape)
    while True:
        fresh = rng.standard_normal(shape)
        before = job.memory * before + np.sqrt(1 - job.memory**2) * fresh
        tails = np.where(rng.random(shape) < job.tails, job.tail_times, 1.0)
        hosts = host * share * lasting[0] * np.maximum(1 + job.host_noise * before, 0.1) * tails
        devices = (
            device * share * lasting[1] * np.maximum(1 + job.device_noise * rng.standard_normal(shape), 0.1)
        )
        exchange = job.exchange_ms * np.maximum(1 + job.device_noise * rng.standard_normal((seeds, 1)), 0.1)
        yield hosts, devices, exchange


def _with(job: Job, taken: np.ndarray, faults: Sequence[Fault | None], where: str) -> np.ndarray:
    """Return (5, faults × N, R): the time of each stage of a micro-batch, with each of the faults."""
    every = np.tile(taken, (1, len(faults), 1))
    seeds = taken.shape[1]
    for number, fault in enumerate(faults):
        if fault is not None and fault.where == where:
            for stage in fault.stages:
                mine = every[stage, number * seeds : (number + 1) * seeds, fault.rank]
                mine *= fault.times
                mine += fault.ms / (1 if stage == POST_SYNC else job.micro)
    return every


def rows_of(marks: Marks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Return what ranks send of all steps except the first: `d` and `h` int64 ns (W, K, R, 6), `leads` uint8 (W,
    K, R, 3).
    """
    count = len(marks.stages)
    host, device, lead, took = (
        values.reshape(-1, *values.shape[2:])[count - 1 :]
        for values in (marks.host, marks.device, marks.device - marks.host, marks.took)
    )
    ns = [np.diff(np.rint(values * 1e6).astype(np.int64), axis=0) for values in (device, host)]
    steps = len(marks.host) - 1
    d, h = (np.zeros((6, steps, *values.shape[1:]), np.int64) for values in ns)
    ns = [values.reshape(steps, count, *values.shape[1:]) for values in ns]
    pieces = marks.stages.count(DATA)
    least = np.maximum(LATE_MS, LATE_SHARE / pieces * np.median(ns[0].sum(axis=1), axis=0) / 1e6)
    began, end, before, after = (
        values.reshape(steps, count, *values.shape[1:])
        for values in (lead[:-1], lead[1:], took[:-1], took[1:])
    )
    caught = np.zeros(d.shape, np.int64)
    masks = np.zeros((3, steps, *least.shape), np.uint8)
    masks[2] = (1 << 6) - 1
    for index, stage in enumerate(marks.stages):
        d[stage] += ns[0][:, index]
        h[stage] += ns[1][:, index]
        full = (before[:, index] > FULL_MS) | (after[:, index] > FULL_MS)
        caught[stage] += (ns[0][:, index] + 1) * ((began[:, index] < least) & (end[:, index] < least) & ~full)
        masks[1] |= full.astype(np.uint8) << stage
        masks[2] &= ~((began[:, index] * 1e6 <= ns[1][:, index]).astype(np.uint8) << stage)
    for stage in range(6):
        masks[0] |= (2 * caught[stage] >= d[stage] + marks.stages.count(stage)).astype(np.uint8) << stage
    return d.transpose(2, 1, 3, 0), h.transpose(2, 1, 3, 0), masks.transpose(2, 1, 3, 0)


def windows(
    job: Job, faults: Sequence[Fault | None] = (None,), seeds: int = 1, steps: int = 50, seed: int = 0
) -> list[list[Window]]:
    """Return the windows of each fault, one for each seed."""
    rows = rows_of(marks_of(job, faults, seeds, steps * job.sampled, seed))
    made = [
        _window(job, *(rows[:: job.sampled] for rows in seed_rows)) for seed_rows in zip(*rows, strict=True)
    ]
    return [made[begin : begin + seeds] for begin in range(0, len(made), seeds)]


def _window(job: Job, d: np.ndarray, host: np.ndarray, leads: np.ndarray) -> Window:
    rows, ranks, _ = d.shape
    rank_by_rank = [
        np.ascontiguousarray(values.transpose(1, 0, 2)).transpose(1, 0, 2) for values in (d, host, leads)
    ]
    steps, segments = np.divmod(np.arange(rows, dtype=np.int64), job.syncs)
    return Window(
        keys=(100 + job.sampled * steps << SEGMENT_BITS) + segments,
        ranks=np.arange(ranks, dtype=np.int64),
        nodes=tuple(f"node-{rank // 8}" for rank in range(ranks)),
        d=rank_by_rank[0],
        flags=np.full((rows, ranks), FLAG_DEVICE_CLOCK, np.uint8),
        expected=ranks,
        strategies=frozenset({"fsdp2" if job.layers else "ddp"}),
        host=rank_by_rank[1],
        leads=rank_by_rank[2],
    )
