"""The summary and its text: what they say of a run, and who they blame for its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sessions import SECOND, Clock, Rank, Relay, aggregation, check_ledger, stored, written_summary
from snapshot import Snapshot

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.document.text import WIDTH
from traceml_ray.reports.deaths import Death, Moment
from traceml_ray.reports.files import text_of
from traceml_ray.reports.headlines import named
from traceml_ray.reports.status import render_status
from traceml_ray.reports.summary import summarize
from traceml_ray.signals.nodes.records import GpuSample, NodeSample
from traceml_ray.stages import BACKWARD, DATA
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

BALANCED = [1, 2, 0, 3, 4, 1]
WAITING = [1, 2, 0, 3, 4, 5]
LATE = [1, 6, 0, 3, 4, 1]


class Run:
    """A run of `world` ranks, two a node, kept in `folder`."""

    def __init__(self, folder: Path, world: int, **info: Any) -> None:
        self.folder = folder
        self.clock = Clock()
        self.aggregator = aggregation(folder, self.clock, **info)
        self.ranks = [Rank(i, world, per_node=2) for i in range(world)]
        self.relays = [Relay(node) for node in range(-(-world // 2))]

    def steps(self, seconds: int, late: int | None = None, **fields: Any) -> None:
        """Ten steps a second; rank `late` is 4 ms late out of data."""
        for _ in range(seconds):
            for relay in self.relays:
                batches = []
                for rank in self.of(relay):
                    number = rank.identity.global_rank
                    ms = BALANCED if late is None else LATE if number == late else WAITING
                    batches.append(rank.batch(10, ms, **fields))
                self.aggregator.ingest(relay.message(*batches))
            self.clock.tick()

    def of(self, relay: Relay) -> list[Rank]:
        return self.ranks[2 * self.relays.index(relay) :][:2]

    def last(self, rank: int, *events: wire.Event, **fields: Any) -> None:
        relay = self.relays[rank // 2]
        self.aggregator.ingest(
            relay.message(self.ranks[rank].batch(0, final=True, events=list(events), **fields))
        )

    def raised(self, rank: int, message: str, after: float) -> None:
        """Rank ends with an exception `after` seconds from now."""
        t_ns = self.clock() + int(after * SECOND)
        self.last(rank, wire.Event("exception", t_ns, 9, 3, message, {"type": message.partition(":")[0]}))

    def failure(self, rank: int, code: int, after: float, message: str = "") -> wire.RankFailure:
        pid = self.ranks[rank].identity.pid
        return wire.RankFailure(rank, rank % 2, pid, code, self.clock() + int(after * SECOND), message)

    def finish(self, code: int = 0, *failures: wire.RankFailure) -> dict[str, Any]:
        self.aggregator.finish(wire.Finish(codec.VERSION, code, list(failures)))
        self.aggregator.close()
        check_ledger(self.folder)
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_bytes())
        return summary

    @property
    def text(self) -> str:
        text = (self.folder / "report.txt").read_text()
        assert max(map(len, text.splitlines())) <= WIDTH
        return text.replace(str(self.folder), "<folder>")


def test_late_rank_is_named_with_its_cost(tmp_path: Path, snapshot: Snapshot) -> None:
    run = Run(tmp_path / "s", 4, world_size=4, nnodes=2)
    run.steps(15)
    run.steps(30, late=2, strategy="ddp")
    for rank in range(4):
        run.last(rank)
    summary = run.finish()
    assert summary["schema"] == "traceml_ray/summary/1"
    assert summary["session"]["status"] == "finished"
    assert summary["session"]["strategy"] == "ddp"
    assert [node["ranks"] for node in summary["session"]["nodes"]] == [[0, 1], [2, 3]]
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["stage"], verdict["rank"], verdict["node"]) == (
        "straggler",
        "data",
        2,
        "host-1",
    )
    assert 15 < verdict["cost_pct"] < 27
    steps = summary["steps"]
    assert (steps["count"], steps["worst_rank"], steps["worst_node"]) == (450, 2, "host-1")
    assert steps["per_rank_median_ms"] == {"0": 10.0, "1": 10.0, "2": 14.0, "3": 10.0}
    assert steps["global_skew_pct"] == 40.0
    assert sum(stage["exposed_share"] for stage in summary["stages"]) == pytest.approx(1, abs=1e-3)
    assert [(suspect["rank"], suspect["stage"]) for suspect in summary["suspects"]] == [(2, "data")]
    assert [span["label"] for span in summary["verdicts"]] == ["healthy", "straggler"]
    assert abs(summary["verdicts"][1]["from_step"] - 150) <= 1
    assert summary["ledger"]["stored"] == summary["ledger"]["produced"] == 1800
    snapshot("report", run.text)


def test_summary_can_be_built_again_from_the_file(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    run.steps(5)
    summary = run.finish()
    with SessionFile(tmp_path / "session.sqlite") as session:
        assert written_summary(session, Thresholds()) == summary


def test_memory_system_and_overhead_are_in_the_summary(tmp_path: Path, snapshot: Snapshot) -> None:
    run = Run(tmp_path / "s", 2)
    run.steps(3)
    for used, rss in ((10, 300), (30, 200)):
        sample = NodeSample(1, float(used), 8, 1.0, used, 100, 0, 0, 0, 0, [GpuSample(0, "x", 50.0, 7, 9)])
        process = wire.ProcessSample(1, 1.0, rss, 1, None, None)
        overhead = wire.Overhead(300_000, SECOND // 100, SECOND, 3000)
        batch = run.ranks[0].batch(0, process=process, overhead=overhead)
        run.aggregator.ingest(run.relays[0].message(batch, node=[sample]))
    summary = run.finish()
    memory = summary["memory"]["per_rank"]
    assert memory["0"] == {"rss_peak_bytes": 300, "rss_last_bytes": 200, "allocated_peak_bytes": None}
    assert memory["1"]["rss_peak_bytes"] is None
    (node,) = summary["system"]["nodes"]
    assert node["cpu_pct"] == {"median": 20.0, "peak": 30.0}
    assert node["gpus"][0]["mem_used_bytes"] == {"median": 7.0, "peak": 7.0}
    assert summary["overhead"] == {
        "of": "worst rank",
        "training_thread_us_per_step": 10.0, "agent_cpu_pct": 1.0, "bytes_per_step": 100.0,
    }  # fmt: skip
    snapshot("report", run.text)


def test_overhead_that_no_batch_has_counted_is_unknown(tmp_path: Path) -> None:
    """Ray came up at the end of a short run: the only batch was packed before anything was sent."""
    run = Run(tmp_path / "s", 1)
    batch = run.ranks[0].batch(90, BALANCED, overhead=wire.Overhead(450_000, 0, 9 * SECOND, 0), final=True)
    run.aggregator.ingest(run.relays[0].message(batch))
    assert run.finish()["overhead"] == {
        "of": "worst rank",
        "training_thread_us_per_step": 5.0, "agent_cpu_pct": None, "bytes_per_step": None,
    }  # fmt: skip
    (line,) = [line for line in run.text.splitlines() if line.startswith("Monitor")]
    assert line.split(maxsplit=1)[1] == "5 µs a step on the training thread (worst rank)"


def test_first_death_that_is_no_consequence_is_the_headline(tmp_path: Path, snapshot: Snapshot) -> None:
    run = Run(tmp_path / "s", 4)
    run.steps(5)
    run.raised(
        0, "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1", 0.1
    )
    run.raised(3, "ValueError: label 17 is out of range", 0.3)
    failures = [
        run.failure(1, -15, 0.2),
        run.failure(3, 1, 0.6),
        run.failure(0, 1, 0.5),
        run.failure(2, -15, 0.2),
    ]
    summary = run.finish(1, *failures)
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["rank"], verdict["node"]) == ("rank_lost", 3, "host-1")
    assert (verdict["last_step"], verdict["exit_reason"]) == (49, "ValueError: label 17 is out of range")
    assert summary["ranks"]["1"]["exit_reason"] == "SIGTERM"
    snapshot("report", run.text)


def test_rank_without_data_is_suspected_where_others_only_lost_a_peer(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    run = Run(tmp_path / "s", 4)
    run.relays = run.relays[:1]  # node 1 ended before its relay was up
    run.steps(5)
    run.raised(1, "RuntimeError: Connection closed by peer [10.0.0.2]:1", 0.1)
    run.raised(0, "RuntimeError: Connection closed by peer [10.0.0.2]:2", 0.2)
    verdict = run.finish(1, run.failure(0, -15, 0.3))["verdict"]
    assert (verdict["label"], verdict["rank"], verdict["ranks"]) == ("rank_lost", None, [2, 3])
    assert verdict["confidence"] == "low"
    snapshot("report", run.text)


def test_rank_that_finished_early_is_named_where_others_only_lost_a_peer(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    run = Run(tmp_path / "s", 2)
    run.steps(5)
    run.last(1)
    run.raised(0, "RuntimeError: Connection closed by peer [10.0.0.2]:2", 0.2)
    verdict = run.finish(1, run.failure(0, 1, 0.3))["verdict"]
    assert (verdict["label"], verdict["rank"], verdict["confidence"]) == ("rank_lost", 1, "medium")
    snapshot("report", run.text)


@pytest.mark.parametrize(
    ("message", "absent"),
    [
        (
            "RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 10000 ms\n Original exception",
            [2],
        ),
        ("RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 8000 ms", [1, 2]),
        ("DistStoreError: wait timeout after 45000ms, keys: /default_pg/0//cpu//0/2", [2]),
    ],
)
def test_rank_that_torch_says_did_not_join_is_named_and_not_the_one_that_says_it(
    tmp_path: Path, message: str, absent: list[int]
) -> None:
    run = Run(tmp_path / "s", 4)
    run.steps(5)
    run.raised(0, message, 0.1)
    run.raised(3, "RuntimeError: Connection closed by peer [10.0.0.2]:2", 0.2)
    verdict = run.finish(1, run.failure(1, -15, 0.3), run.failure(2, -15, 0.3))["verdict"]
    assert (verdict["label"], verdict["ranks"], verdict["confidence"]) == ("rank_lost", absent, "high")
    assert "rank 0 (host-0) failed after step 49" in verdict["why"] and "did not join" in verdict["why"]


def test_exact_time_of_an_agent_beats_the_whole_seconds_of_the_launcher(tmp_path: Path) -> None:
    run = Run(tmp_path, 4)
    run.steps(5)
    run.raised(3, "ValueError: label 17 is out of range", 0.1)
    run.raised(1, "KeyError: 'loss'", 0.9)
    summary = run.finish(1, run.failure(1, 1, 0.0), run.failure(3, 1, 0.0))  # cut, as torchrun has them
    verdict = summary["verdict"]
    assert (verdict["rank"], verdict["ranks"], verdict["confidence"]) == (3, [3], "high")
    assert "rank 3 (host-1) ended first after step 49" in verdict["why"]


@pytest.mark.parametrize(("apart", "first"), [(0.05, [1, 3]), (0.3, [3])])
def test_deaths_closer_than_the_clocks_of_two_nodes_are_a_tie(
    tmp_path: Path, apart: float, first: list[int], snapshot: Snapshot
) -> None:
    run = Run(tmp_path / "s", 4)
    run.steps(5)
    run.raised(3, "ValueError: label 17 is out of range", 0.1)
    run.raised(1, "KeyError: 'loss'", 0.1 + apart)
    run.raised(0, "RuntimeError: Connection closed by peer", 0.1)
    assert run.aggregator.verdict is None or run.aggregator.verdict.label == "healthy"
    run.aggregator.judge()
    assert run.aggregator.verdict is not None
    assert list(run.aggregator.verdict.ranks) == first
    verdict = run.finish(1)["verdict"]
    assert (verdict["rank"], verdict["ranks"]) == (3, first)
    if len(first) > 1:
        assert (verdict["confidence"], verdict["node"], verdict["exit_reason"]) == ("medium", None, None)
        snapshot("report", run.text)


def test_order_on_one_node_is_known_to_the_nanosecond(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    run.steps(5)
    run.raised(1, "ValueError: label 17 is out of range", 0.1)
    run.raised(0, "KeyError: 'loss'", 0.101)
    assert run.finish(1)["verdict"]["ranks"] == [1]


def test_deaths_that_only_the_launcher_saw_within_a_second_are_a_tie(tmp_path: Path) -> None:
    run = Run(tmp_path, 4)
    run.steps(5)
    verdict = run.finish(1, run.failure(2, 7, 0), run.failure(1, 7, 0), run.failure(3, 7, 5))["verdict"]
    assert (verdict["ranks"], verdict["exit_reason"]) == ([1, 2], "exit code 7")


def test_killed_rank_is_reported_with_its_stage_and_signal(tmp_path: Path, snapshot: Snapshot) -> None:
    run = Run(tmp_path / "s", 2)
    run.steps(5, open=wire.OpenStage(50, BACKWARD, 1))
    run.raised(0, "torch.distributed.DistBackendError: NCCL error", 0.1)
    summary = run.finish(1, run.failure(1, -9, 0.4))
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["rank"], verdict["open_stage"]) == ("rank_lost", 1, "backward")
    assert verdict["exit_reason"] == "SIGKILL"
    assert summary["ledger"]["per_rank"]["1"]["unreported"] is None
    assert summary["ledger"]["per_rank"]["0"]["unreported"] == 0
    snapshot("report", run.text)


@pytest.mark.parametrize(
    "message",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "MemoryError: ",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_out_of_memory_is_its_own_headline(tmp_path: Path, message: str) -> None:
    run = Run(tmp_path, 2)
    run.steps(5)
    run.raised(1, message, 0.1)
    assert run.finish(1, run.failure(1, 1, 0.4))["verdict"]["label"] == "oom"


def _ended(run: Run, rank: int, after: float, **data: Any) -> None:
    """The relay of the rank's node says that its process is gone, and how."""
    process = run.ranks[rank].process_id
    t_ns = run.clock() + int(after * SECOND)
    event = wire.Event("process_ended", t_ns, data={"process_id": process, "exit_code": None, **data})
    run.aggregator.ingest(run.relays[rank // 2].message(lost=[process], events=[event]))
    run.aggregator.judge()


def test_process_end_seen_by_the_relay_is_known_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, 3)
    run.steps(5)
    _ended(run, 2, 0.1, exit_code=-15)
    _ended(run, 1, 0.2, exit_code=-11)
    verdict = run.aggregator.verdict
    assert verdict is not None
    assert (verdict.label, verdict.rank, verdict.exit_reason) == ("rank_lost", 1, "SIGSEGV")


@pytest.mark.parametrize(
    ("kills", "code", "label"),
    [(1, -9, "oom"), (1, None, "oom"), (1, -11, "rank_lost"), (0, -9, "rank_lost")],
)
def test_oom_kill_of_the_kernel_is_distinguished_from_other_kills(
    tmp_path: Path, kills: int, code: int | None, label: str
) -> None:
    run = Run(tmp_path, 2)
    run.steps(5)
    _ended(run, 1, 0.1, exit_code=code, oom_kills=kills)
    run.raised(0, "RuntimeError: Connection closed by peer", 0.2)
    assert run.aggregator.verdict is not None and run.aggregator.verdict.label == label
    verdict = run.finish(1, run.failure(1, -9 if code is None else code, 0.4))["verdict"]
    assert (verdict["label"], verdict["rank"]) == (label, 1)


def test_signal_reported_by_the_launcher_is_no_exception(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    run.steps(5)
    summary = run.finish(1, run.failure(1, -9, 0.1, "Signal 9 (SIGKILL) received by PID 4242"))
    assert summary["verdict"]["exit_reason"] == "SIGKILL"


def test_plain_actor_that_ended_is_no_death(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    for rank in run.ranks:
        rank.identity = msgspec.structs.replace(rank.identity, source="ray")
    run.steps(5)
    _ended(run, 1, 0.1, exit_code=-9)
    assert run.finish(0)["verdict"]["label"] == "healthy"


def test_rank_that_never_reported_can_be_the_culprit(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    failure = wire.RankFailure(1, 1, 4242, 1, 5, "ImportError: no module named x\nlong traceback")
    summary = run.finish(1, failure)
    assert (summary["verdict"]["label"], summary["verdict"]["rank"]) == ("rank_lost", 1)
    assert summary["verdict"]["exit_reason"] == "ImportError: no module named x"
    assert summary["verdict"]["last_step"] is None


def test_successful_restart_has_no_headline(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    run.steps(5)
    run.raised(0, "ValueError: once", 0.0)
    old = [run.failure(0, 1, 0.0), run.failure(1, -15, 0.1)]
    run.ranks = [Rank(i, 2, attempt=1) for i in range(2)]
    run.clock.tick(10)
    run.steps(5)
    for rank in range(2):
        run.last(rank)
    state = render_status(run.aggregator.query, tmp_path, None, run.clock())
    assert "Restarted once, after 50 steps" in " ".join(state.split())
    summary = run.finish(0, *old)
    assert summary["verdict"]["label"] == "healthy"
    assert summary["ranks"]["0"]["attempt"] == 1
    assert summary["ranks"]["0"]["processes"] == 2
    assert summary["ledger"]["stored"] == 200
    (before,) = summary["runs"][0]["earlier"]
    assert (before["attempt"], before["steps"], summary["steps"]["count"]) == (0, 50, 50)
    for name in ("report.txt", "report.html"):
        report = " ".join((tmp_path / name).read_text().split())
        assert "Restarted once, after 50 steps (5 s)." in report, name


def test_attempts_are_not_mixed(tmp_path: Path) -> None:
    """The restart died before its first step: its death is the headline, the steps are those before."""
    run = Run(tmp_path, 2)
    run.steps(5)
    run.raised(0, "RuntimeError: gloo: Connection closed by peer", 0.1)
    run.raised(1, "ValueError: once", 0.0)
    old, run.ranks = run.ranks, [Rank(i, 2, attempt=1) for i in range(2)]
    run.clock.tick(10)
    run.raised(1, "RuntimeError: Gloo connectFullMesh failed", 0.0)
    summary = run.finish(1, run.failure(1, 1, 0.5), run.failure(0, -15, 0.6))
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["rank"]) == ("rank_lost", 1)
    assert verdict["exit_reason"] == "RuntimeError: Gloo connectFullMesh failed"
    assert summary["steps"]["count"] == 50
    assert {who["pid"] for who in summary["ranks"].values()} == {rank.identity.pid for rank in old}


@pytest.mark.parametrize("exit_code", [130, -2, -15, 143, -1, 129, -3, 131])
def test_stopped_run_blames_no_rank(tmp_path: Path, exit_code: int) -> None:
    run = Run(tmp_path, 2)
    run.steps(8)
    summary = run.finish(exit_code, run.failure(0, -2, 0), run.failure(1, -15, 0))
    assert (summary["session"]["status"], summary["verdict"]["label"]) == ("stopped", "healthy")


def test_run_without_a_step_reports_why(tmp_path: Path, snapshot: Snapshot) -> None:
    run = Run(tmp_path / "s", 2)
    for rank in range(2):
        run.last(rank, missing={"optimizer": "no optimizer hook in torch 1.0"})
    summary = run.finish()
    assert summary["verdict"]["label"] == "telemetry_limited"
    assert summary["steps"]["median_ms"] is None
    snapshot("report", run.text)


def test_ranks_listed_of_many_are_the_worst(tmp_path: Path) -> None:
    run = Run(tmp_path, 70)
    run.steps(4, late=66)
    run.finish()
    listed = run.text[run.text.index("Ranks (the worst 32 of 70)") :]
    assert "\n    66  host-33" in listed


def test_empty_summary_has_no_none_or_nan_in_its_text(tmp_path: Path) -> None:
    Run(tmp_path, 1).finish()
    with SessionFile(tmp_path / "session.sqlite") as session:
        text = text_of(summarize(session, Thresholds()), tmp_path)
    assert "None" not in text
    assert "nan" not in text


def test_status_shows_where_every_rank_is(tmp_path: Path, snapshot: Snapshot) -> None:
    run = Run(tmp_path, 2)
    fields = {
        "open": wire.OpenStage(30, DATA, 5),
        "errors": {"hook": 2},
        "missing": {"h2d": "no device"},
    }
    run.steps(3, **fields)
    run.aggregator.ingest(b"junk")
    run.aggregator.commit()
    text = render_status(stored(tmp_path), tmp_path, 77, run.clock() + 2 * SECOND)
    assert [line.split() for line in text.splitlines() if "host-0" in line] == [
        [str(rank), "host-0", str(1000 + rank), "3", "s", "ago", "29", "data", "30", "30"]
        for rank in range(2)
    ]
    snapshot("cli", text.replace(str(tmp_path), "<folder>"))


def test_status_adds_up_the_errors_of_all_processes_of_a_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, 1)
    run.steps(1, errors={"hook": 2})
    run.ranks = [Rank(0, 1, per_node=2, attempt=1, pid=77, process_id="again")]
    run.steps(1, errors={"hook": 3})
    run.aggregator.commit()
    lines = render_status(stored(tmp_path), tmp_path, 77, run.clock()).splitlines()
    assert [line.split() for line in lines if "hook" in line] == [["5", "×", "rank", "0,", "hook"]]


@pytest.mark.parametrize(("exit_code", "advice"), [(-11, "faulthandler"), (-1, "A signal from outside")])
def test_advice_for_a_rank_that_a_signal_has_ended(tmp_path: Path, exit_code: int, advice: str) -> None:
    run = Run(tmp_path, 2)
    run.steps(8)
    verdict = run.finish(1, run.failure(0, exit_code, 0))["verdict"]
    assert (verdict["label"], verdict["rank"]) == ("rank_lost", 0) and advice in verdict["next"]


@pytest.mark.parametrize(
    ("death", "consequence", "reason"),
    [
        (Death(0, Moment(1), exit_code=-11), False, "SIGSEGV"),
        (Death(0, Moment(1), exit_code=-15), True, "SIGTERM"),
        (Death(0, Moment(1), exit_code=3), False, "exit code 3"),
        (Death(0, Moment(1), exit_code=-99), False, "signal 99"),
        (Death(0, Moment(1)), False, "its process ended without a message"),
        (
            Death(0, Moment(1), "RuntimeError: Connection reset by peer", 1),
            True,
            "RuntimeError: Connection reset by peer",
        ),
        (Death(0, Moment(1), "ValueError: wrong size.\nMore.", 1), False, "ValueError: wrong size"),
        (
            Death(0, Moment(1), "KeyError: in `fit`:\n\n\tno such key\nMore", 1),
            False,
            "KeyError: in `fit`: no such key",
        ),
    ],
)
def test_death_reason_and_consequence_follow_from_exit_code_and_message(
    death: Death, consequence: bool, reason: str
) -> None:
    assert (death.consequence, death.reason) == (consequence, reason)


@pytest.mark.parametrize(
    ("ranks", "nodes", "where"),
    [
        ([5], ["b"], "rank 5 (b)"),
        ([2, 5], ["a", "b"], "ranks 2 and 5 (a and b)"),
        ([2, 5, 9], ["a", "b", "c"], "ranks 2, 5 and 9 (a, b and 1 more)"),
        ([2, 5], None, "ranks 2 and 5"),
        ([5], None, "rank 5 (b)"),
    ],
)
def test_headline_gives_the_nodes_of_all_ranks(ranks: list[int], nodes: list[str] | None, where: str) -> None:
    """An episode knows the node of one rank only: it is not said of two."""
    about: Any = {"ranks": tuple(ranks), "node": "b", "stages": ("data",), "stage": "data"}
    verdict = Verdict(label="straggler", nodes=tuple(nodes or ()), **about)
    assert named(verdict) == f"straggler: {where} in data"
