"""
Figures in the run that a script has open in its tracker: what is written, and that a tracker that fails,
hangs or ends touches nothing else. W&B, MLflow, Comet and Aim are stand-ins of the same shape here;
`integration/test_trackers.py` and `integration/test_comet_and_aim.py` use the packages themselves.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from played import Played, session_of
from sessions import SECOND

from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.errors import Errors
from traceml_ray.sinks import trackers as sink
from traceml_ray.sinks.report import Report, report_of
from traceml_ray.sinks.report_in_tracker import attach
from traceml_ray.store import query
from traceml_ray.text import without_login
from traceml_ray.trackers.aim_run import AimRun
from traceml_ray.trackers.comet_experiment import CometExperiment
from traceml_ray.trackers.mlflow_run import MlflowRun
from traceml_ray.trackers.run_writer import RunWriter, TrackerLog
from traceml_ray.trackers.summary_writer import SummaryWriter
from traceml_ray.trackers.tracker import TrackerPlace
from traceml_ray.trackers.wandb_run import WandbRun
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

VALUES = {"step_ms": 21.5, "exposed_ms/data": 12.0}
STRAGGLER = wire.Figures(
    1, 40, VALUES, "straggler", "straggler 5 data", "warning", "straggler: rank 5 in data", "Rank 5 is late."
)
HEALTHY = wire.Figures(2, 60, VALUES, "healthy", "healthy", "info", "healthy", "All ranks are even.")
DEADLINE_S = 240.0


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.005)


class Run:
    """A run of a tracker."""

    def __init__(self, name: str = "one") -> None:
        self.name = name
        self.written: list[tuple[wire.Figures, bool]] = []


class Tracked:
    """A tracker: it hangs until it is let, and raises as often as told."""

    name = "place"

    def __init__(self, run: Run | None = None, *, hangs: bool = False, fails: int = 0) -> None:
        self.run, self.fails = run, fails
        self.reached, self.let = threading.Semaphore(0), threading.Event()
        if not hangs:
            self.let.set()

    def open_run(self) -> Run | None:
        return self.run

    def place(self, run: Run) -> TrackerPlace:
        return TrackerPlace(run.name, f"http://place/{run.name}", "http://place")

    def write(self, run: Run, figures: wire.Figures, changed: bool) -> None:
        self.reached.release()
        assert self.let.wait(DEADLINE_S)
        if self.fails:
            self.fails -= 1
            raise ConnectionRefusedError("connection refused, api_key=sk-1234567890abcdef1234")
        run.written.append((figures, changed))


def state_of(writer: RunWriter) -> wire.TrackerState:
    state = writer.state()
    assert state is not None
    return state


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name == "traceml-place"}


@pytest.fixture
def errors() -> Errors:
    return Errors()


# -- what fails -------------------------------------------------------------------------------------


def test_without_an_open_run_nothing_is_started_and_a_run_opened_later_is_written_to(errors: Errors) -> None:
    place = Tracked()
    writer = RunWriter(place, errors)
    writer.offer(STRAGGLER)
    assert writer.state() is None
    assert not threads()
    place.run = run = Run()
    writer.offer(HEALTHY)
    wait_for(lambda: state_of(writer).sent == 1)
    assert run.written == [(HEALTHY, True)]
    writer.stop()


def test_a_tracker_that_raises_is_counted_and_its_secret_is_not_shown(errors: Errors) -> None:
    place = Tracked(Run(), fails=1)
    writer = RunWriter(place, errors)
    writer.offer(STRAGGLER)
    wait_for(lambda: state_of(writer).failed == 1)
    assert "connection refused" in state_of(writer).error
    assert "sk-1234567890abcdef1234" not in state_of(writer).error
    assert errors == {"tracker place: ConnectionRefusedError": 1}
    writer.offer(STRAGGLER)
    wait_for(lambda: state_of(writer).sent == 1)
    assert state_of(writer).error == ""
    assert place.run is not None
    assert place.run.written == [(STRAGGLER, True)], "it has not got this verdict before"
    writer.stop()


def test_a_tracker_that_hangs_holds_up_nothing_and_gets_the_newest(errors: Errors) -> None:
    hanging, other = Tracked(Run(), hangs=True), Tracked(Run("two"))
    writers = [RunWriter(place, errors) for place in (hanging, other)]
    for writer in writers:
        writer.offer(STRAGGLER)
    assert hanging.reached.acquire(timeout=DEADLINE_S)
    assert other.reached.acquire(timeout=DEADLINE_S)
    newest = msgspec.structs.replace(HEALTHY, step=99)
    for figures in (STRAGGLER, HEALTHY, newest):
        for writer in writers:
            writer.offer(figures)
        wait_for(lambda: other.reached.acquire(blocking=False))
    assert state_of(writers[0]).dropped == 2
    hanging.let.set()
    wait_for(lambda: state_of(writers[0]).sent == 2)
    assert hanging.run is not None
    assert hanging.run.written == [(STRAGGLER, True), (newest, True)]
    for writer in writers:
        writer.stop()


def test_a_tracker_that_hangs_for_ever_is_not_waited_for(errors: Errors) -> None:
    place = Tracked(Run(), hangs=True)
    writer = RunWriter(place, errors)
    writer.offer(STRAGGLER)
    assert place.reached.acquire(timeout=DEADLINE_S)
    writer.offer(HEALTHY)
    writer.stop()
    assert state_of(writer).sent == 0
    place.let.set()
    wait_for(lambda: not threads())
    assert place.run is not None
    assert place.run.written == [(STRAGGLER, True)], "after the stop nothing more is begun"


def test_a_run_that_ends_early_gets_no_more_and_the_next_run_is_told_the_verdict(errors: Errors) -> None:
    first, second = Run("one"), Run("two")
    place = Tracked(first)
    writer = RunWriter(place, errors)
    writer.offer(STRAGGLER)
    wait_for(lambda: state_of(writer).sent == 1)
    place.run = None
    writer.offer(STRAGGLER)
    place.run = second
    writer.offer(STRAGGLER)
    wait_for(lambda: bool(second.written))
    assert first.written == [(STRAGGLER, True)]
    assert second.written[0] == (STRAGGLER, True)
    wait_for(lambda: state_of(writer).run == "two")
    assert not errors
    writer.stop()


def test_a_child_of_a_rank_that_writes_has_no_thread_and_ends(errors: Errors) -> None:
    place = Tracked(Run(), hangs=True)
    writer = RunWriter(place, errors)
    writer.offer(STRAGGLER)
    assert place.reached.acquire(timeout=DEADLINE_S)
    child = os.fork()
    if child == 0:
        os._exit(len(threads()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.stop()
    place.let.set()


def test_the_same_figures_are_used_once_and_news_are_told_once(
    errors: Errors, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = wandb_of(monkeypatch)
    log = TrackerLog("auto", errors)
    log.offer(STRAGGLER)
    wait_for(lambda: any(state.sent for state in log.news()))
    log.offer(STRAGGLER)
    log.offer(msgspec.structs.replace(STRAGGLER, made_ns=0))
    assert log.news() == []
    assert len(run.rows) == 1
    log.stop()


def test_only_named_trackers_are_used(errors: Errors, monkeypatch: pytest.MonkeyPatch) -> None:
    run = wandb_of(monkeypatch)
    for names in (None, "mlflow", "tensorboard,mlflow"):
        log = TrackerLog(names, errors)
        log.offer(STRAGGLER)
        assert log.news() == []
    assert run.rows == []


HANGS = """
import os, sys, threading, types
from traceml_ray.errors import Errors
from traceml_ray.trackers.run_writer import TrackerLog
from traceml_ray.wire.messages import Figures

