"""The callback for Ray Train without a cluster, and Ray Data's batches as `data`."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray.train")
pytest.importorskip("torch")

import ray.data.iterator as ray_iterator
from ray import cloudpickle
from ray.train.v2._internal.execution import callback as ray_callback
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller import state as states
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError
from sessions import Clock as WallClock
from sessions import Rank, Relay, aggregation, ask

from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.marks import FORWARD_BEGIN
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.launchers import ray_train, train_callback, train_confirm
from traceml_ray.launchers.train_callback import TraceMLTrainCallback
from traceml_ray.monitor.finish import OTHERS_S
from traceml_ray.ray import actors
from traceml_ray.ray.actors import ActorConfig
from traceml_ray.settings import SettingError, Settings
from traceml_ray.stages import DATA, FORWARD, N_STAGES, PREPARE
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

CONFIG = ActorConfig("s", Settings(session="s"))


@pytest.fixture(autouse=True)
def _a_driver_that_started_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_used", [])
    monkeypatch.setattr(train_callback, "_watched", {})


def sent(callback: Any) -> Any:
    """The callback as another process has it."""
    return pickle.loads(cloudpickle.dumps(callback))


def controller_context(run_id: str, *callbacks: Any) -> Any:
    return SimpleNamespace(run_id=run_id, run_config=SimpleNamespace(name="run", callbacks=list(callbacks)))


def worker(rank: int, world: int = 2, node: int = 0) -> Any:
    return SimpleNamespace(
        distributed_context=SimpleNamespace(world_rank=rank, world_size=world, node_rank=node),
        metadata=SimpleNamespace(node_id=f"id-{node}"),
    )


class Reports:
    """What a controller tells the aggregator about its run."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {}
        self.events: list[wire.Event] = []
        self.ended: list[str] = []
        self.ensured = 0
        self.errors: Counter[str] = Counter()

    def ensure(self) -> None:
        self.ensured += 1

    def report(self, info: dict[str, Any] | None = None, *events: wire.Event) -> None:
        self.info.update(info or {})
        self.events.extend(events)

    def end(self, status: str) -> bool:
        self.ended.append(status)
        return True


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> tuple[TraceMLTrainCallback, Reports]:
    """A callback as it is in a controller, at the beginning of a run."""
    reports = Reports()
    monkeypatch.setattr(train_callback, "RunReporter", lambda *_: reports)
    monkeypatch.setattr(train_callback, "_chosen", {})
    callback = sent(TraceMLTrainCallback())
    callback.after_controller_start(controller_context("r"))
    return callback, reports


def run(command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=True)


# -- where it is found ---------------------------------------------------------------------------


def test_callback_path_imports_neither_ray_train_nor_torch() -> None:
    code = (
        "import sys; from traceml_ray.launchers.ray_train import train_callback_path as path; print(path());"
        "print([name for name in ('torch', 'ray', 'ray.train') if name in sys.modules])"
    )
    done = run([sys.executable, "-c", code])
    assert done.stdout.split("\n")[:2] == ["traceml_ray.launchers.ray_train.TraceMLTrainCallback", "[]"]


def test_callback_is_absent_without_ray_train_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    assert ray_train.train_callback_path() is None
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    find = ray_train.importlib.util.find_spec
    only_ray = lambda name: find(name) if name == "ray" else None  # noqa: E731
    monkeypatch.setattr(ray_train.importlib.util, "find_spec", only_ray)
    assert ray_train.train_callback_path() is None


def test_callback_path_is_valid_even_where_ray_train_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.train.v2._internal.callbacks.env_callback import _initialize_env_callbacks

    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", str(ray_train.train_callback_path()))
    assert [type(callback) for callback in _initialize_env_callbacks()] == [TraceMLTrainCallback]
    monkeypatch.setitem(sys.modules, "traceml_ray.launchers.train_callback", None)
    (inert,) = _initialize_env_callbacks()
    assert not isinstance(inert, (WorkerCallback, WorkerGroupCallback, ControllerCallback))
    assert "Ray Train is not watched" in caplog.text
    assert sent(inert) is not None


