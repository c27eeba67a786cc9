"""Time and bandwidth of collectives: what ranks send, what is judged from it, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from played import Played, look
from torch.testing._internal.distributed.fake_pg import FakeStore
from unit.test_recorder import Loop

from traceml_ray.agent.marks import MAX_CALLS
from traceml_ray.agent.patch.collectives import WORLD, Collectives
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Spans
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.document.model import Table
from traceml_ray.errors import Errors
from traceml_ray.signals.collectives import judge
from traceml_ray.signals.collectives.judge import (
    CollectiveKind,
    OfRank,
    bus_factor,
    collective_times,
    slow_groups,
)
from traceml_ray.signals.collectives.records import MAX_SAMPLES, MAX_SUMS, CallSample, CallTimes
from traceml_ray.signals.collectives.sums import CallSums, Kindred
from traceml_ray.signals.collectives.timed import CollectiveCalls
from traceml_ray.signals.collectives.view import CollectivesView, GetCollectives
from traceml_ray.signals.finding import Finding
from traceml_ray.store import query

MIB = 1 << 20
ALL = Kindred("all_reduce", WORLD, "", 2)


def calls(
    rank: int,
    ns: list[int],
    *,
    op: str = "all_reduce",
    group: str = WORLD,
    size: int | None = 2,
    of_call: int = 10 * MIB,
    first: int = 1,
    every: int = 1,
    node: str | None = "a",
    **fields: Any,
) -> OfRank:
    """The calls of a rank, one in each step."""
    samples = [CallSample(first + i, 0, one, of_call) for i, one in enumerate(ns) if (first + i) % every == 0]
    record = CallTimes(
        0, "host", op, group, "", size, of_call.bit_length(), len(ns), len(ns), of_call * len(ns), sum(ns),
        first, first + len(ns) - 1, every, samples,
    )  # fmt: skip
    return OfRank(rank, node, msgspec.structs.replace(record, **fields))


def only(*records: OfRank) -> CollectiveKind:
    (kind,) = collective_times(records).kinds
    return kind


# -- what is judged ------------------------------------------------------------------------------


def test_time_of_a_call_is_that_of_its_last_rank_and_the_others_wait() -> None:
    """Ranks are late in turn: neither rank's own mean tells how long the exchange takes."""
    kind = only(calls(0, [10_000_000, 30_000_000] * 10), calls(1, [30_000_000, 10_000_000] * 10))
    assert kind.ms == 10.0
    assert kind.host_ms == 20.0
    assert kind.wait_ms == 10.0
    assert kind.algorithm_gb_per_s == pytest.approx(10 * MIB / 10_000_000)
    assert kind.bus_gb_per_s == kind.algorithm_gb_per_s  # 2 (n - 1) / n of two ranks
    assert (kind.calls, kind.calls_per_step, kind.bytes_per_call) == (20, 1.0, 10 * MIB)


@pytest.mark.parametrize(
    ("op", "ranks", "factor"),
    [
        ("all_reduce", 8, 1.75), ("all_reduce_coalesced", 2, 1.0), ("all_gather_into_tensor", 4, 0.75),
        ("reduce_scatter_tensor", 4, 0.75), ("all_to_all_single", 8, 0.875), ("barrier", 8, None),
        ("broadcast", 8, None),
    ],
)  # fmt: skip
def test_factors_of_nccl_tests(op: str, ranks: int, factor: float | None) -> None:
    assert bus_factor(op, ranks) == factor


def test_call_that_is_not_known_of_all_ranks_has_no_time() -> None:
    """The rank that is missing may be the last one."""
    alone = only(calls(0, [MIB] * 20))
    assert (alone.ms, alone.bus_gb_per_s, alone.nodes, alone.why) == (None, None, None, judge.FEW_CALLS)
    assert alone.host_ms == MIB / 1e6
    later = only(calls(0, [5] * 20), calls(1, [5] * 20, first=100))
    assert (later.ms, later.why) == (None, judge.FEW_CALLS)
    unknown = only(calls(0, [5] * 20, size=None), calls(1, [5] * 20, size=None))
    assert (unknown.ms, unknown.nodes) == (None, None)