reached = threading.Event()

class Run:
    disabled = offline = False
    path = url = "x"
    settings = types.SimpleNamespace(base_url="x")
    _init_pid = os.getpid()
    def define_metric(self, *_, **__):
        reached.set()
        threading.Event().wait()

sys.modules["wandb"] = types.SimpleNamespace(run=Run())
log = TrackerLog("auto", Errors())
log.offer(Figures(1, 40))
assert reached.wait(240)
log.stop()
sys.exit(7)
"""


def test_a_script_ends_with_its_exit_code_while_a_tracker_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (7, b"")


# -- what is written --------------------------------------------------------------------------------


class WandbStandIn:
    """What of `wandb.Run` is used."""

    disabled, offline, url, path = False, False, "https://user:pass@wandb.example/e/p/runs/1", "e/p/1"
    settings = SimpleNamespace(base_url="https://api.wandb.example")

    def __init__(self) -> None:
        self._init_pid = os.getpid()
        self.rows: list[dict[str, Any]] = []
        self.alerts: list[dict[str, str]] = []
        self.metrics: list[tuple[str, dict[str, Any]]] = []

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics.append((name, options))

    def log(self, row: dict[str, Any], *, commit: bool) -> None:
        assert not commit
        self.rows.append(row)

    def alert(self, **what: str) -> None:
        self.alerts.append(what)


def wandb_of(monkeypatch: pytest.MonkeyPatch) -> WandbStandIn:
    module: Any = ModuleType("wandb")
    module.run = WandbStandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    run: WandbStandIn = module.run
    return run


def test_wandb_gets_an_axis_of_its_own_the_words_and_alerts(monkeypatch: pytest.MonkeyPatch) -> None:
    run, wandb = wandb_of(monkeypatch), WandbRun()
    assert wandb.open_run() is run
    wandb.write(run, STRAGGLER, changed=True)
    wandb.write(run, STRAGGLER, changed=False)
    wandb.write(run, HEALTHY, changed=True)
    assert run.metrics == [
        ("traceml/step", {"hidden": True}),
        ("traceml/*", {"step_metric": "traceml/step"}),
    ]
    assert run.rows[0] == {
        "traceml/step": 40,
        "traceml/step_ms": 21.5,
        "traceml/exposed_ms/data": 12.0,
        "traceml/verdict": "straggler",
        "traceml/why": "Rank 5 is late.",
    }
    assert run.alerts == [{"title": "straggler: rank 5 in data", "text": "Rank 5 is late.", "level": "WARN"}]
    assert wandb.place(run) == TrackerPlace(
        "e/p/1", "https://wandb.example/e/p/runs/1", "https://api.wandb.example"
    )


def test_a_run_of_the_parent_process_and_a_disabled_run_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = wandb_of(monkeypatch)
    run._init_pid = os.getppid()
    assert WandbRun().open_run() is None
    run._init_pid = os.getpid()
    monkeypatch.setattr(run, "disabled", True)
    assert WandbRun().open_run() is None


class MlflowStandIn:
    """What of the package `mlflow` is used. Active runs are kept by thread, as MLflow keeps them."""

    @staticmethod
    def Metric(*values: Any) -> tuple[Any, ...]:  # noqa: N802
        return values

    RunTag = Metric

    def __init__(self) -> None:
        self.stacks: dict[int, list[Any]] = {}
        self.batches: list[tuple[str, list[Any], list[Any]]] = []
        self.files: list[tuple[str, str, str]] = []
        self.tracking_uri = "https://user:pass@mlflow.example/path"

    def get_tracking_uri(self) -> str:
        return self.tracking_uri

    def get_all_thread_values(self) -> dict[int, list[Any]]:
        return dict(self.stacks)

    def MlflowClient(self, uri: str) -> MlflowStandIn:  # noqa: N802
        assert uri == self.tracking_uri
        return self

    def log_batch(self, run: str, metrics: list[Any], *, tags: list[Any]) -> None:
        self.batches.append((run, metrics, tags))

    def log_artifact(self, run: str, path: str, folder: str) -> None:
        self.files.append((run, path, folder))

    def start(self, thread: threading.Thread, *names: str) -> None:
        assert thread.ident is not None
        self.stacks[thread.ident] = [SimpleNamespace(info=SimpleNamespace(run_id=name)) for name in names]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MlflowStandIn:
    stand_in: Any = MlflowStandIn()
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    monkeypatch.setitem(sys.modules, "mlflow.entities", stand_in)
    fluent: Any = SimpleNamespace(_active_run_stack=stand_in)
    monkeypatch.setitem(sys.modules, "mlflow.tracking.fluent", fluent)
    made: MlflowStandIn = stand_in
    return made


def test_mlflow_gets_metrics_with_the_step_in_the_active_run_of_the_main_thread(
    mlflow: MlflowStandIn,
) -> None:
    adapter = MlflowRun()
    assert adapter.open_run() is None
    mlflow.start(threading.main_thread(), "outer", "inner")
    run = adapter.open_run()
    assert run is not None
    adapter.write(run, STRAGGLER, changed=True)
    adapter.write(run, HEALTHY, changed=False)
    (name, metrics, tags), (_, _, no_tags) = mlflow.batches
    assert (name, no_tags) == ("inner", [])
    assert [(key, value, step) for key, value, _, step in metrics] == [
        ("traceml/step_ms", 21.5, 40),
        ("traceml/exposed_ms/data", 12.0, 40),
    ]
    assert tags == [("traceml/verdict", "straggler"), ("traceml/why", "Rank 5 is late.")]
    assert adapter.place(run) == TrackerPlace(
        "inner", "run inner at https://mlflow.example/path", "https://mlflow.example/path"
    )


def test_a_run_that_another_thread_has_opened_is_used_if_the_main_thread_has_none(
    mlflow: MlflowStandIn,
) -> None:
    adapter = MlflowRun()
    let = threading.Event()
    other = threading.Thread(target=let.wait)
    other.start()
    mlflow.start(other, "trained in a thread")
    run = adapter.open_run()
    assert run is not None
    assert run.run_id == "trained in a thread"
    mlflow.start(threading.main_thread(), "main")
    run = adapter.open_run()
    assert run is not None
    assert run.run_id == "main"
    let.set()
    other.join()


def test_the_run_of_lightnings_logger_is_used_with_its_own_client(
    mlflow: MlflowStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MLFlowLogger:
        def __init__(self) -> None:
            self._run_id: str | None = None
            self._mlflow_client = mlflow

    name = "lightning.pytorch.loggers.mlflow"
    module: Any = SimpleNamespace(MLFlowLogger=MLFlowLogger)
    monkeypatch.setitem(sys.modules, name, module)
    adapter, patcher = MlflowRun(), Patcher(debug=True)
    {module: patch for module, _, patch in adapter.patches()}[name](patcher)
    logger = module.MLFlowLogger()
    patcher.restore()
    assert adapter.open_run() is None, "Lightning opens its run with the first use"
    logger._run_id = "of Lightning"
    run = adapter.open_run()
    assert run is not None
    adapter.write(run, STRAGGLER, changed=False)
    assert mlflow.batches[0][0] == "of Lightning"
    del logger
    assert adapter.open_run() is None


@pytest.mark.parametrize("module", ["tensorboardX.writer", "torch.utils.tensorboard.writer"])
def test_tensorboard_gets_scalars_and_the_verdict_as_text(module: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard" if module.startswith("torch") else "tensorboardX")
    writers, patcher = importlib.import_module(module), Patcher(debug=True)
    adapter = SummaryWriter()
    for name, _, patch in adapter.patches():
        if name == module:
            patch(patcher)
    try:
        first, second = (writers.SummaryWriter(str(tmp_path / name)) for name in ("first", "second"))
    finally:
        patcher.restore()
    run = adapter.open_run()
    assert run is not None
    assert adapter.place(run) == TrackerPlace("", str(tmp_path / "first"), "")
    first.add_scalar("loss", 1.5, 7)
    adapter.write(run, STRAGGLER, changed=True)
    first.close()
    assert adapter.open_run() is not None, "the second is still open"
    second.close()
    assert adapter.open_run() is None
    assert len([*(tmp_path / "first").iterdir()]) == 1, "no other file was opened"
    events = events_of(tmp_path / "first")
    assert ("loss", 7) in events
    assert {("traceml/step_ms", 40), ("traceml/exposed_ms/data", 40)} <= set(events)
    assert ("traceml/verdict/text_summary", 40) in events


class CometStandIn:
    """What of `comet_ml.Experiment` is used. A step, or a context, becomes that of the experiment."""

    url = "https://user:pass@comet.example/team/project/key?token=x"

    def __init__(self) -> None:
        self.alive, self.let = True, threading.Event()
        self.streamer = threading.Thread(target=self.let.wait)
        self.streamer.start()
        self.curr_step = 7
        self.context = "train"
        self.metrics: list[tuple[str, float, int]] = []
        self.others: dict[str, str] = {}

    def get_key(self) -> str:
        return "key"

    def log_metric(
        self, name: str, value: float, step: int | None = None, include_context: bool = True
    ) -> None:
        self.curr_step = self.curr_step if step is None else step
        self.metrics.append((self._named(name, include_context), value, self.curr_step))

    def _log_other(self, name: str, text: str, *, include_context: bool) -> None:
        self.others[self._named(name, include_context)] = text

    def _named(self, name: str, include_context: bool) -> str:
        return f"{self.context}_{name}" if include_context else name


@pytest.fixture
def comet(monkeypatch: pytest.MonkeyPatch) -> Iterator[CometStandIn]:
    assert CometExperiment().open_run() is None, "the script has not imported it"
    experiment = CometStandIn()
    module: Any = SimpleNamespace(get_global_experiment=lambda: experiment)
    monkeypatch.setitem(sys.modules, "comet_ml.config", module)
    yield experiment
    experiment.let.set()


def test_comet_gets_metrics_and_its_step_and_context_stay(comet: CometStandIn) -> None:
    adapter = CometExperiment()
    assert adapter.open_run() is comet
    adapter.write(comet, STRAGGLER, changed=True)
    adapter.write(comet, HEALTHY, changed=False)
    assert comet.metrics[:3] == [
        ("traceml/step", 40, 7),
        ("traceml/step_ms", 21.5, 7),
        ("traceml/exposed_ms/data", 12.0, 7),
    ]
    assert comet.metrics[3] == ("traceml/step", 60, 7)
    assert comet.others == {"traceml/verdict": "straggler", "traceml/why": "Rank 5 is late."}
    assert adapter.place(comet) == TrackerPlace(
        "key", "https://comet.example/team/project/key", "https://comet.example"
    )


def test_an_offline_experiment_has_a_folder_and_no_page(
    comet: CometStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comet, "url", None)
    monkeypatch.setattr(comet, "offline_directory", "/data/comet", raising=False)
    assert CometExperiment().place(comet) == TrackerPlace("", "/data/comet (offline)", "")


def test_an_experiment_that_has_ended_or_is_of_the_parent_process_is_left_alone(comet: CometStandIn) -> None:
    adapter = CometExperiment()
    comet.alive = False
    assert adapter.open_run() is None
    comet.alive = True
    assert adapter.open_run() is comet
    child = os.fork()
    if child == 0:
        os._exit(adapter.open_run() is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a forked child does not have its thread"


def test_comet_gets_the_report_by_the_key_of_the_experiment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[Any, ...]] = []

    class APIExperiment:
        def __init__(self, *, previous_experiment: str) -> None:
            asked.append((previous_experiment,))

        def log_asset(self, path: str, *, name: str) -> None:
            asked.append((path, name))

        def log_other(self, name: str, text: str) -> None:
            asked.append((name, text))

        def log_metrics(self, values: dict[str, float]) -> None:
            asked.append((values,))

    module: Any = SimpleNamespace(APIExperiment=APIExperiment)
    module.api = module
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    monkeypatch.setitem(sys.modules, "comet_ml.api", module)
    attach(wire.TrackerState("comet", "", "/data/comet (offline)", ""), tmp_path / "report.html", STRAGGLER)
    assert asked == []
    state = wire.TrackerState(
        "comet", "key", "https://comet.example/team/project/key", "https://comet.example"
    )
    attach(state, tmp_path / "report.html", STRAGGLER)
    assert asked == [
        ("key",),
        (str(tmp_path / "report.html"), "traceml/report.html"),
        ("traceml/verdict", "straggler"),
        ("traceml/why", "Rank 5 is late."),
        ({"traceml/step": 40, "traceml/step_ms": 21.5, "traceml/exposed_ms/data": 12.0},),
    ]


class AimStandIn:
    """What of `aim.Run` is used."""

    def __init__(self, name: str, *, read_only: bool = False) -> None:
        self.hash, self.read_only = name, read_only
        self.repo = SimpleNamespace(path="aim://user:pass@aim.example:53800")
        self._resources: object | None = object()
        self.series: list[tuple[Any, str, int, dict[str, Any]]] = []
        self.parameters: dict[str, Any] = {}

    def track(self, value: Any, *, name: str, step: int, context: dict[str, Any]) -> None:
        self.series.append((value, name, step, context))

    def __setitem__(self, name: str, value: Any) -> None:
        self.parameters[name] = value

    def close(self) -> None:
        self._resources = None


@pytest.fixture
def aim(monkeypatch: pytest.MonkeyPatch) -> Iterator[AimRun]:
    module: Any = SimpleNamespace(Run=AimStandIn, Text=lambda text: ("text", text))
    monkeypatch.setitem(sys.modules, "aim", module)
    monkeypatch.setitem(sys.modules, "aim.sdk.run", module)
    adapter, patcher = AimRun(), Patcher(debug=True)
    ((name, _, patch),) = adapter.patches()
    assert name == "aim.sdk.run"
    patch(patcher)
    yield adapter
    patcher.restore()


def test_aim_gets_series_with_a_context_and_the_verdict_as_parameter_and_text(aim: AimRun) -> None:
    run = AimStandIn("1a2b")
    assert aim.open_run() is run
    aim.write(run, STRAGGLER, changed=True)
    aim.write(run, HEALTHY, changed=False)
    context = {"traceml": True}
    assert run.series[:3] == [
        (21.5, "traceml/step_ms", 40, context),
        (12.0, "traceml/exposed_ms/data", 40, context),
        (("text", "straggler: rank 5 in data: Rank 5 is late."), "traceml/verdict", 40, context),
    ]
    assert [name for _, name, step, _ in run.series if step == 60] == [
        "traceml/step_ms",
        "traceml/exposed_ms/data",
    ]
    assert run.parameters == {"traceml": {"verdict": "straggler", "why": "Rank 5 is late."}}
    assert aim.place(run) == TrackerPlace("", "run 1a2b at aim://aim.example:53800", "")


def test_the_first_run_of_aim_that_is_open_for_writing_is_used(aim: AimRun) -> None:
    reader, first, second = (
        AimStandIn(name, read_only=name == "reader") for name in ("reader", "first", "second")
    )
    assert aim.open_run() is first
    first.close()
    assert aim.open_run() is second
    del second
    assert aim.open_run() is None
    assert reader.read_only


def events_of(folder: Path) -> list[tuple[str, int]]:
    """Return (tag, step) of the summaries in the event files of a folder."""
    from tensorboardX.proto.event_pb2 import Event

    summaries = []
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            summaries += [(value.tag, event.step) for value in event.summary.value]
            data = data[16 + size :]
    return summaries


# -- the way ----------------------------------------------------------------------------------------


def report(played: Played) -> Report:
    session = session_of(played)
    return report_of(session)


def test_figures_are_those_that_the_pages_show(played: Played) -> None:
    figures = sink.figures_of(report(played))
    assert figures is not None
    assert (figures.label, figures.severity) == ("straggler", "warning")
    assert figures.headline == "straggler: rank 5 (host-1) in data"
    assert figures.values["late_rank"] == figures.values["worst_rank"] == 5
    assert 10 < figures.values["cost_pct"] < 60
    assert figures.values["worst_busy_ms"] > 20
    stages = {name for name in figures.values if name.startswith("exposed_ms/")}
    assert "exposed_ms/data" in stages
    assert figures.values["exposed_ms/data"] > 10
    assert figures.values["step_p50_ms"] <= figures.values["step_p95_ms"]


def test_figures_reach_rank_0_alone_and_what_it_says_comes_back(played: Played) -> None:
    session = session_of(played)
    trackers = sink.Trackers(session, "auto")
    assert trackers.state().where == "no run is open in rank 0 (auto)"
    trackers.offer(report_of(session))
    run = session.newest.id if session.newest else ""
    wait_for(lambda: run in played.aggregator._trackers.figures)
    (figures,) = codec.decode(played.aggregator.ingest(b""), wire.RelayReply).figures.values()
    assert figures.label == "straggler"
    reported = wire.TrackerState(
        "wandb", "e/p/1", "https://wandb/1", "https://api", 3, 1, 2, "TimeoutError: "
    )
    played.aggregator.ingest(played.relays[0].message(played.ranks[0].batch(trackers=[reported])))
    trackers.offer(report_of(session))
    trackers.close(time.monotonic() + DEADLINE_S)
    state = trackers.state()
    assert (state.sent, state.failed, state.dropped) == (3, 1, 2)
    assert (state.where, state.error) == ("wandb: https://wandb/1", "wandb: TimeoutError: ")


def test_a_new_verdict_goes_at_once_and_the_rest_every_ten_seconds(played: Played) -> None:
    asked: list[wire.Figures] = []

    def reply(message: bytes) -> bytes:
        (request,) = msgspec.msgpack.decode(message, type=query.Asked).requests
        asked.append(msgspec.msgpack.decode(request, type=query.PassFigures).figures)
        return played.source.reply(message)

    passer, first = sink._Passer(reply, played.folder), report(played)
    for seconds in (0, 2, 9, 10, 12):
        passer.send(msgspec.structs.replace(first, made_ns=first.made_ns + seconds * SECOND))
    changed = msgspec.structs.replace(first.verdict, label="healthy", rank=None, stage=None, stages=[])
    passer.send(msgspec.structs.replace(first, made_ns=first.made_ns + 13 * SECOND, verdict=changed))
    assert [(figures.made_ns - first.made_ns) // SECOND for figures in asked] == [0, 0, 0, 10, 10, 13]


def test_the_report_is_attached_to_the_ended_run_with_the_password_of_this_machine(
    mlflow: MlflowStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.tracking_uri)
    state = wire.TrackerState("mlflow", "inner", "", "https://mlflow.example/path")
    attach(state, tmp_path / "report.html", STRAGGLER)
    assert mlflow.files == [("inner", str(tmp_path / "report.html"), "traceml")]
    assert mlflow.batches[0][0] == "inner"


def test_no_store_is_made_where_the_ranks_store_is_not(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "mlruns"
    for uri in (f"file://{elsewhere}", f"sqlite:///{elsewhere}", str(elsewhere)):
        with pytest.raises(FileNotFoundError, match="is not on this machine"):
            attach(wire.TrackerState("mlflow", "1", "", uri), tmp_path / "report.html", STRAGGLER)
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://user:pass@host:5000/path?token=x#y", "https://host:5000/path"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("/data/mlruns", "/data/mlruns"),
        ("databricks", "databricks"),
    ],
)
def test_passwords_do_not_leave_the_rank(uri: str, shown: str) -> None:
    assert without_login(uri) == shown