def test_settings_default_to_those_of_the_session_of_this_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = ActorConfig("mine", Settings(session="mine", out="/kept", interval=0.5), everywhere=True)
    monkeypatch.setattr(train_callback, "current_config", lambda: started)
    for settings, session, out, interval in (
        ({}, "mine", "/kept", 0.5),
        ({"interval": 2}, "mine", "/kept", 2.0),
        ({"session": "other"}, "other", str(Path.cwd() / "traceml-sessions"), 0.5),
    ):
        made = msgspec.json.decode(sent(TraceMLTrainCallback(**settings))._config, type=ActorConfig)
        assert (made.session, made.settings.out, made.settings.interval) == (session, out, interval)
        assert made.everywhere
    with pytest.raises(SettingError, match="colour is not a setting"):
        TraceMLTrainCallback(colour="red")


def test_unusable_environment_does_not_make_fit_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRACEML_INTERVAL", "soon")
    assert not sent(TraceMLTrainCallback())._watching


# -- sent to where things are missing ------------------------------------------------------------


def test_callback_without_the_package_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "callback").write_bytes(cloudpickle.dumps([TraceMLTrainCallback(), TraceMLTrainCallback()]))
    code = (
        "import pickle, sys; sys.modules['traceml_ray'] = None;"
        "found = pickle.load(open('callback', 'rb'));"
        "[(c.after_init_train_context(), c.before_worker_shutdown()) for c in found];"
        "print(*(type(c).__name__ for c in found))"
    )
    done = run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.stdout.split() == ["WorkerCallback", "WorkerCallback"]
    assert done.stderr.count("not watching this process") == 1


def hooks() -> list[str]:
    """Every hook of Ray's that we have something to do in."""
    bases = [base for name, base in vars(ray_callback).items() if name.endswith("Callback")]
    named = {name for base in bases for name in dir(base) if not name.startswith("_")}
    return sorted(named & set(vars(TraceMLTrainCallback)))


def test_failing_hook_is_counted_and_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    callback = sent(TraceMLTrainCallback())
    callback._config = b"garbage"
    callback._run = object()  # nothing works on this one
    assert len(hooks()) >= 7
    for name in hooks():
        returned = getattr(callback, name)("too", "many", "arguments")
        assert returned == ({} if name == "before_init_train_context" else None)
    callback.after_controller_start(None)
    callback._watch()
    assert sum(callback._errors.values()) == len(hooks()) + 2
    assert len(caplog.records) == 1


def test_exit_of_a_library_in_a_hook_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def exits(*_: Any) -> None:
        raise SystemExit(7)

    callback = sent(TraceMLTrainCallback())
    monkeypatch.setattr(TraceMLTrainCallback, "_end", exits)
    callback.after_controller_finish(SimpleNamespace(error=None))
    assert sum(callback._errors.values()) == 1
    monkeypatch.setattr(train_callback, "current_config", exits)
    assert not sent(TraceMLTrainCallback())._watching


def test_callback_that_cannot_be_configured_is_sent_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(train_callback, "current_config", fails)
    callback = sent(TraceMLTrainCallback())
    assert not callback._watching
    assert callback.before_init_train_context("nonsense") == {}
    assert not callback._errors


# -- in the controller ---------------------------------------------------------------------------


def test_callbacks_given_twice_watch_once_and_the_explicit_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_callback, "RunReporter", lambda *_: Reports())
    monkeypatch.setattr(train_callback, "_chosen", {})
    named, given = TraceMLTrainCallback(), TraceMLTrainCallback(interval=0.3)
    context = controller_context("r", sent(given))
    first, second = sent(named), sent(given)
    for callback in (first, second):
        callback.after_controller_start(context)
    assert (first._run, sent(first)._watching) == (None, False)
    assert second._run is not None
    twice = [sent(TraceMLTrainCallback()) for _ in range(2)]
    for callback in twice:
        callback.after_controller_start(controller_context("r2"))
    assert [callback._watching for callback in twice] == [True, False]


def test_worker_group_is_an_attempt_and_a_replaced_worker_is_not(controller: Any) -> None:
    callback, reports = controller
    for attempt in (0, 1):
        callback.before_worker_group_start(None)
        callback.before_worker_group_start(None)  # the first try got no resources
        assert callback.before_init_train_context([worker(0), worker(1, node=1)]) == {}
        assert sent(callback)._attempt == attempt
    callback.before_init_train_context([worker(0)])
    assert (sent(callback)._attempt, sent(callback)._nnodes) == (1, 2)
    assert reports.ensured == 4
    assert reports.info == {
        "name": "run", "launcher": "ray_train", "world_size": 2, "nnodes": 2, "attempt": 1
    }  # fmt: skip


