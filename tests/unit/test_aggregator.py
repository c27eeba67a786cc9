"""The aggregator's core: every row once, whatever is sent twice, lost, late, killed or garbage."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from module_time import replace_time
from played import Played
from sessions import (
    MS,
    SECOND,
    Clock,
    Rank,
    Relay,
    actor_of,
    aggregation,
    ask,
    check_ledger,
    confirmed,
    identity,
)
from snapshot import Snapshot

from traceml_ray.monitor import aggregator as aggregator_module
from traceml_ray.monitor import relay_intake
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.live_steps import MAX_UNKNOWN, LiveRanks
from traceml_ray.monitor.offline import finish_offline
from traceml_ray.ray import aggregator as actor
from traceml_ray.settings import Settings
from traceml_ray.stages import FLAG_EXCLUDED, FORWARD, SEGMENT_BITS, SYNC_WAIT
from traceml_ray.store import query
from traceml_ray.store.rank_processes import to_row, world_size
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import read_spool, write_spool

FINISH = wire.Finish(codec.VERSION, 0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _ledger(aggregator: AggregatorCore, folder: Path) -> dict[str, Any]:
    assert aggregator.commit()
    return check_ledger(folder)


def _steps(folder: Path, rank: int = 0) -> list[int]:
    with SessionFile(folder / "session.sqlite") as session:
        return [
            int(key) >> SEGMENT_BITS for rows in session.rows()[0] if rows.rank == rank for key in rows.keys
        ]


def test_rows_are_confirmed_only_once_they_are_on_disk(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0)
    assert confirmed(aggregator.ingest(relay.message(rank.batch(3)))) == 0
    assert confirmed(aggregator.ingest(relay.message(rank.batch(3)))) == 0
    assert _ledger(aggregator, tmp_path)["stored"] == 6
    again = relay.message(seq=2)
    assert confirmed(aggregator.ingest(again)) == 2


def test_message_sent_twice_counts_once_even_after_a_restart(tmp_path: Path) -> None:
    relay, rank = Relay(), Rank(0)
    event = wire.Event("note", 1)
    messages = [relay.message(rank.batch(3, events=[event])) for _ in range(3)]
    aggregator = aggregation(tmp_path)
    for message in [*messages, *messages]:
        aggregator.ingest(message)
    assert _ledger(aggregator, tmp_path)["stored"] == 9
    aggregator.close()
    restarted = aggregation(tmp_path)
    assert [confirmed(restarted.ingest(message)) for message in messages] == [3, 3, 3]
    assert _ledger(restarted, tmp_path)["stored"] == 9
    with SessionFile(tmp_path / "session.sqlite") as session:
        assert len(session.events()[0]) == 3


def test_batch_resent_to_another_relay_counts_once(tmp_path: Path) -> None:
    aggregator, rank = aggregation(tmp_path), Rank(0)
    batches = [rank.batch(4) for _ in range(3)]
    aggregator.ingest(Relay(0, "a").message(*batches[:2]))
    aggregator.ingest(Relay(0, "b").message(*batches[1:]))
    assert _ledger(aggregator, tmp_path)["stored"] == 12


def test_rows_that_overlap_are_cut_at_the_watermark(tmp_path: Path) -> None:
    aggregator, rank = aggregation(tmp_path), Rank(0)
    aggregator.ingest(Relay(0, "a").message(rank.batch(4)))
    rank.produced = 2
    aggregator.ingest(Relay(0, "b").message(rank.batch(6)))  # rows 2 to 7
    assert _ledger(aggregator, tmp_path)["stored"] == 8
    assert _steps(tmp_path) == list(range(8))


def test_message_that_overtook_another_waits_for_it(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0)
    first, second, third = (relay.message(rank.batch(2)) for _ in range(3))
    for message in (second, third, first, second, third):  # sent, first one lost, all sent again
        aggregator.ingest(message)
    assert _ledger(aggregator, tmp_path)["stored"] == 6
    assert _steps(tmp_path) == list(range(6))


def test_gap_that_stays_is_passed_when_the_message_is_sent_again(tmp_path: Path) -> None:
    """The session file was lost: the relay no longer has what an earlier one confirmed."""
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0)
    relay.message(rank.batch(2))
    second = relay.message(rank.batch(2))
    aggregator.ingest(second)
    aggregator.ingest(second)
    count = _ledger(aggregator, tmp_path)
    assert (count["stored"], count["in_flight"]) == (2, 2)
    assert confirmed(aggregator.ingest(second)) == 2


def test_drops_are_counted_where_they_happened(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0)
    aggregator.ingest(relay.message(rank.batch(10)))
    rank.batch(5)
    rank.dropped = 5
    aggregator.ingest(relay.message(rank.batch(10)))
    rank.batch(4)
    aggregator.ingest(relay.message(rank.batch(10), dropped={rank.process_id: 4}))
    rank.batch(3)
    aggregator.ingest(Relay(0, "next").message(rank.batch(10), dropped={rank.process_id: 3}))
    aggregator.ingest(relay.message(rank.batch(0, produced=rank.produced + 2)))
    count = _ledger(aggregator, tmp_path)
    assert count["dropped"] == {"agent": 5, "relay": 7, "aggregator": 0}
    assert (count["produced"], count["stored"], count["in_flight"]) == (54, 40, 2)
    aggregator.finish(FINISH)
    count = check_ledger(tmp_path)
    assert count["dropped"] == {"agent": 5, "relay": 9, "aggregator": 0}
    assert count["in_flight"] == 0


def test_rows_given_up_that_still_arrive_count_as_stored(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0)
    rank.dropped = 6  # given up unconfirmed, and yet it came
    aggregator.ingest(relay.message(rank.batch(10), dropped={rank.process_id: 4}))
    count = _ledger(aggregator, tmp_path)
    assert (count["stored"], count["in_flight"], sum(count["dropped"].values())) == (10, 0, 0)


def test_rank_process_that_only_lost_rows_is_in_the_ledger(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    aggregator.ingest(Relay().message(dropped={"feed": 7}))
    assert _ledger(aggregator, tmp_path)["per_rank"]["unknown"]["dropped"]["relay"] == 7


def test_garbage_is_dropped_and_counted_and_the_rest_is_taken(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0)
    good = rank.batch(3)
    bad = [b"", b"\xc1junk", good[:-9], codec.encode(FINISH), b"\x00" * 100]
    assert confirmed(aggregator.ingest(b"junk")) == 0
    aggregator.ingest(relay.message(*bad, good))
    assert _ledger(aggregator, tmp_path)["stored"] == 3
    assert aggregator.errors["ingest: garbage"] == 1
    named = {place: n for place, n in aggregator.errors.items() if place.startswith("rank batch: ")}
    assert sum(named.values()) == len(bad)
    aggregator.commit()
    with SessionFile(tmp_path / "session.sqlite") as session:
        assert session.meta()["errors"] == aggregator.errors
        assert any("rank batch (host-0)" in event.message for event in session.events()[0])


@given(data=st.data())
@hypothesis.settings(max_examples=25)
def test_aggregator_neither_raises_nor_loses_balance_on_any_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    folder = tmp_path_factory.mktemp("session")
    aggregator, relay, rank = aggregation(folder), Relay(), Rank(0)
    for _ in range(data.draw(st.integers(1, 6))):
        message = bytearray(relay.message(rank.batch(data.draw(st.integers(0, 5)))))
        for _ in range(data.draw(st.integers(0, 4))):
            message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
        codec.decode(aggregator.ingest(bytes(message)), wire.RelayReply)
        aggregator.judge()
    assert aggregator.commit()
    check_ledger(folder)
    aggregator.finish(FINISH)
    check_ledger(folder)
    aggregator.close()


def test_identity_that_comes_late_names_the_rows_before(tmp_path: Path) -> None:
    aggregator, relay = aggregation(tmp_path), Relay()
    rank = Rank(0, 1)
    aggregator.ingest(relay.message(rank.batch(3)))
    rank.identity = identity(5, 8, pid=rank.identity.pid)
    aggregator.ingest(relay.message(rank.batch(3)))
    assert list(_ledger(aggregator, tmp_path)["per_rank"]) == ["5"]
    assert _steps(tmp_path, rank=5) == list(range(6))


def test_later_process_of_a_rank_represents_it(tmp_path: Path, clock: Clock) -> None:
    aggregator, relay = aggregation(tmp_path, clock), Relay()
    first, second = Rank(0, 1, pid=1, process_id="a"), Rank(0, 1, pid=2, process_id="b")
    aggregator.ingest(relay.message(first.batch(3)))
    clock.tick()
    aggregator.ingest(relay.message(second.batch(2)))
    clock.tick()
    aggregator.ingest(relay.message(first.batch(3)))
    count = _ledger(aggregator, tmp_path)
    assert count["per_rank"]["0"]["stored"] == 8
    with SessionFile(tmp_path / "session.sqlite") as session:
        assert len(session.processes()) == 2
        assert session.ranks()[0].process_id == "b"


def test_new_attempt_replaces_the_old_one(tmp_path: Path) -> None:
    aggregator, relay = aggregation(tmp_path), Relay()
    aggregator.ingest(relay.message(Rank(0, 1).batch(30), Rank(0, 1, attempt=1).batch(7)))
    assert _ledger(aggregator, tmp_path)["stored"] == 37
    assert _steps(tmp_path) == list(range(7))


# -- the verdict ---------------------------------------------------------------------------------


def _run(
    aggregator: AggregatorCore, clock: Clock, ranks: list[Rank], seconds: int, late: int | None = None
) -> None:
    relay = Relay(0, f"relay-{clock.now}")
    for _ in range(seconds):
        batches = []
        for rank in ranks:
            slow = late == rank.identity.global_rank
            ms = [1, 2, 0, 3, 4, 5] if late is not None and not slow else [1, 6 if slow else 2, 0, 3, 4, 1]
            batches.append(rank.batch(10, ms))
        aggregator.ingest(relay.message(*batches))
        clock.tick()
        assert aggregator.commit()
        aggregator.judge()


def _label(aggregator: AggregatorCore) -> str | None:
    return aggregator.verdict.label if aggregator.verdict else None


def test_verdict_names_the_late_rank_and_its_changes_are_stored(tmp_path: Path, clock: Clock) -> None:
    aggregator, ranks = aggregation(tmp_path, clock), [Rank(i, 4) for i in range(4)]
    _run(aggregator, clock, ranks, 8)
    assert _label(aggregator) == "healthy"
    _run(aggregator, clock, ranks, 8, late=2)
    assert aggregator.verdict is not None
    assert (aggregator.verdict.label, aggregator.verdict.stage, aggregator.verdict.ranks) == (
        "straggler",
        "data",
        (2,),
    )
    assert aggregator.commit()
    with SessionFile(tmp_path / "session.sqlite") as session:
        labels = [verdict["label"] for verdict in session.verdicts()[0]]
    assert labels[0] == "healthy"
    assert labels[-1] == "straggler"
    assert len(labels) <= 3
    assert not aggregator.errors


@pytest.mark.parametrize(("n", "began_ms", "more_ms"), [(3, 2000, 4), (50, 500, 8)])
def test_rank_that_is_profiled_is_not_named_and_its_steps_are_in_no_statistic(
    tmp_path: Path, n: int, began_ms: int, more_ms: int
) -> None:
    """Its profiler takes long to begin, and each recorded step is longer: all others wait for it."""

    class Profiled(Played):
        def rows(self, steps: int) -> np.ndarray:
            made = super().rows(steps)
            numbers = np.arange(self.step, self.step + steps)
            self.slowed = (numbers >= 60) & (numbers <= 60 + n)
            took = np.where(self.slowed, more_ms * MS, 0) + np.where(numbers == 60, began_ms * MS, 0)
            made[5, :, FORWARD] += took
            made[[rank for rank in range(self.world) if rank != 5], :, SYNC_WAIT] += took
            return made

        def _batch(self, rank: Rank, rows: np.ndarray, **fields: Any) -> bytes:
            flags = FLAG_EXCLUDED * (self.slowed & (rank.identity.global_rank == 5))
            return super()._batch(rank, rows, flags=flags.astype(np.uint8).tobytes(), **fields)

    played, labels = Profiled(tmp_path, late=None), set()
    for second in range(40):
        played.play()
        assert played.aggregator.verdict is not None
        labels |= {played.aggregator.verdict.label} if second >= 10 else set()
    played.end()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert labels == {"healthy"} and summary["verdict"]["label"] == "healthy"
    assert not summary["suspects"] and not summary["episodes"] and not summary["brief"]["count"]
    assert summary["steps"]["p95_ms"] < 22 and summary["throughput"]["steps_per_s"] > 45
    assert summary["steps"]["count"] == 200


def test_ranks_that_report_far_apart_are_judged_at_their_common_steps(tmp_path: Path, clock: Clock) -> None:
    aggregator, relay, ranks = aggregation(tmp_path, clock), Relay(), [Rank(i, 2) for i in range(2)]
    aggregator.ingest(relay.message(ranks[0].batch(900), ranks[1].batch(100)))
    aggregator.judge()
    assert aggregator.verdict is not None
    assert (aggregator.verdict.label, aggregator.verdict.to_step) == ("healthy", 99)


def test_run_totals_go_on_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    relay, ranks = Relay(), [Rank(0), Rank(1)]
    aggregator = aggregation(tmp_path, clock)

    def feed(to: AggregatorCore, steps: int, late: float) -> dict[str, Any]:
        for _ in range(0, steps, 10):
            clock.tick()
            slow, waits = [1, 2 + late, 0, 3, 4, 1], [1, 2, 0, 3, 4, 1 + late]
            to.ingest(relay.message(ranks[0].batch(10, waits), ranks[1].batch(10, slow)))
            to.judge()
        to.commit()
        return cast(dict[str, Any], ask(to, "verdict"))

    feed(aggregator, 200, 6)
    feed(aggregator, 300, 0)
    before = feed(aggregator, 800, 6)
    assert [episode["from_step"] for episode in before["episodes"]] == [500, 11]
    restarted = aggregation(tmp_path, clock)
    after = feed(restarted, 100, 6)
    assert (after["label"], after["from_step"]) == ("straggler", 500)
    onsets = [
        [(episode["from_step"], episode["started_at"]) for episode in to["episodes"]]
        for to in (before, after)
    ]
    assert onsets[0] == onsets[1] and all(started_at for _, started_at in onsets[0])
    assert after["lost_s"] == pytest.approx(before["lost_s"] + 100 * 0.006, rel=0.02)
    assert after["elapsed_s"] == pytest.approx(before["elapsed_s"] + 100 * 0.017, rel=0.01)


def test_unusable_saved_judge_state_is_counted(tmp_path: Path, clock: Clock) -> None:
    relay, ranks = Relay(), [Rank(0), Rank(1)]
    aggregator = aggregation(tmp_path, clock)
    for _ in range(20):
        aggregator.ingest(relay.message(*(rank.batch(10) for rank in ranks)))
        aggregator.judge()
    aggregator._writer.set_meta(judging={"job": {"which": [0, 0], "state": {"episodes": 1}}})
    aggregator.commit()
    restarted = aggregation(tmp_path, clock)
    restarted.judge()
    assert restarted.verdict is not None and restarted.errors["history: TypeError"] == 1


def test_verdict_goes_on_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    aggregator, ranks = aggregation(tmp_path, clock), [Rank(i, 4) for i in range(4)]
    _run(aggregator, clock, ranks, 10, late=1)
    aggregator.close()
    restarted = aggregation(tmp_path, clock)
    restarted.judge()
    assert _label(restarted) == "straggler"


def test_silent_rank_is_missing_and_an_ended_one_is_not(tmp_path: Path, clock: Clock) -> None:
    aggregator, ranks = aggregation(tmp_path, clock), [Rank(i, 2) for i in range(2)]
    _run(aggregator, clock, ranks, 6)
    _run(aggregator, clock, ranks[:1], 6)
    assert aggregator.verdict is not None
    assert aggregator.verdict.label == "telemetry_limited"
    assert aggregator.verdict.coverage == 0.5
    aggregator.ingest(
        Relay(0, "end").message(ranks[1].batch(60, [1, 2, 0, 3, 4, 1]), ranks[1].batch(0, final=True))
    )
    clock.tick(60)
    _run(aggregator, clock, ranks[:1], 1)
    assert _label(aggregator) == "healthy"


def test_lost_rank_is_the_headline_at_once(tmp_path: Path, clock: Clock) -> None:
    aggregator, ranks = aggregation(tmp_path, clock), [Rank(i, 2) for i in range(2)]
    _run(aggregator, clock, ranks, 6)
    relay = Relay(0, "end")
    error = wire.Event("exception", clock(), message="RuntimeError: Connection closed by peer")
    aggregator.ingest(relay.message(ranks[0].batch(0, final=True, events=[error])))
    aggregator.judge()
    assert _label(aggregator) == "healthy"  # rank 0 died of something else: what that is may come yet
    lost = wire.Event("rank_lost", clock() + SECOND, data={"process_id": ranks[1].process_id})
    aggregator.ingest(relay.message(lost=[ranks[1].process_id], events=[lost]))
    aggregator.judge()
    assert aggregator.verdict is not None
    assert (aggregator.verdict.label, aggregator.verdict.rank) == ("rank_lost", 1)


def test_death_reports_of_one_process_are_bounded(tmp_path: Path, clock: Clock) -> None:
    aggregator, rank = aggregation(tmp_path, clock), Rank(0, 1)
    _run(aggregator, clock, [rank], 6)
    for number in range(20):
        errors = [wire.Event("exception", clock() + n, message=f"Error {number} {n}") for n in range(50)]
        aggregator.ingest(Relay(0, f"end {number}").message(rank.batch(0, final=number == 19, events=errors)))
    aggregator.judge()
    assert aggregator.verdict is not None
    assert (aggregator.verdict.label, aggregator.verdict.rank) == ("rank_lost", 0)
    assert "Error 0 0" in aggregator.verdict.why
    assert len(aggregator._judge._fatal) < 10
    assert _ledger(aggregator, tmp_path)["dropped"] == {"agent": 0, "relay": 0, "aggregator": 0}
    with SessionFile(tmp_path / "session.sqlite") as stored:
        assert len(stored.events()[0]) == 1000


def test_deaths_of_earlier_attempts_are_forgotten(tmp_path: Path, clock: Clock) -> None:
    aggregator, relay = aggregation(tmp_path, clock), Relay()
    for attempt in range(30):
        ranks = [Rank(number, 2, attempt=attempt) for number in range(2)]
        error = wire.Event("exception", clock(), message=f"ValueError: {attempt}")
        aggregator.ingest(relay.message(*(r.batch(5, final=True, events=[error]) for r in ranks)))
        clock.tick()
        aggregator.judge()
    assert len(aggregator._judge._fatal) == len(aggregator._judge._fatal_seen) == 2
    assert aggregator.verdict is not None and aggregator.verdict.exit_reason == "ValueError: 29"


# -- the end -------------------------------------------------------------------------------------


def test_finish_writes_the_files_and_may_be_called_again(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0, 1)
    aggregator.ingest(relay.message(rank.batch(30, produced=35)))
    failure = wire.RankFailure(0, 0, rank.identity.pid, -9, 5)
    for _ in range(2):
        aggregator.finish(wire.Finish(codec.VERSION, 1, [failure]))
    aggregator.close()
    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert summary["session"]["status"] == "failed"
    assert summary["ledger"]["dropped"] == {"agent": 0, "relay": 5, "aggregator": 0}
    assert summary["ranks"]["0"]["exit_reason"] == "SIGKILL"
    assert (tmp_path / "report.txt").stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob("*.tmp"))


def test_finish_offline_takes_what_agents_left(tmp_path: Path) -> None:
    rank, spool = Rank(0, 1), tmp_path / "spool"
    spool.mkdir()
    aggregator = aggregation(tmp_path)
    first, *others = (rank.batch(10) for _ in range(3))
    aggregator.ingest(Relay().message(first))
    aggregator.commit()
    aggregator.close()
    write_spool(spool / f"{rank.process_id}.spool", [first, *others, rank.batch(0, final=True)])
    (spool / "broken.spool").write_bytes(b"\x05\x00\x00\x00junk!\xff\xff\xff\xff")
    finish_offline(tmp_path, Settings(), FINISH, spool)
    count = check_ledger(tmp_path)
    assert (count["stored"], count["in_flight"]) == (30, 0)
    assert count["per_rank"]["0"]["unreported"] == 0
    assert (tmp_path / "report.txt").is_file()


def test_damaged_session_file_is_set_aside_and_spools_are_stored(tmp_path: Path) -> None:
    rank, spool = Rank(0, 1), tmp_path / "spool"
    spool.mkdir()
    aggregator = aggregation(tmp_path)
    aggregator.ingest(Relay().message(rank.batch(10)))
    aggregator.close()
    file = tmp_path / "session.sqlite"
    file.write_bytes(file.read_bytes()[:4096] + b"\xa5" * 40_000)
    write_spool(spool / f"{rank.process_id}.spool", [rank.batch(20, final=True)])
    aside = finish_offline(tmp_path, Settings(), FINISH, spool)
    assert aside is not None and aside.stat().st_size > 40_000
    count = check_ledger(tmp_path)
    assert (count["produced"], count["stored"], count["in_flight"]) == (30, 20, 0)
    assert (tmp_path / "report.txt").is_file()


def test_session_without_any_row_has_a_summary(tmp_path: Path) -> None:
    finish_offline(tmp_path, Settings(), FINISH)
    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert summary["verdict"]["label"] == "telemetry_limited"
    assert "no rank ever reported" in summary["verdict"]["why"]


@given(frames=st.lists(st.binary(max_size=50)), cut=st.integers(0, 60))
def test_cut_spool_gives_its_whole_frames(
    tmp_path_factory: pytest.TempPathFactory, frames: list[bytes], cut: int
) -> None:
    path = tmp_path_factory.mktemp("spool") / "a.spool"
    write_spool(path, frames)
    assert read_spool(path) == frames
    path.write_bytes(path.read_bytes()[: -cut or None])
    frames_read = read_spool(path)
    assert frames_read == frames[: len(frames_read)]
    assert len(frames_read) == len(frames) or cut


# -- questions -----------------------------------------------------------------------------------


def test_idle_time_counts_from_the_last_rank_message_or_query(tmp_path: Path, clock: Clock) -> None:
    aggregator, relay = aggregation(tmp_path, clock), Relay()
    clock.tick(30)
    aggregator.ingest(relay.message())  # of its node only
    assert aggregator.idle_s() == 30
    aggregator.ingest(relay.message(Rank(0).batch()))
    assert aggregator.idle_s() == 0
    clock.tick(10)
    query.ask(aggregator.query, [query.GetStatus()], watching=True)
    assert aggregator.idle_s() == 10, "a page that stays open is no use of a session"
    ask(aggregator, "status")
    assert aggregator.idle_s() == 0


def test_wall_clock_change_makes_no_session_idle(tmp_path: Path, clock: Clock) -> None:
    aggregator = AggregatorCore(tmp_path, Settings(), {}, clock)
    clock.tick(3600)
    assert aggregator.idle_s() < 600


def test_threads_that_ingest_commit_and_query_do_not_disturb_each_other(tmp_path: Path) -> None:
    aggregator, relay, ranks = aggregation(tmp_path), Relay(), [Rank(i, 4) for i in range(4)]
    done = threading.Event()
    answers: list[dict[str, Any]] = []

    def keep(*acts: Any) -> None:
        while not done.is_set():
            for act in acts:
                act()

    threads = [
        threading.Thread(target=keep, args=(aggregator.commit, aggregator.judge)),
        threading.Thread(target=keep, args=(lambda: answers.append(ask(aggregator, "ledger")),)),
    ]
    for thread in threads:
        thread.start()
    while not answers:
        time.sleep(0.001)  # the thread has no core yet
    for _ in range(150):
        aggregator.ingest(relay.message(*(rank.batch(2) for rank in ranks)))
    done.set()
    for thread in threads:
        thread.join(timeout=240)
    assert _ledger(aggregator, tmp_path)["stored"] == 150 * 8
    assert not aggregator.errors


# -- kill -9 -------------------------------------------------------------------------------------

_CHILD = """
import sys, threading
from collections import Counter
from pathlib import Path
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.settings import Settings
aggregator = AggregatorCore(Path(sys.argv[1]), Settings(), {})
def commit():
    while True:
        aggregator.commit()
