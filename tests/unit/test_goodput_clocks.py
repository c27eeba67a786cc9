"""The ledger of runs whose wall clocks were set: nothing is lost, invented or counted twice."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import SECOND, identity

from traceml_ray.signals.goodput.answer import Goodput, goodput
from traceml_ray.signals.goodput.attempts import Hang, Sources
from traceml_ray.signals.goodput.records import Life, LifeInterval, OpenInterval
from traceml_ray.signals.goodput.reported import Intervals, Lives, Totals
from traceml_ray.signals.goodput.totals import RankTotals
from traceml_ray.store.rank_processes import RankProcess

START = 1_700_000_000 * SECOND
HOUR, DAY = 3600 * SECOND, 86_400 * SECOND
STEPS_S, SAVE_S, PREPARES_S = 60, 5, 10
"""An attempt prepares for 10 s, then takes steps of 1 s, and saves for 5 s after half of its steps."""


class Try(NamedTuple):
    """An attempt: one rank on each node."""

    nodes: tuple[int, ...] = (0, 1)
    gap_s: int = 8
    """Time after the attempt before."""
    set_ns: tuple[int, ...] = (0, 0)
    """By how much the wall clock of each of its nodes is ahead, as the aggregator sees it."""
    set_during_ns: int = 0
    """By how much all clocks are set in the middle of its steps."""
    killed: bool = True
    tells_boot: bool = True


def sources(*tries: Try, tells_birth: bool = True, hangs: Any = ()) -> tuple[Sources, int]:
    """What is known of these attempts; and the true time from the first to the last moment in them, in ns."""
    processes, lives, intervals, totals = list[RankProcess](), Lives(), Intervals(), Totals()
    killed_ns, now = dict[int, int](), START
    begin = START
    for number, one in enumerate(tries):
        now += one.gap_s * SECOND if number else 0
        first, middle = now + PREPARES_S * SECOND, now + (PREPARES_S + STEPS_S // 2) * SECOND
        end = first + STEPS_S * SECOND
        for rank, (node, set_ns) in enumerate(zip(one.nodes, one.set_ns, strict=True)):
            before, after = set_ns, set_ns + one.set_during_ns
            process = len(processes)
            who = identity(rank, len(one.nodes), attempt=number)
            seen = {"first_seen_ns": now + 2 * SECOND + before, "last_seen_ns": end + after}
            processes.append(
                RankProcess(process, str(process), who, stored=STEPS_S, final=not one.killed, **seen)
            )
            boot = START - (node + 1) * DAY
            save = middle - SAVE_S * SECOND + before, middle + before
            intervals.add(
                process,
                LifeInterval(
                    1, "checkpoint_save", *save, SAVE_S * SECOND, 1, None,
                    boot + before if one.tells_boot else None,
                ),
            )  # fmt: skip
            lives.by_process[process] = Life(
                end + after, now + 2 * SECOND + after, now + after if tells_birth else None,
                first - SECOND + after, first + after, end + after, STEPS_S,
                None if one.killed else end + after,
                booted_ns=boot + after if one.tells_boot else None,
                boot=node if one.tells_boot else None,
            )  # fmt: skip
            if one.killed:
                killed_ns[process] = end + after
            took = STEPS_S * SECOND
            totals.by_process[process] = RankTotals(STEPS_S, took, 0, 0, [])
        now = end
    known = Sources(processes, lives, intervals, totals, None, {}, hangs, True, killed_ns)
    return known, now - begin


def answer_of(*tries: Try, **fields: Any) -> tuple[Goodput, int]:
    """The answer, which adds up; and the true length."""
    known, length = sources(*tries, **fields)
    answer = goodput(known)
    adds_up(answer)
    return answer, length


def adds_up(answer: Goodput) -> None:
    parts = [value or 0.0 for value in answer.seconds.values()]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(answer.rank_s, rel=1e-9)
    for one in answer.attempts:
        assert sum(value or 0.0 for value in one.seconds.values()) == pytest.approx(one.rank_s, rel=1e-9)
        assert one.to_ns >= one.from_ns
    assert sum(one.rank_s for one in answer.attempts) == pytest.approx(answer.rank_s, rel=1e-9)
    edges = [(one.from_ns, one.to_ns) for one in answer.timeline]
    assert all(abs(since - to) < 1000 for (since, _), (_, to) in zip(edges[1:], edges, strict=False))


SOUND = {"productive": 2 * 2 * (STEPS_S - SAVE_S), "checkpoint_save": 2 * 2 * SAVE_S, "recovery": 2 * 8}
"""Parts of two sound attempts of two ranks, in rank-seconds."""


def parts(answer: Goodput) -> dict[str, float | None]:
    return {name: answer.seconds[name] for name in SOUND}


@pytest.mark.parametrize("ahead", [0, HOUR, -HOUR, DAY, -DAY])
def test_a_clock_that_was_set_between_two_attempts_changes_nothing(ahead: int) -> None:
    """The first attempt ran on a clock that was so much ahead."""
    answer, length = answer_of(Try(set_ns=(ahead, ahead)), Try())
    assert answer.rank_s == pytest.approx(2 * length / SECOND)
    assert parts(answer) == pytest.approx(SOUND)
    assert answer.attempts[0].recovery_s == 8
    assert (answer.twice_s, answer.why.get("recovery")) == (0, None)
    if ahead:
        (sentence,) = answer.clocks
        direction = "back" if ahead > 0 else "forward"
        assert sentence.startswith(f"The clock was set {direction} by ")
        assert "between attempt 0 and attempt 1" in sentence
    else:
        assert answer.clocks == []


@pytest.mark.parametrize("nodes", [(0, 1), (2, 3)])
def test_without_a_boot_in_both_the_order_stays_and_the_gap_is_not_known(nodes: tuple[int, int]) -> None:
    """The clock was set back by an hour: the attempts are whole, and what lies between them counts as 0."""
    answer, length = answer_of(Try(set_ns=(HOUR, HOUR), tells_boot=nodes != (0, 1)), Try(nodes))
    assert answer.rank_s == pytest.approx(2 * (length / SECOND - 8))
    assert parts(answer) == pytest.approx({**SOUND, "recovery": None})
    assert answer.attempts[0].recovery_s is None
    assert "clock was set" in answer.why["recovery"]
    assert "counts as 0" in answer.clocks[0]


def test_nodes_that_were_not_there_later_are_moved_with_those_that_were() -> None:
    answer, length = answer_of(Try((0, 1), set_ns=(HOUR, HOUR)), Try((0, 2)), Try((2, 3)))
    assert answer.rank_s == pytest.approx(2 * length / SECOND)
    assert answer.attempts[0].recovery_s == answer.attempts[1].recovery_s == 8


def test_a_node_whose_clock_was_wrong_in_one_attempt_only_is_moved_alone() -> None:
    """Node 1 was five minutes ahead, and was not corrected before its processes were killed."""
    answer, length = answer_of(Try(set_ns=(0, 300 * SECOND)), Try())
    assert answer.rank_s == pytest.approx(2 * length / SECOND)
    assert parts(answer) == pytest.approx(SOUND)


@pytest.mark.parametrize("by", [HOUR, -HOUR, DAY, -20 * SECOND])
def test_a_checkpoint_before_the_clock_was_set_stays_where_it_was(by: int) -> None:
    """The clock is set in the middle of the steps. The newest report of a life is on the clock after that."""
    answer, length = answer_of(Try(set_during_ns=by))
    assert answer.rank_s == pytest.approx(2 * length / SECOND)
    assert answer.seconds["checkpoint_save"] == pytest.approx(2 * SAVE_S)
    assert answer.seconds["productive"] == pytest.approx(2 * (STEPS_S - SAVE_S))
    assert f"set {'back' if by < 0 else 'forward'} by" in answer.clocks[0]
    assert "during attempt 0" in answer.clocks[0]


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_an_attempt_may_begin_on_the_clock_that_the_one_before_ended_with(by: int) -> None:
    answer, length = answer_of(Try(set_during_ns=by), Try(set_ns=(by, by)))
    assert answer.rank_s == pytest.approx(2 * length / SECOND)
    assert parts(answer) == pytest.approx(SOUND)
    assert len(answer.clocks) == 1


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_a_rank_that_could_not_report_that_the_clock_was_set_ends_when_it_was_killed(by: int) -> None:
    """Rank 1 stands in native code; its newest report is 10 s older than its end, on the clock before."""
    known, length = sources(Try(nodes=(0, 0)))
    life = known.lives.by_process[1]
    times = {name: getattr(life, name) - 10 * SECOND - by for name in ("t_ns", "last_row_ns")}
    others = ("attached_ns", "born_ns", "first_step_ns", "first_row_ns", "booted_ns")
    times |= {name: getattr(life, name) - by for name in others}
    known.lives.by_process[1] = type(life)(
        **{**dict(zip(life.__struct_fields__, _values(life), strict=True)), **times}
    )
    answer = goodput(known)
    adds_up(answer)
    assert answer.rank_s == pytest.approx(2 * length / SECOND)


def _values(life: Life) -> list[Any]:
    return [getattr(life, name) for name in life.__struct_fields__]


def test_an_attempt_whose_start_is_not_known_begins_when_the_monitor_attached() -> None:
    answer, length = answer_of(Try(set_ns=(HOUR, HOUR)), Try(), tells_birth=False)
    assert answer.rank_s == pytest.approx(2 * (length / SECOND - 2))
    assert answer.attempts[0].recovery_s == 8 + 2


def test_processes_that_go_on_while_the_next_attempt_begins_are_no_clock_that_was_set() -> None:
    """Nodes 0 and 1 are lost, and end 20 s after nodes 2 and 3 begin."""
    answer, length = answer_of(Try(), Try((2, 3), gap_s=-20))
    assert answer.rank_s == pytest.approx(2 * length / SECOND)
    assert (answer.attempts[0].recovery_s, answer.clocks) == (0, [])


def test_a_hang_stays_in_its_attempt_when_the_clock_was_set_back() -> None:
    """Both attempts were at this time, by the clock. The hang was in the first one, to its end."""
    ahead = 40 * SECOND
    since = START + (PREPARES_S + STEPS_S) * SECOND - 20 * SECOND + ahead
    hang = Hang(since, None)
    answer, _ = answer_of(Try(set_ns=(ahead, ahead)), Try(), hangs=[hang])
    assert answer.attempts[0].seconds["hang"] == pytest.approx(2 * 20)
    assert not answer.attempts[1].seconds["hang"]


def test_a_checkpoint_that_goes_on_counts_once_on_the_one_clock() -> None:
    known, _ = sources(Try(set_ns=(HOUR, HOUR)), Try())
    for process in (0, 1):
        life = known.lives.by_process[process]
        going = OpenInterval(2, "checkpoint_save", 3 * SECOND, None, 3 * SECOND)
        values = dict(zip(life.__struct_fields__, _values(life), strict=True))
        known.lives.by_process[process] = Life(**{**values, "open": [going]})
    answer = goodput(known)
    adds_up(answer)
    assert answer.attempts[0].seconds["checkpoint_save"] == pytest.approx(2 * (SAVE_S + 3))


# -- whatever clocks do -------------------------------------------------------------------------------------

_MINUTE = 60 * SECOND
_SET = st.sampled_from([0, 0, 5_000_000, HOUR, -HOUR, DAY, -DAY]) | st.integers(-5000, 5000).map(
    lambda minutes: minutes * _MINUTE
)


@st.composite
def any_try(draw: st.DrawFn) -> Try:
    nodes = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)))
    sets = tuple(draw(_SET) for _ in nodes)
    return Try(nodes, draw(st.integers(0, 100)), sets, draw(_SET), draw(st.booleans()), draw(st.booleans()))


@given(st.lists(any_try(), min_size=1, max_size=4), st.booleans())
@settings(max_examples=40)
def test_whatever_clocks_do_it_adds_up_and_nothing_is_negative(tries: list[Try], born: bool) -> None:
    answer, _ = answer_of(*tries, tells_birth=born)
    assert answer.rank_s > 0
    assert [one.ranks for one in answer.attempts] == [len(one.nodes) for one in tries]


@given(st.lists(any_try(), min_size=1, max_size=4), st.booleans())
@settings(max_examples=40)
def test_no_attempt_is_lost_if_its_nodes_agree_on_the_time(tries: list[Try], born: bool) -> None:
    """The aggregator corrects the clocks of nodes. Its own may be set, and any node may not tell its boot."""
    agree = [one._replace(set_ns=one.set_ns[:1] * len(one.nodes)) for one in tries]
    answer, _ = answer_of(*agree, tells_birth=born)
    # a gap that is not known may be a part of an attempt, as may an overlap that is allowed
    longest_s = STEPS_S + PREPARES_S + sum(one.gap_s for one in agree) + 60
    for one in answer.attempts:
        assert 0 < (one.to_ns - one.from_ns) / SECOND <= longest_s + 0.05


@st.composite
def one_node_in_all(draw: st.DrawFn) -> list[Try]:
    """
    Attempts of which node 0 is a part. In each attempt but the newest all clocks may be wrong; and each node
    but the first by another time, if all its nodes come again.
    """
    tries = draw(st.lists(any_try(), min_size=1, max_size=4))
    seen, made = set[int](), list[Try]()
    for one in reversed(tries):
        nodes = tuple(dict.fromkeys((0, *one.nodes)))[:3]
        whole = draw(_SET) if made else 0
        again = seen >= {*nodes}
        sets = tuple(draw(_SET) if again and node else whole for node in nodes)
        seen |= {*nodes}
        made.append(one._replace(nodes=nodes, set_ns=sets, tells_boot=True))
    return made[::-1]


@given(one_node_in_all())
@settings(max_examples=40)
def test_if_one_node_was_in_all_attempts_the_whole_time_is_known(tries: list[Try]) -> None:
    answer, length = answer_of(*tries)
    lengths = (STEPS_S + PREPARES_S) * len(tries) + sum(one.gap_s for one in tries[1:])
    assert lengths == length / SECOND
    expected = 0
    for one, after in zip(tries, [*tries[1:], None], strict=True):
        expected += len(one.nodes) * (STEPS_S + PREPARES_S + (after.gap_s if after else 0))
    assert answer.rank_s == pytest.approx(expected, abs=0.05 * len(tries) * 3)
    saved = sum(len(one.nodes) for one in tries) * SAVE_S
    assert answer.seconds["checkpoint_save"] == pytest.approx(saved, abs=0.05 * len(tries) * 3)