@pytest.mark.parametrize(("setting", "checked"), [("off", []), ("restart", [{"id-0", "id-1"}, {"id-0"}])])
def test_nodes_of_the_attempt_before_are_checked_once_before_a_new_one(
    controller: Any, setting: str, checked: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    callback, reports = controller
    config = ActorConfig("s", Settings(session="s", confirm=setting))  # type: ignore[arg-type]
    callback._config = msgspec.json.encode(config)
    asked: list[set[str]] = []

    def confirm(session: str, run: str, nodes: frozenset[str]) -> str:
        assert (session, run) == ("s", "r")
        asked.append({*nodes})
        return "check: node-1 is slow" if len(asked) == 1 else ""

    monkeypatch.setattr(train_confirm, "confirm", confirm)
    for workers in ([worker(0), worker(1, node=1)], [worker(0)], [worker(0)]):
        callback.before_worker_group_start(None)
        callback.before_worker_group_start(None)  # the first try got no resources
        callback.before_init_train_context(workers)
    assert asked == checked
    notes = [event.message for event in reports.events if event.kind == "note"]
    assert notes == ["check: node-1 is slow"] * bool(checked)


def test_run_that_goes_on_is_known_to_its_controller(controller: Any) -> None:
    callback, reports = controller
    run = train_callback.watched_run()
    assert run is not None
    assert (run.run_id, run.session, run.attempt()) == ("r", "default", 0)
    for _ in range(2):
        callback.before_worker_group_start(None)
        callback.before_init_train_context([worker(0), worker(1)])
    run.note("a note " * 1000)
    assert run.attempt() == 1
    assert [(event.kind, len(event.message)) for event in reports.events] == [("note", 2000)]
    train_callback._watched["other"] = run
    assert train_callback.watched_run() is None, "which of two runs is meant is not known"
    del train_callback._watched["other"]
    callback.after_controller_finish(SimpleNamespace(error=None))
    assert train_callback.watched_run() is None


def shutting_down(state: Any) -> list[Any]:
    """The state before a run's last one; an older Ray has none."""
    return [states.ShuttingDownState(state)] if hasattr(states, "ShuttingDownState") else []


def test_failures_and_resizes_are_reported_once_and_the_end_is_waited_for(controller: Any) -> None:
    callback, reports = controller
    callback.before_worker_group_start(None)
    callback.before_init_train_context([worker(0), worker(1)])
    running = states.RunningState()
    failed = WorkerGroupError("…", {1: ValueError("bad\nbatch"), 0: RuntimeError("gloo")})
    decision = SimpleNamespace(num_workers=1)
    scheduling = ControllerError(TimeoutError("no room"))
    for state in (
        running,
        states.ResizingState(decision),
        states.RestartingState(failed),
        states.ReschedulingState(scheduling),
        running,
        *shutting_down(states.ErroredState(failed)),
        states.ErroredState(failed),
    ):
        callback.after_controller_state_update(running, state)
    reported = [(event.kind, event.message, event.data.get("ranks")) for event in reports.events]
    assert reported == [
        ("resize", "Ray Train goes from 2 to 1 workers", None),
        ("worker_failure", "rank 0: RuntimeError: gloo; rank 1: ValueError: bad", "0,1"),
        ("failure", "ControllerError: Training failed due to controller error:", None),
        ("worker_failure", "rank 0: RuntimeError: gloo; rank 1: ValueError: bad", "0,1"),
    ]
    assert reports.ended == []  # its workers may still be there
    callback.after_controller_finish(SimpleNamespace(error=failed))
    assert reports.ended == ["failed"]
    assert len(reports.events) == 4


def test_successful_run_is_finished_and_an_aborted_one_stopped(controller: Any) -> None:
    callback, reports = controller
    running = states.RunningState()
    for state in (*shutting_down(states.FinishedState()), states.FinishedState()):
        callback.after_controller_state_update(running, state)
    callback.after_controller_finish(SimpleNamespace(error=None))
    callback.after_controller_state_update(running, states.AbortedState())
    assert (reports.ended, reports.events) == (["finished", "stopped"], [])


def test_swallowed_errors_are_reported_at_the_end(controller: Any) -> None:
    callback, reports = controller
    callback.before_init_train_context("nonsense")
    callback.after_controller_finish(SimpleNamespace(error=None))
    (event,) = reports.events
    assert "before_init_train_context: AttributeError (1)" in event.message


# -- what the aggregator is told -----------------------------------------------------------------


class Aggregator:
    """
    A real one that has heard of one rank, and is asked as an actor is, every half second of its clock. It
    hears that rank's last word when it is asked for the time `last`; the first time, it may not answer.
    """

    def __init__(self, folder: Path, last: int = 1, answers: bool = True) -> None:
        self._clock = WallClock()
        self.core = aggregation(folder, self._clock)
        self.got: list[wire.RunEnd] = []
        self.finish = SimpleNamespace(remote=self._take)
        self._relay, self._rank = Relay(), Rank(0, 1)
        self._last, self._answers = last, answers
        self.core.ingest(self._relay.message(self._rank.batch(3)))

    def _take(self, data: bytes) -> bytes:
        """Answer as the actor does, whose other thread writes what is due."""
        self.got.append(codec.decode(data, wire.RunEnd))
        self._clock.tick(0.5)
        if len(self.got) == self._last:
            self.core.ingest(self._relay.message(self._rank.batch(0, final=True)))
        if len(self.got) == 1 and not self._answers:
            raise RuntimeError("gone")
        answer = self.core.end(data)
        self.core.endings.write_due()
        return answer


def reporter(monkeypatch: pytest.MonkeyPatch, aggregator: Aggregator | None) -> train_callback.RunReporter:
    monkeypatch.setattr(train_callback, "find_aggregator", lambda _: aggregator)
    monkeypatch.setattr(train_callback.ray, "get", lambda ref, **_: ref)
    patience = 240 if aggregator else 0.3
    for name in ("STARTING_S", "ANSWER_S", "WORD_S"):
        monkeypatch.setattr(train_callback, name, patience)
    for name in ("RETRY_S", "ASK_S"):
        monkeypatch.setattr(train_callback, name, 0.001)
    return train_callback.RunReporter(CONFIG, "job")


def event(message: str) -> wire.Event:
    return wire.Event("note", 1, message=message)


def test_undelivered_events_go_with_the_next_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    aggregator = Aggregator(tmp_path, answers=False)
    made = reporter(monkeypatch, aggregator)
    made.report({"name": "run"}, event("a"))
    assert made.end("finished")
    assert {(run.job_id, run.info["name"]) for run in aggregator.got} == {("job", "run")}
    assert [e.message for run in aggregator.got[1:] for e in run.events] == ["a"]
    assert aggregator.got[-1].status == "finished"
    (run,) = ask(aggregator.core, "runs")
    assert (run.name, run.status, run.ledger.stored) == ("run", "finished", 3)
    assert [event.message for event in ask(aggregator.core, "events")] == ["a"]
    assert made.errors == {"run: RuntimeError": 1}


def test_end_waits_for_delivering_ranks_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    aggregator = Aggregator(tmp_path / "waits", last=3)
    assert reporter(monkeypatch, aggregator).end("finished")
    assert len(aggregator.got) == 4  # the last one is asked when all is written
    aggregator = Aggregator(tmp_path / "hears nothing", last=1 << 30)
    assert reporter(monkeypatch, aggregator).end("failed")
    assert OTHERS_S / 0.5 < len(aggregator.got) < OTHERS_S / 0.5 + 3
    assert [run.status for run in ask(aggregator.core, "runs")] == ["failed"]


@pytest.mark.parametrize("events", [[event("a")], []], ids=["with an event", "without"])
def test_end_without_an_aggregator_reports_that_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, events: list[wire.Event]
) -> None:
    made = reporter(monkeypatch, None)
    made.report(None, *events)
    assert not made.end("finished")
    made._thread.join(240)  # it would report to the aggregator of the next test
    assert not made._thread.is_alive()