threading.Thread(target=commit, daemon=True).start()
source, sink = sys.stdin.buffer, sys.stdout.buffer
while length := source.read(4):
    reply = aggregator.ingest(source.read(int.from_bytes(length, "little")))
    sink.write(len(reply).to_bytes(4, "little") + reply)
    sink.flush()
"""


def _feed(folder: Path, unconfirmed: dict[int, bytes], make: Any, kill_after: int) -> None:
    """Be a relay to a child that is killed after so many messages; keeps what it did not confirm."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    queue = list(unconfirmed.values())
    try:
        for _ in range(kill_after):
            message = queue.pop(0) if queue else make()
            child.stdin.write(len(message).to_bytes(4, "little") + message)
            child.stdin.flush()
            reply = child.stdout.read(int.from_bytes(child.stdout.read(4), "little"))
            for seq in [seq for seq in unconfirmed if seq <= confirmed(reply)]:
                del unconfirmed[seq]
        message = queue.pop(0) if queue else make()  # one is in its hands when it dies
        child.stdin.write(len(message).to_bytes(4, "little") + message)
        child.stdin.flush()
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(timeout=240)
        child.stdout.close()
        try:
            child.stdin.close()
        except BrokenPipeError:
            pass


def test_aggregator_killed_at_any_moment_neither_loses_nor_doubles_a_row(tmp_path: Path) -> None:
    chance = random.Random(7)
    relay, ranks = Relay(), [Rank(i, 2) for i in range(2)]
    unconfirmed: dict[int, bytes] = {}

    def make() -> bytes:
        event = wire.Event("note", relay.seq)
        message = relay.message(*(rank.batch(chance.randint(0, 20), events=[event]) for rank in ranks))
        unconfirmed[relay.seq] = message
        return message

    for _ in range(6):
        _feed(tmp_path, unconfirmed, make, chance.randint(5, 400))
        check_ledger(tmp_path)
    aggregator = aggregation(tmp_path)
    for message in [*unconfirmed.values()]:
        aggregator.ingest(message)
    count = _ledger(aggregator, tmp_path)
    assert count["stored"] == count["produced"] == sum(rank.produced for rank in ranks)
    for rank in ranks:
        assert _steps(tmp_path, rank.identity.global_rank) == list(range(rank.produced))
    with SessionFile(tmp_path / "session.sqlite") as session:
        assert len(session.events()[0]) == 2 * relay.seq


