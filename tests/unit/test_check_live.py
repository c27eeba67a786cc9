"""The verdict of a running job says what a check of its machines has measured, as its report does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from played import Played, session_of
from plotly.io.json import to_json_plotly
from sessions import LIMITS, Clock, aggregation, identity, stored

from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.reports.headlines import beside
from traceml_ray.reports.summary import summarize
from traceml_ray.signals.check.judge import CheckResult
from traceml_ray.signals.check.live import LATEST_S, MAX_BYTES, SETTLED_S, LiveCheck
from traceml_ray.signals.check.records import DURING, Checked, MachineState, Measure
from traceml_ray.signals.check.view import GetCheck
from traceml_ray.signals.live import Ranks
from traceml_ray.signals.nodes.records import GpuSample
from traceml_ray.sinks.figures import _run_metrics
from traceml_ray.stages import FORWARD
from traceml_ray.store import query
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.results import LiveVerdict
from traceml_ray.store.session_file import SessionFile
from traceml_ray.terminal.panel import panel
from traceml_ray.terminal.snapshot import Choice, take_snapshot

_TRIALS = 1.0, 1.002, 0.998, 1.001, 0.999, 1.0
_LATE = 5
"""Rank that is late: the second of node 1, with GPU 1 of its node."""


def check(node: int, t_ns: int, slow: float = 1.0, **more: Any) -> Checked:
    """A check of a node with four GPUs, of which GPU 1 has the level `slow`; usual is 1."""
    levels = [1.0, slow, 1.0, 1.0]
    measures = [
        Measure(
            "gpu_matmul", f"GPU {gpu}", "FLOP/s", [7e14 * level * one for one in _TRIALS], "H200", device=gpu
        )
        for gpu, level in enumerate(levels)
    ]  # fmt: skip
    return Checked(t_ns, f"checked-{node}", measures=measures, seconds=20.0, **more)


class PlayedCheck(Played):
    """A played session. The first rank of each node sends a check once; GPU 1 of node 1 is at `slow`."""

    slow = 1.0
    sends = 0
    """Second in which they send it."""

    def check_of(self, node: int) -> Checked:
        return check(node, self.clock(), self.slow if node == 1 else 1.0)

    def of_rank(self, rank: int) -> dict[str, Any]:
        if rank % self._per_node or self._seconds != self.sends:
            return {}
        return {"check": [self.check_of(rank // self._per_node)]}


def played(
    folder: Path,
    kind: type[PlayedCheck] = PlayedCheck,
    *,
    slow: float = 1.0,
    sends: int = 1,
    seconds: int = 16,
) -> PlayedCheck:
    job = kind(folder, late=_LATE, stage=FORWARD, onset=10, gpus=0)
    job.slow, job.sends = slow, sends
    for _ in range(seconds):
        job.play()
    return job


def verdict_of(played: Played) -> LiveVerdict:
    answer = query.ask_one(played.aggregator.query, query.GetVerdict())
    assert answer is not None and answer.label == "straggler" and answer.ranks == [_LATE]
    return answer


def said(why: str) -> str:
    """The sentence of a verdict on its machines, up to the end."""
    place = max(why.find("Confirmed by"), why.find("Not confirmed by"))
    assert place >= 0, why
    return why[place:]


def during(t_ns: int, mhz: float) -> Checked:
    """What a check during training says of a node whose GPU 1 runs at the clock `mhz`; usual is 1,980."""
    measures = [
        Measure(
            "gpu_clock", f"GPU {gpu}", "Hz", [(mhz if gpu == 1 else 1980.0) * 1e6 * one for one in _TRIALS],
            "H200", device=gpu,
        )
        for gpu in range(4)
    ]  # fmt: skip
    hot = GpuSample(
        1, "H200", 99.0, None, None, 600.0, 700.0, 88.0, mhz, 1980.0, ["hw_thermal_slowdown"], 0, 0, 0, 0, 0,
        None,
    )  # fmt: skip
    state = MachineState(gpus=[hot] if mhz < 1900 else [])
    return Checked(t_ns, "", state=state, measures=measures, number=7, kind=DURING, about=_LATE)


@pytest.mark.parametrize(("slow", "confirmed"), [(0.86, True), (1.0, False)])
def test_verdict_is_confirmed_alike_while_it_runs_after_a_restart_and_in_the_report(
    tmp_path: Path, slow: float, confirmed: bool
) -> None:
    job = played(tmp_path, slow=slow)
    live = verdict_of(job)
    assert live.confirmed is confirmed
    if confirmed:
        assert said(live.why).startswith(
            "Confirmed by a check before training: GPU 1 of host-1 multiplies matrices 14 % slower than its 7"
        )
        assert live.next.startswith("Take the GPU out of the job")
    else:
        assert said(live.why) == (
            "Not confirmed by a check before training: host-1 is as fast as other nodes "
            "(matrix multiplication, GPU)."
        )
        assert live.next.startswith("Look at what rank 5 does differently: its data")
    with SessionFile(tmp_path / "session.sqlite") as file:
        assert file.verdicts()[0][-1]["confirmed"] is confirmed  # read while it runs
        summary = summarize(file, LIMITS)
    answer = summary.verdict
    assert (answer.confirmed, said(answer.why), answer.next) == (confirmed, said(live.why), live.next)
    assert summary.conclusion.why == answer.why and summary.conclusion.next == answer.next
    named = next(one for one in summary.findings if one.signal == "steps")
    assert named.evidence["confirmed"] is confirmed and named.why == answer.why
    restarted = aggregation(tmp_path, job.clock)
    restarted.judge()
    again = query.ask_one(restarted.query, query.GetVerdict())
    assert again is not None
    assert (again.confirmed, said(again.why), again.next) == (confirmed, said(live.why), live.next)


def test_live_result_is_that_of_the_file_to_the_byte(tmp_path: Path) -> None:
    job = played(tmp_path, slow=0.86, seconds=5)
    (live,) = [signal.latest("job") for signal in job.aggregator._judge.signals if signal.name == "check"]
    file = query.ask_one(stored(tmp_path), GetCheck())
    assert file.slow and file.ranks
    assert msgspec.json.encode(live) == msgspec.json.encode(file)


def test_check_that_arrives_while_a_rank_is_late_changes_the_verdict(tmp_path: Path) -> None:
    job = played(tmp_path, slow=0.86, sends=17)
    before = verdict_of(job)
    assert before.confirmed is None and "onfirmed" not in before.why
    for _ in range(5):
        job.play()
    assert verdict_of(job).confirmed is True
    with SessionFile(tmp_path / "session.sqlite") as file:
        known = [one["confirmed"] for one in file.verdicts()[0] if one["label"] == "straggler"]
    assert known == [None, True]


def test_what_the_verdict_says_is_not_said_again_beside_it(tmp_path: Path) -> None:
    job = played(tmp_path, slow=0.86)
    findings = query.ask_one(job.aggregator.query, query.Findings())
    straggler, slow = findings
    assert (slow.label, slow.explains) == ("slow_device", straggler.key)
    assert slow.why in straggler.why and beside(findings, straggler.key) == []
    poll = session_of(job)
    for pane in ("overview", "signals"):
        for _ in range(2):
            poll.poll()
            shown = poll.make(lambda name=pane: take_snapshot(poll, poll.newest, Choice(name)))[1]
        screen = " ".join(line.plain.strip("│ ") for line in panel(shown, Choice(pane), 200, 60))
        assert screen.count("multiplies matrices 14 %") == 1, pane
    run = poll.newest
    assert run is not None
    (gauge,) = [one for one in _run_metrics(run) if one.name.endswith("verdict_confirmed")]
    assert gauge.series == [(("job",), 1.0)]
    pages = SessionPages(job.source, clock=job.clock)
    for _ in range(2):
        pages.poll()
    _, answer = Refresher(pages).refresh("/", "", {})
    strip = to_json_plotly(answer["set"]["verdict-strip"])
    assert strip.count("multiplies") == 2, "once to read, once to copy"
    assert "Open signals" in strip
    job.end()
    for name in ("report.txt", "report.html"):
        words = " ".join((tmp_path / name).read_text().split())
        assert words.count("multiplies matrices 14 %") == 1, name


@pytest.mark.parametrize(
    ("mhz", "confirmed", "begins"),
    [
        (1500.0, True, "Confirmed by a check during training: GPU 1 of host-1 runs at a 24 % lower clock"),
        (1980.0, False, "Not confirmed by a check during training: host-1 is as fast as other nodes (clock"),
    ],
)
def test_check_during_the_job_confirms_alike_live_and_in_the_report(
    tmp_path: Path, mhz: float, confirmed: bool, begins: str
) -> None:
    class During(PlayedCheck):
        def check_of(self, node: int) -> Checked:
            return during(self.clock(), mhz if node == 1 else 1980.0)

    job = played(tmp_path, During, sends=15, seconds=19)
    live = verdict_of(job)
    assert live.confirmed is confirmed and said(live.why).startswith(begins)
    with SessionFile(tmp_path / "session.sqlite") as file:
        answer = summarize(file, LIMITS).verdict
    assert (answer.confirmed, said(answer.why), answer.next) == (confirmed, said(live.why), live.next)


# -- what is kept


def live_check(clock: Clock) -> LiveCheck:
    return LiveCheck(threading.Lock(), clock.timer)


def ranks_of(processes: int, first: int = 0) -> Ranks:
    known = {
        rank: RankProcess(first + rank, f"p{rank}", identity(rank, processes, per_node=4))
        for rank in range(processes)
    }
    by_id = {process.id: process for process in known.values()}
    labels = {process.id: f"node-{rank // 4}" for rank, process in known.items()}
    return Ranks(by_id, labels, processes, known)


def result(live: LiveCheck) -> CheckResult:
    latest = live.latest("run")
    assert latest is not None
    return latest


def test_checks_are_judged_once_they_have_all_arrived_and_again_for_other_ranks() -> None:
    clock, ranks = Clock(), ranks_of(8)
    live = live_check(clock)
    assert live.judge({"run": ranks}) == ()
    live.add(0, check(0, 5))
    live.add(4, check(1, 5, 0.8))
    live.add(4, check(1, 4, 0.5))  # an older one
    assert live.judge({"run": ranks}) == () and live.latest("run") is None
    clock.tick(SETTLED_S)
    assert live.judge({"run": ranks}) == ["run"] and live.judge({"run": ranks}) == []
    assert [(one.part, round(one.lower, 2)) for one in result(live).slow] == [("GPU 1", 0.2)]
    assert live.judge({"run": ranks_of(8, first=100)}) == [] and live.latest("run") is None
    assert live.judge({"run": ranks}) == ["run"] and result(live).slow
    live.judge({})
    assert live.latest("run") is None


def test_checks_that_arrive_without_end_are_judged_now_and_then() -> None:
    clock, ranks, rounds = Clock(), ranks_of(8), 0
    live = live_check(clock)
    for number in range(int(LATEST_S) + 2):
        live.add(4, check(1, number))
        rounds += len(live.judge({"run": ranks}))
        clock.tick(SETTLED_S / 2)
    assert rounds == 1


def test_kept_checks_are_bounded_and_the_newest_stay() -> None:
    clock = Clock()
    live = live_check(clock)
    errors = ["x" * 256] * 64
    size = len(msgspec.msgpack.encode(check(0, 5, errors=errors)))
    processes = MAX_BYTES // size + 10
    for process in range(processes):
        live.add(process, check(0, 5, errors=errors))
    assert live.nbytes <= MAX_BYTES and live.nbytes > MAX_BYTES - 2 * size
    clock.tick(SETTLED_S)
    ranks = Ranks({}, dict.fromkeys(range(processes), "node-0"), 1, {})
    last = RankProcess(processes - 1, "p", identity(0, 1))
    live.judge({"run": Ranks({}, ranks.labels, 1, {0: last})})
    assert result(live).nodes == 1
