"""
Passes what relays send to the file writer, the step history and the other users of it. It also measures the
clocks of nodes from these messages.

Each message is accepted once, by its number, and so is each rank batch that it contains. Ray processes
without a rank are numbered as they arrive. If a run continues with another attempt, that is recorded as a
restart or a resize, with its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from traceml_ray import text
from traceml_ray.analysis.node_clock import DRIFT, ClockEstimate
from traceml_ray.errors import Errors
from traceml_ray.identity import RankIdentity
from traceml_ray.monitor.bundling import Bundling
from traceml_ray.monitor.live_steps import LiveSteps, Recent
from traceml_ray.monitor.live_verdict import LiveJudge
from traceml_ray.monitor.profiling import LayerRequests, Profiling
from traceml_ray.monitor.tracker_exchange import TrackerExchange
from traceml_ray.signals.collectives.records import LAST_CALLS
from traceml_ray.signals.experts.records import EXPERTS
from traceml_ray.signals.kind import Kind
from traceml_ray.signals.kinds import KINDS
from traceml_ray.signals.live import LiveSignal
from traceml_ray.signals.nodes.records import NODE
from traceml_ray.signals.throughput.records import SIZES
from traceml_ray.store.rank_processes import NUMBERED, RankProcess, by_run, generations, node_key
from traceml_ray.store.results import EventRow
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import Part


class Groups:
    """
    Numbers Ray processes without a rank: one group for each run. `processes` are those numbered before the
    aggregator was restarted. Nodes, and the ranks within a node, are also numbered in order of arrival. Once
    all processes of a group have ended, the next process begins another group, from rank 0.
    """

    def __init__(self, processes: Iterable[RankProcess]) -> None:
        self._groups: dict[str, _Group] = {}
        for run, known in by_run(processes).items():
            for process in generations(known)[-1]:
                if process.identity is not None and process.identity.source == NUMBERED:
                    self._groups.setdefault(run, _Group()).add(process, process.identity)

    def number(self, process: RankProcess, identity: RankIdentity) -> RankIdentity:
        """
        Return `identity` with the rank of this process. That is the rank it has, else the rank of an ended
        actor of the same name, else the next free rank. `identity.node_id` must be set if it can be known.
        """
        group, before = self._groups.get(identity.job_id), process.identity
        if before is not None and (before.source, before.job_id) != (NUMBERED, identity.job_id):
            before = None
        if group is None or (group.over and before is None):
            group = self._groups[identity.job_id] = _Group()
        return group.add_next(process, identity) if before is None else group.numbered(identity, before)

    def grown(self) -> Iterable[tuple[RankProcess, RankIdentity]]:
        """
        Yield the rank processes whose identity is out of date since their group grew, with the
        new identity.
        """
        for group in self._groups.values():
            yield from group.grown()


class _Group:
    def __init__(self) -> None:
        self._size = 0
        self._processes: list[RankProcess] = []
        self._actors: dict[str, RankProcess] = {}
        self._nodes: dict[str, tuple[int, int]] = {}
        """Number of each node, and how many ranks the node has had."""
        self._changed = False

    @property
    def over(self) -> bool:
        """Whether all processes of the group have ended."""
        return all(process.ended for process in self._processes)

    def add(self, process: RankProcess, identity: RankIdentity) -> None:
        """Add a rank process that is numbered. `identity` is, or will be, the identity of that process."""
        self._size = max(self._size, identity.global_rank + 1)
        node, ranks = self._nodes.get(identity.node_id or identity.hostname, (identity.node_rank, 0))
        self._nodes[identity.node_id or identity.hostname] = node, max(ranks, identity.local_rank + 1)
        self._processes.append(process)
        if identity.name:
            self._actors[identity.name] = process
        self._changed = True

    def add_next(self, process: RankProcess, identity: RankIdentity) -> RankIdentity:
        """Add a rank process without a number; return its identity with a number."""
        key = identity.node_id or identity.hostname
        node, local = self._nodes.get(key, (len(self._nodes), 0))
        rank = self._size
        old = self._actors.get(identity.name)
        if old is not None and old.ended and old.identity is not None:
            rank = old.identity.global_rank
            local = old.identity.local_rank if node_key(old) == key else local
        numbers = msgspec.structs.replace(identity, global_rank=rank, node_rank=node, local_rank=local)
        self.add(process, numbers)
        return self.numbered(identity, numbers)

    def grown(self) -> Iterable[tuple[RankProcess, RankIdentity]]:
        if not self._changed:
            return
        self._changed = False
        for process in self._processes:
            before = process.identity
            if before is not None and before.source == NUMBERED:
                now = self.numbered(before, before)
                if now != before:
                    yield process, now

    def numbered(self, identity: RankIdentity, numbers: RankIdentity) -> RankIdentity:
        """Return `identity` with the ranks of `numbers` and the present sizes of the group."""
        _, here = self._nodes.get(identity.node_id or identity.hostname, (0, 0))
        return msgspec.structs.replace(
            identity,
            global_rank=numbers.global_rank,
            node_rank=numbers.node_rank,
            local_rank=numbers.local_rank,
            world_size=max(self._size, numbers.global_rank + 1),
            local_world_size=max(here, numbers.local_rank + 1),
            nnodes=max(len(self._nodes), numbers.node_rank + 1),
        )


@dataclass
class _Now:
    """The last attempt of a run that has rows."""

    attempt: int
    world_size: int
    last_rows_ns: int


class AttemptTracker:
    """Finds restarts and resizes. `processes` are those known before the aggregator was restarted."""

    def __init__(self, processes: Iterable[RankProcess]) -> None:
        self._runs: dict[str, _Now] = {}
        for process in sorted(processes, key=lambda process: process.last_rows_ns or 0):
            if process.last_rows_ns is not None:
                self.check(process)

    def check(self, process: RankProcess) -> wire.Event | None:
        """
        Check a rank process that has rows; return an event when they are the first of a new attempt.

        `seconds` are between the last report with rows of the attempt before and the first of this
        one, as the aggregator got them: exact to about one interval of reporting.
        """
        identity, last_rows_ns = process.identity, process.last_rows_ns
        if identity is None or last_rows_ns is None:
            return None
        now = self._runs.get(identity.job_id)
        if now is not None and identity.attempt <= now.attempt:
            if identity.attempt == now.attempt:
                now.last_rows_ns, now.world_size = max(last_rows_ns, now.last_rows_ns), identity.world_size
            return None
        self._runs[identity.job_id] = _Now(identity.attempt, identity.world_size, last_rows_ns)
        return None if now is None else _event(now, self._runs[identity.job_id])


def _event(before: _Now, after: _Now) -> wire.Event:
    seconds = (after.last_rows_ns - before.last_rows_ns) / 1e9
    size = text.count(after.world_size, "rank")
    if before.world_size != after.world_size:
        size += f" ({before.world_size} before)"
    return wire.Event(
        "restart",
        after.last_rows_ns,
        message=f"{text.age(seconds)} (± 1 s) without steps; then attempt {after.attempt} on {size}",
        data={
            "attempt": after.attempt,
            "seconds": seconds,
            "world_size_before": before.world_size,
            "world_size_after": after.world_size,
        },
    )


STORE_S = 60.0
"""Time between two stored measurements of a node if nothing has changed, in s."""
_FINE_NS = 1_000_000
"""Clock bounds below this need not be improved in the file before `STORE_S` has passed, in ns."""
_ON_ITS_OWN_CLOCK = "xid"
"""Kind of events that are compared with samples of their node by time."""
_R = TypeVar("_R", bound=Part)


class _Stored(NamedTuple):
    at_ns: int
    offset_ns: int
    bound_ns: int


class NodeClocks:
    """
    The offset of each node's clock to the aggregator's, measured over messages that are sent anyway.

    Used with the writer's lock held.
    """

    def __init__(self, writer: SessionWriter) -> None:
        self._writer = writer
        self._estimates: dict[str, ClockEstimate] = {}
        self._stored: dict[str, _Stored] = {}

    def measure(self, batch: wire.RelayBatch, now_ns: int) -> None:
        """
        Measure a node's clock from a message that arrived at `now_ns`, and record the result for
        the node.
        """
        node_id = batch.node.node_id
        estimate = self._estimates.setdefault(node_id, ClockEstimate())
        estimate.add(now_ns, batch.sent_ns, batch.answer)
        node, offset, bound = self._writer.nodes[node_id], estimate.offset_ns, estimate.bound_ns
        node.clock_offset_ns, node.clock_bound_ns = offset, bound
        if offset is not None and bound is not None and self._is_due(node_id, now_ns, offset, bound):
            self._stored[node_id] = _Stored(now_ns, offset, bound)
            self._writer.add_clock(node_id, now_ns - offset, offset, bound)

    def on_ours(self, event: wire.Event, node_id: str | None) -> wire.Event:
        """
        Return an event of a node with its time converted to the aggregator's clock, if the offset
        is known.
        """
        return event if event.kind == _ON_ITS_OWN_CLOCK else self._moved(event, ("t_ns",), node_id)

    def record_on_ours(self, kind: Kind[_R], record: _R, node_id: str | None) -> _R:
        """
        Return a record with its `node_times` converted to the aggregator's clock, if the offset is
        known.
        """
        return self._moved(record, kind.node_times, node_id) if kind.node_times else record

    def _moved(self, sent: _R, names: Sequence[str], node_id: str | None) -> _R:
        node = self._writer.nodes.get(node_id or "")
        if node is None or not node.correction_ns:
            return sent
        known = {name: t_ns for name in names if (t_ns := getattr(sent, name)) is not None}
        moved = {
            name: min(max(t_ns + node.correction_ns, -(1 << 63)), (1 << 63) - 1)
            for name, t_ns in known.items()
        }
        return msgspec.structs.replace(sent, **moved)

    def _is_due(self, node_id: str, now_ns: int, offset_ns: int, bound_ns: int) -> bool:
        """
        Whether the present measurement must be stored because it is better, it has changed, or `STORE_S` has
        passed.
        """
        known = self._stored.get(node_id)
        if known is None or abs(now_ns - known.at_ns) >= STORE_S * 1e9:
            return True
        moved = abs(offset_ns - known.offset_ns) - DRIFT * abs(now_ns - known.at_ns)
        better = known.bound_ns > _FINE_NS and bound_ns <= known.bound_ns // 2
        return better or moved > known.bound_ns + bound_ns


MAX_PROCESSES = 1 << 17
"""Largest number of processes of one session. Data of further processes is counted, not stored."""


Records = list[tuple[Kind[Any], Any]]
"""Records, each with its kind."""


class ReceivedOfRank(NamedTuple):
    """A decoded batch of a rank."""

    batch: wire.RankBatch
    records: Records


class Received(NamedTuple):
    """A decoded message of a relay."""

    batch: wire.RelayBatch
    ranks: list[ReceivedOfRank]
    records: Records
    """Records about the node."""
    of_ranks: dict[str, Records]
    """Records about each rank process that the relay itself has read."""


@dataclass(eq=False)
class RelayIntake:
    """
    Takes in the messages of relays; one per session. All methods except `decode` are called with the writer's
    lock.

    Args:
        writer: of the session file.
        recent: keeps the newest spans and samples of nodes.
        steps: the histories of the live runs.
        signals: the signals judged in addition to steps; receives records and spans.
        judge: receives events of rank processes.
        bundling: receives events.
        profiling: receives what ranks report about their captures.
        layers: receives requests.
        trackers: receives what ranks report of their trackers.
        clock: wall clock in ns.
        errors: the aggregator's error counts, by place.
    """

    writer: SessionWriter
    recent: Recent
    steps: LiveSteps
    signals: Sequence[LiveSignal]
    judge: LiveJudge
    bundling: Bundling
    profiling: Profiling
    layers: LayerRequests
    trackers: TrackerExchange
    clock: Callable[[], int]
    errors: Errors

    def __post_init__(self) -> None:
        processes = self.writer.processes.values()
        self._groups, self._restarts = Groups(processes), AttemptTracker(processes)
        self._clocks = NodeClocks(self.writer)
        self._uses: dict[str, Callable[[Any, Any], None]] = {
            **{signal.kind.name: signal.add for signal in self.signals if signal.kind is not None},
            SIZES.name: self.recent.add_sizes,
            EXPERTS.name: self.recent.add_tokens,
            NODE.name: self.recent.add_sample,
            LAST_CALLS.name: self.judge.note_collectives,
        }
        """Functions that receive records of a kind while the session runs, with the owner of each record."""
        self._refused: dict[str, int] = {}
        """Number of the first message after a gap, by relay incarnation."""

    def decode(self, batch: wire.RelayBatch) -> Received:
        """Return the contents of a relay's message. What cannot be read is counted."""
        ranks = []
        for data in batch.batches:
            try:
                ranks.append(self.of_rank(codec.decode(data, wire.RankBatch)))
            except codec.WireError as error:
                self.errors.note("rank batch", error, batch.node.hostname)
        of_ranks = {name: self._records(records, "process") for name, records in batch.of_ranks.items()}
        return Received(batch, ranks, self._records(batch.records, "node"), of_ranks)

    def of_rank(self, batch: wire.RankBatch) -> ReceivedOfRank:
        """Decode a rank batch and its records. Every batch must be decoded here, however it arrived."""
        return ReceivedOfRank(batch, self._records(batch.records, "process") if batch.records else [])

    def _records(self, records: wire.Records, owner: str) -> Records:
        """
        Return the records of a message. Records that cannot be read, or have another version, are
        counted.
        """
        decoded: Records = []
        for name, encoded in records.items():
            kind = KINDS.get(name)
            if kind is None or kind.scope != owner:
                self.errors.count("records: unknown_kind", len(encoded))
                continue
            for raw in encoded:
                try:
                    decoded.append((kind, kind.decode(raw)))
                except codec.WireError as error:
                    self.errors.note(kind.lost, error)
        return decoded

    def accept(self, received: Received, now: int) -> None:
        """Accept a message with its batches, if it is the next message of its relay."""
        batch = received.batch
        if not self._is_next(batch.incarnation, batch.seq):
            return
        writer, node_id = self.writer, batch.node.node_id
        writer.acknowledge(batch, now)
        self._clocks.measure(batch, now)
        for part in received.ranks:
            self.accept_rank(part, node_id)
        for name, rows in batch.dropped.items():
            if (process := self._process(name, now)) is None:
                continue
            before = process.dropped_by_relay.get(batch.incarnation, 0)
            process.dropped_by_relay[batch.incarnation] = max(rows, before)
            process.produced = max(process.produced, rows)
        for name in batch.lost:
            if (process := self._process(name, now)) is not None:
                process.lost = not process.final
        for name, records in received.of_ranks.items():
            if (process := writer.processes.get(name)) is not None:
                self._store_records(process.id, records, node_id)
            else:
                for kind, record in records:
                    self.errors.count(kind.lost, kind.amount(record))
        for event in batch.events:
            process = writer.processes.get(str(event.data.get("process_id")))
            self.add_event(self._clocks.on_ours(event, node_id), process, node_id)
        self._begin_requests(batch.requests)
        self._store_records(node_id, received.records, node_id)

    def _store_records(self, owner: int | str, records: Records, node_id: str | None) -> None:
        """Store the records of a rank process (by number), or of a node (by id), in order."""
        for kind, record in records:
            record = self._clocks.record_on_ours(kind, record, node_id)
            self.writer.add_record(kind, owner, record)
            if (use := self._uses.get(kind.name)) is not None:
                use(owner, record)

    def _is_next(self, incarnation: str, seq: int) -> bool:
        """
        Whether this message is the next of its relay. A message after a gap is accepted when it
        comes again.
        """
        due = self.writer.taken.get(incarnation, 0) + 1
        if seq > due and self._refused.get(incarnation) != seq:
            self._refused.setdefault(incarnation, seq)
            return False
        if seq >= due:
            self._refused.pop(incarnation, None)
        return seq >= due

    def accept_rank(self, received: ReceivedOfRank, node_id: str | None) -> None:
        """Accept a batch of a rank once. `node_id` None: its node is not known."""
        batch, now, writer = received.batch, self.clock(), self.writer
        process = writer.processes.get(batch.process_id) or self._process(batch.process_id, now)
        if process is None or batch.seq <= process.last_batch:
            return
        before = process.identity
        if batch.identity is not None:
            self._identify(process, batch.identity, node_id)
        self._store_rows(process, batch, now)
        if process.absorb(batch, now) or process.identity is not before:
            writer.process(batch.process_id, now)
        else:
            writer.progressed(process)
        restart = self._restarts.check(process)
        if restart is not None and process.identity is not None:
            writer.add_event(restart, run=process.identity.job_id)
        if batch.process is not None:
            writer.add_process(process, batch.process)
        if received.records:
            self._store_records(process.id, received.records, node_id)
        if batch.spans:
            writer.add_spans(process, batch.spans)
            self.recent.add_spans(process.id, batch.spans)
            for signal in self.signals:
                signal.add_spans(process.id, batch.spans)
        for event in batch.events:
            self.add_event(self._clocks.on_ours(event, node_id), process, node_id)
        if batch.requests:
            self._begin_requests(batch.requests)
        if batch.trackers and process.identity is not None:
            self.trackers.note(process.identity.job_id, batch.trackers)
        if batch.capture is not None:
            self.profiling.ingest(process, batch.capture)

    def _begin_requests(self, requests: list[wire.MeasureRequest]) -> None:
        """Begin what people have requested. Requests that cannot be served are counted."""
        for asked in requests:
            if asked.profile is not None:
                self.profiling.ask(asked.profile, asked.id)
            if asked.layers is not None:
                self.layers.ask(asked.layers, asked.id)

    def _process(self, name: str, now: int) -> RankProcess | None:
        """Return the rank process called `name`; create it if it is new. None: there are too many."""
        if name not in self.writer.processes and len(self.writer.processes) >= MAX_PROCESSES:
            self.errors.count("too_many_processes")
            return None
        return self.writer.process(name, now)

    def add_event(self, event: wire.Event, process: RankProcess | None, node_id: str | None) -> None:
        """Accept an event of a rank process or node."""
        if event.kind != "standing":  # only the judge uses it
            self.writer.add_event(event, process, node_id)
        self.bundling.add_event(event, process)
        if process is not None:
            where: dict[str, Any] = {"rank": process.rank, "process": process.id, "node_id": node_id}
            self.judge.note(EventRow(id=0, run=None, **where, **msgspec.structs.asdict(event)))

    def _store_rows(self, process: RankProcess, batch: wire.RankBatch, now: int) -> None:
        """Add the rows that are new. An agent resends rows that its relay may have lost."""
        n = len(batch.flags)
        skip = max(0, process.next_row - batch.first_row)
        if skip >= n:
            return
        columns = batch.columns(skip)
        self.writer.add_rows(process, batch.first_row + skip, *columns)
        self.steps.append(process.id, columns)
        process.next_row = batch.first_row + n
        process.last_key = int.from_bytes(batch.keys[-8:], "little", signed=True)
        process.last_rows_ns = now

    def _identify(self, process: RankProcess, identity: RankIdentity, node_id: str | None) -> None:
        """Record the rank and the node of a process. Ray processes without a rank are numbered."""
        before = process.identity
        if identity.node_id is None:
            known = node_id or (before.node_id if before else None)
            identity = msgspec.structs.replace(identity, node_id=known)
        if identity.source == NUMBERED:
            identity = self._groups.number(process, identity)
        if identity != before:
            process.identity = identity

    def resize_groups(self) -> None:
        """Update the group sizes that numbered processes were given."""
        for process, identity in self._groups.grown():
            self.writer.process(process.process_id, 0).identity = identity
