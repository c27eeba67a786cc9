"""The agent's rounds against a channel made of lists: what is kept, resent, dropped and counted."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from module_time import replace_time
from sessions import identity, records_of
from torch import nn

from traceml_ray.agent import bootstrap, rank_agent
from traceml_ray.agent.marks import SpanSums
from traceml_ray.agent.outbox import BatchDraft, Unsent
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.errors import Errors
from traceml_ray.identity import RankIdentity
from traceml_ray.settings import RelayPaths, Settings
from traceml_ray.signals.collectives.records import LAST_CALLS, CollectivesReport
from traceml_ray.signals.experts.records import EXPERTS, MAX_EXPERTS, MAX_ROUTERS, RouterTokens
from traceml_ray.signals.experts.routers import COUNTS_AT_ONCE
from traceml_ray.signals.memory.records import MEMORY, MemorySample
from traceml_ray.stages import DATA, LEAD_BYTES, N_STAGES, ROW_BYTES, SEGMENT_BITS
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import read_spool


class Pipe:
    """A relay that takes so many packets, and confirms what the test tells it to."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.generation = 1
        self.errors = Errors()
        self.taken: list[bytes] = []
        self.answers: list[bytes] = []
        self.closed = False

    def offer(self, data: bytes) -> bool:
        if len(self.taken) >= self.room:
            return False
        self.taken.append(data)
        return True

    def replies(self) -> list[bytes]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.closed = True

    def batches(self) -> list[wire.RankBatch]:
        return [codec.decode(data, wire.RankBatch) for data in self.taken]

    def confirm(self, agent: RankAgent, seq: int, settled: int | None = None) -> None:
        reply = wire.RankReply(codec.VERSION, agent.process_id, seq, seq if settled is None else settled)
        self.answers.append(codec.encode(reply))


def make(pipe: Pipe, spool: str | None = None, **options: object) -> RankAgent:
    return RankAgent(Settings(session="s", **options), pipe, spool=spool)  # type: ignore[arg-type]


def end(agent: RankAgent, events: list[wire.Event] | None = None) -> None:
    """Run the thread to its end: `close` alone waits a second at most, in which it may get no core."""
    agent.start()
    agent.close(events)
    assert agent._thread is not None
    agent._thread.join(240)


def push(agent: RankAgent, count: int) -> None:
    for _ in range(count):
        agent.ring.push(agent.ring.accepted << SEGMENT_BITS, 0, [1, 2, 3, 4, 5, 6])


def test_batch_carries_rows_identity_process_and_open_stage() -> None:
    pipe = Pipe()
    agent = make(pipe)
    push(agent, 3)
    agent.tick()
    (batch,) = pipe.batches()
    assert (batch.first_row, batch.produced, batch.dropped, len(batch.flags)) == (0, 3, 0, 3)
    assert struct.unpack("<18q", batch.rows) == (1, 2, 3, 4, 5, 6) * 3
    assert batch.identity is not None and batch.process is not None and batch.open is not None
    assert batch.process.rss_bytes and batch.process.threads


def test_process_is_sampled_once_a_second_however_often_it_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, now = Pipe(), [100.0]
    agent = make(pipe)
    replace_time(monkeypatch, rank_agent, monotonic=lambda: now[0])
    for _ in range(6):
        agent.tick()
        now[0] += 0.5
    assert [batch.process is not None for batch in pipe.batches()] == [True, False] * 3


def test_memory_is_sampled_each_round_and_its_sources_are_sent_when_they_are_new_or_now_and_then() -> None:
    pipe = Pipe()
    agent = make(pipe)
    agent.recorder.steps.rows.step = 7
    for _ in range(61):
        agent.tick()
    batches = pipe.batches()
    assert [len(records_of(batch, MEMORY)) for batch in batches] == [1] * 61
    (sample,) = records_of(batches[0], MEMORY)
    assert (sample.step, sample.device, sample.allocated_bytes) == (7, None, None)
    assert sample.rss_bytes and sample.limit_bytes and batches[0].sent_ns >= sample.t_ns > 0
    assert [number for number, batch in enumerate(batches) if batch.memory_from] == [0, 30, 60]
    assert batches[0].memory_from["rss_bytes"] == "kernel" and "allocated_bytes" not in batches[0].memory_from
    assert not agent.instrumentation.errors