def test_ranks_with_different_samples_are_compared_in_those_that_both_have() -> None:
    kind = only(calls(0, [7_000_000] * 40, every=4), calls(1, [5_000_000] * 40, every=2))
    assert kind.ms == 5.0
    assert kind.slowest[0].matched == 10


@pytest.mark.parametrize("op", ["broadcast", "reduce", "gather", "scatter", "send", "recv"])
def test_no_time_where_a_rank_may_leave_before_the_others_join(op: str) -> None:
    kind = only(calls(0, [5] * 20, op=op), calls(1, [5] * 20, op=op))
    assert (kind.ms, kind.algorithm_gb_per_s, kind.why) == (None, None, judge.NOT_BETWEEN_ALL)


def test_started_calls_have_bytes_and_no_time() -> None:
    started = [calls(rank, [0] * 20, samples=[], timed=0, total_ns=0) for rank in (0, 1)]
    kind = only(*started)
    assert (kind.ms, kind.host_ms, kind.why, kind.bytes_per_call) == (
        None,
        None,
        judge.ONLY_STARTED,
        10 * MIB,
    )


def test_started_calls_are_not_shown_beside_the_same_calls_of_nccl_inspector() -> None:
    started = [calls(rank, [0] * 20, samples=[], timed=0, total_ns=0) for rank in (0, 1)]
    measured = [calls(rank, [9_000_000] * 20, group="0xab", source="inspector") for rank in (0, 1)]
    assert [kind.source for kind in collective_times([*started, *measured]).kinds] == ["inspector"]
    others = [calls(rank, [9] * 20, group="0xab", op="all_gather", source="inspector") for rank in (0, 1)]
    assert {kind.source for kind in collective_times([*started, *others]).kinds} == {"host", "inspector"}


def test_groups_that_are_alike_are_one_kind() -> None:
    pairs = [
        calls(2 * pair + i, [(1 + pair) * 1_000_000] * 20, group=str(pair), node="ab"[pair % 2 and i])
        for pair in range(4)
        for i in (0, 1)
    ]
    kinds = collective_times(pairs).kinds
    assert [(kind.groups, kind.nodes, kind.ms) for kind in kinds] == [(2, 2, 3.0), (2, 1, 2.0)]
    assert [group.group for group in kinds[1].slowest] == ["2", "0"]


def test_change_is_that_of_the_newest_quarter_of_the_calls() -> None:
    slower = [1_000_000] * 20 + [9_000_000] * 2 + [1_500_000] * 10
    kind = only(calls(0, slower), calls(1, slower))
    assert kind.change_pct == pytest.approx(50.0)
    assert only(calls(0, slower[-20:]), calls(1, slower[-20:])).change_pct is None  # too few


def test_noise_is_no_change() -> None:
    rng = np.random.default_rng(5)
    changed = 0
    for _ in range(200):
        ns = (1e6 * rng.lognormal(0, 0.3, 64)).astype(int).tolist()
        changed += only(calls(0, ns), calls(1, ns)).change_pct is not None
    assert changed <= 4


def test_name_that_two_groups_share_has_no_time() -> None:
    """More ranks than the group has: the calls of several groups cannot be told apart."""
    kind = only(*(calls(rank, [5] * 20, size=2) for rank in range(4)))
    assert kind.ms is None


def test_calls_that_move_most_come_first() -> None:
    small = [calls(rank, [5] * 20, of_call=100) for rank in (0, 1)]
    large = [calls(rank, [5] * 20, op="all_gather") for rank in (0, 1)]
    assert [kind.op for kind in collective_times([*small, *large]).kinds] == ["all_gather", "all_reduce"]


# -- slow groups ---------------------------------------------------------------------------------


