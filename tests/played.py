"""A session with a planted fault, played into a real aggregator. Pages and browsers show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from sessions import MS, SECOND, Clock, Rank, Relay, aggregation

from traceml_ray.dash_app.route import Route
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.nodes.records import GpuProcess, GpuSample, NodeSample
from traceml_ray.signals.throughput.records import StepWork
from traceml_ray.stages import (
    DATA,
    FLAG_DEVICE_CLOCK,
    FLAG_EXCLUDED,
    FLAG_INSEPARABLE,
    FORWARD,
    LEAD_BYTES,
    N_STAGES,
    POST_SYNC,
    SYNC_WAIT,
)
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import SourceError
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

QUIET = (1.0, 2.0, 0.5, 6.0, 9.0, 1.5)
"""Stage times of a balanced step in ms: post_sync, data, prepare, forward, backward, sync_wait."""


HOST = (0.4, 0.2, 0.1, 2.0, 3.0, 0.1)
"""Stage times in ms of the host of a device in such a step."""
LATE, FULL, SURE = range(LEAD_BYTES)


def look(pages: SessionPages, page: str, **selection: Any) -> dict[str, Any]:
    """Return what a page shows. `selection` is as in the URL of the page."""
    key = str(selection.pop(page, ""))
    if page == "cell":
        key = msgspec.json.encode({name: selection.pop(name) for name in ("ranks", "first", "last")}).decode()
    route = Route(page, key, tuple((name, str(value)) for name, value in selection.items()))
    return pages.header(route) if page == "header" else pages.view(route)


class PlayedSource:
    """A source that asks an aggregator in this process. `down`: it does not answer."""

    stored, starting = False, None

    def __init__(self, aggregator: AggregatorCore) -> None:
        self.target = aggregator.folder.name
        self.out = str(aggregator.folder.path.parent)
        self.aggregator = aggregator
        self.down = False
        self.asked = 0

    def reply(self, message: bytes) -> bytes:
        self.asked += 1
        if self.down:
            raise SourceError(f"session {self.target!r} did not answer in time")
        return self.aggregator.query(message)

    def close(self) -> None: ...


class Played:
    """
    A played session of `world` ranks, `per_node` on each node, in the session folder `folder`. From step
    `onset` on, rank `late` takes `late_ms` more in `stage`, and the others wait for it. All times have noise
    of `jitter_ms`. `device`: the rows are from a device, whose host takes the times of HOST and is late when
    the rank is.
    """

    def __init__(
        self,
        folder: Path,
        world: int = 8,
        *,
        per_node: int = 4,
        late: int | None = 5,
        stage: int = DATA,
        late_ms: float = 12.0,
        onset: int = 100,
        jitter_ms: float = 0.3,
        gpus: int = 2,
        clock: Clock | None = None,
        seed: int = 0,
        device: bool = False,
        **who: Any,
    ) -> None:
        self.clock = clock or Clock()
        self.aggregator = aggregation(folder, self.clock, world_size=world, nnodes=-(-world // per_node))
        self.folder = folder
        self.source = PlayedSource(self.aggregator)
        self.world, self.late, self.stage, self.onset = world, late, stage, onset
        self._late_ms, self._jitter, self._gpus = late_ms, jitter_ms, gpus
        self._rng = np.random.default_rng(seed)
        self._who, self._per_node, self._device = who, per_node, device
        self.clock_from = 0
        """First step whose rows have times of the device."""
        self.every = 1
        """From `clock_from` on, one step in every `every` steps has times of the device."""
        self.leaks: dict[int, int] = {}
        """Bytes that a rank allocates each second and keeps, by rank."""
        self.memory_s = 1
        """Interval of memory samples, in s. Judging these samples is half of the cost of a second."""
        self._seconds = 0
        self._held: dict[int, list[bytes]] = {}
        self.begin()

    def begin(self, **who: Any) -> None:
        """
        Start new processes for all ranks, from step 0. `who`: fields of their identity (attempt,
        job_id, …).
        """
        who = {**self._who, **who}
        self.step = 0
        self.ranks = [Rank(rank, self.world, per_node=self._per_node, **who) for rank in range(self.world)]
        for rank in self.ranks:
            node = f"node-{rank.identity.node_rank}"
            rank.identity = msgspec.structs.replace(rank.identity, node_id=node)
        name = "".join(str(value) for value in who.values())
        self.relays = [Relay(n, f"relay-{n}-{name}") for n in range(-(-self.world // self._per_node))]

    def rows(self, n: int) -> np.ndarray:
        """Return the next `n` steps of all ranks, int64 ns (world, n, 6). All ranks leave a step together."""
        local = np.array(QUIET) + self._rng.uniform(0, self._jitter, (self.world, n, N_STAGES))
        if self.late is not None:
            from_here = np.arange(self.step, self.step + n) >= self.onset
            local[self.late, from_here, self.stage] += self._late_ms
        busy = local[:, :, :SYNC_WAIT].sum(axis=2)
        local[:, :, SYNC_WAIT] = busy.max(axis=0) - busy + QUIET[SYNC_WAIT]
        return (local * MS).astype("<i8")

    def play(
        self,
        steps: int = 5,
        *,
        silent: tuple[int, ...] = (),
        lost: tuple[int, ...] = (),
        late: tuple[int, ...] = (),
        commit: bool = True,
        judge: bool = True,
        **fields: Any,
    ) -> None:
        """
        Play one second: `steps` steps of all ranks except `silent` ones, a sample of each node, and a
        judgement, which is the expensive part. Rows of `lost` ranks are dropped. Messages of `late` ranks
        arrive in a later second.
        """
        self.clock.tick()
        self._seconds += 1
        rows = self.rows(steps)
        for node, relay in enumerate(self.relays):
            batches = []
            for rank in self.ranks:
                number = rank.identity.global_rank
                if rank.identity.node_rank == node and number not in silent:
                    held = self._held.setdefault(number, [])
                    held.append(self._batch(rank, rows[number], **fields, **self.of_rank(number)))
                    batches += held if number not in (*lost, *late) else []
                    if number not in late:
                        held.clear()
            self.aggregator.ingest(relay.message(*batches, node=[self._sample(node)]))
        self.step += steps
        if commit:
            assert self.aggregator.commit()
        if judge:
            self.aggregator.judge()

    def dies(self, rank: int, exit_code: int, message: str = "") -> None:
        """End the process of a rank. Its relay sees that; `message` is the exception that the rank raised."""
        self.clock.tick()
        who, relay = self.ranks[rank], self.relays[rank // self._per_node]
        error = {"traceback": f'  File "train.py", line 7, in step\n{message}'}
        events = [wire.Event("exception", self.clock(), self.step, FORWARD, message, error)][: bool(message)]
        data = {"process_id": who.process_id, "exit_code": exit_code}
        ended = wire.Event("process_ended", self.clock(), data=data)
        batch = who.batch(0, open=wire.OpenStage(self.step, FORWARD, MS), events=events)
        self.aggregator.ingest(relay.message(batch, lost=[who.process_id], events=[ended]))
        self.aggregator.commit()
        self.aggregator.judge()

    def end(self, exit_code: int = 0) -> None:
        """Let all ranks send their final message, and end the session."""
        for node, relay in enumerate(self.relays):
            ranks = [rank for rank in self.ranks if rank.identity.node_rank == node]
            self.aggregator.ingest(relay.message(*(rank.batch(0, final=True) for rank in ranks)))
        self.aggregator.finish(wire.Finish(codec.VERSION, exit_code))

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return the fields that only this rank sends."""
        return {}

    def _batch(self, rank: Rank, rows: np.ndarray, **fields: Any) -> bytes:
        n, last, s = len(rows), self.step + len(rows) - 1, self._seconds
        usual: dict[str, Any] = {
            "process": wire.ProcessSample(self.clock(), 95.0, (900 + 5 * s) << 20, 24, 1 << 20, s << 21),
            "memory": self._memory(rank),
            "memory_from": {"rss_bytes": "kernel", "limit_bytes": "kernel", "limit_used_bytes": "kernel"},
            "open": wire.OpenStage(last + 1, FORWARD, 2 * MS),
            "spans": [wire.SpanSum("optimizer", POST_SYNC, n, n * MS // 2, MS, self.step, last)],
            "overhead": wire.Overhead(5_000 * (last + 1), 2 * MS * s, SECOND * s, 900 * s),
            "strategy": "ddp",
            "work": [StepWork(self.step, last, n, n, 4 * n, 256 * n, device="NVIDIA H200")] if n else [],
        }
        beside = self._beside(rank, rows) if self._device else {}
        return rank.batch(n, rows=rows.tobytes(), **{**usual, **beside, **fields})

    def _memory(self, rank: Rank) -> list[MemorySample]:
        s, device = self._seconds, rank.identity.local_rank if self._gpus else None
        host = {"rss_bytes": 1400 << 20, "limit_bytes": 512 << 30, "limit_used_bytes": 200 << 30}
        if s % self.memory_s:
            return []
        if device is not None:
            kept = s * self.leaks.get(rank.identity.global_rank, 0)
            host |= {"allocated_bytes": (40 << 30) + kept, "reserved_bytes": (50 << 30) + kept}
            host["process_bytes"] = host["reserved_bytes"] + (2 << 30)
            host |= {"device_used_bytes": 60 << 30, "device_total_bytes": 140 << 30}
        return [MemorySample(self.clock(), self.step, device, **host)]

    def _beside(self, rank: Rank, rows: np.ndarray) -> dict[str, Any]:
        """Return what a rank with a device clock sends in addition to its rows: host rows and leads."""
        n, number = len(rows), rank.identity.global_rank
        host = np.tile((np.array(HOST) * MS).astype("<i8"), (n, 1))
        leads = np.zeros((n, LEAD_BYTES), np.uint8)
        leads[:, SURE] = (1 << SYNC_WAIT) - 1
        if number == self.late:
            late = np.arange(self.step, self.step + n) >= self.onset
            host[late, self.stage] = rows[late, self.stage]
            leads[late, LATE], leads[late, SURE] = 1 << self.stage, 0
        flags = np.full(n, FLAG_DEVICE_CLOCK, np.uint8)
        flags[: not rank.produced] |= FLAG_EXCLUDED
        flags[np.arange(self.step, self.step + n) % self.every != 0] = FLAG_INSEPARABLE
        if self.step < self.clock_from:
            flags = flags & FLAG_EXCLUDED | FLAG_INSEPARABLE
            return {"flags": flags.tobytes()}
        return {"host_rows": host.tobytes(), "leads": leads.tobytes(), "flags": flags.tobytes()}

    def _sample(self, node: int) -> NodeSample:
        n, first = self._seconds, self.ranks[node * self._per_node].identity.pid
        gpus = [
            GpuSample(
                gpu, "NVIDIA H200", 88.0 + gpu, 60 << 30, 140 << 30, 600.0 + 5 * node, 700.0, 61.0, 1900.0,
                1980.0, ["sw_power_cap"] if node else [], 0, n << 28, n << 27, n << 30, n << 30,
                [GpuProcess(first + gpu, 60 << 30)] if n % 5 == 0 else None,
            )
            for gpu in range(self._gpus)
        ]  # fmt: skip
        return NodeSample(
            self.clock(), 40.0 + 10 * node, 96, 21.0, 200 << 30, 512 << 30, n << 26, n << 24, n << 27,
            n << 27, gpus or None, 0, 0.01, 0.0, 0.02, 0,
        )  # fmt: skip


def session_of(played: Played) -> SessionPoll:
    """Return a poller of the session, which has asked once."""
    session = SessionPoll(played.source, clock=played.clock, timer=played.clock.timer)
    session.poll()
    return session


def played_to_end(
    folder: Path, world: int = 4, *, kind: type[Played] = Played, seconds: int = 8, **given: Any
) -> str:
    """Play a session of 10 steps a second with nobody late to its end; return its name."""
    job = kind(folder, world, onset=0, **{"late": None, "gpus": 0, **given})
    for _ in range(seconds):
        job.play(10)
    job.end()
    job.aggregator.close()
    return folder.name
