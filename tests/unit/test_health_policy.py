"""
The health check for Ray Train: what it decides, and that it decides nothing where the monitor is not sure.

No released Ray has `ray.train.health`. A module of the same shape (commit 10c15d9) stands in for it here.
"""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played import Played
from ray import cloudpickle
from sessions import SECOND

from traceml_ray.analysis.uneven_work import Reason
from traceml_ray.launchers import health_policy, train_callback
from traceml_ray.launchers.health_policy import HealthCheckError, HealthJudge, ask, evaluator, health_check
from traceml_ray.launchers.health_rules import HealthLimits, Look, Opinion, Sign, decide, kept, look_at
from traceml_ray.launchers.train_callback import WatchedRun
from traceml_ray.settings import SettingError
from traceml_ray.stages import DATA, FORWARD, SYNC_WAIT
from traceml_ray.store import query
from traceml_ray.wire import messages as wire

LIMITS = HealthLimits(dry_run=False, diagnose_s=30, straggler_s=60, hang_s=40, dead_s=40, stale_s=10)
STRAGGLER = Sign(
    kind="straggler", key="straggler:5:forward", ranks=(5,), nodes=("node-1",), cost_pct=30.0, of_node=True
)
HANG = Sign(kind="hang", key="hang:2", ranks=(2,), nodes=("node-0",))


# -- the shape of ray.train.health ---------------------------------------------------------------


class _Evaluator:
    def on_worker_group_start(self) -> None: ...


def stand_in() -> ModuleType:
    """Return a module with the names and fields of `ray.train.health` that a health check uses."""
    module = ModuleType("ray.train.health")

    def define(name: str, required: Sequence[str] = (), **defaults: object) -> None:
        fields = [(key, Any, dataclasses.field(kw_only=True)) for key in required]
        fields += [(key, Any, dataclasses.field(default=value)) for key, value in defaults.items()]
        setattr(module, name, dataclasses.make_dataclass(name, fields))

    define("Noop", reason="")
    define("Reattempt", reason="")
    define("Evict", ["target_nodes"], reason="")
    define("Diagnose", ["checks"], reason="")
    define("HealthCheck", probe_creator=list, evaluator_creator=list)
    module.Evaluator = _Evaluator  # type: ignore[attr-defined]
    return module