@pytest.mark.parametrize("asked", [False, True], ids=["unused", "asked for the end"])
def test_actor_ends_itself_though_ray_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    aggregator, ended = aggregation(tmp_path), list[bool]()
    made = actor_of(aggregator, idle_ttl=0.01)

    def no_answer(_: str) -> None:
        raise ConnectionError("the GCS does not answer")

    monkeypatch.setattr(actor, "find_relays", no_answer)
    monkeypatch.setattr(actor, "end_myself", lambda: ended.append(True))
    if asked:
        assert codec.decode(made.finish(codec.encode(FINISH)), wire.Finished).pending
    else:
        aggregator._busy_ns -= SECOND
    made._beat()
    assert ended == [True]
    assert made._stopped.ok and (tmp_path / "summary.json").is_file()
    assert aggregator.errors == {"relays, end: ConnectionError": 1}


def test_rank_processes_beyond_the_limit_are_refused_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_intake, "MAX_PROCESSES", 2)
    aggregator, relay, ranks = aggregation(tmp_path), Relay(), [Rank(number, 3) for number in range(3)]
    aggregator.ingest(relay.message(*(rank.batch(3) for rank in ranks)))
    aggregator.ingest(relay.message(ranks[0].batch(3), lost=[ranks[2].process_id], dropped={"x": 5}))
    assert _ledger(aggregator, tmp_path)["stored"] == 9
    assert aggregator.errors == {"too_many_processes": 3}


