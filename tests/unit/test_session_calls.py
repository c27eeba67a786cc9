"""A driver's session, asked at every moment: it answers, or says at once what is wrong and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import ray
from played import Played
from sessions import actor_of, run_message

import traceml_ray
from traceml_ray import driver, live_session
from traceml_ray.live_session import EndedError, Session, StartError
from traceml_ray.store.profiles import Profile, ProfileInfo, RankProfile
from traceml_ray.store.session import prepare
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire


class Remote:
    """A method of an actor; what it raises is raised by `ray.get`."""

    def __init__(self, actor: Handle, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> Callable[[], Any]:
        return lambda: self._actor.call(self._name, *args)


class Handle:
    """The handle of an aggregator in this process; `dead`: calls fail, `comes_back` after so many."""

    def __init__(self, actor: Any, number: int = 1) -> None:
        self._actor_id, self.actor = number, actor
        self.dead, self.comes_back = False, -1

    def __getattr__(self, name: str) -> Remote:
        return Remote(self, name)

    def call(self, name: str, *args: Any) -> Any:
        if self.dead and self.comes_back != 0:
            self.comes_back -= 1
            raise ray.exceptions.RayActorError(error_msg="The actor died.")
        return getattr(self.actor, name)(*args)


class Cluster:
    """What a driver asks of Ray here; `aggregator` has the session's name."""

    def __init__(self, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
        self.played, self.connected = played, True
        self.handle = Handle(actor := actor_of(played.aggregator))
        self.aggregator: Handle | None = self.handle
        actor.stop = self._stop  # its own ends this process, which is an actor's there
        monkeypatch.setattr(live_session, "find_aggregator", lambda _: self.aggregator)
        monkeypatch.setattr(live_session, "find_aggregator", lambda _: self.aggregator)
        monkeypatch.setattr(live_session, "find_relays", lambda _: {})
        monkeypatch.setattr(live_session, "relay_nodes", lambda _: [])
        monkeypatch.setattr(live_session, "find_relay", lambda *_: None)
        monkeypatch.setattr(live_session, "cluster_nodes", list)
        monkeypatch.setattr(live_session, "unwatch_trainers", lambda: None)
        timer = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        for module in (live_session, live_session, live_session):
            monkeypatch.setattr(module, "time", timer)
        monkeypatch.setattr(ray, "is_initialized", lambda: self.connected)
        monkeypatch.setattr(ray, "get", lambda ref, **_: ref())
        monkeypatch.setattr(ray, "kill", lambda *_, **__: None)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: self)
        self.gcs_address, self.now = "here", 0.0
        self.finished = wire.Finished(codec.VERSION, "written")

    def sleep(self, _: float) -> None:
        """A second passes."""
        self.now += 1
        if self.aggregator is not None:
            self.played.play(1)

    def get_node_id(self) -> str:
        return "n"

    def _stop(self) -> bytes:
        self.played.end()
        self.played.aggregator.close()
        self.gone()
        return codec.encode(self.finished)

    def gone(self) -> None:
        """The aggregator is gone for good, and its process with it."""
        self.handle.dead, self.aggregator = True, None


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    held = prepare(tmp_path, "s")
    played = Played(held.path, 2, late=1, onset=0, gpus=0)
    held.release()
    return Cluster(played, monkeypatch)


@pytest.fixture
def session(cluster: Cluster) -> Session:
    return Session("s", cluster.handle)


QUESTIONS: dict[str, Callable[[Session], Any]] = {
    "nodes": lambda session: session.nodes(),
    "ranks": lambda session: session.ranks(),
    "runs": lambda session: session.runs(),
    "summary": lambda session: session.summary(),
    "verdict": lambda session: session.verdict(),
    "memory": lambda session: session.memory(),
    "throughput": lambda session: session.throughput(),
    "logged": lambda session: session.logged(),
    "output": lambda session: session.output(0),
    "bundles": lambda session: session.bundles(),
    "profiles": lambda session: session.profiles(),
    "layers": lambda session: session.layers(),
    "status": lambda session: session.status(),
}
"""What is answered at each moment."""
ORDERS: dict[str, Callable[[Session], Any]] = {
    "dump": lambda session: session.dump(),
    "profile": lambda session: session.profile(),
    "layers": lambda session: session.layers(5),
    "download": lambda session: session.download("nowhere"),
    "wait_ready": lambda session: session.wait_ready(),
}
"""What only a session that runs can do."""


def ended(cluster: Cluster) -> None:
    cluster.played.play(20)
    finals = [rank.batch(0, final=True) for rank in cluster.played.ranks]
    cluster.played.aggregator.ingest(cluster.played.relays[0].message(*finals))
    assert run_message(cluster.played.aggregator, "job", status="finished").ok


