"""`traceml_ray.start()` and `attach()` on a cluster of one node: a session, its questions, its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray_cluster import FakeCluster, actor_processes, fake_cluster, until

import traceml_ray
from traceml_ray import live_session
from traceml_ray.ray.actor_calls import ActorChannel
from traceml_ray.ray.actors import find_aggregator, relay_folder
from traceml_ray.settings import SettingError
from traceml_ray.store.session import SessionError
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster(nodes=1, cpus=3, lean=True) as made:
        yield made


@ray.remote(num_cpus=0.1)
class Worker:
    """Trains a tiny model by itself; the optimizer is slow where it is told so."""

    def attach(self, session: str, **who: Any) -> bool:
        return traceml_ray.attach(session, **who)

    def train(self, steps: int, pause_ms: float = 0.0) -> float:
        import time

        import torch

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.DataLoader([torch.ones(4)] * steps, batch_size=1)
        for batch in data:
            loss = model(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause_ms / 1e3)
        return float(loss)

    def detach(self) -> None:
        traceml_ray.detach()

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def worker() -> Any:
    """One process for all: it is attached to one session after another."""
    return Worker.remote()


def names_of(session: str) -> list[str]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in listed if actor["name"].startswith(f"{session}/")]


def rows_of(folder: Path) -> int:
    with SessionFile(folder / "session.sqlite") as file:
        return int(file.ledger().stored)


def test_session_is_found_by_name_and_leaves_no_actor(tmp_path: Path) -> None:
    session = traceml_ray.start(session="found", out=tmp_path)
    assert session.wait_ready() is session
    assert str(tmp_path / "found") in repr(session)
    again = traceml_ray.start(session="found")
    assert (again.id, again.folder) == ("found", tmp_path / "found")
    with pytest.warns(UserWarning, match="runs already and keeps .*; ignored: interval"):
        traceml_ray.start(session="found", interval=2)
    [node] = session.nodes()
    assert node.alive
    assert node.node_id == ray.get_runtime_context().get_node_id()
    folder = relay_folder("found", node.node_id)
    assert folder.exists()
    session.stop()
    assert names_of("found") == []
    assert not folder.exists()
    until(lambda: not actor_processes("NodeRelay") and not actor_processes("Aggregator"), "processes end")
    session.stop()  # it has ended already
    assert again.status().status == "finished"
    with pytest.raises(traceml_ray.StartError, match=r"has ended, its files are in /.*/found$"):
        again.dump()
    assert (tmp_path / "found" / "summary.json").exists()
    with traceml_ray.start(session="found", out=tmp_path) as other:
        session.stop()  # what has its name by now is another one
        assert other.wait_ready().status().status == "running"
        with pytest.raises(traceml_ray.StartError, match="moved aside"):
            session.status()


def test_session_has_a_dashboard_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with traceml_ray.start(session="shown", out=tmp_path) as session:
        url = session.dashboard(port=0)
        assert session.dashboard() == url

        def state() -> str:
            with urllib.request.urlopen(url + "health", timeout=240) as answer:
                return str(json.loads(answer.read())["state"])

        until(lambda: state() == "waiting", "the session is seen")
        [aggregator] = actor_processes("Aggregator")
        aggregator.suspend()
        until(lambda: state() == "stale", "an aggregator that does not answer is noticed")
        monkeypatch.setattr(live_session, "QUESTION_S", 0.0)
        with pytest.raises(traceml_ray.StartError, match="'shown' did not answer within 0 s"):
            session.status()
        monkeypatch.undo()
        aggregator.resume()
        until(lambda: state() == "waiting", "it is heard again")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=240)


def test_session_is_found_by_another_driver(cluster: FakeCluster, tmp_path: Path) -> None:
    with traceml_ray.start(session="shared", out=tmp_path) as session:
        script = (
            f"import ray, traceml_ray; ray.init({cluster.address!r}, log_to_driver=False)\n"
            "session = traceml_ray.start(session='shared'); print(session.folder)"
        )
        environ = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=240
        )
        assert ran.stdout.strip() == str(session.folder), ran.stderr[-2000:]


@pytest.mark.long
def test_sessions_on_one_cluster_stay_apart(tmp_path: Path) -> None:
    with (
        traceml_ray.start(session="one", out=tmp_path) as one,
        traceml_ray.start(session="two", out=tmp_path) as two,
    ):
        worker = Worker.options(name="alone").remote()
        assert ray.get(worker.attach.remote("two"))
        ray.get(worker.train.remote(20))
        ray.get(worker.detach.remote())
        until(lambda: two.status().ledger.stored == 20, "rows of two")
        assert one.status().ledger.produced == 0
        ray.kill(worker)


def test_actors_without_ranks_form_a_group_by_name(tmp_path: Path) -> None:
    with traceml_ray.start(session="plain", out=tmp_path) as session:
        workers = [Worker.options(name=f"learner-{number}").remote() for number in range(2)]
        assert all(ray.get([worker.attach.remote("plain") for worker in workers]))
        ray.get([worker.train.remote(60, 5 + 25 * number) for number, worker in enumerate(workers)])
        ray.get([worker.detach.remote() for worker in workers])
        until(lambda: session.status().ledger.stored == 120, "all rows")
        summary = traceml_ray.to_builtins(session.summary())
        assert sorted(rank["name"] for rank in summary["ranks"].values()) == ["learner-0", "learner-1"]
        assert summary["session"]["world_size"] == 2
        assert summary["verdict"]["label"] == "accounting_only"  # nobody waits for anybody
        [run] = session.runs()
        assert run.id == ray.get_runtime_context().get_job_id()
        for worker in workers:
            ray.kill(worker)


@pytest.mark.long
def test_actor_with_explicit_ranks_keeps_them(tmp_path: Path) -> None:
    with traceml_ray.start(session="explicit", out=tmp_path) as session:
        worker = Worker.remote()
        who = {"rank": 3, "local_rank": 1, "local_world_size": 2, "world_size": 4, "job_id": "mine"}
        assert ray.get(worker.attach.remote("explicit", **who))
        ray.get(worker.train.remote(5))
        ray.get(worker.detach.remote())
        until(lambda: session.status().ledger.stored == 5, "rows")
        assert list(session.summary().ranks) == ["3"]
        assert session.summary().session.world_size == 4
        assert [run.id for run in session.runs()] == ["mine"]
        with pytest.raises(ray.exceptions.RayTaskError, match="must be given together"):
            ray.get(Worker.remote().attach.remote("explicit", rank=1))


def test_rows_wait_for_a_session_that_starts_late(worker: Any, tmp_path: Path) -> None:
    assert ray.get(worker.attach.remote("late"))
    ray.get(worker.train.remote(30))
    with traceml_ray.start(session="late", out=tmp_path) as session:
        until(lambda: session.status().ledger.stored == 30, "rows of before")
        ray.get(worker.detach.remote())


def test_killed_relay_and_aggregator_return_without_losing_rows(worker: Any, tmp_path: Path) -> None:
    with traceml_ray.start(session="killed", out=tmp_path) as session:
        session.wait_ready()
        ray.get(worker.attach.remote("killed"))
        ray.get(worker.train.remote(40))
        until(lambda: rows_of(session.folder) == 40, "rows")
        [aggregator] = actor_processes("Aggregator")
        aggregator.kill()
        ray.get(worker.train.remote(40))
        until(lambda: rows_of(session.folder) == 80, "rows of while there was no aggregator")
        [relay] = actor_processes("NodeRelay")
        relay.kill()
        ray.get(worker.train.remote(40))
        ray.get(worker.detach.remote())
        until(lambda: rows_of(session.folder) == 120, "rows of while there was no relay")
        # Killed for good, as by `ray.kill`: it is made anew.
        ray.kill(live_session.find_relay("killed", ray.get_runtime_context().get_node_id()), no_restart=True)
        until(lambda: names_of("killed") and len(names_of("killed")) == 2, "a new relay")
        ledger = session.status().ledger
        assert (ledger.produced, ledger.stored) == (120, 120)


def test_aggregator_that_ends_by_itself_meanwhile_needs_no_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    live_session.end_hung(child.pid)  # a zombie
    child.wait()
    live_session.end_hung(child.pid)


def test_agent_notices_a_relay_restarted_between_two_calls(tmp_path: Path) -> None:
    def batch(seq: int) -> bytes:
        made = wire.RankBatch(
            codec.VERSION, "process_id", seq, 0, seq, 0, seq - 1, bytes(8), b"\0", bytes(48)
        )
        return codec.encode(made)

    with traceml_ray.start(session="restarted", out=tmp_path) as session:
        session.wait_ready()
        channel = ActorChannel("restarted")
        until(lambda: channel.replies() == [] and channel.offer(batch(1)), "a relay")
        until(channel.replies, "a reply")
        [relay] = actor_processes("NodeRelay")
        relay.kill()
        until(lambda: [p for p in actor_processes("NodeRelay") if p.pid != relay.pid], "a new one")
        session.wait_ready()
        before = channel.generation

        def noticed() -> bool:
            assert channel.replies() == []
            return channel.generation > before or (channel.offer(batch(9)) and False)

        until(noticed, "it is found anew")  # though it takes calls, as if nothing had happened
        assert channel.offer(batch(1)) and channel.offer(batch(9))
        until(lambda: rows_of(session.folder) == 2, "both")
        channel.close()


@pytest.mark.parametrize("who", ["NodeRelay", "Aggregator"])
def test_rows_not_taken_by_a_hung_actor_are_in_the_file(worker: Any, tmp_path: Path, who: str) -> None:
    session = traceml_ray.start(session=f"hung-{who}", out=tmp_path).wait_ready()
    assert ray.get(worker.attach.remote(session.id))
    ray.get(worker.train.remote(20))
    until(lambda: rows_of(session.folder) == 20, "rows")
    [hung] = actor_processes(who)
    hung.suspend()
    ray.get(worker.train.remote(30))
    ray.get(worker.detach.remote())
    session.stop()
    with SessionFile(session.folder / "session.sqlite") as file:
        assert file.ledger().stored == file.ledger().produced == 50
    assert (session.folder / "report.txt").exists()
    assert not list(relay_folder(session.id, ray.get_runtime_context().get_node_id()).glob("*.spool"))


def test_session_files_are_downloaded_to_the_driver_and_compared(worker: Any, tmp_path: Path) -> None:
    with traceml_ray.start(session="far", out=tmp_path / "there").wait_ready() as session:
        ray.get(worker.attach.remote("far"))
        ray.get(worker.train.remote(60, 2.0))
        ray.get(worker.detach.remote())
        until(lambda: session.status().ledger.stored == 60, "rows")
        here = session.download(tmp_path / "here")
        assert rows_of(here) == 60
        assert b"traceml-ray" in (here / "report.html").read_bytes()
        comparison = session.compare(here)  # they are the same steps
        assert (comparison.word, comparison.change_pct, comparison.b.last_step) == (
            "no difference",
            0,
            comparison.a.last_step,
        )
        with pytest.raises(SessionError, match="no session 'gone'"):
            session.compare("gone")
        assert sorted(path.name for path in session.folder.iterdir() if "download" in path.name) == []


def test_idle_session_ends_itself_and_writes_its_files(tmp_path: Path) -> None:
    session = traceml_ray.start(session="idle", out=tmp_path, idle_ttl=2)
    until(lambda: not names_of("idle"), "the end of an idle session")
    assert (session.folder / "report.txt").exists()


@pytest.mark.long
def test_example_of_plain_actors_names_the_slow_actor(cluster: FakeCluster, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "ray_actors.py"
    ran = subprocess.run(
        [sys.executable, str(example), "--actors", "4", "--steps", "80", "--slow-actor", "1"],
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": cluster.address},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "straggler: rank 1" in ran.stdout, ran.stderr[-3000:]
    left = sorted(path.name for path in (tmp_path / "traceml-sessions" / "default").iterdir())
    # One that is late in most steps may have been profiled by then.
    assert set(left) - {"profiles"} == {
        *(".lock", "report.html", "report.txt", "session.sqlite", "summary.json")
    }
    assert "trainer-1" in (tmp_path / "traceml-sessions" / "default" / "report.txt").read_text()


def test_command_line_shows_the_status_and_stops_a_session(tmp_path: Path) -> None:
    traceml_ray.start(session="told", out=tmp_path).wait_ready()
    command = [sys.executable, "-m", "traceml_ray.cli"]
    status = subprocess.run([*command, "status", str(tmp_path / "told")], capture_output=True, text=True)
    [aggregator] = actor_processes("Aggregator")
    assert f"running (live, aggregator pid {aggregator.pid})" in status.stdout, status.stderr
    ended = subprocess.run([*command, "stop", str(tmp_path / "told")], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    until(lambda: not names_of("told"), "every actor ends")
    assert not (tmp_path / "told" / "live.json").exists()
    assert '"stopped"' in (tmp_path / "told" / "summary.json").read_text()


def test_start_with_bad_settings_or_environment_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="session='a/b' must be"):
        traceml_ray.start(session="a/b")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(traceml_ray.StartError, match="cannot write sessions into"):
        traceml_ray.start(session="blocked", out=blocked / "sessions")
    until(lambda: not names_of("blocked"), "nothing is left of it")
    with traceml_ray.start(session="old", out=tmp_path) as _:
        monkeypatch.setattr(live_session, "__version__", "9.9.9")
        with pytest.raises(traceml_ray.StartError, match=r"traceml-ray 0\.\d+\.\d+, this is 9\.9\.9"):
            traceml_ray.start(session="old")
    (tmp_path / "ray-2.40.0.dist-info").mkdir()
    (tmp_path / "ray-2.40.0.dist-info" / "METADATA").write_text("Name: ray\nVersion: 2.40.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(traceml_ray.StartError, match=r"2\.51 or newer"):
        traceml_ray.start(session="any")


def test_start_without_ray_asks_for_ray_init() -> None:
    script = "import traceml_ray\ntry: traceml_ray.start()\nexcept traceml_ray.StartError as e: print(e)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert "call ray.init() before" in ran.stdout, ran.stderr


def test_agent_starts_no_cluster_after_ray_shutdown(cluster: FakeCluster) -> None:
    script = (
        f"import ray, time, traceml_ray, torch; ray.init({cluster.address!r}, log_to_driver=False)\n"
        "assert traceml_ray.attach('nobody'); time.sleep(1.5); ray.shutdown(); time.sleep(2.5)\n"
        "print(ray.is_initialized())"
    )
    environ = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=240
    )
    assert ran.stdout.strip() == "False", ran.stderr[-2000:]
    assert ran.returncode == 0
    assert find_aggregator("nobody") is None
