"""
Ray Train's own trainers on a private cluster, with no line of ours in the training loop.

One cluster for all, with as many CPUs as a trainer asks for; every `fit()` is two small workers.
"""

from __future__ import annotations

import copyreg
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train")
pytest.importorskip("torch")

import ray
import ray.cloudpickle
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2.api.exceptions import WorkerGroupError
from ray_cluster import FakeCluster, fake_cluster, until

import traceml_ray
from traceml_ray.launchers.health_policy import HealthJudge
from traceml_ray.launchers.health_rules import HealthLimits
from traceml_ray.launchers.train_callback import TraceMLTrainCallback, _hook, watched_run
from traceml_ray.live_session import Session
from traceml_ray.ray.actors import current_config, find_aggregator
from traceml_ray.store.results import RunInfo

BATCHES = 60


class Lines(torch.utils.data.Dataset[Any]):
    """Points of a line; on the rank `late` each of them is 20 ms late."""

    def __init__(self, late: bool) -> None:
        self.late = late

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.late:
            time.sleep(0.02)
        x = torch.full((4,), index / BATCHES)
        return x, x[:1] * 3


def step(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    loss = ((model(x) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def prepared() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(config: dict[str, Any]) -> float:
    """
    The usual loop of Ray Train: model and loader prepared by it, metrics reported with a checkpoint.
    The rank `dies` is gone without a word in the first attempt.
    """
    model, optimizer = prepared()
    rank = ray.train.get_context().get_world_rank()
    loader = torch.utils.data.DataLoader(Lines(rank == config.get("late")), batch_size=1)
    died = Path(config["folder"], "died")
    for number, (x, y) in enumerate(ray.train.torch.prepare_data_loader(loader)):
        if number == 30 and rank == config.get("dies") and not died.exists():
            died.touch()
            os._exit(7)
        loss = step(model, optimizer, x, y)
    path = Path(config["folder"], f"rank-{rank}")
    path.mkdir(exist_ok=True)
    torch.save(model.state_dict(), path / "model.pt")
    ray.train.report({"loss": loss}, checkpoint=Checkpoint.from_directory(path) if rank == 0 else None)
    return loss


def train_until_rank_1_raises() -> None:
    """A loop that takes no argument."""
    model, optimizer = prepared()
    for number in range(40):
        if number == 30 and ray.train.get_context().get_world_rank() == 1:
            print("last line of rank 1")
            os.write(2, b"and of C\n")
            raise ValueError("planted\nin the loop")
        step(model, optimizer, torch.ones(1, 4), torch.ones(1))
        time.sleep(0.01)


def train_on_ray_data() -> None:
    model, optimizer = prepared()
    shard = ray.train.get_dataset_shard("train")
    for _ in range(2):
        for batch in shard.iter_torch_batches(batch_size=4):
            time.sleep(0.002)
            step(model, optimizer, batch["x"].float().repeat(1, 4).reshape(-1, 4), torch.ones(1))


def train_until_there_are_two() -> None:
    """Alone: until it is ended, because a second worker can come. As two: 40 steps."""
    model, optimizer = prepared()
    context = ray.train.get_context()
    steps = 40 if context.get_world_size() == 2 else 4000
    for _ in range(steps):
        step(model, optimizer, torch.ones(1, 4), torch.ones(1))
        time.sleep(0.02 if context.get_world_rank() else 0.01)


def train_for_a_while(config: dict[str, Any]) -> None:
    """200 steps of 20 ms. Rank 1 is gone without a word in the middle of the first attempt."""
    model, optimizer = prepared()
    died = Path(config["folder"], "died")
    for number in range(200):
        if number == 150 and ray.train.get_context().get_world_rank() == 1 and not died.exists():
            died.touch()
            os._exit(7)
        step(model, optimizer, torch.ones(1, 4), torch.ones(1))
        time.sleep(0.02)


class Judging(WorkerGroupCallback):
    """
    Asks the judge of a health check at every poll of the controller, as Ray's health checks will. It writes
    down the attempt, and what was seen of it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "looks.jsonl"
        self.judge: HealthJudge | None = None

    def after_worker_group_start(self, worker_group: Any) -> None:
        if self.judge is not None:
            self.judge.restart()

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        if self.judge is None:
            self.judge = HealthJudge(HealthLimits(poll_s=0.2, stale_s=30.0))
        opinion, run = self.judge.opinion(), watched_run()
        looks, since_s = self.judge._looks, self.judge._since_s
        if looks and run is not None and looks[-1].asked_s >= since_s:
            seen = {"attempt": run.attempt(), "doubt": looks[-1].doubt, "nodes": looks[-1].nodes}
            with self.path.open("a") as file:
                file.write(json.dumps({**seen, "decided": opinion is not None, **self.judge.errors}) + "\n")
        if run is not None and not self.judge._made:
            self.judge._made.add(("diagnose", ""))
            run.note("judged")


def fails(*_: object) -> None:
    raise RuntimeError("a mistake of ours")


class Failing(TraceMLTrainCallback):
    """Ours, with a mistake in every hook."""

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]


for name in [name for name in vars(TraceMLTrainCallback) if name.startswith(("before_", "after_"))]:
    setattr(Failing, name, _hook()(fails) if "init_train" not in name else _hook(dict)(fails))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[FakeCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.3")  # how often the controller looks
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
        interrupted = signal.getsignal(signal.SIGINT)  # `fit` puts a handler of its own there
        with fake_cluster(1, cpus=2) as made:
            yield made
        signal.signal(signal.SIGINT, interrupted)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRACEML_SESSION", "TRACEML_OUT", "RAY_TRAIN_CALLBACKS"):
            patch.delenv(name, raising=False)
        started = traceml_ray.start(session="train", out=tmp_path_factory.mktemp("out"), interval=0.2)
        yield started
        started.stop()


@pytest.fixture
def callbacks_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `start()` puts into the environment: here, each test begins with a clean one."""
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "traceml_ray.launchers.ray_train.TraceMLTrainCallback")


def trainer(loop: Any, folder: Path, name: str, workers: Any = 2, **more: Any) -> TorchTrainer:
    run = {key: more.pop(key) for key in ("callbacks", "failure_config", "worker_runtime_env") if key in more}
    scaling = {"resources_per_worker": {"CPU": 1}, **more.pop("scaling", {})}
    return TorchTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=workers, **scaling),
        run_config=RunConfig(name=name, storage_path=str(folder), **run),
        **more,
    )


