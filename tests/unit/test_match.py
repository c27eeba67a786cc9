"""Which rank did not join: the first collective that does not match, from the calls of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from traceml_ray.signals.collectives.calls import CollectiveCall, ProcessGroup, RankCollectives, table_of
from traceml_ray.signals.collectives.match import Mismatch, match

WORLD = ProcessGroup("0", "default_pg")
SECOND = 1_000_000_000


class Job:
    """Ranks that call collectives one after the other, as gloo does: a call is over when all have joined."""

    def __init__(self, world: int, groups: Sequence[ProcessGroup] = (WORLD,)) -> None:
        self.world = world
        self.groups = {group.name: group for group in groups}
        self._calls: dict[int, list[CollectiveCall]] = {rank: [] for rank in range(world)}
        self.now = SECOND

    def call(self, ranks: Sequence[int], op: str = "all_reduce", *, line: int = 10, **more: Any) -> None:
        """Let `ranks` call `op`; `more` are fields of the call, `group` its group."""
        group = more.pop("group", "0")
        for rank in ranks:
            self.now += 1_000_000
            made = sum(call.group == group for call in self._calls[rank])
            sizes = {
                "in_sizes": ((8,),),
                "in_dtypes": ("Float",),
                "out_sizes": ((8,),),
                "out_dtypes": ("Float",),
            }
            fields = {"created_ns": self.now, "where": f"train (train.py:{line})", **sizes, **more}
            self._calls[rank].append(CollectiveCall(group, made + 1, op, **fields))

    def ranks(self, **changed: Any) -> list[RankCollectives]:
        """Return the calls of all ranks. `changed` are fields of one rank: `rank1={"ended": True}`."""
        last: dict[tuple[str, int], int] = {}
        for calls in self._calls.values():
            for call in calls:
                key = call.group, call.seq
                last[key] = last.get(key, 0) + 1
        reports = []
        for rank, calls in self._calls.items():
            groups = [g for g in self.groups.values() if g.ranks is None or rank in g.ranks]
            done = [
                msgspec.structs.replace(call, done=last[call.group, call.seq] == self._size(call.group))
                for call in calls
            ]
            report = RankCollectives(
                rank=rank, calls=done, groups=groups, whole=True, taken_ns=self.now + 5 * SECOND
            )
            reports.append(msgspec.structs.replace(report, **changed.get(f"rank{rank}", {})))
        return reports

    def _size(self, group: str) -> int:
        ranks = self.groups[group].ranks
        return self.world if ranks is None else len(ranks)


def _named(mismatch: Mismatch | None) -> tuple[str, tuple[int, ...], int]:
    assert mismatch is not None
    return mismatch.kind, mismatch.ranks, mismatch.seq


def test_healthy_calls_name_nothing() -> None:
    job = Job(4)
    for _ in range(5):
        job.call(range(4))
    assert match(job.ranks()) is None
    assert match(job.ranks(), hang=True) is None
    assert match([]) is None


def test_another_operation_under_the_same_number() -> None:
    job = Job(4)
    job.call(range(4))
    job.call([0], "barrier", line=30)
    job.call([1, 2, 3], line=33)
    mismatch = match(job.ranks())
    assert _named(mismatch) == ("operation", (0,), 2)
    assert mismatch is not None
    assert mismatch.proven
    assert (mismatch.where, mismatch.others_where) == ("train (train.py:30)", "train (train.py:33)")
    assert (mismatch.instead, mismatch.op, mismatch.others) == ("barrier", "all_reduce", (1, 2, 3))


def test_two_ranks_that_differ_are_both_named_unless_one_did_it_before() -> None:
    job = Job(2)
    job.call([0], "barrier", line=30)
    job.call([1], line=33)
    mismatch = match(job.ranks())
    assert _named(mismatch) == ("operation", (0, 1), 1)
    assert mismatch is not None
    assert mismatch.confidence == "medium"
    job = Job(2)
    for line in (33, 34) * 3:
        job.call([0, 1], line=line)
    job.call([0], line=33)
    job.call([1], "barrier", line=40)
    assert _named(match(job.ranks())) == ("operation", (1,), 7)


def test_another_size_and_another_type() -> None:
    for kind, changed in (("size", {"in_sizes": ((9,),)}), ("dtype", {"in_dtypes": ("Half",)})):
        job = Job(4)
        job.call([0, 1, 3])
        job.call([2], **changed)
        assert _named(match(job.ranks())) == (kind, (2,), 1)


def test_advice_on_another_size_at_another_line_is_to_look_for_the_way_there() -> None:
    """As with one micro-batch less: the next call that sums something has another size."""
    for line, advice in ((40, "before the two places"), (10, "the size of the tensor")):
        job = Job(4)
        job.call([0, 1, 3])
        job.call([2], line=line, in_sizes=((9,),))
        mismatch = match(job.ranks())
        assert mismatch is not None and mismatch.kind == "size" and advice in mismatch.next


def _received(rank: int, peer: int, *, done: bool = False) -> CollectiveCall:
    return CollectiveCall("0", 1, f"recv {rank}<-{peer}", p2p=True, done=done, where=f"pass_on (t.py:{rank})")


def test_receives_in_a_circle_are_named_in_a_hang() -> None:
    """NCCL records sends and receives. In a job that goes on, the sends may be over already."""
    ranks = [RankCollectives(rank=rank, calls=[_received(rank, (rank - 1) % 3)]) for rank in range(3)]
    mismatch = match(ranks, hang=True)
    assert mismatch is not None
    assert (mismatch.kind, mismatch.ranks, mismatch.where) == ("circle", (0, 1, 2), "pass_on (t.py:0)")
    assert "rank 0 waits in recv 0<-2 at pass_on (t.py:0)" in mismatch.why
    assert match(ranks) is None
    pair = CollectiveCall("0", 1, "send 0->1", p2p=True)
    both = [RankCollectives(rank=0, calls=[pair]), RankCollectives(rank=1, calls=[_received(1, 0)])]
    assert match(both, hang=True) is None, "the two sides of one message"


def test_receive_without_a_send_names_the_rank_that_does_not_send() -> None:
    waits = [RankCollectives(rank=rank, calls=[_received(rank, rank + 1)]) for rank in (0, 1)]
    mismatch = match([*waits, RankCollectives(rank=2)], hang=True)
    assert mismatch is not None
    assert (mismatch.kind, mismatch.ranks, mismatch.others) == ("missing", (2,), (1,))
    assert mismatch.why.startswith("Rank 1 waits in recv 1<-2 at pass_on (t.py:1)")


def test_another_root_is_named_in_a_hang() -> None:
    """Rank 3 waits for rank 1, which has already left the call. Nothing in the calls differs."""
    job = Job(4)
    job.call(range(4), "scatter", line=20)
    job.call([1, 2], line=21)
    calls = {rank: list(report.calls) for rank, report in enumerate(job.ranks())}
    for rank in (0, 3):
        calls[rank][0] = msgspec.structs.replace(calls[rank][0], done=False)
    changed: dict[str, Any] = {
        "rank0": {"calls": calls[0], "call": "scatter", "peer": 0},
        "rank3": {"calls": calls[3], "call": "scatter", "peer": 1},
    }
    mismatch = match(job.ranks(**changed), hang=True)
    assert _named(mismatch) == ("root", (3,), 1)
    assert mismatch is not None and "rank 3 calls scatter with root 1 at train (train.py:20)" in mismatch.why
    changed["rank3"]["peer"] = 0
    assert _named(match(job.ranks(**changed), hang=True))[0] == "missing", "the same root"


def test_equal_numbers_of_elements_match() -> None:
    job = Job(2)
    job.call([0], in_sizes=((4, 2),))
    job.call([1])
    job.call([0], "all_to_all", in_sizes=((9,),))
    job.call([1], "all_to_all")
    job.call([0], "scatter", in_sizes=((8,), (8,)))
    job.call([1], "scatter", in_sizes=())
    job.call([0], "broadcast", in_dtypes=("Int",))
    job.call([1], "broadcast")
    assert match(job.ranks(), hang=True) is None


def test_a_rank_that_has_not_joined_is_late_until_the_job_hangs() -> None:
    job = Job(4)
    job.call(range(4))
    job.call([0, 1, 3], line=20)
    evaluating = {"rank2": {"where": "evaluate (train.py:88)"}}
    assert _named(match(job.ranks(**evaluating))) == ("late", (2,), 2)
    mismatch = match(job.ranks(**evaluating), hang=True)
    assert _named(mismatch) == ("missing", (2,), 2)
    assert mismatch is not None
    assert not mismatch.proven
    assert mismatch.where == "evaluate (train.py:88)"
    assert mismatch.others_where == "train (train.py:20)"
    assert mismatch.waited_s is not None
    assert mismatch.waited_s > 5


def test_a_rank_that_raised_an_exception_is_not_said_to_come_yet() -> None:
    job = Job(3)
    job.call(range(3))
    job.call([0, 1], line=20)
    mismatch = match(job.ranks(rank2={"ending": "exit code 1"}))
    assert mismatch is not None and (mismatch.kind, mismatch.proven) == ("late", False)
    assert mismatch.why == (
        "Rank 2 did not join all_reduce (call 2 of group default_pg): it has ended, exit code 1, its last "
        "call there is number 1 at train (train.py:10). The other 2 wait in it at train (train.py:20)."
    )
    assert mismatch.next.startswith("Look at how rank 2 ended.")


def test_a_rank_that_has_ended_is_proven_missing() -> None:
    job = Job(4)
    job.call(range(4))
    job.call([0, 1, 3])
    mismatch = match(job.ranks(rank2={"ended": True, "ending": "ValueError"}))
    assert _named(mismatch) == ("missing", (2,), 2)
    assert mismatch is not None
    assert mismatch.proven


def test_two_groups_in_a_different_order() -> None:
    pair = ProcessGroup("1", "pair", (0, 1))
    job = Job(4, (WORLD, pair))
    job.call(range(4))
    job.call([0], group="1", line=40)
    job.call([1, 2, 3], line=41)
    mismatch = match(job.ranks())
    assert _named(mismatch) == ("order", (0,), 2)
    assert mismatch is not None
    assert mismatch.where == "train (train.py:40)"


def test_a_circle_over_three_groups() -> None:
    groups = [ProcessGroup(str(i), f"ring{i}", ranks) for i, ranks in enumerate([(0, 1), (1, 2), (0, 2)])]
    job = Job(3, groups)
    job.call([0], group="0")
    job.call([1], group="1")
    job.call([2], group="2")
    assert _named(match(job.ranks())) == ("circle", (0, 1, 2), 1)


def test_the_rank_at_the_end_of_a_chain_is_named() -> None:
    """Ranks 2 and 3 wait in the pair's collective for nothing but rank 3, which sleeps."""
    pair = ProcessGroup("1", "pair", (2, 3))
    job = Job(4, (WORLD, pair))
    job.call([0, 1])
    job.call([2], group="1")
    assert _named(match(job.ranks(), hang=True)) == ("missing", (3,), 1)