def test_run_whose_files_cannot_be_written_does_not_end_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    aggregator = Aggregator(tmp_path)
    (tmp_path / "summary.json").mkdir()
    assert not reporter(monkeypatch, aggregator).end("finished")
    assert [*aggregator.core.errors] == ["finish: IsADirectoryError"]


# -- Ray Data ------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


class Shard(ray_iterator.DataIterator):
    """Batches that take 50 ns each."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count, self.closed = clock, count, 0

    def _iter_batches(self, **_: Any) -> Any:
        def batches() -> Iterator[int]:
            try:
                for number in range(self.count):
                    self.clock.now += 50
                    yield number
            finally:
                self.closed += 1

        return ray_iterator._IterableFromIterator(batches)

    def _to_ref_bundle_iterator(self) -> Any: ...
    def stats(self) -> str:
        return ""

    def schema(self) -> Any: ...
    def get_context(self) -> Any: ...
    def materialize(self) -> Any: ...


class Watched:
    """One process with our patches in, on a clock of its own."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ring = StepRing(64)
        self.recorder = Recorder(self.ring, self.clock)
        self.patches = Instrumentation(self.recorder)

    def train(self) -> None:
        """The rest of a step: 10 ns of preparing, 20 of forward and 30 of backward."""
        self.clock.now += 10
        self.recorder.forward_begin(FORWARD_BEGIN)
        self.clock.now += 20
        self.recorder.backward_begin()
        self.clock.now += 30
        self.recorder.backward_end(True)
        self.recorder.optimizer_begin()
        self.recorder.optimizer_end(True)

    def rows(self) -> list[list[int]]:
        self.recorder.replay()
        _, _, _, rows = self.ring.drain(64)
        values = memoryview(rows).cast("q").tolist()
        return [values[begin : begin + N_STAGES] for begin in range(0, len(values), N_STAGES)]


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    made.patches.install()
    yield made
    made.patches.remove()