def run_named(session: Session, name: str) -> RunInfo:
    (run,) = (run for run in session.runs() if run.name == name)
    return run


def whole(summary: dict[str, Any], rows: int, errors: dict[str, int] | None = None) -> None:
    """Every row of every rank is there, and nothing else of ours went wrong in any of them."""
    run = next(run for run in summary["runs"] if run["id"] == summary["run"])
    assert run["ledger"]["stored"] == run["ledger"]["produced"] == rows
    for rank in summary["ranks"].values():
        # A call that was lost while actors were being made is told, too, and no mistake.
        own_errors = {place: n for place, n in rank["errors"].items() if not place.startswith("channel.")}
        assert (own_errors, rank["missing"]) == (errors or {}, {})


@pytest.mark.usefixtures("callbacks_by_name")
def test_driver_that_only_started_a_session_gets_verdict_and_restart(
    session: Session, tmp_path: Path
) -> None:
    config = {"late": 1, "dies": 1, "folder": str(tmp_path)}
    once = FailureConfig(max_failures=1)
    result = trainer(train, tmp_path, "zero code", train_loop_config=config, failure_config=once).fit()
    summary = json.loads((session.folder / "summary.json").read_text())  # there when `fit` returns
    assert result.error is None
    if hasattr(result, "return_value"):  # an older Ray keeps none
        assert result.return_value == result.metrics["loss"]
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["stage"], verdict["rank"]) == ("straggler", "data", 1)
    run = run_named(session, "zero code")
    fields = ("status", "launcher", "world_size", "nnodes", "attempts", "label")
    assert [getattr(run, name) for name in fields] == ["finished", "ray_train", 2, 1, 2, "straggler"]
    assert summary["run"] == run.id
    assert {rank["ended"] for rank in summary["ranks"].values()} == {"finished"}
    assert summary["session"]["strategy"] == "ddp"
    assert {rank["attempt"] for rank in summary["ranks"].values()} == {1}
    assert {rank["processes"] for rank in summary["ranks"].values()} == {2}
    events = {event["kind"]: event for event in summary["events"]}
    assert "1" in events["worker_failure"]["data"]["ranks"].split(",")
    assert events["restart"]["data"]["attempt"] == 1
    assert events["restart"]["data"]["seconds"] > 1
    assert summary["steps"]["count"] == BATCHES  # those of the second attempt, and not of both