def test_a_rank_alone_in_a_group_of_unknown_ranks_waits_for_one_that_may_come() -> None:
    """Rank 3 may be the other member, and come. If it waits, too, all wait for each other."""
    pair = ProcessGroup("1", "pair")
    job = Job(4, (WORLD, pair))
    job.call([0], group="1")
    job.call([1, 2])
    waits_for_one = [
        msgspec.structs.replace(rank, groups=[pair] if rank.rank == 0 else [WORLD]) for rank in job.ranks()
    ]
    late = match(waits_for_one)
    assert late is not None
    assert (late.kind, late.ranks, late.proven) == ("late", (3,), False)
    job.call([3])
    assert _named(match(job.ranks())) == ("order", (0,), 1)


def test_a_rank_that_ended_in_a_call_is_named() -> None:
    """It was killed: its call is not over, and it does not lack it."""
    job = Job(3)
    job.call(range(3))
    stuck = [
        msgspec.structs.replace(
            rank, calls=[msgspec.structs.replace(call, done=False) for call in rank.calls]
        )
        for rank in job.ranks(rank1={"ended": True, "ending": "exit code -9"})
    ]
    mismatch = match(stuck)
    assert _named(mismatch) == ("missing", (1,), 1)
    assert mismatch is not None
    assert "ended in it (exit code -9)" in mismatch.why


