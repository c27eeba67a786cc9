"""
The agent's thread: sends a rank's rows to the relay of its node.

Once per interval it drains the ring, samples the process, and offers one `RankBatch` to its channel. Batches
that are not confirmed as stored are kept up to a limit, and offered again to a new relay. Beyond the limit
the oldest batch is dropped, and counted if no relay has received it. Only `close` runs on the training
thread.

`ProcessSampler` samples the process cheaply. Versions and configuration are sent once, because they are
needed after the process has died.
"""

from __future__ import annotations

import functools
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from traceml_ray import __version__
from traceml_ray import identity as identities
from traceml_ray.agent import stacks
from traceml_ray.agent.activity import Activity
from traceml_ray.agent.capture import CaptureAgent
from traceml_ray.agent.channel import Channel
from traceml_ray.agent.device_use import DeviceUse
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.mark_log import LOCK_S
from traceml_ray.agent.outbox import Batch, BatchDraft, EarlyCopy, RankOutbox, Unsent
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.errors import sendable
from traceml_ray.identity import rank_filter
from traceml_ray.settings import Settings
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.collectors import COLLECTORS
from traceml_ray.signals.kinds import KINDS
from traceml_ray.trackers.run_writer import TrackerLog
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import ProcessSample

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_CHARS = 300


def environment() -> dict[str, str]:
    """
    Return versions of what this process has imported so far, and the configuration of torch's
    allocator.
    """
    values = {"traceml_ray": __version__, "python": platform.python_version()}
    if (torch := sys.modules.get("torch")) is not None:
        values["torch"] = str(torch.__version__)
        for name in ("cuda", "hip"):
            if version := getattr(torch.version, name, None):
                values[name] = str(version)
    if (ray := sys.modules.get("ray")) is not None:
        values["ray"] = str(getattr(ray, "__version__", ""))
    values |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {name: sendable(value)[:_CHARS] for name, value in values.items() if value}


class ProcessSampler:
    """Samples CPU, memory, threads and I/O of this process. A value that cannot be read is `None`."""

    def __init__(self) -> None:
        import psutil

        self._process: Any = psutil.Process()
        self._process.cpu_percent(None)  # the first call only sets the starting point

    def sample(self) -> ProcessSample:
        """Return one sample. Takes about 0.2 ms."""
        read = written = None
        with self._process.oneshot():
            cpu = self._process.cpu_percent(None)
            rss = self._process.memory_info().rss
            threads = self._process.num_threads()
            try:
                counters = self._process.io_counters()
                read, written = counters.read_bytes, counters.write_bytes
            except Exception:  # some containers do not allow reading it: the value is then null
                pass
        return ProcessSample(time.time_ns(), cpu, rss, threads, read, written)


MANY_RANKS = 256
"""From this number of ranks on an agent reports half as often, to limit what the aggregator receives."""
SAMPLE_S = 0.9
"""Time between two samples of the process, in s. A sample costs more than a batch."""
CLOSE_WAIT_S = 0.3
"""Longest time to wait at the end of the process for the relay to confirm the last batch, in s."""
CONFIRM_POLL_S = 0.005
SETTLE_S = 1.0
_CERTAIN = ("torch.distributed", "ray_train", "explicit")
"""Sources whose identity is final. Other sources are asked again."""
_T = TypeVar("_T")
_C = TypeVar("_C", bound=Collector)


def new_process_id() -> str:
    """Return the id of one rank's process."""
    return secrets.token_hex(8)


