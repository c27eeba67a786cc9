"""Nodes whose clocks are not the aggregator's: how far off they are, and what is corrected by that."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import MS, SECOND, Clock, Rank, Relay, aggregation, ask

from traceml_ray.analysis.node_clock import DRIFT, ClockEstimate, NodeClock
from traceml_ray.signals.goodput.records import LIFE, LIFECYCLE, Life, LifeInterval, OpenInterval
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.memory.view import recordings_of
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

US = 1000


class Node:
    """A relay on a machine whose clock is `ahead` of the aggregator's and runs `drift` faster."""

    def __init__(self, folder: Path, clock: Clock, ahead: float, drift: float = 0.0, number: int = 0) -> None:
        self.relay, self.clock = Relay(number), clock
        self.ahead, self.drift, self._since = ahead, drift, clock.now
        self.answer: tuple[int, int] | None = None

    def now(self) -> int:
        return self.clock.now + int(self.ahead * SECOND + self.drift * (self.clock.now - self._since))

    def exchange(self, aggregator, there_ns: int, back_ns: int, *batches: bytes, **fields) -> None:
        """A message goes to the aggregator and its answer comes back, each in its own time."""
        data = self.relay.message(*batches, sent_ns=self.now(), answer=self.answer, **fields)
        self.clock.now += there_ns
        reply = codec.decode(aggregator.ingest(data), wire.RelayReply)
        self.clock.now += back_ns
        assert reply.sent_ns is not None
        self.answer = reply.sent_ns, self.now()


@pytest.fixture
def live(tmp_path: Path):
    clock = Clock()
    aggregator = aggregation(tmp_path, clock)
    yield aggregator, clock
    aggregator.close()


def known(aggregator, node: int = 0) -> tuple[int, int]:
    node_entry = next(entry for entry in ask(aggregator, "nodes") if entry.node_id == f"node-{node}")
    return node_entry.clock_offset_ns, node_entry.clock_bound_ns


@pytest.mark.parametrize("ahead", [5.0, -5.0, 0.0])
def test_offset_is_found_within_its_bound_however_unequal_the_two_ways_are(live, tmp_path, ahead) -> None:
    aggregator, clock = live
    node, rng = Node(tmp_path, clock, ahead), random.Random(1)
    for _ in range(40):
        node.exchange(aggregator, 300 * US + rng.randrange(40 * MS), 2 * MS + rng.randrange(200 * MS))
        clock.tick(0.25)
    offset, bound = known(aggregator)
    assert abs(offset + ahead * SECOND) <= bound
    assert MS < bound < 10 * MS  # half of the fastest ways there and back, not of any one round


def test_offset_is_not_known_before_an_answer_has_come_back(live, tmp_path) -> None:
    aggregator, clock = live
    node = Node(tmp_path, clock, 5.0)
    node.exchange(aggregator, MS, MS)
    assert known(aggregator) == (None, None)
    node.exchange(aggregator, MS, MS)
    offset, bound = known(aggregator)
    assert offset == pytest.approx(-5 * SECOND, abs=US) and bound == pytest.approx(MS, abs=US)


@pytest.mark.parametrize("drift", [8e-5, -8e-5])
def test_clock_that_drifts_stays_within_the_bound_and_is_stored_as_it_was(live, tmp_path, drift) -> None:
    aggregator, clock = live
    node = Node(tmp_path, clock, 5.0, drift)
    moments = []
    for second in range(3600):
        clock.tick()
        fast = second % 40 == 0
        node.exchange(aggregator, *((MS, MS) if fast else (90 * MS, 150 * MS)))
        offset, bound = known(aggregator) if second % 100 == 50 else (None, 0)
        if offset is not None:
            assert abs(node.now() + offset - clock.now) <= bound < 10 * MS
            moments.append((node.now(), clock.now))
    aggregator.commit()
    with SessionFile(tmp_path / "session.sqlite") as file:
        measured = file.clocks()["node-0"]
    assert 60 < len(measured.t_ns) < 100  # once a minute, and when it was found to be better
    of_node, true = (np.array(times) for times in zip(*moments, strict=True))
    converted, bounds = measured.to_aggregator(of_node)
    assert (np.abs(converted - true) <= bounds).all() and bounds.max() < 20 * MS


def test_clock_that_is_set_is_measured_anew(live, tmp_path) -> None:
    aggregator, clock = live
    node = Node(tmp_path, clock, 0.0)
    for ahead in (0.0, 2.0, -3.0):
        node.ahead = ahead
        before = node.now()
        for _ in range(8):
            node.exchange(aggregator, MS, 3 * MS)
            clock.tick()
        offset, bound = known(aggregator)
        assert abs(offset + ahead * SECOND) <= bound <= 3 * MS
        aggregator.commit()
        with SessionFile(tmp_path / "session.sqlite") as file:
            (converted,), _ = file.clocks()["node-0"].to_aggregator(np.array([node.now()]))
        assert abs(converted - clock.now) <= 3 * MS and before


