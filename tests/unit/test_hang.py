"""Who holds the others up when nothing moves, from where every rank stands."""

from __future__ import annotations

from typing import Any

import pytest
from snapshot import Snapshot

from traceml_ray.analysis.hang import RankPosition, find, find_in_setup, with_unknown
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.stages import BACKWARD, DATA, FORWARD, POST_SYNC, SYNC_WAIT

QUIET_S = 22.0


def place(
    rank: int, stage: int = SYNC_WAIT, step: int = 31, elapsed_s: float = 21.0, **known: Any
) -> RankPosition:
    return RankPosition(rank=rank, node="host-0", step=step, stage=stage, elapsed_s=elapsed_s, **known)


def waits(rank: int, **known: Any) -> RankPosition:
    return place(rank, where="train (train.py:60)", **known)


def named(*places: RankPosition) -> tuple[str, tuple[int, ...], str | None]:
    verdict = find(places, QUIET_S)
    assert verdict is not None
    return verdict.label, verdict.ranks, verdict.stage


def why(*places: RankPosition) -> str:
    verdict = find(places, QUIET_S)
    assert verdict is not None
    return verdict.why


def test_rank_that_has_come_least_far_is_waited_for(snapshot: Snapshot) -> None:
    places = place(0), place(1, FORWARD), place(2, DATA), place(3)
    assert named(*places) == ("hang", (2,), "data")
    snapshot("verdict", why(*places))
    assert named(place(0), place(1, DATA), place(2, DATA)) == ("hang", (1, 2), "data")
    assert named(place(0, step=31), place(1, POST_SYNC, step=30), place(2, POST_SYNC)) == (
        "hang", (1,), "post_sync",
    )  # fmt: skip


def test_open_span_between_two_steps_is_a_stall_and_no_hang(snapshot: Snapshot) -> None:
    places = place(0, POST_SYNC, span="checkpoint"), place(1)
    assert named(*places) == ("stalled", (0,), "post_sync")
    snapshot("verdict", why(*places))
    verdict = find(places, QUIET_S)
    assert verdict is not None and verdict.span == "checkpoint"
    assert named(place(0, DATA, span="tokenize"), place(1))[0] == "hang"
    assert named(place(0, POST_SYNC, span="checkpoint", silent_s=9.0), place(1))[0] == "hang"


def test_rank_whose_thread_moves_is_busy_and_does_not_hang(snapshot: Snapshot) -> None:
    busy = place(0, POST_SYNC, where="evaluate (train.py:88)", still_s=0.5)
    assert named(busy, place(1), place(2)) == ("stalled", (0,), "post_sync")
    snapshot("verdict", why(busy, place(1), place(2)))
    still = place(0, POST_SYNC, where="evaluate (train.py:88)", still_s=12.0)
    assert named(still, place(1), place(2))[0] == "hang"
    assert named(busy, place(1, POST_SYNC, still_s=12.0), place(2))[:2] == ("hang", (0, 1)), "one is stuck"
    after = find([place(0, DATA, elapsed_s=700, still_s=0.5), place(1, elapsed_s=700)], 700)
    assert after is not None and after.label == "hang", "a loop that never ends moves, too"


def receives(rank: int, peer: int | None, call: str = "recv") -> RankPosition:
    return place(rank, FORWARD, where="pass_on (train.py:70)", call=call, peer=peer, pending_s=20.0)


def test_ranks_that_receive_from_each_other_are_a_circle(snapshot: Snapshot) -> None:
    ring = [receives(rank, (rank - 1) % 4) for rank in range(4)]
    verdict = find(ring, QUIET_S)
    assert verdict is not None and (verdict.label, verdict.ranks) == ("hang", (0, 1, 2, 3))
    snapshot("verdict", f"{verdict.why}\n{verdict.next}")
    assert named(receives(0, 1), receives(1, 0), place(2))[1] == (0, 1)
    assert named(receives(0, 1), receives(1, 2), receives(2, 1), place(3))[1] == (1, 2)


def test_rank_that_waits_in_a_call_that_is_no_span_is_seen(snapshot: Snapshot) -> None:
    """As in `new_group`, when ranks make groups in a different order. It shows in stacks alone."""
    groups = [
        place(
            rank, POST_SYNC, where=f"make_groups (train.py:{2 + rank // 3})", call="new_group", still_s=18.0
        )
        for rank in range(4)
    ]
    assert named(*groups)[:2] == ("hang", (3,))
    snapshot("verdict", why(*groups))
    verdict = find(groups, QUIET_S)
    assert verdict is not None and "same groups in the same order" in verdict.next