class RankAgent:
    """Everything of traceml_ray in one training process: recorder, patches, thread and channel."""

    def __init__(
        self,
        settings: Settings,
        channel: Channel,
        identity: Callable[[], identities.RankIdentity] = identities.resolve,
        spool: str | None = None,
        part_of_run_ns: int | None = None,
    ) -> None:
        self.settings = settings
        self._spool = spool
        self.channel = channel
        self._identify = identity
        self.ring = StepRing(settings.ring_rows)
        self.recorder = Recorder(self.ring)
        patcher = Patcher(debug=settings.debug)
        self.trackers = TrackerLog(settings.log_to, patcher.errors)
        self.instrumentation = Instrumentation(self.recorder, patcher, self.trackers.patches())
        self.device = DeviceUse(settings.device_clock, self.instrumentation, self.ring)
        self.process_id = new_process_id()
        self.identity: identities.RankIdentity | None = None
        self._identity_known = False
        self.verdict: dict[str, codec.Value] = {}
        """On rank 0: the current verdict on its run, see `wire.RankReply`."""
        self._outbox = RankOutbox(settings.agent_buffer_bytes)
        self._early = EarlyCopy(spool, settings.agent_buffer_bytes)
        self._seq = self._dropped = 0
        self._dumped: set[codec.Value] = set()
        self._activity = Activity()
        self._began_ns = time.monotonic_ns()
        self._cpu_ns = 0
        self.ended_in: int | None = None
        """The stage in which the exception that ended the training thread was raised."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._sampler: ProcessSampler | None = None
        self._sampled = -SAMPLE_S
        ours = self.instrumentation
        self.unsent = Unsent(ours.errors)
        self._rank = Rank(self.recorder, ours, self.device, settings, self.add_event, spool, part_of_run_ns)
        self.collectors = {name: make(self._rank) for name, make in COLLECTORS.items()}
        self._by_class: dict[type[Collector], Collector] = {
            type(one): one for one in self.collectors.values()
        }
        self._handlers = {name: one for one in self.collectors.values() for name in one.commands}
        self.captures = CaptureAgent(
            self.recorder,
            ours.spans,
            ours.errors,
            spool,
            lambda: self.process_id,
            calls=ours.rpc,
        )

    def start(self) -> None:
        """Start the thread. It does the rest, so that the import of torch is not delayed."""
        for collector in self.collectors.values():
            self.guard("install", collector.install)
        self._thread = threading.Thread(target=self._run, name="traceml-agent", daemon=True)
        self._thread.start()

    def add_event(self, event: wire.Event) -> None:
        """Send an event with the next batch. Any thread may call this."""
        self.unsent.events.append(event)

    def request(self, asked: wire.MeasureRequest) -> None:
        """Send a request of the script to the aggregator. Any thread may call this."""
        self.unsent.requests.append(asked)

    def close(self, events: list[wire.Event] | None = None) -> None:
        """
        Send what is left as the final batch. Batches that are not stored yet are written to the spool.
        Bounded in time.
        """
        self.unsent.events.extend(events or [])
        self.trackers.stop()
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * CLOSE_WAIT_S + 0.4)
        for collector in self.collectors.values():
            self.guard("remove", collector.remove)

    def abandon(self, forked: bool) -> None:
        """Stop using torch: this process is no longer watched, or is a child of a watched process."""
        for collector in self.collectors.values():
            self.guard("abandon", functools.partial(collector.abandon, forked))

    def collector(self, kind: type[_C]) -> _C:
        """
        Return the collector of a signal, by its class. It receives what a script reports about
        the signal.
        """
        return cast("_C", self._by_class[kind])

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        due = self._next_tick()
        while not self._closing.wait(max(0.0, min(SETTLE_S, due - time.monotonic()))):
            if time.monotonic() < due:  # even with a long interval the log must stay short
                self.guard("replay", self.recorder.replay)
                self.guard("device clock", self.device.tick)
                continue
            self.guard("tick", self.tick)
            self._cpu_ns = time.thread_time_ns()
            due = self._next_tick()
        self.guard("close", self._finish)

    def _next_tick(self) -> float:
        """
        Return when to report next, in monotonic seconds.

        All ranks of a large job report at the same times of the wall clock. A verdict needs all ranks, so the
        oldest report decides how late it is.
        """
        now, interval = time.monotonic(), self.settings.interval
        if self.identity is None or (self.identity.world_size or 0) <= MANY_RANKS:
            return now + interval
        left = 2 * interval - time.time() % (2 * interval)
        return now + left + (2 * interval if left < interval / 2 else 0)

    def guard(self, place: str, action: Callable[[], _T]) -> _T | None:
        """Return the result of `action`. If it raises, count the error and return None."""
        try:
            return action()
        except Exception as error:
            self.instrumentation.errors.note(place, error)
            return None

    def tick(self, final: bool = False) -> None:
        """Do one round: move rows into batches, offer batches to the relay, and process its replies."""
        if not self.recorder.replay(LOCK_S):
            self.instrumentation.errors.count("marks: not read, a thread holds the recorder")
        self.guard("device clock", self.device.finish if final else self.device.tick)
        self._rank.spans = spans = self.guard("spans", lambda: self._collect_spans(final)) or []
        self.unsent.spans += spans
        for name, collector in self.collectors.items():
            self.guard(name, functools.partial(self._collect, collector, final))
        self.guard("profile", self.captures.tick)
        self.guard("activity", self._look)
        while self._enqueue(final):
            pass
        self._exchange()
        if self.unsent.events and not final:  # events that the relay has requested
            self._enqueue(final)
            self._exchange()
        self.guard("spool", lambda: self._early.tick(self.process_id, self._outbox))

    def _collect(self, collector: Collector, final: bool) -> None:
        """Add the records of a signal to what is sent."""
        self.unsent.add(collector.collect(final))

    def _enqueue(self, final: bool) -> bool:
        """Make one batch. Returns True if there is enough left for another."""
        for dropped in self._outbox.make_room():
            self._lose(dropped)
        draft, records = self._draft()
        # Rows come last: after them only the encoding can fail.
        most = min(wire.MAX_ROWS, draft.row_bytes // self.ring.row_bytes)
        first, keys, flags, rows, host_rows, leads = self.ring.drain_hosts(most)
        more = bool(self.ring.accepted > first + len(flags) or self.unsent)
        lost = self.ring.dropped + self.recorder.lost_rows
        batch = wire.RankBatch(
            v=codec.VERSION,
            process_id=self.process_id,
            seq=self._seq + 1,
            sent_ns=time.time_ns(),
            produced=self.ring.accepted + lost,
            dropped=lost + self._dropped,
            first_row=first,
            keys=keys,
            flags=flags,
            rows=rows,
            host_rows=host_rows,
            leads=leads,
            final=final and not more,
            **draft.fields,
        )
        data = self.guard("batch", functools.partial(codec.encode, batch))
        held = len(batch.events), len(batch.spans), len(batch.requests)
        made = Batch(self._seq + 1, len(flags), *held, data or b"", records)
        if data is None:
            self._lose(made)
            return more
        self._seq += 1
        self._outbox.put(made)
        return more

    def _draft(self) -> tuple[BatchDraft, dict[str, int]]:
        """Return (the next batch without its rows, the amount of each kind of record in it)."""
        patches = self.instrumentation
        draft = BatchDraft(patches.errors)
        self.unsent.events += patches.errors.causes() + self.channel.errors.causes()
        draft.put("identity", self.guard("identity", self._resolve))
        draft.put("open", self.guard("open stage", self._reported_stage))
        draft.put("process", self.guard("process", self._sample))
        draft.put("overhead", self._overhead())
        for name, value in (self.guard("parallelism", patches.parallelism) or {}).items():
            draft.put(name, value)
        draft.put("capture", self.captures.status)
        draft.put("trackers", self.trackers.news() or None)
        draft.put("missing", {name: sendable(why) for name, why in patches.missing.copy().items()})
        if not self._seq:
            draft.put("environment", self.guard("environment", environment))
        records = self.unsent.move_into(draft)
        sources, self._rank.memory_from = self._rank.memory_from, {}
        draft.put("memory_from", sources)
        draft.put_last("errors", self._errors())
        return draft, records

    def _overhead(self) -> wire.Overhead:
        elapsed = time.monotonic_ns() - self._began_ns
        return wire.Overhead(self.recorder.marks_ns, self._cpu_ns, elapsed, self._outbox.sent_bytes)

    def _errors(self) -> dict[str, int]:
        """Return the number of errors by place, including what was lost before it was in a batch."""
        # Other threads add to these dicts. They are copied in one operation, so they do not change during a
        # loop.
        recorder = self.recorder
        counts = dict(self.instrumentation.errors)
        counts.update({sendable(f"channel.{kind}"): n for kind, n in dict(self.channel.errors).items()})
        lost = {
            "marks lost: no room": recorder.lost_marks,
            "spans lost: more than 256 names": recorder.sums.refused,
            "spans lost: too many open": recorder.steps.spans.lost,
            "sizes of batches lost: no room": recorder.steps.work.sizes.lost,
            "router: indices of no expert": self.instrumentation.routers.outside,
        }
        return counts | {place: count for place, count in lost.items() if count}

    def _lose(self, batch: Batch) -> None:
        """Count the contents of a batch that will not be sent."""
        self._dropped += batch.rows
        lost = {"events": batch.events, "spans": batch.spans, "requests": batch.requests}
        lost |= {KINDS[name].lost: amount for name, amount in batch.records.items()}
        for what, count in lost.items():
            self.instrumentation.errors.count(f"{what} lost with their batch", count)

    def _exchange(self) -> None:
        self._apply_replies()
        self._outbox.offer(self.channel)
        self._apply_replies()

    def _apply_replies(self) -> None:
        for data in self.channel.replies():
            try:
                reply = codec.decode(data, wire.RankReply)
            except codec.WireError as error:
                self.instrumentation.errors.note("reply", error)
                continue
            if reply.process_id == self.process_id:
                self.verdict = reply.verdict or self.verdict
                if reply.figures is not None and not self._closing.is_set():
                    self.trackers.offer(reply.figures)
                self._outbox.confirm(reply.acked_seq, reply.settled_seq)
                for batch, why in self._outbox.refused(reply.refused):
                    self.instrumentation.errors.note("batch refused", codec.WireError(sendable(why)[:40]))
                    self._lose(batch)
            for command in reply.commands:
                self.guard("command", functools.partial(self._handle_command, command))
        self._outbox.follow(self.channel)  # a lost connection is detected here

    def _handle_command(self, command: wire.Command) -> None:
        """Execute a command of the aggregator. Unknown commands and commands of another run are ignored."""
        if command.name in ("where", "dump"):
            self._answer(command)
            return
        if command.name == "profile" and self._is_meant(command):
            self.captures.handle_command(command)
        handler = self._handlers.get(command.name)
        if handler is not None and self._is_meant(command):
            handler.handle_command(command)

    def _answer(self, command: wire.Command) -> None:
        """Report where this process is, once for each id. Records of signals about it go with the report."""
        asked, run = command.args.get("id"), command.args.get("run")
        if asked in self._dumped or (
            run is not None and (self.identity is None or run != self.identity.job_id)
        ):
            return
        self._dumped.add(asked)
        handler = self._handlers.get(command.name)
        if handler is not None:
            self.guard("command", functools.partial(handler.handle_command, command))
            self.guard("command", functools.partial(self._collect, handler, False))
        event = stacks.event(self.recorder.owner, self._open_stage(), str(asked))
        if command.name == "where":
            event = msgspec.structs.replace(event, kind="standing", message="")
        self.unsent.events.append(event)

    def _reported_stage(self) -> wire.OpenStage:
        still_s = self._activity.still_s
        still_ns = None if still_s is None else int(1e9 * still_s)
        return msgspec.structs.replace(self._open_stage(), still_ns=still_ns)

    def _look(self) -> None:
        self._activity.look(self.recorder.owner, self.recorder.open_stage().elapsed_ns)

    def _is_meant(self, command: wire.Command) -> bool:
        """Return whether a command about a profile, or about layers, is for this rank process."""
        who = self.identity
        if who is None or command.args.get("run") != who.job_id or self._closing.is_set():
            return False
        return who.global_rank in rank_filter(str(command.args.get("ranks")))

    def _open_stage(self) -> wire.OpenStage:
        opened = self.recorder.open_stage()
        if self.ended_in is not None:
            return msgspec.structs.replace(opened, stage=self.ended_in)
        if (
            standing := self.guard("device clock", lambda: self.device.device_position(opened.step))
        ) is not None:
            return standing
        return msgspec.structs.replace(opened, span=self.instrumentation.spans.innermost or opened.span)

    def _collect_spans(self, final: bool) -> list[wire.SpanSum]:
        """Collect the sums of named spans."""
        sums = self.recorder.sums
        if not final:
            return sums.collect()
        self.recorder.finish()
        return [*sums.collect(), *sums.collect()]

    def _resolve(self) -> identities.RankIdentity | None:
        """
        Resolve the identity of this rank. It is resolved again until torch.distributed, the best source, is
        initialized.
        """
        if not self._identity_known:
            try:
                self.identity = self._identify()
                self._identity_known = self.identity.source in _CERTAIN
            except identities.IdentityError as error:
                self.instrumentation.missing["identity"] = str(error)[:200]
        return self.identity

    def _sample(self) -> wire.ProcessSample | None:
        self._sampler = self._sampler or ProcessSampler()
        if time.monotonic() - self._sampled < SAMPLE_S:
            return None
        self._sampled = time.monotonic()
        return self._sampler.sample()

    def _finish(self) -> None:
        self.guard("last tick", functools.partial(self.tick, final=True))
        self.guard("spool", self._write_copy)
        deadline = time.monotonic() + CLOSE_WAIT_S
        while self._outbox.unacked() and self._outbox.connected and time.monotonic() < deadline:
            time.sleep(CONFIRM_POLL_S)
            self._exchange()
        self.channel.close()

    def _write_copy(self) -> None:
        """
        Write everything that is not confirmed as stored to the spool, before any wait. A relay that has
        received it may be ended, or may answer too late, before the aggregator has stored it.
        """
        if self._spool is not None and (frames := self._outbox.frames()):
            from traceml_ray.wire.spool import write_spool

            write_spool(Path(self._spool) / f"{self.process_id}.spool", frames)
        self._early.remove()