def test_newest_rank_processes_of_unknown_rank_are_kept_in_memory(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path), Relay(), Rank(0, 1)
    aggregator.ingest(relay.message(rank.batch(3)))
    strangers = [Rank(0, 1, process_id=f"stranger-{n}").batch(1, identity=None) for n in range(300)]
    aggregator.ingest(relay.message(*strangers))
    aggregator.judge()
    processes = aggregator._writer.processes
    kept = {*aggregator._steps._owners, *aggregator._steps._unknown}
    held = [name for name, process in processes.items() if process.id in kept]
    assert held == [rank.process_id, *(f"stranger-{n}" for n in range(300 - MAX_UNKNOWN, 300))]


def test_job_claiming_a_huge_world_size_is_judged_and_reported(tmp_path: Path, snapshot: Snapshot) -> None:
    aggregator, relay, ranks = aggregation(tmp_path), Relay(), [Rank(number, 1 << 20) for number in (0, 1)]
    aggregator.ingest(relay.message(*(rank.batch(60) for rank in ranks)))
    aggregator.judge()
    verdict = aggregator.verdict
    assert verdict is not None and verdict.coverage == 2 / (1 << 20)
    snapshot("verdict", verdict.why)
    aggregator.finish(FINISH)
    assert (tmp_path / "summary.json").stat().st_size < 50_000