@pytest.fixture
def health(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = stand_in()
    monkeypatch.setitem(sys.modules, "ray.train.health", module)
    return module


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events of a run that this process controls."""
    noted: list[str] = []
    run = WatchedRun("s", "job", lambda: 0, noted.append)
    monkeypatch.setattr(train_callback, "_watched", {"job": run})
    return noted


class Playing:
    """Answers of a session that are played to a judge, with the judge's clock."""

    def __init__(self, limits: HealthLimits = LIMITS) -> None:
        self.now_s = 1000.0
        self.showing: Callable[[float], Look | None] = lambda asked_s: Look(asked_s=asked_s, nodes=2)
        self.judge = HealthJudge(limits, lambda _limits, asked_s: self.showing(asked_s), lambda: self.now_s)
        self.judge._thread = threading.current_thread()  # a test looks itself

    def show(self, *signs: Sign, doubt: str = "") -> None:
        self.showing = lambda asked_s: Look(asked_s=asked_s, signs=signs, doubt=doubt, nodes=2)

    def play(self, seconds: float, every: float = 5.0) -> list[Opinion]:
        """Look every `every` s for `seconds`. Return all decisions."""
        opinions = []
        for _ in range(round(seconds / every)):
            self.now_s += every
            self.judge.see()
            opinions.append(self.judge.opinion())
        return [opinion for opinion in opinions if opinion is not None]


def actions(opinions: Sequence[Opinion]) -> list[str]:
    return [opinion.action for opinion in opinions]


# -- what it decides -----------------------------------------------------------------------------


@pytest.mark.usefixtures("notes")
def test_lasting_straggler_is_diagnosed_then_its_node_is_evicted_once() -> None:
    playing = Playing()
    playing.show(STRAGGLER)
    assert actions(playing.play(30)) == []
    (diagnosed,) = playing.play(30)
    assert (diagnosed.action, diagnosed.nodes) == ("diagnose", ("node-1",))
    (evicted,) = playing.play(300)
    assert (evicted.action, evicted.nodes) == ("evict", ("node-1",))


@pytest.mark.usefixtures("notes")
def test_after_an_eviction_a_new_attempt_is_judged_afresh_and_only_so_many_nodes_are_evicted() -> None:
    playing = Playing(msgspec.structs.replace(LIMITS, max_evictions=2))
    for node in ("a", "b", "c"):
        playing.judge.restart()
        playing.show(msgspec.structs.replace(STRAGGLER, nodes=(node,)))
        assert actions(playing.play(60)) == ["diagnose"], "it has not lasted in this attempt"
        assert actions(playing.play(300)) == ["evict"] * (node != "c")


@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("kind", ["hang", "dead"])
def test_hang_and_dead_rank_are_attempted_again_and_a_known_stall_is_not(kind: Any) -> None:
    playing = Playing()
    playing.show(msgspec.structs.replace(HANG, kind=kind))
    assert actions(playing.play(300)) == ["diagnose", "reattempt"]
    playing.judge.restart()
    playing.show(msgspec.structs.replace(HANG, kind="stalled"))
    assert actions(playing.play(300)) == ["diagnose"]


@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize(
    "flaw",
    [{"of_node": False}, {"cost_pct": 9.0}, {"nodes": ("node-0", "node-1")}, {"nodes": (), "of_node": False}],
    ids=str,
)
def test_straggler_that_is_not_surely_of_one_node_and_costly_is_only_diagnosed(flaw: Any) -> None:
    playing = Playing()
    playing.show(msgspec.structs.replace(STRAGGLER, **({"of_node": len(flaw.get("nodes", "n")) == 1} | flaw)))
    assert actions(playing.play(600)) == ["diagnose"]


@pytest.mark.usefixtures("notes")
def test_only_node_of_a_run_is_not_evicted() -> None:
    playing = Playing()
    playing.showing = lambda asked_s: Look(asked_s=asked_s, signs=(STRAGGLER,), nodes=1)
    assert actions(playing.play(600)) == ["diagnose"]


@pytest.mark.usefixtures("notes")
def test_only_allowed_decisions_are_made() -> None:
    playing = Playing(msgspec.structs.replace(LIMITS, allowed=("reattempt",)))
    playing.show(STRAGGLER)
    assert playing.play(600) == []
    playing.show(HANG)
    assert actions(playing.play(600)) == ["reattempt"]


def test_dry_run_notes_each_decision_once_in_the_run_and_makes_none(
    notes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    playing = Playing(msgspec.structs.replace(LIMITS, dry_run=True))
    playing.show(msgspec.structs.replace(STRAGGLER, text="straggler: rank 5 (host-1) in forward"))
    assert playing.play(600) == []
    assert notes == [
        "health check (dry run, nothing is done): diagnose: straggler: rank 5 (host-1) in forward, for 30 s",
        "health check (dry run, nothing is done): "
        "evict node node-1: straggler: rank 5 (host-1) in forward, for 60 s",
    ]
    assert [record.message for record in caplog.records] == notes


# -- where nothing is decided --------------------------------------------------------------------


@pytest.mark.usefixtures("notes")
def test_flapping_verdict_and_partial_data_decide_nothing() -> None:
    playing = Playing()
    for _ in range(40):
        playing.show(STRAGGLER)
        assert playing.play(25) == []
        playing.show()
        assert playing.play(5) == []
    for _ in range(40):
        playing.show(STRAGGLER)
        assert playing.play(25) == []
        playing.show(STRAGGLER, doubt="7 of 8 ranks are known")
        assert playing.play(5) == []


@pytest.mark.usefixtures("notes")
def test_without_a_fresh_answer_nothing_is_decided_and_time_without_answers_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(_asked_s: float) -> Look:
        raise TimeoutError("no answer")

    playing = Playing()
    playing.show(STRAGGLER)
    playing.play(55)
    playing.judge._made.clear()
    playing.showing = fails
    assert len(playing.play(10)) == 1, "the newest answer is still fresh"
    playing.judge._made.clear()
    assert playing.play(600) == []
    playing.show(STRAGGLER)
    assert playing.play(30) == [], "what was seen before the gap does not count"
    assert playing.judge.errors == {"health: look: TimeoutError": 122}
    assert [record.message for record in caplog.records if "no answer" in record.message] == [
        "health check: nothing is decided: no answer of the session for 15 s (TimeoutError: no answer)"
    ]


def test_answer_that_was_asked_for_before_a_restart_does_not_count() -> None:
    looks = [Look(asked_s=float(second), signs=(HANG,), nodes=2) for second in range(0, 100, 5)]
    assert decide(looks, LIMITS, now_s=95) is not None
    assert decide(looks, LIMITS, now_s=95, since_s=90) is None
    assert decide(looks, LIMITS, now_s=95, since_s=96) is None


LOOKS = st.lists(
    st.tuples(
        st.sampled_from([1.0, 5.0, 5.0, 10.0, 11.0]),  # s since the look before
        st.sampled_from(["sure", "sure", "sure", "cheap", "other node", "unsure", "none", "partial"]),
    ),
    max_size=40,
)


def look_of(asked_s: float, what: str) -> Look:
    change: dict[str, dict[str, Any]] = {
        "cheap": {"cost_pct": 9.9},
        "other node": {"nodes": ("node-0",)},
        "unsure": {"of_node": False},
    }
    signs = () if what == "none" else (msgspec.structs.replace(STRAGGLER, **change.get(what, {})),)
    return Look(asked_s=asked_s, signs=signs, doubt="x" if what == "partial" else "", nodes=2)


@given(LOOKS, st.floats(0, 15), st.integers(0, 2))
def test_node_is_evicted_only_if_every_look_for_long_enough_says_so(
    steps: list[tuple[float, str]], late_s: float, evictions: int
) -> None:
    looks, now_s = [], 0.0
    for gap_s, what in steps:
        now_s += gap_s
        looks.append(look_of(now_s, what))
    opinion = decide(looks, LIMITS, now_s=now_s + late_s, evictions=evictions)
    assert opinion == decide(kept(looks, LIMITS), LIMITS, now_s=now_s + late_s, evictions=evictions)

    times, kinds, node = [look.asked_s for look in looks], [what for _, what in steps], "node-1"
    if looks and looks[-1].signs:
        (node,) = looks[-1].signs[0].nodes
    right = "other node" if node == "node-0" else "sure"
    runs = [
        index
        for index in range(len(looks))
        if times[-1] - times[index] >= LIMITS.straggler_s
        and set(kinds[index:]) == {right}
        and all(after - before <= LIMITS.stale_s for before, after in pairwise(times[index:]))
    ]
    allowed = bool(runs) and late_s <= LIMITS.stale_s and evictions < LIMITS.max_evictions
    assert (opinion is not None and opinion.action == "evict") == allowed


@pytest.mark.usefixtures("notes")
def test_session_that_does_not_answer_never_makes_the_controller_wait() -> None:
    asked, answer = threading.Event(), threading.Event()

    def hangs(_limits: HealthLimits, asked_s: float) -> Look:
        asked.set()
        answer.wait(240)
        return Look(asked_s=asked_s)

    judge = HealthJudge(LIMITS, hangs)
    assert judge.opinion() is None
    assert asked.wait(240)
    assert judge.opinion() is None, "it returns while the thread still waits"
    judge._over.set()
    answer.set()


def test_run_that_nobody_watches_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    judge = HealthJudge(LIMITS, lambda *_: None)
    assert not judge.see()
    assert [record.message for record in caplog.records] == [
        "health check: nothing is decided: no session watches this run"
    ]


# -- fed by a session ----------------------------------------------------------------------------


def seen(job: Played, attempt: int = 0, asked_s: float = 0.0, later_s: float = 0.0) -> Look:
    now_ns = job.clock() + int(later_s * 1e9)
    return ask(job.source.reply, "job", attempt, LIMITS, asked_s, now_ns)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A session in which rank 5, on node-1, is late in the forward pass."""
    job = Played(tmp_path_factory.mktemp("played") / "s", stage=FORWARD, gpus=0)
    job.memory_s = 5
    for _ in range(40):
        job.play(10)
    yield job
    job.aggregator.close()


def test_straggler_of_a_real_session_is_a_sign_of_its_node(job: Played) -> None:
    look = seen(job)
    assert (look.doubt, look.nodes) == ("", 2)
    (sign,) = look.signs
    assert (sign.kind, sign.ranks, sign.nodes, sign.of_node) == ("straggler", (5,), ("node-1",), True)
    assert sign.cost_pct > LIMITS.straggler_cost_pct


def test_run_without_a_verdict_is_partial(job: Played) -> None:
    ranks = [rank.identity for rank in job.ranks]
    look = look_at([], None, ranks, [], attempt=0, asked_s=0, now_ns=job.clock(), stale_s=60)
    assert (look.doubt, look.signs) == ("there is no verdict yet", ())


def test_answers_about_another_attempt_or_from_a_silent_node_are_partial(job: Played) -> None:
    assert seen(job, attempt=1).doubt == "the answers are about an earlier attempt"
    assert seen(job, later_s=11).doubt == "2 of 2 nodes do not report"


def test_session_with_a_rank_that_does_not_report_is_partial(tmp_path: Path) -> None:
    job = Played(tmp_path / "s", gpus=0, stage=FORWARD, onset=0)
    job.memory_s = 5
    for _ in range(40):
        job.play(10, silent=(3,))
    assert seen(job).doubt == "7 of 8 ranks are known"
    job.aggregator.close()


@pytest.mark.parametrize(("what", "of_node"), [("tokens", False), ("experts", False), ("other", True)])
def test_straggler_with_more_work_is_not_its_node(job: Played, what: Any, of_node: bool) -> None:
    verdict = query.ask_one(job.source.reply, query.GetVerdict("job"))
    assert verdict is not None
    (sign,) = look_at(
        query.ask_one(job.source.reply, query.Findings("job")),
        msgspec.structs.replace(verdict, reason=Reason(what=what)),
        [rank.identity for rank in job.ranks],
        query.ask_one(job.source.reply, query.GetNodes("job")),
        attempt=0, asked_s=0, now_ns=job.clock(), stale_s=60,
    ).signs  # fmt: skip
    assert sign.of_node == of_node


class Hanging(Played):
    """A session in which, from one moment on, rank 2 stays in its data, and all others wait for it."""

    hangs_s = 0

    def of_rank(self, rank: int) -> dict[str, Any]:
        stage = DATA if rank == 2 else SYNC_WAIT
        return {"open": wire.OpenStage(self.step, stage, self.hangs_s * SECOND)} if self.hangs_s else {}


def test_hang_of_a_real_session_is_a_sign(tmp_path: Path) -> None:
    job = Hanging(tmp_path / "s", gpus=0, late=None)
    for _ in range(20):
        job.play(10)
    for job.hangs_s in range(1, 60):
        job.play(0)
    look = seen(job)
    assert [(sign.kind, sign.ranks, sign.nodes) for sign in look.signs] == [("hang", (2,), ("node-0",))]
    assert look.doubt == ""
    job.aggregator.close()


def test_death_in_a_real_session_is_a_sign(tmp_path: Path) -> None:
    job = Played(tmp_path / "s", gpus=0, late=None)
    job.memory_s = 5
    for _ in range(20):
        job.play(10)
    job.dies(6, -9)
    (sign,) = seen(job).signs
    assert (sign.kind, sign.ranks, sign.nodes) == ("dead", (6,), ("node-1",))
    job.aggregator.close()


# -- Ray's side ----------------------------------------------------------------------------------


def test_without_the_interface_a_clear_message_and_no_import_error() -> None:
    pytest.importorskip("ray.train")
    try:
        import ray.train.health  # noqa: F401
    except ImportError:
        with pytest.raises(HealthCheckError, match=r"has no ray\.train\.health .* in no release"):
            health_check()
    else:
        pytest.skip("this Ray has ray.train.health")


@pytest.mark.parametrize(("name", "missing"), [("Evict", "target_nodes"), ("HealthCheck", "the class")])
def test_another_state_of_the_interface_is_refused_by_name(health: Any, name: str, missing: str) -> None:
    if missing == "the class":
        delattr(health, name)
    else:
        setattr(health, name, dataclasses.make_dataclass(name, ["reason"]))
    with pytest.raises(HealthCheckError, match=rf"health\.{name} of Ray .* lacks {missing}"):
        health_check()


@pytest.mark.usefixtures("health")
@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"straggler_sec": 3}, "unknown field `straggler_sec`.*straggler_s"),
        ({"hang_s": 0}, "hang_s"),
        ({"allowed": ["evict", "kill"]}, "kill"),
        ({"poll_s": 40}, "stale_s=60 must be at least 2 times poll_s=40"),
    ],
)
def test_bad_limit_is_refused_where_it_is_given(limits: Any, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        health_check(**limits)


def test_decisions_are_those_of_ray(health: Any, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    playing = Playing()
    monkeypatch.setattr(health_policy, "HealthJudge", lambda _limits: playing.judge)
    check = pickle.loads(cloudpickle.dumps(health_check(checks=["nccl"], dry_run=False).evaluator_creator))
    (judging,) = check()
    assert isinstance(judging, health.Evaluator)
    assert judging.evaluate(None) == health.Noop()

    def decisions(sign: Sign) -> list[Any]:
        judging.on_worker_group_start()
        playing.show(sign)
        made = []
        for _ in range(20):
            playing.now_s += 5
            playing.judge.see()
            made.append(judging.evaluate(None))
        return [decision for decision in made if decision != health.Noop()]

    diagnose, evict = decisions(msgspec.structs.replace(STRAGGLER, text="straggler: rank 5"))
    assert diagnose == health.Diagnose(
        reason="traceml-ray: diagnose: straggler: rank 5, for 30 s", checks=["nccl"]
    )
    assert evict == health.Evict(
        reason="traceml-ray: evict node node-1: straggler: rank 5, for 60 s", target_nodes=["node-1"]
    )
    assert decisions(HANG)[-1] == health.Reattempt(reason="traceml-ray: attempt again: , for 40 s")
    assert len(notes) == 4


@pytest.mark.usefixtures("health")
def test_limits_reach_the_controller() -> None:
    sent = pickle.loads(cloudpickle.dumps(health_check(hang_s=17, allowed=["reattempt"]).evaluator_creator))
    assert sent.args[0]["hang_s"] == 17
    assert evaluator(*sent.args) is not None
    assert len(sent()) == 1


@pytest.mark.usefixtures("health")
def test_controller_without_this_package_gets_no_evaluator_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "creator"
    path.write_bytes(cloudpickle.dumps(health_check().evaluator_creator))
    code = (
        "import sys, pickle\n"
        "sys.modules['traceml_ray'] = None\n"
        f"print(pickle.load(open({str(path)!r}, 'rb'))())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "[]\n"
    assert "no health check in this run" in done.stderr