@pytest.mark.usefixtures("callbacks_by_name")
def test_exception_in_the_loop_is_unchanged_and_the_headline(session: Session, tmp_path: Path) -> None:
    # Named in the environment and given too: watched once.
    given = traceml_ray.TraceMLTrainCallback(interval=0.1)
    with pytest.raises(WorkerGroupError) as raised:
        trainer(train_until_rank_1_raises, tmp_path, "raises", callbacks=[given]).fit()
    (failure,) = raised.value.worker_failures.items()
    error = getattr(failure[1], "_base_exc", failure[1])  # Ray 2.51 has it inside one of its own
    assert (failure[0], type(error), str(error)) == (1, ValueError, "planted\nin the loop")
    assert "traceml" not in str(raised.value)
    summary = traceml_ray.to_builtins(session.summary())
    assert summary["run"] == run_named(session, "raises").id
    assert run_named(session, "raises").status == "failed"
    assert [run.name for run in session.runs()].count("raises") == 1
    verdict = summary["verdict"]
    assert (verdict["label"], verdict["rank"]) == ("rank_lost", 1)
    assert verdict["exit_reason"] == "ValueError: planted"
    assert {rank["processes"] for rank in summary["ranks"].values()} == {1}
    (last,) = summary["output"]
    assert {"last line of rank 1", "and of C"} <= {line["text"] for line in last["lines"]}
    kinds = {event["kind"]: event for event in summary["events"]}
    assert kinds["stopped"]["rank"] == 0
    assert kinds["worker_failure"]["message"] == "rank 1: ValueError: planted"
    whole(summary, 60)


@pytest.mark.long
def test_broken_callback_and_broken_package_change_nothing(session: Session, tmp_path: Path) -> None:
    quiet = {"late": None, "folder": str(tmp_path)}
    expected = trainer(train, tmp_path, "watched", train_loop_config=quiet).fit()
    before = len(session.runs())
    (tmp_path / "traceml_ray").mkdir()
    (tmp_path / "traceml_ray" / "__init__.py").write_text("raise OSError('no such package')")
    broken = traceml_ray.TraceMLTrainCallback()
    broken._config = b"garbage"  # every hook in the controller needs it
    result = trainer(
        train,
        tmp_path,
        "unwatched",
        train_loop_config=quiet,
        callbacks=[broken],
        worker_runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}},
    ).fit()
    assert result.error is None
    assert result.metrics["loss"] == expected.metrics["loss"]
    assert set(result.metrics) == set(expected.metrics)
    assert len(session.runs()) == before