def groups(rng: np.random.Generator, count: int, steps: int = 40, **slower: float) -> dict[str, Any]:
    """Times of groups in each step, log-normal around 1 ms."""
    return {
        str(group): (
            np.arange(steps, dtype=np.int64),
            1e6 * slower.get(f"g{group}", 1.0) * rng.lognormal(0, 0.2, steps),
        )
        for group in range(count)
    }


def test_slow_group_is_named_and_healthy_ones_are_not() -> None:
    rng = np.random.default_rng(1)
    assert slow_groups(groups(rng, 8, g3=1.8)) == ["3"]
    for count in (2, 4, 8, 64):
        for _ in range(200):
            assert slow_groups(groups(rng, count)) == []


def test_group_that_was_slow_for_a_while_is_not_named() -> None:
    times = groups(np.random.default_rng(2), 4)
    times["1"][1][:20] *= 5
    assert slow_groups(times) == []


def test_too_few_groups_or_calls_name_nothing() -> None:
    rng = np.random.default_rng(3)
    assert slow_groups(groups(rng, 3, g1=9.0)) == []
    assert slow_groups(groups(rng, 4, steps=15, g1=9.0)) == []


def test_finding_names_the_ranks_of_the_slow_group() -> None:
    pairs = [
        calls(2 * pair + i, [(9 if pair == 2 else 1) * 1_000_000] * 40, group=str(pair))
        for pair in range(4)
        for i in (0, 1)
    ]
    answer = collective_times(pairs)
    (finding,) = CollectivesView().findings(answer, [], None)
    assert isinstance(finding, Finding)
    assert (finding.label, finding.ranks, finding.severity) == ("slow_collective", (4, 5), "notice")
    assert finding.evidence == {"ms": 9.0, "median_ms": 1.0, "groups": 4}


# -- what is sent --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=300), st.integers(0, 40))
def test_ranks_choose_the_same_calls_however_far_they_are(per_step: list[int], behind: int) -> None:
    """One rank is behind the other; what both have kept of the same steps is the same."""
    steps = [step for step, many in enumerate(per_step) for _ in range(many % 7)]
    ahead, slower = CallSums("host"), CallSums("host")
    for step in steps:
        ahead.add(ALL, step, 5, MIB)
    for step in steps[: len(steps) - behind]:
        slower.add(ALL, step, 7, MIB)
    (one,) = ahead.due(0.0, True) or [None]
    (other,) = slower.due(0.0, True) or [None]
    if one is None or other is None:
        return
    assert len(one.samples) <= MAX_SAMPLES
    assert one.calls == len(steps)
    assert one.every % other.every == 0
    of_both = {(s.step, s.place) for s in other.samples if s.step % one.every == 0}
    kept = {(s.step, s.place) for s in one.samples if s.step <= other.last_step}
    assert of_both <= kept
    assert kept - of_both <= {(other.last_step, place) for place in range(4)}  # a step that is under way


def test_samples_are_spread_over_a_long_run() -> None:
    sums = CallSums("host")
    for step in range(100_000):
        sums.add(ALL, step, step + 1, MIB)
    (record,) = sums.due(0.0, True)
    steps = [one.step for one in record.samples]
    assert MAX_SAMPLES // 2 <= len(steps) <= MAX_SAMPLES
    assert {*np.diff(steps).tolist()} == {record.every}
    assert steps[-1] > 95_000
    assert (record.calls, record.timed, record.bytes) == (100_000, 100_000, 100_000 * MIB)


def test_records_are_sent_less_often_in_a_large_job_and_only_if_changed() -> None:
    few, many = CallSums("host", 8, 32), CallSums("host", 4096)
    for sums, pause in ((few, 5.0), (many, 60.0)):
        sums.add(ALL, 1, 5, 8)
        assert len(sums.due(100.0, False)) == 1
        sums.add(ALL, 2, 5, 8)
        assert sums.due(100.0 + pause - 0.1, False) == []
        assert len(sums.due(100.0 + pause, False)) == 1
        assert sums.due(200.0, True) == []
    for step in range(200):
        many.add(ALL, step, 5, 8)
    assert len(many.due(300.0, True)[0].samples) <= 32