@pytest.mark.parametrize("method", ["iter_batches", "iter_torch_batches"])
def test_wait_for_a_batch_of_ray_data_is_data(watched: Watched, method: str) -> None:
    shard = Shard(watched.clock, 3)
    for _ in range(2):  # epochs
        for _ in getattr(shard, method)(batch_size=2):
            watched.train()
    rows = watched.rows()
    assert len(rows) == 6
    assert {(row[DATA], row[PREPARE], row[FORWARD]) for row in rows} == {(50, 10, 20)}
    assert shard.closed == 2
    assert not watched.patches.errors
    assert not watched.patches.missing


def test_watched_batches_can_be_iterated_again_and_left_early(watched: Watched) -> None:
    shard = Shard(watched.clock, 3)
    batches = shard.iter_batches()
    assert list(batches) == list(batches) == [0, 1, 2]
    assert callable(batches.iterator_gen)
    for _ in batches:
        break
    assert shard.closed == 3
    iterator = iter(batches)
    assert (next(iterator), next(iterator)) == (0, 1)
    iterator.close()
    assert shard.closed == 4
    assert list(iterator) == []
    with pytest.raises(AttributeError, match="nothing"):
        batches.nothing  # noqa: B018


def test_batches_of_batches_count_once(watched: Watched) -> None:
    inner, outer = Shard(watched.clock, 2), Shard(watched.clock, 1)
    outer._iter_batches = lambda **_: inner.iter_batches()  # type: ignore[method-assign]
    for _ in outer.iter_torch_batches():
        watched.train()
    assert [row[DATA] for row in watched.rows()] == [50, 50]


def test_model_in_training_can_be_sent_to_a_process_without_the_package(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def sent_away() -> bytes:
        class Net(torch.nn.Linear):
            def __call__(self, x: Any) -> Any:
                return super().__call__(x) + 1

        class Outer(torch.nn.Sequential): ...

        net = Outer(Net(2, 2))
        watched.patches.roots.add(net)
        watched.patches.roots._mark_class(Net)
        torch.nn.init.zeros_(net[0].weight)
        torch.nn.init.zeros_(net[0].bias)
        stored = cloudpickle.dumps(net)
        watched.patches.remove()
        return stored

    stored = sent_away()
    gc.collect()  # else the class is found again that is still here
    for name in [name for name in sys.modules if name.partition(".")[0] == "traceml_ray"]:
        monkeypatch.setitem(sys.modules, name, None)
    model = pickle.loads(stored)
    assert "__call__" in vars(type(model)) and model(torch.ones(2)).tolist() == [1, 1]


def test_ray_data_is_unpatched_on_removal() -> None:
    before = ray_iterator.DataIterator.iter_batches
    made = Watched()
    made.patches.install()
    assert ray_iterator.DataIterator.iter_batches is not before
    made.patches.remove()
    assert ray_iterator.DataIterator.iter_batches is before


def test_ray_data_that_does_not_fit_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_iterator, "DataIterator", object)
    made = Watched()
    made.patches.install()
    made.patches.remove()
    assert list(made.patches.missing) == ["ray_data"]
