"""Memory of a run that goes on: judged a few ranks at a time, in bounded room; events, verdicts."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_series import BEGAN, GIB, MIB, SECOND, flat, on_host
from msgspec.structs import replace
from played import Played
from sessions import LIMITS, aggregation, ask, identity

from traceml_ray.analysis.labels import Label
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.reports.answers import Answers
from traceml_ray.signals.live import Ranks
from traceml_ray.signals.memory import sentences
from traceml_ray.signals.memory.judge import judge
from traceml_ray.signals.memory.live import (
    MAX_FRESH,
    MAX_PLACES,
    SHARE,
    SIZE,
    SLICE_S,
    LiveMemory,
    MemoryEvents,
    SampleBuffer,
)
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.memory.shapes import Memory, Series
from traceml_ray.signals.memory.view import GetMemory
from traceml_ray.signals.views import with_causes
from traceml_ray.stages import SYNC_WAIT
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.wire import messages as wire


def _host(second: int, rss: float, **more: Any) -> MemorySample:
    limit = {"limit_bytes": 64 * GIB, "limit_used_bytes": round(8 * GIB + rss)}
    return MemorySample(BEGAN + second * SECOND, 4 * second, None, rss_bytes=round(rss), **limit, **more)


# -- what is kept


def test_few_samples_are_all_kept() -> None:
    kept = SampleBuffer()
    for second in range(SIZE):
        kept.add(_host(second, second * MIB, uss_bytes=second if second % 30 == 0 else None))
    t_ns, step, columns = kept.arrays()
    assert ((t_ns - BEGAN) // SECOND).tolist() == list(range(SIZE))
    assert step.tolist() == [4 * second for second in range(SIZE)]
    assert set(columns) == {"rss_bytes", "uss_bytes", "limit_bytes", "limit_used_bytes"}
    assert np.isnan(columns["uss_bytes"]).sum() == SIZE - 18


def test_many_samples_are_kept_evenly_and_the_newest_all() -> None:
    kept, n = SampleBuffer(), 30_000
    for second in range(n):
        kept.add(_host(second, second * MIB, peak_bytes=9 * GIB if second == 777 else MIB))
    t_ns, _, columns = kept.arrays()
    second = (t_ns - BEGAN) // SECOND
    assert len(second) <= SIZE
    assert second[-SIZE // 2 :].tolist() == list(range(n - SIZE // 2, n))
    between = np.diff(second)
    assert second[0] == 0 and len(set(between[:32].tolist())) == 1 and between[0] * SIZE > n
    assert (columns["rss_bytes"] == second * MIB).all()
    assert columns["peak_bytes"].max() == 9 * GIB


def test_slow_leak_is_found_in_what_is_kept() -> None:
    kept, n, rng = SampleBuffer(), 20_000, np.random.default_rng(0)
    for second in range(n):
        kept.add(_host(second, 2 * GIB + second * 20 * 1024 + rng.normal(0, MIB)))
    [finding] = judge([Series(0, "a", "p", None, *kept.arrays())]).findings
    assert finding.kind == "creep"
    assert finding.evidence["bytes_per_s"] == pytest.approx(20 * 1024, rel=0.05)


# -- a few ranks at a time


class _Time:
    """Seconds, and CPU seconds of which each look takes `costs`."""

    def __init__(self, costs: float) -> None:
        self.now = self.used = 0.0
        self.costs = costs

    def busy(self) -> float:
        self.used += self.costs
        return self.used


def _ranks(n: int, world: int | None = None) -> Ranks:
    processes = {rank: RankProcess(rank, f"p{rank}", identity(rank, n)) for rank in range(n)}
    return Ranks(processes, dict.fromkeys(processes, "node-a"), world or n)


def _live(n: int, costs: float = 0.0, seconds: int = 60, leaking: int = 1) -> tuple[LiveMemory, _Time]:
    time = _Time(costs)
    live = LiveMemory(threading.Lock(), lambda: time.now, time.busy)
    for second in range(seconds):
        for rank in range(n):
            live.add(rank, _host(second, 2 * GIB + (rank == leaking) * second * 8 * MIB))
    return live, time


def test_all_ranks_are_judged_within_a_share_of_a_core() -> None:
    live, time = _live(20, costs=0.01)
    ranks = _ranks(20)
    while not live.judge({"run": ranks}):
        time.now += 0.05
    used = 20 * time.costs
    assert SHARE * time.now >= used - 2 * SLICE_S
    assert SHARE * time.now <= 3 * used
    assert {f.rank for f in live.latest("run").findings} == {1}  # type: ignore[union-attr]


def test_only_ranks_with_new_samples_are_judged_again() -> None:
    live, time = _live(4)
    assert live.judge({"run": _ranks(4)}) == ["run"]
    time.now += 1
    assert live.judge({"run": _ranks(4)}) == []
    before = live.latest("run")
    live.add(2, _host(60, 3 * GIB))
    time.now += 1
    assert live.judge({"run": _ranks(4)}) == ["run"]
    assert [row.samples for row in live.latest("run").ranks] == [60, 60, 61, 60]  # type: ignore[union-attr]
    assert before is not live.latest("run")


def test_question_is_answered_by_all_samples_of_few_ranks_and_the_last_round_of_many() -> None:
    live, _ = _live(4)
    assert live.fresh("run", _ranks(4)) == live.latest("run") is not None
    live.add(2, _host(60, 2 * GIB))
    answer = live.fresh("run", _ranks(4))
    assert answer is not None and [row.samples for row in answer.ranks] == [60, 60, 61, 60]
    many, _ = _live(MAX_FRESH + 1, seconds=8)
    assert many.fresh("run", _ranks(MAX_FRESH + 1)) is None


def test_runs_that_ended_are_forgotten_and_places_are_bounded() -> None:
    live, time = _live(2)
    live.judge({"run": _ranks(2)})
    time.now += 1
    live.judge({})
    assert live.latest("run") is None
    for process in range(MAX_PLACES + 10):
        live.add(process, _host(0, GIB))
    assert len(live._kept) == MAX_PLACES


# -- events


def _found(severity: str, after_s: float, ranks: int = 1, over: float = 4.0) -> Memory:
    """A growth of ten seconds, `at` seconds after that, by so much over a random walk."""
    live, _ = _live(2, leaking=0)
    memory = live.fresh("run", _ranks(2))
    assert memory is not None
    [finding] = memory.findings
    to_ns = BEGAN + round((10 + after_s) * SECOND)
    copies = [
        replace(
            finding,
            rank=rank,
            severity=severity,
            from_ns=BEGAN,
            to_ns=to_ns,
            evidence={**finding.evidence, "over_walk": over},
        )
        for rank in range(ranks)
    ]
    return Memory(findings=copies)


def test_finding_is_an_event_once_and_again_when_it_gets_worse() -> None:
    events, rounds = MemoryEvents(), ["warning", "warning", "warning", "critical", "critical", "info"]
    sent = [
        [e for _, e in events.of(_found(severity, 3 * number), 0)] for number, severity in enumerate(rounds)
    ]
    assert [len(events_of_round) for events_of_round in sent] == [0, 1, 0, 1, 0, 0]
    event = sent[1][0]
    assert (event.kind, event.data["finding"], event.data["rank"]) == ("memory", "creep", 0)
    assert event.data["bytes_per_s"] == pytest.approx(8 * MIB, rel=0.01)
    assert event.message.startswith("Rank 0 (node-a): host memory grows by")


def test_finding_of_one_round_only_is_no_event() -> None:
    events = MemoryEvents()
    rounds = (_found("warning", 0), Memory(), _found("warning", 9))
    assert [len(events.of(events_of_round, 0)) for events_of_round in rounds] == [0, 0, 0]


def test_growth_is_an_event_once_it_has_been_found_for_some_of_its_time() -> None:
    events = MemoryEvents()
    early, events_sent = (
        _found("critical", 2.0),
        [events.of(_found("critical", second), 0) for second in (0, 1, 2)],
    )
    assert events_sent == [[], [], []] and events.lasting(early).findings == []
    assert len(events.of(_found("critical", 3), 0)) == 1
    assert events.lasting(early).findings == early.findings
    assert len(MemoryEvents().of(_found("warning", 0, over=6.5), 0)) == 1


def test_finding_of_many_ranks_is_one_event() -> None:
    events = MemoryEvents()
    events.of(_found("warning", 0, 64), 0)
    [(rank, event)] = events.of(_found("warning", 9, 64), 0)
    assert rank == 0 and event.data["ranks"] == 64
    assert event.message.startswith("creep on ranks 0-63. Rank 0 (node-a): host memory grows")


# -- in a session


def _leaking(folder: Path, seconds: int = 24) -> Played:
    played = Played(folder / "demo", late=None)
    played.leaks[5] = 512 * MIB
    for _ in range(seconds):
        played.play(5)
    return played


def test_leak_of_a_live_run_is_an_event_and_is_read_before_the_verdict(tmp_path: Path) -> None:
    played = _leaking(tmp_path)
    verdict = played.aggregator.verdict
    assert verdict is not None and verdict.label == "healthy"
    assert "memory" not in verdict.why
    brief = played.aggregator._judge.brief["job"]
    assert (brief["label"], brief["first"]) == ("healthy", "memory creep: rank 5 (host-1)")
    assert "900 steps (3 min) of memory left." in str(brief["first_why"])
    with played.aggregator.stored() as file:
        events_stored = [event for event in file.events()[0] if event.kind == "memory"]
    assert {event.data["finding"] for event in events_stored} == {"creep", "first_cause"}
    assert {(event.rank, event.data["rank"]) for event in events_stored} == {(5, 5)}
    assert len(events_stored) == len(
        {(event.data["finding"], event.data["severity"]) for event in events_stored}
    )


def test_live_answer_is_that_of_the_file(tmp_path: Path) -> None:
    """A leak, and memory outside of torch that comes with the first all_to_all of a rank."""
    played = Played(tmp_path / "demo", late=None)
    played.leaks[5] = 512 * MIB
    usual = played._memory

    def memory(rank: Any) -> list[MemorySample]:
        return [
            replace(sample, process_bytes=(sample.process_bytes or 0) + GIB * (played._seconds > 20))
            for sample in usual(rank)
        ]

    played._memory = memory  # type: ignore[method-assign]
    for second in range(40):
        name = "all_to_all" if second >= 20 else "all_reduce"
        first = 5 * second
        played.play(5, spans=[wire.SpanSum(name, SYNC_WAIT, 5, 5, 1, first, first + 4, 1 << 20, "7")])
    live = ask(played.aggregator, "memory")
    assert live == Answers(played.folder, LIMITS).answer(GetMemory())
    assert live.first_cause is not None and live.first_cause.rank == 5
    assert {(attribution.op, attribution.group) for attribution in live.collectives} == {("all_to_all", "7")}
    assert len(live.collectives) == 8
    assert len({finding.kind for finding in live.findings}) > 1


def test_restarted_aggregator_goes_on_with_what_is_stored(tmp_path: Path) -> None:
    """It answers from all samples, and says nothing twice."""
    played = _leaking(tmp_path)
    before = ask(played.aggregator, "memory")
    played.aggregator.commit()
    played.aggregator.close()
    played.aggregator = aggregation(played.folder, played.clock, world_size=8, nnodes=2)
    for _ in range(3):
        played.play(5)
    after = ask(played.aggregator, "memory")
    assert [row.samples for row in after.ranks] == [row.samples + 3 for row in before.ranks]
    assert after.first_cause is not None and after.first_cause.rank == 5
    with played.aggregator.stored() as file:
        events_stored = [event.data for event in file.events()[0] if event.kind == "memory"]
    identities = [(data["finding"], data["rank"], data["severity"]) for data in events_stored]
    assert len(identities) == len(set(identities)) >= 2


@pytest.mark.parametrize("n", [0, 5, 300, 384, 385, 600, 5000])
def test_samples_that_are_read_are_kept_as_those_that_come(n: int) -> None:
    came = SampleBuffer()
    for second in range(n):
        came.add(_host(second, second * MIB))
    t_ns = BEGAN + np.arange(n) * SECOND
    read = SampleBuffer.from_arrays(t_ns, np.arange(n) * 4, {"rss_bytes": np.arange(n) * 1.0 * MIB})
    assert read.taken == n
    for second in range(n, n + 2000):
        came.add(_host(second, second * MIB))
        read.add(_host(second, second * MIB))
    for kept in (came, read):
        times, _, columns = kept.arrays()
        second = (times - BEGAN) // SECOND
        assert len(second) <= SIZE and second[0] == 0
        assert second[-SIZE // 2 :].tolist() == list(range(n + 2000 - SIZE // 2, n + 2000))
        assert (np.diff(second) > 0).all() and np.diff(second).max() * SIZE < 8 * (n + 2000)
        assert (columns["rss_bytes"] == second * MIB).all()


def test_clock_of_a_node_moves_the_times_of_its_ranks() -> None:
    live, _ = _live(2)
    ranks = _ranks(2)
    for process in ranks.processes.values():
        process.identity = replace(process.identity, node_id=f"n{process.id}")
    answer = live.fresh("run", dataclasses.replace(ranks, clocks={"n1": (7 * SECOND, 1_000_000)}))
    assert answer is not None
    [creep] = [finding for finding in answer.findings if finding.kind == "creep"]
    before = live.fresh("other", ranks)
    assert before is not None
    assert creep.to_ns - before.findings[0].to_ns == 7 * SECOND


def test_oom_names_what_grew_before(tmp_path: Path) -> None:
    played = _leaking(tmp_path)
    played.dies(5, 1, "torch.OutOfMemoryError: CUDA out of memory.")
    verdict = played.aggregator.verdict
    assert verdict is not None and (verdict.label, verdict.ranks) == ("oom", (5,))
    assert "Rank 5's allocated memory had grown by 107 MB a step, 1" in verdict.why
    assert "of memory left" not in verdict.why
    played.end(1)
    summary = json.loads((played.folder / "summary.json").read_text())
    assert summary["verdict"]["label"] == "oom"
    assert "Rank 5's allocated memory had grown by 107 MB a step, 1" in summary["verdict"]["why"]


def test_oom_of_a_rank_that_did_not_grow_says_so(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", late=None)
    for _ in range(20):
        played.play(5)
    played.dies(5, 1, "torch.OutOfMemoryError: CUDA out of memory.")
    verdict = played.aggregator.verdict
    assert verdict is not None and verdict.why.endswith("the next allocation was too large.")


def test_oom_of_a_host_names_the_rank_that_took_its_memory() -> None:
    live, _ = _live(3, leaking=2)
    memory = live.fresh("run", _ranks(3))
    assert memory is not None
    sentence = sentences.cause(memory, [0], "node-a")
    assert sentence.startswith(
        "It was on the same node as rank 2, whose host memory had grown by 2.1 MB a step"
    )
    assert sentences.cause(memory, [0], "node-b").startswith("Its memory had not grown")


@pytest.mark.parametrize(("label", "reason"), [("oom", "MemoryError"), ("rank_lost", "SIGKILL")])
def test_rank_that_took_memory_in_its_last_second_is_not_said_to_have_had_its_level(
    label: Label, reason: str
) -> None:
    ends = 400 * MIB * (np.arange(40) >= 39)
    memory = judge([on_host(0, flat(40)), on_host(1, flat(40, 1) + ends)], expected=2)
    verdict = Verdict(label=label, ranks=(1,), why="Rank 1 ended first.", exit_reason=reason)
    took = with_causes(verdict, {"memory": memory}).why
    assert took.startswith("Rank 1 ended first. Rank 1's host memory was 4")
    assert took.endswith(" MB above its usual level at the end.")
    other = with_causes(replace(verdict, ranks=(0,)), {"memory": memory}).why
    assert ("had not grown" in other) == (label == "oom")


def test_healthy_memory_says_nothing(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", late=None)
    for _ in range(20):
        played.play(5)
    verdict = played.aggregator.verdict
    assert verdict is not None and "memory" not in verdict.why
    with played.aggregator.stored() as file:
        assert [event for event in file.events()[0] if event.kind == "memory"] == []
