"""Ranks that begin anew within an attempt: who is shown, who died, and what is judged from when on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sessions import SECOND, Clock, Rank, Relay, aggregation, ask

from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.store.rank_processes import RankProcess, current_ranks, generations, world_size
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

BALANCED, WAITING, LATE = [1, 6, 0, 3, 4, 6], [1, 6, 0, 3, 4, 16], [1, 16, 0, 3, 4, 6]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _start(world: int, life: str, **who: Any) -> list[Rank]:
    """The processes of one start: other processes, the same attempt."""
    pid = 1000 + 100 * int(life)
    return [Rank(n, world, pid=pid + n, process_id=f"life-{life}-{n}", **who) for n in range(world)]


def _train(
    to: AggregatorCore, clock: Clock, ranks: Sequence[Rank], seconds: int, late: int | None = None
) -> list[str | None]:
    """Fifty steps a second; return the label after each second."""
    labels: list[str | None] = []
    relay = Relay(0, f"relay-{clock.now}")
    for _ in range(seconds):
        batches = []
        for rank in ranks:
            ms = BALANCED if late is None else LATE if rank.identity.global_rank == late else WAITING
            batches.append(rank.batch(50, ms))
        to.ingest(relay.message(*batches))
        clock.tick()
        assert to.commit()
        to.judge()
        labels.append(to.verdict.label if to.verdict else None)
    assert not to.errors
    return labels


def _killed(to: AggregatorCore, clock: Clock, ranks: Sequence[Rank], code: int = -15) -> None:
    """Their relay saw their processes end by a signal."""
    events = [
        wire.Event("process_ended", clock(), data={"process_id": rank.process_id, "exit_code": code})
        for rank in ranks
    ]
    lost = [rank.process_id for rank in ranks]
    to.ingest(Relay(0, f"end-{clock.now}-{lost}").message(lost=lost, events=events))
    clock.tick(4)


def _ended(to: AggregatorCore, clock: Clock, ranks: Sequence[Rank]) -> None:
    batches = [rank.batch(0, final=True) for rank in ranks]
    to.ingest(Relay(0, f"end-{clock.now}-{ranks[0].process_id}").message(*batches))
    clock.tick(4)


def _summary(to: AggregatorCore) -> dict[str, Any]:
    assert to.commit()
    summary: dict[str, Any] = ask(to, "summary")
    return summary


# -- workers that were stopped by their launcher -------------------------------------------------


def test_death_of_workers_that_were_replaced_is_no_verdict(tmp_path: Path, clock: Clock) -> None:
    to, old = aggregation(tmp_path, clock), _start(4, "0")
    _train(to, clock, old, 5)
    _killed(to, clock, old)
    to.judge()
    assert to.verdict is not None and to.verdict.label == "healthy"  # the cause may come yet
    assert set(_train(to, clock, _start(4, "1"), 5)) == {"healthy"}
    assert len(to._judge._fatal) == 0
    summary = _summary(to)
    assert summary["verdict"]["label"] == "healthy"
    assert {rank["ended"] for rank in summary["ranks"].values()} == {None}


def test_first_death_of_the_workers_that_came_last_is_the_headline(tmp_path: Path, clock: Clock) -> None:
    to, old, new = aggregation(tmp_path, clock), _start(2, "0"), _start(2, "1")
    _train(to, clock, old, 5)
    _killed(to, clock, old, -9)
    _train(to, clock, new, 5)
    _killed(to, clock, new[1:], -11)
    to.judge()
    assert to.verdict is not None
    assert (to.verdict.label, to.verdict.rank, to.verdict.exit_reason) == ("rank_lost", 1, "SIGSEGV")
    to.finish(wire.Finish(codec.VERSION, 1))
    verdict = _summary(to)["verdict"]
    assert (verdict["rank"], verdict["exit_reason"]) == (1, "SIGSEGV")


@pytest.mark.parametrize(("code", "label"), [(1, "rank_lost"), (0, "healthy")])
def test_culprit_of_a_failed_job_may_have_been_replaced(
    tmp_path: Path, clock: Clock, code: int, label: str
) -> None:
    to, old = aggregation(tmp_path, clock), _start(2, "0")
    _train(to, clock, old, 10)
    _killed(to, clock, old[1:], -11)
    clock.tick(5)
    new = Rank(1, 2, pid=1, process_id="again")
    to.ingest(Relay(0, "again").message(new.batch(0)))  # one comes in its place, and no step
    _ended(to, clock, [old[0], new])
    to.finish(wire.Finish(codec.VERSION, code))
    verdict = _summary(to)["verdict"]
    assert (verdict["label"], verdict["exit_reason"]) == (label, "SIGSEGV" if code else None)


def test_workers_stopped_at_a_restart_are_no_culprits_of_a_job_that_fails_later(
    tmp_path: Path, clock: Clock
) -> None:
    to, old, new = aggregation(tmp_path, clock), _start(2, "0"), _start(2, "1")
    _train(to, clock, old, 10)
    _killed(to, clock, old)
    _train(to, clock, new, 10)
    _ended(to, clock, new)
    to.finish(wire.Finish(codec.VERSION, 1))
    assert _summary(to)["verdict"]["label"] == "healthy"


# -- workers that ended and begin at step 0 ------------------------------------------------------


@pytest.mark.parametrize("who", [{}, {"source": "ray_train"}, {"source": "v1"}])
def test_steps_that_restart_are_judged_from_step_0(tmp_path: Path, clock: Clock, who: dict[str, str]) -> None:
    to, old = aggregation(tmp_path, clock), _start(4, "0", **who)
    _train(to, clock, old, 8)
    _ended(to, clock, old)
    labels = _train(to, clock, _start(4, "1", **who), 5, late=1)
    assert labels[-1] == "straggler"
    assert to.verdict is not None and to.verdict.ranks == (1,)
    verdict = _summary(to)["verdict"]
    assert (verdict["label"], verdict["ranks"]) == ("straggler", [1])


@pytest.mark.parametrize("names", ["", "abcd"])
def test_second_round_of_actors_is_judged_by_itself(tmp_path: Path, clock: Clock, names: str) -> None:
    """Numbered as they come: the second round has two of the four, and rank 0 again."""
    to = aggregation(tmp_path, clock)
    for life, world in (("0", 4), ("1", 2)):
        ranks = [
            Rank(0, 1, source="ray", pid=10 * int(life) + n, process_id=f"{life}-{n}", name=names[n : n + 1])
            for n in range(world)
        ]
        _train(to, clock, ranks, 8)
        _ended(to, clock, ranks)
    for make in (lambda: to, lambda: aggregation(tmp_path, clock)):  # the second is restored from the file
        job = make()
        job.judge()
        assert job.verdict is not None
        assert (job.verdict.label, job.verdict.coverage, job.verdict.to_step) == ("healthy", 1.0, 399)
        summary = _summary(job)
        assert (summary["session"]["world_size"], list(summary["ranks"])) == (2, ["0", "1"])


def test_restored_aggregator_goes_on_with_the_judging_of_the_same_workers(
    tmp_path: Path, clock: Clock
) -> None:
    to, old, new = aggregation(tmp_path, clock), _start(2, "0"), _start(2, "1")
    _train(to, clock, old, 8, late=0)
    _ended(to, clock, old)
    _train(to, clock, new, 8, late=1)
    before = ask(to, "verdict")
    restored = aggregation(tmp_path, clock)
    _train(restored, clock, new, 1, late=1)
    after = ask(restored, "verdict")
    assert after["ranks"] == before["ranks"] == [1]
    assert [episode["from_step"] for episode in after["episodes"]] == [
        episode["from_step"] for episode in before["episodes"]
    ]
    assert before["elapsed_s"] < after["elapsed_s"] < before["elapsed_s"] + 2


# -- a job that becomes smaller, or larger -------------------------------------------------------


@pytest.mark.parametrize("ends", [_ended, _killed])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_job_of_another_size_is_judged_by_its_new_ranks(
    tmp_path: Path, clock: Clock, before: int, after: int, ends: Any
) -> None:
    to, old, new = aggregation(tmp_path, clock), _start(before, "0"), _start(after, "1")
    _train(to, clock, old, 8)
    ends(to, clock, old)
    for rank in reversed(new):  # the ranks that were not there before come first
        to.ingest(Relay(0, f"come-{rank.process_id}").message(rank.batch(0)))
        clock.tick()
        to.judge()
    labels = _train(to, clock, new, 5)
    assert set(labels) == {"healthy"}
    assert to.verdict is not None and (to.verdict.to_step, to.verdict.coverage) == (249, 1.0)
    summary = _summary(to)
    assert (summary["session"]["world_size"], list(summary["ranks"])) == (
        after,
        [str(rank) for rank in range(after)],
    )
    assert (summary["verdict"]["label"], summary["session"]["silent_ranks"]) == ("healthy", [])
    assert ask(to, "runs")[0].world_size == after


# -- what is no restart --------------------------------------------------------------------------


def _process(number: int, rank: int, first: float, last: float, world: int = 4, **fields: Any) -> RankProcess:
    who = Rank(rank, world, pid=number).identity
    seen = {"first_seen_ns": int(first * SECOND), "last_seen_ns": int(last * SECOND)}
    return RankProcess(number, str(number), who, **{"stored": 9, **seen, **fields})


def _ids(processes: Sequence[RankProcess]) -> list[list[int]]:
    return [[process.id for process in generation] for generation in generations(processes)]


def test_ranks_that_register_apart_are_of_one_start() -> None:
    processes = [
        _process(1, 0, 0, 3, final=True),  # ended before the next was there
        _process(2, 1, 8, 99),
        _process(3, 2, 60, 99),
    ]
    assert _ids(processes) == [[1, 2, 3]]
    assert list(current_ranks(processes)) == [0, 1, 2]


def test_rank_that_ended_early_remains_while_its_peers_go_on() -> None:
    processes = [
        _process(1, 0, 0, 10, final=True),
        _process(2, 1, 0, 20, lost=True),
        _process(3, 2, 0, 99),
        _process(4, 1, 30, 99),  # in the place of 2, while 3 goes on
        _process(5, 3, 40, 99),  # late
    ]
    assert _ids(processes) == [[1, 2, 3, 4, 5]]
    assert {rank: process.id for rank, process in current_ranks(processes).items()} == {
        0: 1,
        1: 4,
        2: 3,
        3: 5,
    }


@pytest.mark.parametrize("gone", [{"final": True}, {"lost": True}, {}])
def test_ranks_of_a_lost_node_are_not_of_the_smaller_job(gone: dict[str, bool]) -> None:
    """Also before it is known that the node is lost, and where its last word came late."""
    processes = [
        _process(1, 0, 0, 10, final=True),
        _process(2, 1, 0, 18, **gone),
        _process(3, 0, 15, 99, 1),
    ]
    assert _ids(processes) == [[1, 2], [3]]
    assert world_size(current_ranks(processes), None) == 1


def test_workers_without_a_row_are_not_shown_before_they_train() -> None:
    old = [_process(n + 1, n, 0, 10, 2, final=True) for n in range(2)]
    new = [_process(n + 3, n, 20, 20, 2, stored=0) for n in range(2)]
    assert [process.id for process in current_ranks([*old, *new]).values()] == [1, 2]
    new[1].stored = 9
    assert [process.id for process in current_ranks([*old, *new]).values()] == [3, 4]


def test_message_of_an_end_may_come_after_the_next_start() -> None:
    old = [_process(1, 0, 0, 10, 2, lost=True), _process(2, 1, 0, 16, 2, lost=True)]
    assert _ids([*old, _process(3, 0, 15, 99, 2)]) == [[1, 2], [3]]
    old[1].last_seen_ns += 10 * SECOND
    assert _ids([*old, _process(3, 0, 15, 99, 2)]) == [[1, 2, 3]]


def test_job_of_many_restarts_is_divided_at_each() -> None:
    processes = [
        _process(10 * life + rank + 1, rank, 20 * life + rank, 20 * life + 15, 4, final=True)
        for life in range(5)
        for rank in range(4)
    ]
    assert _ids(processes) == [[10 * life + rank + 1 for rank in range(4)] for life in range(5)]