def test_ranks_of_a_large_job_do_not_send_all_at_once() -> None:
    sent: list[float] = []
    for rank in range(128):
        sums, now = CallSums("inspector", rank=rank), 100.0
        sums.add(ALL._replace(group_size=4096), 1, 5, 8)
        while not sums.due(now, False):
            now += 1.0
        sent.append(now)
    assert min(sent) == 100.0 and max(sent) == 160.0
    assert max(sent.count(now) for now in sent) <= 6


def test_too_many_kinds_are_counted() -> None:
    sums = CallSums("host")
    for number in range(MAX_SUMS + 3):
        sums.add(ALL._replace(group=str(number)), 1, 5, 8)
    assert len(sums.due(0.0, True)) == MAX_SUMS
    assert sums.refused == 3


# -- the calls of a rank -------------------------------------------------------------------------


class Watched:
    """Collectives of a loop in a world of two ranks of which one is made up."""

    def __init__(self, patcher: Patcher) -> None:
        self.loop = Loop()
        self.loop.step()
        recorder = self.loop.recorder
        recorder.clock = self._later
        self.collectives = Collectives(recorder, Spans(recorder, patcher.failed), patcher.failed)
        self.collectives.patch(patcher)
        self.errors = Errors()
        self.spans = recorder.steps.sums
        self.collector = CollectiveCalls(self.spans, self.errors, lambda: 0.0)
        self.loop.data(1)

    def _later(self) -> int:
        """Each time that the clock is read, a microsecond has passed."""
        self.loop.clock.wait(1_000)
        return self.loop.clock()

    def records(self) -> dict[str, CallTimes]:
        self.loop.recorder.replay()
        return {one.op: one for one in self.collector.collect(True)}


@pytest.fixture
def watched() -> Iterator[Watched]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    patcher = Patcher()
    try:
        yield Watched(patcher)
    finally:
        patcher.restore()
        dist.destroy_process_group()
    assert not patcher.errors and not patcher.missing


def test_call_has_its_bytes_time_and_step(watched: Watched) -> None:
    dist.all_reduce(torch.ones(256))
    dist.all_gather_into_tensor(torch.ones(8), torch.ones(4))
    records = watched.records()
    reduced, gathered = records["all_reduce"], records["all_gather_into_tensor"]
    assert (reduced.calls, reduced.timed, reduced.bytes, reduced.group_size) == (1, 1, 1024, 2)
    assert (reduced.process_group, reduced.description) == (WORLD, "")
    assert gathered.bytes == 32  # of all ranks together
    (sample,) = reduced.samples
    assert (sample.step, sample.size) == (1, 1024)
    assert reduced.total_ns == sample.ns > 0


def test_asynchronous_and_coalesced_calls_are_only_started(watched: Watched) -> None:
    dist.all_reduce(torch.ones(256), async_op=True)
    with dist.distributed_c10d._coalescing_manager():
        dist.reduce_scatter_tensor(torch.ones(4), torch.ones(8))
    records = watched.records()
    assert [(one.calls, one.timed, one.samples) for one in records.values()] == [(1, 0, [])] * 2
    assert records["all_reduce"].bytes == 1024  # what marks the call is no part of its size
    watched.loop.step()
    (span,) = [
        one for one in (*watched.spans.collect(), *watched.spans.collect()) if one.name == "all_reduce"
    ]
    assert span.bytes == 1024


def test_first_row_is_not_measured_because_ranks_connect_in_it(watched: Watched) -> None:
    watched.loop.recorder.steps.forget(0)
    dist.all_reduce(torch.ones(4))
    assert watched.records() == {}


def test_calls_of_a_group_have_its_size_and_what_it_is_called(watched: Watched) -> None:
    group = dist.new_group([0, 1], group_desc="tp")
    dist.all_reduce(torch.ones(4), group=group)
    (record,) = watched.records().values()
    assert (record.process_group, record.description, record.group_size) == (group.group_name, "tp", 2)


