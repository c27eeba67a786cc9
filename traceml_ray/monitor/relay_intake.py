"""
What the aggregator takes from relays: into the file's writer, the step history, and whatever else uses it.

Each message is taken once, by its number, and so is each batch of a rank in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from traceml_ray import wire
from traceml_ray.analysis.step_sizes import unpacked
from traceml_ray.errors import Errors
from traceml_ray.identity import RankIdentity
from traceml_ray.monitor.bundling import Bundling
from traceml_ray.monitor.layer_requests import LayerRequests
from traceml_ray.monitor.live_memory import LiveMemory
from traceml_ray.monitor.live_steps import LiveSteps
from traceml_ray.monitor.live_verdict import LiveJudge
from traceml_ray.monitor.node_clocks import NodeClocks
from traceml_ray.monitor.profiling import Profiling
from traceml_ray.monitor.rank_numbering import Groups, Restarts
from traceml_ray.store.rank_processes import NUMBERED, RankProcess
from traceml_ray.store.recent import Recent
from traceml_ray.store.writer import SessionWriter

MAX_PROCESSES = 1 << 17
"""Processes of one session; what more of them send is counted, not taken."""


@dataclass(eq=False)
class RelayIntake:
    """
    One per session; all but `decode` is called with the writer's lock.

    Args:
        writer: of the session file.
        recent: keeps the newest spans and samples of nodes.
        steps: the histories of the live runs.
        memory: takes samples of memory, and collectives.
        judge: takes events of rank processes.
        bundling: takes events,
        profiling: and these with what ranks say of their captures.
        layers: takes requests.
        clock: wall clock in ns.
        errors: the aggregator's, by place.
    """

    writer: SessionWriter
    recent: Recent
    steps: LiveSteps
    memory: LiveMemory
    judge: LiveJudge
    bundling: Bundling
    profiling: Profiling
    layers: LayerRequests
    clock: Callable[[], int]
    errors: Errors

    def __post_init__(self) -> None:
        processes = self.writer.processes.values()
        self._groups, self._restarts = Groups(processes), Restarts(processes)
        self._clocks = NodeClocks(self.writer)
        self._refused: dict[str, int] = {}
        """By relay (incarnation): the message that came after a gap, the first time."""

    def decode(self, batch: wire.RelayBatch) -> list[wire.RankBatch]:
        """Return the batches of ranks in that of a relay; one that cannot be read is counted."""
        found = []
        for data in batch.batches:
            try:
                found.append(wire.decode(data, wire.RankBatch))
            except wire.WireError as error:
                self.errors.note("rank batch", error, batch.node.hostname)
        return found

    def take(self, batch: wire.RelayBatch, inner: list[wire.RankBatch], now: int) -> None:
        """Take a message with the batches in it, if it is the next of its relay."""
        if not self._is_next(batch.incarnation, batch.seq):
            return
        writer, node_id = self.writer, batch.node.node_id
        writer.take(batch, now)
        self._clocks.take(batch, now)
        for part in inner:
            self.take_rank(part, node_id)
        for name, rows in batch.dropped.items():
            if (process := self._process(name, now)) is None:
                continue
            before = process.dropped_by_relay.get(batch.incarnation, 0)
            process.dropped_by_relay[batch.incarnation] = max(rows, before)
            process.produced = max(process.produced, rows)
        for name in batch.lost:
            if (process := self._process(name, now)) is not None:
                process.lost = not process.final
        for name, output in batch.output.items():
            if (process := writer.processes.get(name)) is not None:
                self._add_output(output, process, node_id)
        for event in batch.events:
            process = writer.processes.get(str(event.data.get("process_id")))
            self.add_event(self._clocks.on_ours(event, node_id), process, node_id)
        if batch.sample is not None:
            self.recent.add_sample(node_id, batch.sample)

    def _is_next(self, incarnation: str, seq: int) -> bool:
        """Whether this message is the next of its relay; a gap is let pass when it comes a second time."""
        due = self.writer.taken.get(incarnation, 0) + 1
        if seq > due and self._refused.get(incarnation) != seq:
            self._refused.setdefault(incarnation, seq)
            return False
        if seq >= due:
            self._refused.pop(incarnation, None)
        return seq >= due

    def take_rank(self, batch: wire.RankBatch, node_id: str | None) -> None:
        """Take a batch of a rank, once; None: its node is not known."""
        now, writer = self.clock(), self.writer
        process = writer.processes.get(batch.process_id) or self._process(batch.process_id, now)
        if process is None or batch.seq <= process.last_batch:
            return
        before = process.identity
        if batch.identity is not None:
            self._identify(process, batch.identity, node_id)
        self._take_rows(process, batch, now)
        if process.absorb(batch, now) or process.identity is not before:
            writer.process(batch.process_id, now)
        else:
            writer.progressed(process)
        restart = self._restarts.check(process)
        if restart is not None and process.identity is not None:
            writer.add_event(restart, run=process.identity.job_id)
        if batch.process is not None:
            writer.add_process(process, batch.process)
        for sample in batch.memory:
            writer.add_memory(process, sample)
            self.memory.add(process.id, sample)
        if batch.sharding is not None:
            writer.set_sharding(process, batch.sharding)
        for span in batch.spans:
            writer.add_span(process, span)
            self.recent.add_span(process.id, span)
            self.memory.add_span(process.id, span)
        for window in batch.layers:
            writer.add_layers(process, window)
        for work in batch.work:
            writer.add_work(process, work)
        self._take_sizes(process, batch.sizes)
        self._add_output(batch.output, process, node_id)
        for event in batch.events:
            self.add_event(self._clocks.on_ours(event, node_id), process, node_id)
        self.profiling.take_batch(process, batch)

    def _process(self, name: str, now: int) -> RankProcess | None:
        """Return the rank process of that name, made when it is new; None when there are too many."""
        if name not in self.writer.processes and len(self.writer.processes) >= MAX_PROCESSES:
            self.errors.count("too_many_processes")
            return None
        return self.writer.process(name, now)

    def add_event(self, event: wire.Event, process: RankProcess | None, node_id: str | None) -> None:
        """Take an event of a rank process or node."""
        if event.kind != "standing":  # of use for the judge only
            self.writer.add_event(event, process, node_id)
        self.bundling.take(event, process)
        self.profiling.take(event)
        self.layers.take(event)
        if process is not None:
            self.judge.note({"process": process.id, **msgspec.structs.asdict(event)})

    def _add_output(self, output: list[wire.Output], process: RankProcess, node_id: str | None) -> None:
        for each in output:
            self.writer.add_output(process, self._clocks.on_ours(each, node_id))

    def _take_sizes(self, process: RankProcess, pieces: list[wire.StepSizes]) -> None:
        """Take sizes of batches; what cannot be read is counted, and left out."""
        for sizes in pieces:
            try:
                unpacked(sizes)
            except ValueError as error:
                self.errors.note("sizes of batches", error)
                continue
            self.writer.add_sizes(process, sizes)
            self.recent.add_sizes(process.id, sizes)

    def _take_rows(self, process: RankProcess, batch: wire.RankBatch, now: int) -> None:
        """Add the rows that are new: an agent sends what its relay may have lost a second time."""
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
        """Note which rank a process is, on which node; processes of Ray without a rank are numbered."""
        before = process.identity
        if identity.node_id is None:
            known = node_id or (before.node_id if before else None)
            identity = msgspec.structs.replace(identity, node_id=known)
        if identity.source == NUMBERED:
            identity = self._groups.number(process, identity)
        if identity != before:
            process.identity = identity

    def of_node(self, commands: list[wire.Command], node_id: str) -> list[wire.Command]:
        """
        Return the commands without those about a rank process of another node. Of a large job these would be
        more than a reply may have.
        """
        processes = self.writer.processes

        def elsewhere(command: wire.Command) -> bool:
            process = processes.get(str(command.args.get("process")))
            return (
                process is not None and process.identity is not None and process.identity.node_id != node_id
            )

        return [command for command in commands if not elsewhere(command)]

    def resize_groups(self) -> None:
        """Bring the sizes that numbered processes were given up to date."""
        for process, identity in self._groups.grown():
            self.writer.process(process.process_id, 0).identity = identity