def test_rank_that_never_reported_is_named_instead_of_the_network(snapshot: Snapshot) -> None:
    """As one that is stopped before its first report arrives."""
    places = [place(rank, where="train (train.py:60)") for rank in (0, 2, 3)]
    verdict = with_unknown(find(places, QUIET_S), [1], places)
    assert verdict is not None and (verdict.label, verdict.ranks) == ("hang", ())
    snapshot("verdict", f"{verdict.why}\n{verdict.next}")
    named_rank = find([place(0, DATA), place(2)], QUIET_S)
    assert with_unknown(named_rank, [1], places) is named_rank


def test_groups_that_all_ranks_make_at_the_same_line_may_be_in_another_order() -> None:
    groups = [place(rank, POST_SYNC, where="f (t.py:2)", call="new_group", still_s=18.0) for rank in range(4)]
    verdict = find(groups, QUIET_S)
    assert verdict is not None and "same groups in the same order" in verdict.next


def joins(rank: int, call: str | None = "init_process_group", still_s: float = 125.0) -> RankPosition:
    where = "setup (train.py:4)" if call else "prepare (train.py:9)"
    return place(rank, DATA, 0, 125.0, where=where, call=call, still_s=still_s)


def test_rank_that_never_joins_the_process_group_is_named_before_the_first_step(snapshot: Snapshot) -> None:
    places = [joins(0), joins(1), joins(2, None), joins(3)]
    verdict = find_in_setup(places, 125.0, 4)
    assert verdict is not None and (verdict.label, verdict.ranks, verdict.last_step) == ("hang", (2,), None)
    snapshot("verdict", f"{verdict.why}\n{verdict.next}")


@pytest.mark.parametrize(
    "places",
    [
        [joins(0), joins(1), joins(2, None, 0.5)],
        [joins(0), joins(1, still_s=30.0), joins(2, None, 30.0)],
        [joins(0), joins(1)],
        [joins(0), joins(1), joins(2)],
        [joins(0, "broadcast"), joins(1, "broadcast"), joins(2, None)],
    ],
    ids=["one works", "not for long", "one is not known", "all wait for the same", "serves requests"],
)
def test_setup_that_may_go_on_is_no_hang(places: list[RankPosition]) -> None:
    assert find_in_setup(places, 125.0, 3) is None


def test_rank_that_pickles_inside_a_call_is_busy() -> None:
    pickles = place(0, POST_SYNC, where="collect (train.py:9)", call="all_gather_object", still_s=0.2)
    others = [
        place(rank, POST_SYNC, where="collect (train.py:9)", call="all_gather_object", pending="all_gather",
              pending_s=20.0, still_s=20.0)
        for rank in (1, 2)
    ]  # fmt: skip
    assert named(pickles, *others)[:2] == ("stalled", (0,))


def test_rank_that_receives_from_one_that_waits_elsewhere_is_named_with_it(snapshot: Snapshot) -> None:
    others = [waits(rank, call="all_reduce", pending_s=20.0) for rank in (0, 2, 3)]
    assert named(receives(1, 0), *others)[:2] == ("hang", (1,))
    snapshot("verdict", why(receives(1, 0), *others))
    pair = receives(0, 1), receives(1, 0, "send")
    assert "for each other" not in why(*pair), "one sends what the other receives: that is no circle"
    busy = place(0, FORWARD, still_s=0.1)
    assert named(busy, receives(1, 0), receives(2, 1))[:2] == ("stalled", (0,)), "a slow first stage"


def test_rank_that_waits_for_a_receive_is_not_said_to_have_skipped_a_collective() -> None:
    """Torch records no `irecv` of gloo: only the span of the wait is known."""
    receiver = place(2, FORWARD, where="exchange (train.py:96)", span="wait", span_s=21.0)
    others = [place(r, FORWARD, where="average (train.py:31)", call="all_reduce", pending="all_reduce",
                    pending_s=21.0) for r in (0, 1, 3)]  # fmt: skip
    verdict = find([receiver, *others], QUIET_S)
    assert verdict is not None and verdict.ranks == (2,) and "waits in `wait`" in verdict.why
    assert verdict.next == (
        "Rank 2 waits for an earlier `isend`, `irecv` or `async_op=True`: look for the rank that did not "
        "start the other side of it."
    )


def test_step_is_said_where_it_is_all_that_differs() -> None:
    """As with one micro-batch less, before the ranks have said where they are."""
    text = why(place(0), place(1, step=32), place(2), place(3))
    assert text == (
        "rank 1 (host-0) waits in the gradient exchange, in step 32; the other 3 wait in the gradient "
        "exchange, in step 31. No step was closed for 22 s."
    )


def test_rank_waited_for_in_a_barrier_is_busy_and_those_in_it_are_not(snapshot: Snapshot) -> None:
    others = [place(rank, POST_SYNC, span="barrier", span_s=20.0) for rank in (1, 2)]
    saving = place(0, POST_SYNC, span="checkpoint")
    assert named(saving, *others) == ("stalled", (0,), "post_sync")
    snapshot("verdict", why(saving, *others))
    assert find([saving, *(place(r, POST_SYNC, span="barrier", span_s=2.0) for r in (1, 2))], QUIET_S) is None