def test_calls_beyond_the_room_are_counted(watched: Watched) -> None:
    for _ in range(MAX_CALLS + 7):
        watched.spans.add_call(watched.spans.number("all_reduce", WORLD) or 0, 1, 5, 8)
    assert watched.records()["all_reduce"].calls == MAX_CALLS
    assert watched.errors["collectives not summed: no room"] == 7


# -- faces ---------------------------------------------------------------------------------------


class WithCollectives(Played):
    """Two nodes of two ranks; all of them reduce 10 MiB in 5 ms, and pairs gather."""

    def of_rank(self, rank: int) -> dict[str, Any]:
        reduced = calls(rank, [5_000_000 + 1_000_000 * rank] * 40, size=4).record
        pair = calls(rank, [1_000_000] * 40, op="all_gather", group=str(rank // 2), number=1).record
        return {"collectives": [reduced, pair]}


@pytest.fixture
def session(tmp_path: Path) -> WithCollectives:
    played = WithCollectives(tmp_path / "s", 4, per_node=2, late=None, gpus=0)
    for _ in range(6):
        played.play(10)
    return played


def test_page_and_report_show_times_and_bandwidth(session: WithCollectives, tmp_path: Path) -> None:
    pages = SessionPages(session.source, clock=session.clock, timer=session.clock.timer)
    pages.poll()
    shown = str(look(pages, "signals"))
    assert "Collectives (median call)" in shown and "Bus" in str(look(pages, "overview"))
    session.end()
    report = (tmp_path / "s" / "report.txt").read_text()
    lines = report[report.index("Collectives (median call)") :].splitlines()
    assert lines[2].split() == [
        "all_reduce",
        "4",
        "2",
        "10.5",
        "MB",
        "1",
        "5",
        "ms",
        "1.5",
        "ms",
        "2.10",
        "3.15",
        "CPU",
    ]
    assert lines[3].split()[:4] == ["all_gather", "2", "×", "2"]


def test_block_of_a_summary_becomes_the_answer_again(session: WithCollectives) -> None:
    view = CollectivesView()
    (answer,) = query.ask(session.source.reply, [GetCollectives()])
    assert len(answer.kinds) == 2
    assert view.of_block(msgspec.to_builtins(view.block(answer))) == answer


some_records = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["all_reduce", "barrier"]),
    st.sampled_from([0, 1, 5, 1024, MIB]),
    st.sampled_from(["world", "1", "2"]),
    st.sampled_from([1, 2, None]),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(some_records, max_size=20))
def test_no_two_series_of_a_gauge_have_the_same_labels(records: list[tuple[Any, ...]]) -> None:
    answer = collective_times(
        calls(rank, [5] * 20, op=op, of_call=of_call, group=group, size=size, node="ab"[apart])
        for rank, op, of_call, group, size, apart in records
    )
    for section in CollectivesView().sections(answer):
        for gauge in section.gauges:
            labels = [series[0] for series in gauge.series]
            assert len({*labels}) == len(labels)


def test_large_job_is_not_asked_while_it_runs() -> None:
    view = CollectivesView()
    ranks: Any = {0: None}
    assert view.polls_s(ranks, 8) == 10.0
    assert view.polls_s(ranks, 8192) is None
    assert view.polls_s({}, 0) is None


def test_bandwidth_of_small_calls_is_no_number_of_the_run() -> None:
    for of_call, shown in ((4, False), (2 * MIB, True)):
        answer = collective_times([calls(rank, [5_000] * 9, of_call=of_call) for rank in (0, 1)])
        assert bool(CollectivesView().sections(answer)[0].numbers) is shown


def test_nothing_is_shown_without_collectives() -> None:
    assert CollectivesView().sections(collective_times([])) == []
    (section,) = CollectivesView().sections(collective_times([calls(0, [5] * 9), calls(1, [6] * 9)]))
    assert isinstance(section.blocks[0], Table)