def test_all_wait() -> None:
    job = Job(2)
    job.call(range(2))
    stuck = [
        msgspec.structs.replace(
            rank, calls=[msgspec.structs.replace(call, done=False) for call in rank.calls]
        )
        for rank in job.ranks()
    ]
    assert match(stuck) is None
    assert _named(match(stuck, hang=True)) == ("all_wait", (), 1)


def test_ranks_that_were_recorded_before_the_others_went_on_do_not_wait() -> None:
    """As when a rank comes after half a minute, while the ranks are asked where they are."""
    job = Job(4)
    job.call(range(4), "barrier")
    before = [
        msgspec.structs.replace(
            rank, calls=[msgspec.structs.replace(call, done=False) for call in rank.calls]
        )
        for rank in job.ranks()
    ]
    for _ in range(3):
        job.call(range(4))
    after = job.ranks()
    assert match([after[0], before[1], after[2], before[3]], hang=True) is None


def test_older_calls_that_are_not_known_are_not_missing() -> None:
    job = Job(3)
    for _ in range(6):
        job.call(range(3))
    reports = job.ranks()
    reports[1] = msgspec.structs.replace(reports[1], calls=reports[1].calls[4:], whole=False)
    reports[2] = msgspec.structs.replace(reports[2], calls=(), whole=False)
    assert match(reports, hang=True) is None