@pytest.mark.usefixtures("session")
def test_callback_starts_its_own_session_and_times_ray_data(tmp_path: Path) -> None:
    dataset = ray.data.from_items([{"x": float(number)} for number in range(80)])
    given = traceml_ray.TraceMLTrainCallback(session="other", out=tmp_path / "out", interval=0.2)
    assert Failing().before_worker_group_start(None) is None
    trainer(
        train_on_ray_data,
        tmp_path,
        "ray data",
        1,
        datasets={"train": dataset},
        callbacks=[given, Failing()],
    ).fit()
    assert current_config() is not None
    assert current_config().session == "train"  # still that of `start`
    summary = json.loads((tmp_path / "out" / "other" / "summary.json").read_text())
    fields = ("name", "status", "attempts")
    assert [[run[name] for name in fields] for run in summary["runs"]] == [["ray data", "finished", 1]]
    whole(
        summary, 40, {"train: fails: RuntimeError": 1}
    )  # what was swallowed while there was an agent to tell
    stages = {stage["name"]: stage for stage in summary["stages"]}
    assert stages["data"]["median_ms"] > 0
    assert stages["prepare"]["median_ms"] >= 2
    Session("other", find_aggregator("other")).stop()


@pytest.mark.usefixtures("callbacks_by_name")
def test_local_mode_is_left_alone(session: Session, tmp_path: Path) -> None:
    before = session.runs()
    config = {"late": None, "folder": str(tmp_path)}
    assert trainer(train, tmp_path, "local", 0, train_loop_config=config).fit().error is None
    assert session.runs() == before


@pytest.mark.long
def test_example_names_the_rank_it_made_late(cluster: FakeCluster, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "ray_train.py"
    done = subprocess.run(
        [sys.executable, str(example), "--workers", "3", "--steps", "40", "--slow", "data:1:30"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": cluster.address, "TRACEML_INTERVAL": "0.2"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "straggler: rank 1" in done.stdout
    assert (tmp_path / "traceml-sessions" / "default" / "report.txt").is_file()


@pytest.mark.long
@pytest.mark.usefixtures("callbacks_by_name")
def test_trainer_that_grows_continues_as_another_attempt(
    cluster: FakeCluster, session: Session, tmp_path: Path
) -> None:
    def room_for_another() -> None:
        until(lambda: any(run.name == "grows" for run in session.runs()), "the run")
        until(lambda: any(r.name == "grows" and r.ledger.stored > 20 for r in session.runs()), "steps")
        cluster.add(cpus=2)

    threading.Thread(target=room_for_another, daemon=True).start()
    trainer(
        train_until_there_are_two,
        tmp_path,
        "grows",
        (1, 2),
        scaling={"resources_per_worker": {"CPU": 2}, "elastic_resize_monitor_interval_s": 0.5},
    ).fit()
    summary = traceml_ray.to_builtins(session.summary())
    run = run_named(session, "grows")
    assert [run.status, run.attempts, run.world_size, run.nnodes] == ["finished", 2, 2, 2]
    assert (summary["run"], set(summary["ranks"])) == (run.id, {"0", "1"})
    assert summary["steps"]["count"] == 40
    events = {event["kind"]: event for event in summary["events"]}
    assert events["resize"]["message"] == "Ray Train goes from 1 to 2 workers"
    assert events["restart"]["data"]["world_size_before"] == 1
    assert len(summary["session"]["nodes"]) == 2


@pytest.mark.long
@pytest.mark.usefixtures("callbacks_by_name")
def test_health_check_sees_each_attempt_from_the_controller(session: Session, tmp_path: Path) -> None:
    judging, once = Judging(tmp_path), FailureConfig(max_failures=1)
    config = {"folder": str(tmp_path)}
    trainer(
        train_for_a_while,
        tmp_path,
        "judged",
        train_loop_config=config,
        callbacks=[judging],
        failure_config=once,
    ).fit()
    looks = [json.loads(line) for line in judging.path.read_text().splitlines()]
    whole_looks = [look for look in looks if not look["doubt"]]
    assert {look["attempt"] for look in whole_looks} == {0, 1}
    assert {look["nodes"] for look in whole_looks} == {1}
    assert not any(look["decided"] for look in looks), "a dry run decides nothing"
    assert {place for look in looks for place in look if ":" in place} <= {"health: look: QueryError"}
    events = session.events(run_named(session, "judged").id)
    assert [event.message for event in events if event.message == "judged"] == ["judged"] * 2, (
        "one per attempt"
    )