def test_packet_that_was_held_up_for_minutes_says_little_and_nothing_wrong(live, tmp_path) -> None:
    aggregator, clock = live
    node = Node(tmp_path, clock, 5.0)
    for _ in range(3):
        node.exchange(aggregator, MS, MS)
    held = node.relay.message(sent_ns=node.now(), answer=node.answer)
    clock.tick(300)
    aggregator.ingest(held)
    offset, bound = known(aggregator)
    assert abs(offset + 5 * SECOND) <= bound <= MS + 2 * 300 * DRIFT * SECOND


def test_two_nodes_ten_seconds_apart_stand_on_one_axis(live, tmp_path) -> None:
    """A process on each ends a second after the other: by their own clocks it was the other way round."""
    aggregator, clock = live
    nodes = [Node(tmp_path, clock, 5.0, number=0), Node(tmp_path, clock, -5.0, number=1)]
    ranks = [Rank(rank, 2, per_node=1) for rank in range(2)]
    for _ in range(5):
        for node, rank in zip(nodes, ranks, strict=True):
            sample = MemorySample(node.now(), 1, None, rss_bytes=1)
            node.exchange(aggregator, MS, MS, rank.batch(1, memory=[sample]))
            clock.tick(0.5)
    truth = []
    for node, rank in zip(nodes, ranks, strict=True):
        truth.append(clock.now)
        of_rank = wire.Event("exception", node.now(), message="boom")
        ended = wire.Event("process_ended", node.now(), data={"process_id": rank.process_id, "exit_code": 1})
        xid = wire.Event("xid", node.now(), data={"gpu": 0, "xid": 79, "times": 1})
        batch = rank.batch(0, events=[of_rank])
        node.exchange(aggregator, MS, MS, batch, events=[ended, xid], lost=[rank.process_id])
        clock.tick()
    aggregator.commit()
    with SessionFile(tmp_path / "session.sqlite") as file:
        events, _ = file.events()
        times = {
            kind: [event.t_ns for event in events if event.kind == kind]
            for kind in ("exception", "process_ended", "xid")
        }
        assert times["exception"] == times["process_ended"]
        assert all(abs(t - true_ns) <= MS for t, true_ns in zip(times["exception"], truth, strict=True))
        # What is compared with samples of its node by the time they have in common keeps that.
        assert [round((t - true_ns) / SECOND) for t, true_ns in zip(times["xid"], truth, strict=True)] == [
            5,
            -5,
        ]
        clocks = file.clocks()
        series = [
            clocks[f"node-{node}"].to_aggregator(samples.t_ns)[0]
            for node, samples in enumerate(file.memory_samples()[0])
        ]
        apart = (series[1] - series[0]) / SECOND
        assert np.allclose(apart, 0.5, atol=0.01)
    deaths = ask(aggregator, "deaths")
    assert [death.rank for death in deaths] == [0, 1]


def test_measurements_of_clocks_are_refused_where_nobody_made_them(live, tmp_path) -> None:
    aggregator, clock = live
    node = Node(tmp_path, clock, 5.0)
    for _ in range(3):
        node.exchange(aggregator, MS, MS)
    aggregator.commit()
    for column, value in [("bound_ns", -1), ("offset_ns", 1 << 62), ("t_ns", "x"), ("offset_ns", 1.5)]:
        with sqlite3.connect(tmp_path / "session.sqlite") as changed:
            before = changed.execute(f"SELECT {column} FROM clock").fetchone()
            changed.execute(f"UPDATE clock SET {column} = ?", (value,))
        with (
            SessionFile(tmp_path / "session.sqlite") as file,
            pytest.raises(SessionFileError, match="damaged"),
        ):
            file.clocks()
        with sqlite3.connect(tmp_path / "session.sqlite") as changed:
            changed.execute(f"UPDATE clock SET {column} = ?", before)


def test_session_of_relays_that_do_not_measure_has_no_clocks(live, tmp_path) -> None:
    aggregator, _ = live
    aggregator.ingest(Relay().message(Rank(0).batch(1)))
    aggregator.commit()
    assert known(aggregator) == (None, None)
    with SessionFile(tmp_path / "session.sqlite") as file:
        assert file.clocks() == {}


def test_first_measurement_is_as_exact_as_those_after_it_allow() -> None:
    bounds = (
        np.array([0, 1, 61]) * SECOND,
        np.array([90 * MS, 5 * MS, 4 * MS]),
        np.array([100 * MS, 2 * MS, 3 * MS]),
    )
    clock = NodeClock.of(*bounds)
    assert clock.bound_ns[0] <= 2 * MS + DRIFT * SECOND + 1 and clock.bound_ns[1] <= 2 * MS
    assert (np.abs(clock.offset_ns - np.array([5, 5, 4]) * MS) <= clock.bound_ns).all()
    was_set = NodeClock.of(bounds[0], np.array([90 * MS, 5 * SECOND, 5 * SECOND]), bounds[2])
    assert was_set.bound_ns[0] == 100 * MS and was_set.offset_ns[0] == 90 * MS