def test_rank_that_skips_a_backward_pass_is_not_said_to_have_made_more_calls() -> None:
    """The gathers of its next forward pass meet those of the others' backward pass, as in FSDP."""
    job = Job(4)

    def forward(ranks: Sequence[int]) -> None:
        job.call(ranks, "all_gather", line=143)
        job.call(ranks, "all_gather", line=143)

    def backward(ranks: Sequence[int]) -> None:
        job.call(ranks, "all_gather", line=274)
        job.call(ranks, "all_gather", line=274)
        job.call(ranks, "all_reduce", line=274)

    for _ in range(2):
        forward(range(4))
        backward(range(4))
    forward(range(4))
    backward([0, 1, 3])
    forward([2])
    job.call([2], "all_gather", line=274)
    mismatch = match(job.ranks())
    assert mismatch is not None and (mismatch.kind, mismatch.ranks) == ("operation", (2,))
    assert mismatch.why == (
        "Call 15 of group default_pg differs: rank 2 calls all_gather at train (train.py:274); the other 3 "
        "call all_reduce at train (train.py:274)."
    )


def test_a_group_that_was_made_again_has_the_numbers_of_the_newer_one() -> None:
    job = Job(2)
    job.call(range(2), "barrier")
    job.call(range(2))
    again = [
        msgspec.structs.replace(rank, calls=[*rank.calls, CollectiveCall("0", 1, "all_gather", done=True)])
        for rank in job.ranks()
    ]
    again[1] = msgspec.structs.replace(again[1], calls=again[1].calls[2:])
    assert match(again, hang=True) is None


def test_a_table_keeps_no_calls() -> None:
    job = Job(2)
    job.call(range(2))
    table = table_of(job.ranks())
    assert all(not rank.calls for rank in table.ranks.values())
    assert table.text_of("0") == "group default_pg"