def test_aggregator_has_relays_of_many_nodes_send_less_often(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    for number in range(65):
        aggregator.node_state(f"n{number}", f"host-{number}", "10.0.0.1", True)

    def tick_s() -> float:
        aggregator.commit()
        return codec.decode(aggregator.ingest(Relay().message()), wire.RelayReply).tick_s

    assert tick_s() == 1.0
    for number in range(2):
        aggregator.node_state(f"n{number}", f"host-{number}", "10.0.0.1", False)
    assert tick_s() == wire.TICK_S
    aggregator.close()


@given(
    st.lists(
        st.sampled_from(
            ["errors", "missing", "strategy", "group", "dropped", "overhead", "open", "final", "placement"]
        )
    )
)
def test_rank_processes_on_disk_are_those_in_memory_whatever_a_batch_changes(changes: list[str]) -> None:
    """Only the columns that a batch has changed are written."""
    with tempfile.TemporaryDirectory() as folder:
        aggregator, relay, rank = aggregation(Path(folder)), Relay(), Rank(0, 2)
        for number, change in enumerate(changes):
            value: Any = {
                "errors": {"hook": number},
                "missing": {"h2d": str(number)},
                "strategy": f"s{number}",
                "group": (0, 2 + number),
                "placement": wire.Placement({"pp": [number, 9]}, [number], 9, f"worker{number}"),
                "dropped": number,
                "overhead": wire.Overhead(number, number, number, number),
                "open": wire.OpenStage(number, 1, 77),
                "final": True,
            }[change]
            aggregator.ingest(relay.message(rank.batch(1, **{change: value})))
            if number % 3 == 2:
                aggregator.ingest(relay.message(dropped={rank.process_id: number}))
            assert aggregator.commit()
            with aggregator.stored() as file:
                kept = {process.process_id: to_row(process) for process in file.processes()}
            assert kept == {name: to_row(process) for name, process in aggregator._writer.processes.items()}
        aggregator.close()


OPERATIONS = ["rows", "open", "final", "restart", "unknown", "node", "lost", "ended"]


def test_aggregator_of_many_nodes_judges_once_all_with_ranks_have_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregator_module, "MANY_NODES", 1)
    clock = Clock()
    aggregator = aggregation(tmp_path, clock)
    relays, ranks = [Relay(0), Relay(1), Relay(2)], [Rank(0), Rank(1)]

    def round_of(*numbers: int) -> list[bool]:
        complete = []
        for number in numbers:
            aggregator.ingest(relays[number].message(ranks[number].batch(5)))
            aggregator.ingest(relays[2].message())  # a node without ranks
            complete.append(aggregator.pace.round_is_complete)
        aggregator.commit()
        aggregator.judge()
        clock.tick()
        return complete

    round_of(0, 1)
    aggregator.ingest(relays[2].message())
    assert not aggregator.pace.round_is_complete
    assert round_of(0, 1) == [False, True]
    assert [round_of(0) for _ in range(4)] == [[False]] * 3 + [[True]], "a silent node is not waited for"
    assert round_of(1, 0) == [False, True]
    aggregator.close()