def test_samples_of_memory_that_do_not_fit_wait_for_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [MemorySample(1, 1, device, *[1 << 40] * 14) for device in range(1000)]
    monkeypatch.setattr("traceml_ray.signals.memory.samplers.MemorySampler.sample", lambda *_: list(many))
    pipe = Pipe()
    agent = make(pipe)
    push(agent, 2000)
    agent.tick()
    assert all(len(data) <= wire.MAX_BATCH_BYTES for data in pipe.taken)
    assert [sample.device for batch in pipe.batches() for sample in records_of(batch, MEMORY)] == [
        *range(1000)
    ]


def test_samples_of_memory_that_are_lost_are_counted() -> None:
    pipe = Pipe(room=0)
    agent = make(pipe, agent_buffer_bytes=10_000)
    for _ in range(200):
        agent.tick()
    pipe.room = 1000
    agent.tick()
    lost = agent.instrumentation.errors["memory samples lost with their batch"]
    assert lost > 0 and sum(len(records_of(batch, MEMORY)) for batch in pipe.batches()) + lost == 201


@pytest.mark.parametrize(
    ("world", "second", "due"), [(8, 0.3, 0.5), (256, 0.3, 0.5), (1024, 0.3, 0.7), (1024, 0.9, 1.1)]
)
def test_agents_of_a_large_job_report_half_as_often_and_all_at_the_same_time(
    world: int, second: float, due: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make(Pipe())
    agent.identity = RankIdentity(0, 0, 0, world, 8, world // 8, "host", None, "job", 0, 1, "torchrun")
    replace_time(monkeypatch, rank_agent, monotonic=lambda: 50.0, time=lambda: 1e9 + second)
    assert agent._next_tick() == pytest.approx(50 + due)


def test_rows_beyond_one_batch_go_in_several_consecutive_ones() -> None:
    pipe = Pipe()
    agent = make(pipe)
    push(agent, 2500)
    agent.tick()
    starts, counts = zip(*((b.first_row, len(b.flags)) for b in pipe.batches()), strict=True)
    assert counts[0] > 1000 and sum(counts) == 2500  # the first has a sample of memory, too
    assert starts == (0, counts[0], counts[0] + counts[1])
    assert all(len(data) <= wire.MAX_BATCH_BYTES for data in pipe.taken)


def test_unconfirmed_batches_are_resent_in_order_on_a_new_connection() -> None:
    pipe = Pipe()
    agent = make(pipe)
    for _ in range(3):
        push(agent, 1)
        agent.tick()
    pipe.confirm(agent, 1)
    pipe.taken.clear()
    pipe.generation = 2
    push(agent, 1)
    agent.tick()
    assert [b.seq for b in pipe.batches()][-3:] == [2, 3, 4]
    assert sorted({b.first_row for b in pipe.batches()}) == [1, 2, 3]


def test_batches_taken_but_not_stored_are_resent_to_the_next_relay() -> None:
    pipe = Pipe()
    agent = make(pipe)
    for _ in range(3):
        push(agent, 1)
        agent.tick()
    pipe.confirm(agent, 3, settled=1)
    agent.tick()
    assert [b.seq for b in pipe.batches()] == [1, 2, 3, 4]  # the same relay gets nothing twice
    pipe.taken.clear()
    pipe.generation += 1
    agent.tick()
    assert [b.seq for b in pipe.batches()] == [2, 3, 4, 5]
    pipe.confirm(agent, 5, settled=5)
    pipe.taken.clear()
    pipe.generation += 1
    agent.tick()
    assert [b.seq for b in pipe.batches()] == [6]


def test_rows_taken_by_a_relay_are_not_counted_as_dropped_by_the_agent() -> None:
    pipe = Pipe()
    agent = make(pipe, agent_buffer_bytes=10_000)
    for _ in range(20):
        push(agent, 10)
        agent.tick()
        pipe.confirm(agent, agent._seq, settled=-1)
    pipe.generation += 1
    pipe.room = 0
    for _ in range(20):
        agent.tick()
    pipe.room = 1000
    agent.tick()
    assert sum(len(b.flags) for b in pipe.batches()[:20]) == 200
    assert pipe.batches()[-1].dropped == 0


def test_backpressure_drops_the_oldest_rows_and_counts_them() -> None:
    pipe = Pipe(room=0)
    agent = make(pipe, agent_buffer_bytes=10_000)
    for _ in range(20):
        push(agent, 10)
        agent.tick()
    pipe.room = 1000
    agent.tick()
    last = pipe.batches()[-1]
    arrived = sum(len(b.flags) for b in pipe.batches())
    assert last.produced == 200 and last.dropped == 200 - arrived > 0


def test_full_ring_counts_rows_as_produced_and_dropped() -> None:
    pipe = Pipe()
    agent = make(pipe, ring_rows=64)
    push(agent, 100)
    agent.tick()
    assert (pipe.batches()[0].produced, pipe.batches()[0].dropped) == (100, 36)


@pytest.mark.parametrize(
    "reply", [b"", b"garbage", codec.encode(wire.RankReply(codec.VERSION, "other", 99, 99))]
)
def test_invalid_reply_confirms_nothing(reply: bytes) -> None:
    pipe = Pipe()
    agent = make(pipe)
    push(agent, 1)
    agent.tick()
    pipe.answers.append(reply)
    agent.tick()
    pipe.generation += 1
    agent.tick()
    assert [b.seq for b in pipe.batches()][-3:] == [1, 2, 3]
    counted = pipe.batches()[-1].errors
    assert bool(counted) == (reply in (b"", b"garbage"))


def test_end_leaves_in_the_spool_what_a_relay_took_and_nobody_has_stored(tmp_path: Path) -> None:
    pipe = Pipe()
    agent = make(pipe, spool=str(tmp_path), interval=30.0)
    push(agent, 2)
    agent.tick()
    push(agent, 3)
    agent.tick()
    pipe.confirm(agent, 3, settled=1)  # no disk is waited for, and the relay may be ended before
    end(agent)
    (left,) = tmp_path.glob("*.spool")
    batches = [codec.decode(data, wire.RankBatch) for data in read_spool(left)]
    assert [(b.seq, len(b.flags), b.final) for b in batches] == [(2, 3, False), (3, 0, True)]
    assert [b.seq for b in pipe.batches()] == [1, 2, 3]


def test_end_leaves_its_copy_before_it_waits_for_a_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that gets no core may be gone before the wait is over."""
    pipe, there, now = Pipe(), list[bool](), [50.0]
    agent = make(pipe, spool=str(tmp_path), interval=30.0)

    def sleep(seconds: float) -> None:
        there.append(any(tmp_path.glob("*.spool")))
        now[0] += seconds

    replace_time(monkeypatch, rank_agent, monotonic=lambda: now[0], sleep=sleep)
    push(agent, 2)
    agent.tick()
    agent._finish()
    assert there and all(there)
    assert now[0] == pytest.approx(50 + rank_agent.CLOSE_WAIT_S, abs=2 * rank_agent.CONFIRM_POLL_S)


def test_end_leaves_batches_that_no_relay_took_in_the_spool(tmp_path: Path) -> None:
    pipe = Pipe(room=1)
    agent = make(pipe, spool=str(tmp_path), interval=30.0)
    push(agent, 5)
    agent.tick()
    push(agent, 2)
    end(agent, [wire.Event("exit", 1)])
    (left,) = tmp_path.glob("*.spool")
    batches = [codec.decode(data, wire.RankBatch) for data in read_spool(left)]
    assert [b.seq for b in batches] == [1, 2], "what was taken but not confirmed is there, too"
    assert batches[-1].final and batches[-1].events[0].kind == "exit"
    assert pipe.closed


def test_rank_that_is_killed_before_there_is_a_relay_leaves_what_it_has_reported(tmp_path: Path) -> None:
    pipe = Pipe(room=0)
    pipe.generation = 0
    agent = make(pipe, spool=str(tmp_path))
    for rows in (2, 3):
        push(agent, rows)
        agent.tick()
    (early,) = tmp_path.glob("*.spool")
    assert early.stat().st_mode & 0o077 == 0
    assert early.name < f"{agent.process_id}.0.spool", "relays leave what comes later in that one"
    batches = [codec.decode(data, wire.RankBatch) for data in read_spool(early)]
    assert [(b.seq, len(b.flags)) for b in batches] == [(1, 2), (2, 3)]
    pipe.room, pipe.generation = 1000, 1
    agent.tick()
    assert early.exists(), "a relay has it, but not the disk"
    pipe.confirm(agent, 3, settled=2)
    agent.tick()
    agent.tick()
    assert list(tmp_path.iterdir()) == []


def test_copy_without_a_relay_is_bounded_and_ends_with_the_process(tmp_path: Path) -> None:
    pipe = Pipe(room=0)
    pipe.generation = 0
    agent = make(pipe, spool=str(tmp_path), agent_buffer_bytes=1 << 16, interval=30.0)
    for _ in range(4):
        push(agent, 600)
        agent.tick()
    (early,) = tmp_path.glob("*.spool")
    assert 1 << 15 < early.stat().st_size < 1 << 16
    end(agent)
    assert [path.name for path in tmp_path.iterdir()] == [f"{agent.process_id}.spool"]


def test_confirmed_end_leaves_no_spool(tmp_path: Path) -> None:
    pipe = Pipe()
    agent = make(pipe, spool=str(tmp_path), interval=30.0)
    push(agent, 5)
    pipe.confirm(agent, 1)
    agent.tick()
    pipe.confirm(agent, 2)
    end(agent)
    assert list(tmp_path.iterdir()) == []


def test_invalid_rank_in_the_environment_is_reported_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "4")
    pipe = Pipe()
    agent = make(pipe)
    agent.tick()
    agent.tick()
    assert "RANK" in pipe.batches()[-1].missing["identity"]


def dump(agent: RankAgent, name: str, run: str | None = None, what: str = "dump") -> bytes:
    command = wire.Command(what, {"id": name, "run": run})
    return codec.encode(wire.RankReply(codec.VERSION, agent.process_id, 0, 0, [command]))


def test_stack_request_is_answered_once_though_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceml_ray.signals.collectives.agent.read", lambda *_: None)
    pipe = Pipe()
    agent = make(pipe)
    for asked in ("h1", "h1", "h2"):
        pipe.answers.append(dump(agent, asked))
        thread = threading.Thread(target=agent.tick)
        thread.start()
        thread.join(240)
    events = [event for batch in pipe.batches() for event in batch.events]
    assert [(e.kind, e.data["dump"]) for e in events] == [("stacks", "h1"), ("stacks", "h2")]
    assert "test_rank_agent.py" in str(events[0].data["where"])


def test_position_request_is_answered_in_short_with_the_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "traceml_ray.signals.collectives.agent.read",
        lambda asked, _: CollectivesReport(5, asked, "recorder", [], []),
    )
    pipe = Pipe()
    agent = make(pipe)
    for _ in range(2):
        pipe.answers.append(dump(agent, "h1?0", what="where"))
        thread = threading.Thread(target=agent.tick)
        thread.start()
        thread.join(240)
    (batch,) = [batch for batch in pipe.batches() if batch.events]
    (event,) = batch.events
    assert (event.kind, event.message) == ("standing", "")
    assert "test_rank_agent.py" in str(event.data["where"])
    assert [report.asked for report in records_of(batch, LAST_CALLS)] == ["h1?0"], "in the same batch"
    assert sum(len(records_of(batch, LAST_CALLS)) for batch in pipe.batches()) == 1


def test_requests_of_another_run_or_unknown_ones_are_ignored() -> None:
    pipe = Pipe()
    agent = make(pipe)
    agent.tick()
    pipe.answers += [dump(agent, "h1", "another"), dump(agent, "h2").replace(b"dump", b"jump")]
    agent.tick()
    agent.tick()
    assert [event for batch in pipe.batches() for event in batch.events] == []
    assert pipe.batches()[-1].errors == {}


def test_long_events_with_many_rows_stay_within_a_packet() -> None:
    pipe = Pipe()
    agent = make(pipe)
    push(agent, 1024)
    agent.unsent.events += [wire.Event(kind, 1, message="x" * 12_000) for kind in ("stacks", "note")]
    agent.tick()
    assert all(len(data) <= wire.MAX_BATCH_BYTES for data in pipe.taken)
    assert sum(len(batch.flags) for batch in pipe.batches()) == 1024


def test_rows_wait_in_the_ring_while_other_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that fails on the training thread while the batch is being made."""
    pipe = Pipe()
    agent = make(pipe)
    missing, place = agent.instrumentation.missing, iter(range(1000))

    def counts(text: str) -> str:
        missing[f"another {next(place)}"] = agent.instrumentation.errors.debug = False  # type: ignore[assignment]
        return text

    missing["one"] = "reason"
    monkeypatch.setattr("traceml_ray.agent.rank_agent.sendable", counts)
    push(agent, 3)
    agent.guard("tick", agent.tick)
    monkeypatch.undo()
    missing.clear()
    agent.tick()
    assert sum(len(b.flags) for b in pipe.batches()) == 3
    assert (pipe.batches()[-1].produced, pipe.batches()[-1].dropped) == (3, 0)


def test_losses_before_sending_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe(room=0)
    agent = make(pipe, agent_buffer_bytes=0)
    recorder, spans = agent.recorder, agent.instrumentation.spans
    for number in range(260):
        begun = spans.begin(f"stage {number}")
        if begun is not None:
            spans.end(begun)
    for _ in range(40):
        spans.begin("stage 0")
    recorder.lost_marks, recorder.lost_rows = 7, 2
    for seq in range(3):
        agent.unsent.events.append(wire.Event("note", seq))
        agent.recorder.sums.add("mine", DATA, 1, 10, 0, False)
        agent.tick()  # what was made before has no room any longer
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda _: encode(1 / 0))
    agent.unsent.events.append(wire.Event("note", 4))
    agent.tick()
    monkeypatch.undo()
    pipe.room = 1000
    agent.tick()
    last = pipe.batches()[-1]
    assert (last.produced, last.dropped) == (2, 2)
    assert last.errors["marks lost: no room"] == 7
    assert last.errors["spans lost: more than 256 names"] == 260 - (256 - len(SpanSums().names))
    assert last.errors["spans lost: too many open"] == 40 - 32
    assert last.errors["events lost with their batch"] >= 4
    assert last.errors["spans lost with their batch"] >= 2


def test_marks_that_cannot_be_read_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceml_ray.agent.rank_agent.LOCK_S", 0.0)
    pipe = Pipe()
    agent = make(pipe)
    with agent.recorder._lock:
        thread = threading.Thread(target=agent.tick)
        thread.start()
        thread.join(240)
    assert pipe.batches()[-1].errors["marks: not read, a thread holds the recorder"] == 1


def test_open_span_is_in_the_batch() -> None:
    pipe = Pipe()
    agent = make(pipe)
    agent.instrumentation.spans.innermost = "checkpoint"
    agent.tick()
    (batch,) = pipe.batches()
    assert batch.open is not None and batch.open.span == "checkpoint"


def test_failures_of_identity_spans_and_events_cost_no_row() -> None:
    def nobody() -> RankIdentity:
        raise OSError("too many open files")

    pipe = Pipe()
    agent = RankAgent(Settings(session="s"), pipe, nobody)  # type: ignore[arg-type]
    for name in ("file-\udc80", "good"):
        agent.recorder.sums.add(name, DATA, 1, 10, 0, False)
    agent.close([wire.Event("exception", 0, message="\udc80")])  # the thread was never started
    for _ in range(2):
        push(agent, 5)
        agent.tick()
    agent.channel.errors["\udc80"] = 1
    push(agent, 3)
    agent.tick()
    agent.channel.errors.clear()
    push(agent, 1)
    agent.tick()
    batches = pipe.batches()
    assert [(b.first_row, len(b.flags)) for b in batches] == [(0, 5), (5, 5), (10, 3), (13, 1)]
    assert [b.seq for b in batches] == [1, 2, 3, 4]
    assert [span.name for b in batches for span in b.spans] == ["good"]
    last = batches[-1]
    assert (last.produced, last.dropped, last.identity) == (14, 0, None)
    for place in ("identity: OSError", "events not sent: malformed", "spans not sent: malformed"):
        assert last.errors[place]
    assert not [event for b in batches for event in b.events if event.kind == "exception"]


def test_batches_stay_below_their_limit_however_much_there_is_to_send() -> None:
    pipe = Pipe()
    agent = make(pipe)
    names = [f"{number:03}-{'x' * 60}" for number in range(256)]
    for name in names:
        for stage in range(N_STAGES):
            agent.recorder.sums.add(name, stage, 1, 1 << 60, 1 << 60, False)
    agent.close([wire.Event("stacks", 0, message="y" * 12_000), wire.Event("note", 0, message="z" * 60_000)])
    push(agent, 2000)
    agent.tick()
    push(agent, 1)
    agent.tick(final=True)
    assert max(map(len, pipe.taken)) <= wire.MAX_BATCH_BYTES
    batches = pipe.batches()
    assert sum(len(b.flags) for b in batches) == batches[-1].produced == 2001
    assert len({(d.name, d.stage) for b in batches for d in b.spans}) == len(names) * N_STAGES
    assert [event.kind for b in batches for event in b.events if event.kind != "swallowed"] == ["stacks"]
    assert batches[-1].errors["events not sent: too_large"] == 1
    assert [b.final for b in batches] == [False] * (len(batches) - 1) + [True]


class Router(nn.Module):
    """Gives each token to the experts that it is made with."""

    def __init__(self, *chosen: int) -> None:
        super().__init__()
        self.chosen = torch.tensor(chosen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.chosen.repeat(len(tokens))


def test_counts_of_as_many_routers_as_are_allowed_are_sent_in_turn_and_all_at_the_end() -> None:
    pipe = Pipe()
    agent = make(pipe)
    routers, token = agent.instrumentation.routers, torch.zeros(1)
    watched = [Router(number, number) for number in range(MAX_ROUTERS)]
    for router in watched:
        routers.watch(router, MAX_EXPERTS, "router" * 20, None)
    with pytest.raises(ValueError, match="64 routers"):
        routers.watch(Router(0), 4, "one more", None)
    for router in watched:
        router(token)
    for counts in routers._counts.values():
        counts[1:-1] += 1 << 40  # long numbers
    push(agent, 10)
    rounds = MAX_ROUTERS * (MAX_EXPERTS + 2) // COUNTS_AT_ONCE
    for _ in range(rounds):
        agent.tick()
    assert len(pipe.taken) == rounds, "one batch a round"
    assert max(map(len, pipe.taken)) < wire.MAX_BATCH_BYTES // 3
    sent = [router for batch in pipe.batches() for router in records_of(batch, EXPERTS)]
    assert [router.number for router in sent] == [*range(MAX_ROUTERS)]
    assert {router.name: router.tokens for router in sent} == routers.counts()
    for router in watched:
        router(token)
    pipe.taken.clear()
    agent.tick(final=True)
    assert max(map(len, pipe.taken)) <= wire.MAX_BATCH_BYTES and pipe.batches()[-1].final
    sent = [router for batch in pipe.batches() for router in records_of(batch, EXPERTS)]
    assert {router.name: router.tokens for router in sent} == routers.counts()
    assert (sent[0].name, sent[0].tokens[0]) == ("router" * 10 + "rout", 4 + (1 << 40))
    assert not agent.instrumentation.errors


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        (wire.Placement(mesh={"x" * 60_000: [0, 2]}), "too_large"),
        (wire.Placement(stages=[*range(codec.MAX_ITEMS + 1)]), "malformed"),
        (wire.Placement(of_stages=-1), "malformed"),
        (wire.Placement(worker="\udc80"), "malformed"),
    ],
)
def test_value_that_a_relay_would_refuse_costs_itself_only(
    placement: wire.Placement, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceml_ray.agent.instrument.Instrumentation.placement", placement)
    pipe = Pipe()
    agent = make(pipe)
    for _ in range(2):
        push(agent, 700)
        agent.tick()
    batches = pipe.batches()
    assert max(map(len, pipe.taken)) <= wire.MAX_BATCH_BYTES
    assert [batch.placement for batch in batches] == [None] * len(batches)
    assert batches[0].identity is not None and batches[0].strategy == "single"
    assert (sum(len(b.flags) for b in batches), batches[-1].dropped) == (1400, 0)
    assert batches[-1].errors[f"placement not sent: {reason}"] == len(batches)
    (cause,) = [event for batch in batches for event in batch.events]
    assert cause.message.startswith("swallowed in placement not sent: WireError: ")


@given(st.lists(st.sampled_from([0.0, 0.01, 0.4, 1.0]), min_size=8, max_size=8))
def test_batch_with_all_rows_that_it_has_room_for_is_within_the_limit(shares: list[float]) -> None:
    errors = Errors()
    unsent = Unsent(errors)
    draft = BatchDraft(errors)
    hosts, dims, reasons, events, spans, routers, counts, places = (
        round(share * most)
        for share, most in zip(shares, (9000, 900, 70, 8, 1500, 64, 512, 130), strict=True)
    )
    draft.put("identity", msgspec.structs.replace(identity(0), hostname="h" * hosts))
    draft.put("placement", wire.Placement(mesh={"m" * dims: [0, 2]}, stages=[*range(dims)]))
    draft.put("missing", {f"patch {number}": "x" * 200 for number in range(reasons)})
    unsent.events = [wire.Event("stacks", 1, message="y" * 12_000) for _ in range(events)]
    unsent.spans = [wire.SpanSum("s" * 60, 1, *[1 << 60] * 5) for _ in range(spans)]
    unsent.add(RouterTokens(number, f"router {number}", [1 << 60] * counts) for number in range(routers))
    unsent.move_into(draft)
    draft.put_last("errors", {f"{number:0100}": 1 << 60 for number in range(places)})
    per_row = 9 + 2 * ROW_BYTES + LEAD_BYTES
    rows = min(wire.MAX_ROWS, draft.row_bytes // per_row)
    columns = bytes(8 * rows), bytes(rows), bytes(ROW_BYTES * rows)
    numbers = [1 << 60, 1 << 60, 1 << 44, 1 << 44, 1 << 44]
    batch = wire.RankBatch(codec.VERSION, "a" * 64, *numbers, *columns, **draft.fields)
    whole = msgspec.structs.replace(batch, host_rows=columns[2], leads=bytes(LEAD_BYTES * rows), final=True)
    data = codec.encode(whole)
    assert codec.decode(data, wire.RankBatch, max_bytes=wire.MAX_BATCH_BYTES) == whole
    assert rows >= 70 and whole.identity is not None


def test_batch_that_the_relay_refuses_is_counted_and_not_sent_again() -> None:
    pipe = Pipe()
    agent = make(pipe)
    for rows in (3, 4, 5):
        push(agent, rows)
        agent.add_event(wire.Event("note", 0))
        agent.tick()
    refusal = wire.RankReply(codec.VERSION, agent.process_id, 1, 1, refused={2: "too_many_processes", 9: "x"})
    pipe.answers.append(codec.encode(refusal))
    pipe.taken.clear()
    pipe.generation += 1
    agent.tick()
    agent.tick()
    assert [batch.seq for batch in pipe.batches()] == [3, 4, 5]
    last = pipe.batches()[-1]
    assert (last.produced, last.dropped) == (12, 4)
    assert last.errors["batch refused: too_many_processes"] == 1
    assert last.errors["events lost with their batch"] == 1


def test_exception_without_a_printable_message_is_reported_by_its_kind() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError

    opened = make(Pipe()).recorder.open_stage()
    assert bootstrap.event(opened, SilentError()).message == "SilentError"
    assert bootstrap.event(opened, KeyError("\udc80")).message.startswith("KeyError")
    assert codec.size_of(bootstrap.event(opened, ValueError("\udc80")))


def test_secrets_in_an_exception_are_hidden() -> None:
    opened = make(Pipe()).recorder.open_stage()
    for report in bootstrap.event, lambda *how: bootstrap.out_of_memory(*how, "step"):
        event = report(opened, ValueError("refused:\nAuthorization: Bearer hush-1\nhttps://me:hush-2@host/x"))
        assert "hush" not in event.message + str(event.data)
        assert "refused:\nAuthorization: ***" in event.message
        assert str(event.data["traceback"]).startswith("ValueError: refused")


def test_job_launched_by_a_rank_does_not_inherit_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bootstrap.rank_environment(Settings(session="s"), RelayPaths("/x"), {}).items():
        monkeypatch.setenv(name, value)
    bootstrap.clear_rank_environment()
    assert os.environ["TRACEML_SESSION"] == "s", "that was said by a person"
    monkeypatch.setenv(bootstrap.RANK_PID, "1")
    bootstrap.clear_rank_environment()
    assert not [name for name in os.environ if name.startswith("TRACEML_")]