def test_memory_of_two_nodes_is_analysed_on_one_clock(live, tmp_path) -> None:
    """By the nodes' own clocks rank 0 would have grown 8 s later than it did, and so after rank 1."""
    aggregator, clock = live
    nodes = [Node(tmp_path, clock, 5.0, number=0), Node(tmp_path, clock, -3.0, number=1)]
    ranks = [Rank(rank, 2, per_node=1) for rank in range(2)]
    true: list[list[int]] = [[], []]
    for second in range(20):
        for number, node in enumerate(nodes):
            true[number].append(clock.now)
            sample = MemorySample(node.now(), second, None, rss_bytes=1 << 30)
            node.exchange(aggregator, 2 * MS, MS, ranks[number].batch(1, memory=[sample]))
        clock.tick()
    aggregator.commit()
    with SessionFile(tmp_path / "session.sqlite") as file:
        recordings = recordings_of(file)
    for recording, true_times in zip(recordings, true, strict=True):
        assert recording.bound_ns is not None and recording.bound_ns <= 4 * MS
        assert (np.abs(recording.t_ns - np.array(true_times)) <= recording.bound_ns).all()
    between = true[0][5] - 100 * MS, true[0][8] + 500 * MS
    shown = ask(
        aggregator, "memory_samples", processes=(1, 2), last=10, first_ns=between[0], last_ns=between[1]
    )
    for process, true_times in enumerate(true, 1):
        times = [sample.t_ns for owner, sample in shown if owner == process]
        assert np.allclose(times, true_times[5:9], atol=4 * MS)


def test_times_far_from_any_measurement_have_a_wide_bound() -> None:
    clock = NodeClock(np.array([0, 1000 * SECOND]), np.array([5, 900]), np.array([10, 20]))
    times, bound = clock.to_aggregator(np.array([-100, 499, 501, 2000]) * SECOND)
    assert (times - np.array([-100, 499, 501, 2000]) * SECOND).tolist() == [5, 5, 900, 900]
    away = np.array([100, 499, 499, 1000]) * SECOND
    assert np.allclose(bound, np.array([10, 10, 20, 20]) + DRIFT * away, atol=1)


delays = st.integers(0, 500 * MS)


@given(st.lists(st.tuples(delays, delays, st.integers(1, 60)), min_size=2, max_size=30),
       st.integers(-10 * SECOND, 10 * SECOND), st.floats(-9e-5, 9e-5))  # fmt: skip
def test_true_offset_is_never_outside_the_bound(rounds, ahead: int, drift: float) -> None:
    estimate, now, answer = ClockEstimate(), 1_700_000_000 * SECOND, None
    began = now

    def node() -> int:
        return now + ahead + int(drift * (now - began))

    for there, back, pause in rounds:
        sent = node()
        now += there
        estimate.add(now, sent, answer)
        if estimate.offset_ns is not None and estimate.bound_ns is not None:
            assert abs(node() + estimate.offset_ns - now) <= estimate.bound_ns + US
        replied = now
        now += back
        answer = replied, node()
        now += pause * SECOND
    assert estimate.restarts == 0


def test_all_times_of_a_record_are_converted_together_and_what_is_not_known_stays_so(live, tmp_path) -> None:
    aggregator, clock = live
    node, rank = Node(tmp_path, clock, 5.0), Rank(0, 1)
    for _ in range(5):
        node.exchange(aggregator, MS, MS, rank.batch(1))
        clock.tick(0.5)
    true = clock.now
    open_now = [OpenInterval(2, "evaluation", SECOND, None, SECOND)]
    life = Life(node.now(), node.now() - 9 * SECOND, None, node.now() - 7 * SECOND, open=open_now)
    saved = LifeInterval(1, "checkpoint_save", node.now() - 3 * SECOND, node.now() - SECOND, SECOND)
    node.exchange(aggregator, MS, MS, rank.batch(1, life=[life], lifecycle=[saved]))
    aggregator.commit()
    with SessionFile(tmp_path / "session.sqlite") as file:
        ((_, _, kept),) = file.records(LIFE)
        ((_, _, interval),) = file.records(LIFECYCLE)
    off = kept.t_ns - true
    assert abs(off) <= MS
    assert (kept.attached_ns - true, kept.born_ns) == (off - 9 * SECOND, None)
    assert (kept.first_step_ns - true, kept.ended_ns) == (off - 7 * SECOND, None)
    assert (interval.began_ns - true, interval.ended_ns - true) == (off - 3 * SECOND, off - SECOND)
    (evaluation,) = kept.open_intervals()
    assert (evaluation.began_ns - true, evaluation.ended_ns - true) == (off - SECOND, off)
    assert kept.open_intervals([2]) == []