class _Rounds:
    """
    The core of an aggregator with many nodes. Their rounds are complete at the given times (s); time passes
    while the actor waits.
    """

    def __init__(self, complete: list[float], until: float) -> None:
        self.now, self.complete, self.until = 0.0, complete, until
        self.done: list[tuple[str, float]] = []
        self.pace = self.endings = self._core = self
        self.many_nodes, self.left_behind, self.fenced, self.verdict = True, False, False, None
        self.errors: Counter[str] = Counter()

    @property
    def round_is_complete(self) -> bool:
        return bool(self.complete) and self.complete[0] <= self.now

    @property
    def over(self) -> bool:
        return self.now >= self.until

    def wait(self, timeout: float) -> None:
        self.now = round(self.now + min(timeout, 0.1), 3)

    def judge(self) -> None:
        self.done.append(("judge", self.now))
        if self.round_is_complete:
            self.complete.pop(0)

    def commit(self) -> None:
        self.done.append(("commit", self.now))

    def idle_s(self) -> float:
        return 0.0

    def write_due(self) -> None: ...
    def clear(self) -> None: ...


def test_rows_of_many_nodes_are_committed_after_their_round_not_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = _Rounds([0.4, 1.4, 2.4], 5.5)
    made = actor_of(core)
    made._wake, made._loaded = core, False
    monkeypatch.setattr(actor, "end_myself", lambda: None)
    monkeypatch.setattr(made, "_stop", lambda: None)
    monkeypatch.setattr(actor, "LINGER_S", 0)
    replace_time(monkeypatch, actor, monotonic=lambda: core.now)
    made._beat()
    assert not core.errors
    assert [t_s for what, t_s in core.done if what == "commit"] == [0.0, 0.4, 1.4, 2.4, 3.9, 5.4]
    assert core.done[2:4] == [("judge", 0.4), ("commit", 0.4)], "the verdict does not wait for the disk"


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3)), max_size=12))
@hypothesis.settings(max_examples=25)
def test_judge_knows_the_ranks_as_if_it_learned_them_anew(operations: list[tuple[str, int]]) -> None:
    """It learns them again only when something has changed that matters for them."""
    with tempfile.TemporaryDirectory() as folder:
        aggregator, relay = aggregation(Path(folder)), Relay()
        runs = aggregator._judge.live_runs
        ranks = {number: Rank(number, 4 + number) for number in range(4)}
        for operation, number in operations:
            rank = ranks[number]
            if operation == "restart":
                rank = ranks[number] = Rank(number, 4 + number, attempt=rank.identity.attempt + 1)
            elif operation == "node":
                aggregator.node_state("node-0", "host-0", f"10.0.0.{number}", True)
            elif operation == "lost":
                aggregator.node_state("node-0", "host-0", "10.0.0.1", False)
            elif operation == "ended":
                aggregator.end(codec.encode(wire.RunEnd(codec.VERSION, "job", {}, [], "finished")))
            else:
                special: dict[str, Any] = {"unknown": {"identity": None}, "final": {"final": True}}
                fields = special.get(operation, {})
                aggregator.ingest(relay.message(rank.batch(int(operation == "rows"), **fields)))
            aggregator.judge()
            known, runs.known = runs.known, LiveRanks()
            with aggregator._writer.lock:
                anew = runs.refresh()
            assert dataclasses.replace(known, epoch=anew.epoch) == anew
            for run, processes_of_run in anew.ranks.items():
                assert aggregator._steps._runs[run].world == world_size(processes_of_run, None)
            runs.known = known
        aggregator.close()