def test_rank_that_does_not_answer_is_the_evidence_wherever_it_was_last(snapshot: Snapshot) -> None:
    gone = place(1, BACKWARD, silent_s=21.0, state="stopped (SIGSTOP)")
    places = place(0), gone, place(2, POST_SYNC)
    assert named(*places) == ("hang", (1,), "backward")
    snapshot("verdict", why(*places))
    verdict = find([place(0), place(1, BACKWARD, 27, silent_s=21.0, state="stopped (SIGSTOP)")], QUIET_S)
    assert verdict is not None and "kill -CONT" in verdict.next
    assert (verdict.from_step, verdict.last_step) == (31, 30), "what it said last is older than that"


def test_stacks_identify_the_rank_that_differs(snapshot: Snapshot) -> None:
    waiting = [place(rank, POST_SYNC, where="mean (train.py:40)", call="all_reduce") for rank in (0, 2, 3)]
    busy = place(1, POST_SYNC, where="evaluate (train.py:88)", step=31)
    witness = waits(4)
    assert named(*waiting, busy, witness) == ("hang", (1,), "post_sync")
    snapshot("verdict", why(*waiting, busy, witness))


def test_rank_outside_the_collective_is_named_where_all_wait(snapshot: Snapshot) -> None:
    barrier = [place(r, POST_SYNC, where="all_here (train.py:12)", call="barrier") for r in (0, 2)]
    assert named(*barrier, waits(1)) == ("hang", (1,), "sync_wait")
    snapshot("verdict", why(*barrier, waits(1)))
    assert named(barrier[0], waits(1)) == ("hang", (), None), "of two, either may be the odd one"
    snapshot("verdict", why(barrier[0], waits(1)))


def test_rank_is_not_named_where_all_wait_for_the_same(snapshot: Snapshot) -> None:
    assert named(place(0), place(1)) == ("hang", (), None)
    snapshot("verdict", why(place(0), place(1)))


def test_ended_rank_is_waited_for_in_vain(snapshot: Snapshot) -> None:
    places = place(0), place(1), place(2, POST_SYNC, ended=True)
    assert named(*places) == ("hang", (2,), None)
    snapshot("verdict", why(*places))


@pytest.mark.parametrize(
    "places",
    [
        [],
        [place(0)],
        [place(0, POST_SYNC), place(1, POST_SYNC), place(2, DATA)],  # a validation on all alike
        [place(0, elapsed_s=2.0), place(1, POST_SYNC), place(2, POST_SYNC)],  # the first is out of it
        [place(0, FORWARD), place(1, silent_s=20.0)],  # nobody waits
        [place(0, silent_s=20.0), place(1, silent_s=20.0)],  # nobody answers: it may be us
        [place(0, ended=True), place(1, ended=True)],
    ],
)
def test_rank_is_not_called_hanging_while_others_work_or_are_silent(places: list[RankPosition]) -> None:
    assert find(places, QUIET_S) is None


def test_stacks_are_kept_once_for_equal_ranks_and_whole_for_the_different_one() -> None:
    text = "thread MainThread, training:\n  train.py:60 in train\nthread loader:\n  x.py:1 in run"
    others = [waits(rank, stack=text) for rank in (0, 2, 3)]
    odd = place(
        1, FORWARD, where="f (m.py:3)", stack="thread MainThread, training:\n  m.py:3 in f\nthread b:\n  c"
    )
    verdict = find([odd, *others], QUIET_S)
    assert isinstance(verdict, Verdict)
    assert [stack.ranks for stack in verdict.stacks] == [(1,), (0, 2, 3)]
    assert verdict.stacks[0].text == odd.stack
    assert verdict.stacks[1].text == "thread MainThread, training:\n  train.py:60 in train"


def test_collective_on_the_device_is_waited_for_without_a_mark(snapshot: Snapshot) -> None:
    pending = {"pending": "all_reduce", "pending_seq": 57, "pending_s": 21.0}
    others = place(0, FORWARD, **pending), place(2, FORWARD, **pending)
    assert named(*others, place(1, FORWARD)) == ("hang", (1,), "forward")
    snapshot("verdict", why(*others, place(1, FORWARD)))
    skipped = {**pending, "pending_seq": 56}
    assert named(*others, place(1, POST_SYNC, **skipped)) == ("hang", (1,), "post_sync")
    assert find([place(0, FORWARD, **{**pending, "pending_s": 3.0}), place(1, FORWARD)], QUIET_S) is None


def test_stopped_process_is_sufficient_evidence() -> None:
    stopped = place(1, FORWARD, silent_s=9.0, state="stopped (SIGSTOP)")
    assert named(place(0, FORWARD), stopped) == ("hang", (1,), "forward")
    assert find([place(0, FORWARD), place(1, FORWARD, silent_s=9.0, state="running")], QUIET_S) is None