def stopped(cluster: Cluster) -> None:
    """By another handle."""
    cluster.played.play(20)
    Session("s", cluster.handle).stop()


def killed(cluster: Cluster) -> None:
    cluster.played.play(20)
    cluster.played.aggregator.close()
    cluster.gone()


def restarting(cluster: Cluster) -> None:
    cluster.played.play(20)
    cluster.handle.dead, cluster.handle.comes_back = True, 2


def shut_down(cluster: Cluster) -> None:
    killed(cluster)
    cluster.connected = False


def folder_gone(cluster: Cluster) -> None:
    killed(cluster)
    shutil.rmtree(cluster.played.folder)


def elsewhere(cluster: Cluster) -> None:
    killed(cluster)


def replaced(cluster: Cluster) -> None:
    """Another session has taken its name, and its folder."""
    killed(cluster)
    cluster.played.folder.rename(cluster.played.folder.with_name("s.before"))
    other = Played(cluster.played.folder, 2, late=None, gpus=0)
    other.clock.tick(100)
    other.aggregator.close()
    shutil.rmtree(other.folder)
    other = Played(other.folder, 2, late=None, gpus=0, clock=other.clock)
    other.play(5)
    cluster.aggregator = Handle(actor_of(other.aggregator), 2)


FILES = r"'s' has ended; its files are in /.*/s: traceml-ray report /.*/s$"
MOMENTS: dict[str, tuple[Callable[[Cluster], Any], str | None, str | None]] = {
    "before the first rank": (lambda _: None, None, None),
    "running": (lambda cluster: cluster.played.play(20), None, None),
    "restarting": (restarting, None, None),
    "its run has ended": (ended, None, None),
    "stopped": (stopped, None, "ended, its files are in /.*/s$"),
    "aggregator is gone": (killed, None, "ended, its files are in /.*/s$"),
    "Ray was shut down": (shut_down, None, "its files are in /.*/s"),
    "folder is gone": (folder_gone, "'s' has ended, and its folder /.*/s is gone", "is gone"),
    "on another node": (elsewhere, FILES.replace("/s:", "/s on node m:"), "on node m"),
    "another has its name": (replaced, "traceml-ray sessions --sessions /", "belongs to another session"),
}
"""What has happened; why questions have no answer then, and why orders have none."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_question_is_answered_at_each_moment_or_says_what_to_do(
    cluster: Cluster, session: Session, moment: str
) -> None:
    happen, why, _ = MOMENTS[moment]
    session._calls.is_here = moment != "on another node"
    session._calls.node_id = "n" if session._calls.is_here else "m"
    happen(cluster)
    before = cluster.now
    for name, question in QUESTIONS.items():
        if why is None:
            answer = question(session)
            assert answer is not None or moment == "before the first rank", name
        else:
            with pytest.raises(EndedError, match=why):
                question(session)
    assert cluster.now - before <= 2, "nothing waits"
    if moment not in ("before the first rank", "folder is gone", "on another node", "another has its name"):
        assert session.verdict().label == session.status().verdict
        assert min(rank.stored for rank in session.ranks()) >= 20


@pytest.mark.parametrize("moment", [name for name, (_, _, why) in MOMENTS.items() if why is not None])
def test_order_to_a_session_that_has_ended_is_refused_at_once(
    cluster: Cluster, session: Session, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    happen, _, why = MOMENTS[moment]
    session._calls.is_here = moment != "on another node"
    session._calls.node_id = "n" if session._calls.is_here else "m"
    happen(cluster)
    monkeypatch.chdir(cluster.played.folder.parent)
    before = cluster.now
    for name, order in ORDERS.items():
        others = {"wait_ready": "its files are in /"} | dict.fromkeys(
            ("profile", "layers"), "has no step left"
        )
        with pytest.raises(StartError, match=f"{why}|{others.get(name, why)}"):
            order(session)
    assert cluster.now == before, "nothing waits"
    assert not Path("nowhere").exists(), "nothing is left of a download that was refused"


def test_each_answer_is_written_as_json_in_the_documented_way(cluster: Cluster, session: Session) -> None:
    for _ in range(4):
        cluster.played.play(20)
    answers = {name: question(session) for name, question in QUESTIONS.items()}
    answers |= {"dump": session.dump(), "compare": session.compare(cluster.played.folder)}
    answers["analyze"] = traceml_ray.analyze(cluster.played.folder)
    made = Profile(
        id="p", session="s", run=None, time="", t_ns=1, why="", first_step=None, n_steps=3, memory=False,
        stacks=False, shapes=False, ranks=[RankProfile(0, "done")], found=[], traceml_ray="0",
    )  # fmt: skip
    answers |= {"profile": made, "profiles": [ProfileInfo(made, "x", 3)]}
    for name, answer in answers.items():
        written = json.dumps(traceml_ray.to_builtins(answer), allow_nan=False)
        fields = msgspec.to_builtins(answer, enc_hook=str)
        more = len(answer.more) - 1 if name == "summary" else 0  # its `more` is no block, but has some
        assert len(json.loads(written)) == len(fields) + more, name
    assert answers["throughput"].rank_samples_per_s.tolist() == [
        *traceml_ray.to_builtins(answers["throughput"])["rank_samples_per_s"]
    ]
    nothing = np.array([[np.nan, 1.0]])
    assert traceml_ray.to_builtins({1: nothing, "x": (np.int64(3), float("inf"))}) == {
        "1": [[None, 1.0]],
        "x": [3, None],
    }
    with pytest.raises(TypeError, match="object is not an answer"):
        traceml_ray.to_builtins([object()])


def test_what_is_said_of_a_session_is_what_works(cluster: Cluster, session: Session) -> None:
    for _ in range(20):
        cluster.played.play(10)
    assert repr(session).endswith("try .verdict(), .nodes(), .stop()>")
    session.stop()
    folder = cluster.played.folder
    assert repr(session).endswith(
        f"'s', ended: files in {folder}; try .verdict(), .summary(), traceml-ray report {folder}>"
    )
    assert session.compare(folder).word == "no difference"
    session._calls.is_here = False
    assert repr(session).endswith(f"try traceml-ray report {folder}>")


def test_stopping_what_has_ended_changes_nothing(cluster: Cluster, session: Session) -> None:
    cluster.played.play(20)
    session.stop()
    written = {path: path.read_bytes() for path in cluster.played.folder.iterdir() if path.is_file()}
    session.stop()
    assert {path: path.read_bytes() for path in cluster.played.folder.iterdir() if path.is_file()} == written
    cluster.connected = False
    shutil.rmtree(cluster.played.folder)
    session.stop()  # as when the driver exits


def test_stopping_a_session_whose_name_is_another_ones_leaves_that_alone(
    cluster: Cluster, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(cluster)
    touched: list[object] = []
    for name in ("find_relays", "forget", "unwatch_trainers"):
        monkeypatch.setattr(live_session, name, touched.append)
    monkeypatch.setattr(ray, "kill", lambda *_, **__: touched.append("killed"))
    session.stop()
    assert touched == []


@pytest.mark.parametrize("happen", [killed, shut_down])
def test_stop_writes_the_reports_that_nobody_else_writes(
    cluster: Cluster, session: Session, happen: Callable[[Cluster], None]
) -> None:
    happen(cluster)
    assert not (cluster.played.folder / "summary.json").exists()
    session.stop()
    assert (cluster.played.folder / "summary.json").exists()
    assert session.status().status == "finished"


def test_session_that_goes_on_without_this_driver_is_not_taken_over(
    cluster: Cluster, session: Session
) -> None:
    held = prepare(cluster.played.folder.parent, "s", again=True)
    cluster.played.play(20)
    cluster.connected = False
    with pytest.raises(StartError, match=r"Ray was shut down in this process: traceml-ray stop /.*/s"):
        session.stop()
    held.release()
    assert session.status().status == "running"


def test_stop_says_that_the_files_could_not_be_written(cluster: Cluster, session: Session) -> None:
    cluster.finished = wire.Finished(codec.VERSION, "failed", "OSError: no space left")
    with pytest.raises(StartError, match="has ended, but its files could not be written: OSError: no space"):
        session.stop()


def test_profile_does_nothing_in_a_driver_whose_ray_was_shut_down(
    cluster: Cluster, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "current_config", lambda: session.config)
    monkeypatch.setattr(driver, "find_aggregator", lambda _: cluster.aggregator)
    assert driver.session_here() is not None
    cluster.connected = False
    assert traceml_ray.profile().result() is None


def test_dashboard_of_a_session_that_has_ended_is_of_its_file(
    cluster: Cluster, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, str]] = []

    class Process:
        def __init__(self, *_: object, **options: str) -> None:
            asked.append(options)

        def wait(self, _: float) -> str:
            return "url"

        def kill(self) -> None: ...

    monkeypatch.setattr(live_session, "DashboardProcess", Process)
    assert session.dashboard() == "url"
    killed(cluster)
    session._dashboard = None
    assert session.dashboard() == "url"
    assert [options["ray_address"] for options in asked] == ["here", ""]
    shutil.rmtree(cluster.played.folder)
    session._dashboard = None
    with pytest.raises(EndedError, match="is gone"):
        session.dashboard()
