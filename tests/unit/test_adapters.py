"""The frameworks' callbacks: steps as the framework counts them, spans once, the verdict in its log."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from integration import loops
from sessions import NoSamples, Rank, Relay, Straight, aggregation

from traceml_ray.adapters.marks import CHECKPOINT, EVALUATION, Marks, hook
from traceml_ray.agent import bootstrap
from traceml_ray.monitor import relay
from traceml_ray.settings import Settings
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

VERDICT: dict[str, codec.Value] = {
    "label": "straggler",
    "why": "rank 1 is late",
    "stage": "data",
    "rank": 1,
    "cost_pct": 40.0,
    "mean_step_ms": 12.5,
}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[loops.Job]:
    """A watched process; its events are in `events`, the verdict in `agent.verdict`."""
    job: Any = loops.Job()
    job.events = []
    job.instrumentation.errors.debug = False
    job.agent = SimpleNamespace(
        recorder=job.recorder, instrumentation=job.instrumentation, verdict={}, add_event=job.events.append
    )
    job.declared = {}
    job.logged = []
    work = SimpleNamespace(declare=lambda **known: job.declared.update(known), log=job.logged.append)
    job.agent.collector = lambda _: work
    monkeypatch.setattr(bootstrap, "_agent", job.agent)
    job.instrumentation.install()
    yield job
    job.instrumentation.remove()


def test_verdict_reaches_rank_0_and_no_other(tmp_path: Path) -> None:
    core, before = aggregation(tmp_path / "s"), Relay()
    ranks = [Rank(number) for number in (0, 1)]
    core.ingest(before.message(*(rank.batch(200) for rank in ranks)))
    core.judge()
    node = wire.NodeIdentity("n", "host-0", "127.0.0.1")
    made = relay.RelayCore(tmp_path / "r.sock", node, Straight(core), NoSamples(), Settings())
    try:
        made.accept(ranks[0].batch(1))
        made.poll()
        made.poll()
        replies = [codec.decode(made.accept(rank.batch(1)), wire.RankReply) for rank in ranks]
    finally:
        made.close()
        core.close()
    assert replies[0].verdict["label"] and replies[0].verdict["why"]
    assert set(replies[0].verdict) == set(VERDICT)
    assert replies[1].verdict == {}


def test_steps_are_numbered_as_the_framework_counts_them(job: Any) -> None:
    marks = Marks()
    marks.step(5000)  # from a checkpoint
    loops.plain(job)
    marks.step(5000 + loops.STEPS)
    job.recorder.replay()
    assert [row["step"] for row in job.rows()] == list(range(5000, 5000 + loops.STEPS))
    marks.step(7)
    loops.plain(job)
    job.recorder.replay()
    assert min(row["step"] for row in job.rows()) == 5000 + loops.STEPS, "numbers only grow"


def test_steps_counted_by_marks_cost_the_training_thread_nothing(job: Any) -> None:
    marks = Marks()
    marks.step(0)
    loops.plain(job)
    for done in range(1, loops.STEPS + 1):
        marks.step(done)
    assert job.rows() == [], "the marks are understood later, by another thread"
    job.recorder.replay()
    assert [row["step"] for row in job.rows()] == list(range(loops.STEPS))


def test_callback_span_and_own_span_of_one_name_count_once(job: Any, tmp_path: Path) -> None:
    import torch

    marks = Marks()
    loops.plain(job)
    for _ in range(2):
        marks.begin(CHECKPOINT)
        torch.save({}, tmp_path / "x.pt")
        marks.end(CHECKPOINT)
        marks.end(CHECKPOINT)
    began = job.recorder.clock()
    marks.begin(EVALUATION)
    job.nets[0].eval()(torch.ones(2, loops.WIDTH))
    job.nets[0].train()
    marks.end(EVALUATION)
    loops.plain(job)
    job.recorder.finish()
    spans = [*job.recorder.sums.collect(), *job.recorder.sums.collect()]
    assert sum(span.count for span in spans if span.name == CHECKPOINT) == 2
    evaluated = sum(span.total_ns for span in spans if span.name == EVALUATION)
    assert 0 < evaluated <= job.recorder.clock() - began, "not twice"
    assert not job.instrumentation.errors


def test_verdict_is_given_as_figures_and_on_a_change_as_text(job: Any) -> None:
    marks = Marks()
    assert (marks.figures(), marks.new_verdict()) == ({}, None)
    job.agent.verdict = VERDICT
    for _ in range(2):
        marks.micro_batch()
    marks.step(1)
    assert marks.figures() == {
        "traceml/step_ms": 12.5,
        "traceml/cost_pct": 40.0,
        "traceml/late_rank": 1.0,
        "traceml/micro_batches": 2.0,
    }
    assert [marks.new_verdict(), marks.new_verdict()] == ["traceml-ray: straggler: rank 1 is late", None]
    severe = {"first": "memory creep: rank 2", "first_why": "It grows."}
    job.agent.verdict = {**VERDICT, **severe}
    sentence = "traceml-ray: memory creep: rank 2: It grows. straggler: rank 1 is late"
    assert [marks.new_verdict(), marks.new_verdict()] == [sentence, None]
    job.agent.verdict = {**VERDICT, "label": "healthy", "rank": None, "cost_pct": None}
    assert marks.figures() == {
        "traceml/step_ms": 12.5,
        "traceml/late_rank": -1.0,
        "traceml/micro_batches": 2.0,
    }


def test_callback_raises_nothing_and_does_nothing_without_an_agent(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.agent.add_event = job.agent.recorder = None
    callback = Callback()
    assert (callback.on_step(), callback.on_epoch()) == (None, None)
    assert sum(job.instrumentation.errors.values()) == 2
    monkeypatch.setattr(bootstrap, "_agent", None)
    assert (callback.on_step(), callback.on_epoch()) == (None, None)
    assert sum(job.instrumentation.errors.values()) == 2


class Callback:
    """As those of the frameworks."""

    def __init__(self) -> None:
        self.marks = Marks()

    @hook
    def on_step(self) -> bool:
        return self.marks.step(1)

    @hook
    def on_epoch(self) -> None:
        self.marks.epoch(1, 0)


# -- as a framework calls them, where there is none ----------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what puts a module in the place of a framework's and loads the adapter made for it."""

    def load(adapter: str, **modules: dict[str, Any]) -> Any:
        for name, names in modules.items():
            module = ModuleType(name.replace("__", "."))
            module.__dict__.update(names)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        place = f"traceml_ray.adapters.{adapter}"
        monkeypatch.delitem(sys.modules, place, raising=False)
        imported = import_module(place)
        del sys.modules[place]
        return imported

    return load


class HuggingFace:
    """A Trainer: what it logs is handed to each callback, and of two logs the same object is returned."""

    def __init__(self, *callbacks: Any) -> None:
        self.callbacks = list(callbacks)
        self.state = SimpleNamespace(global_step=0, epoch=0.0, log_history=[], is_world_process_zero=True)
        self.state.max_steps = 40

    def call_event(self, event: str, **keywords: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(None, self.state, SimpleNamespace(should_save=False), **keywords)

    def log(self, logs: dict[str, float]) -> dict[str, float]:
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call_event("on_log", logs=logs)
        return logs

    def train(self) -> dict[str, float]:
        self.call_event("on_train_begin")
        self.state.global_step += 1
        self.log({"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1})
        return self.log({"train_runtime": 1.0, "train_loss": 1.0})

    def evaluate(self, prefix: str = "eval") -> dict[str, float]:
        return self.log({f"{prefix}_loss": 0.5})


class Silent:
    """A callback that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Report(Silent):
    """`report_to`."""

    def __init__(self) -> None:
        self.rows: list[set[str]] = []

    def on_log(self, *_: Any, logs: Any, **__: Any) -> None:
        self.rows.append(set(logs))


@pytest.fixture
def hugging_face(stand_in: Any) -> Any:
    modules = stand_in(
        "huggingface",
        transformers={"TrainerCallback": object, "DefaultFlowCallback": Silent},
        transformers__utils={"logging": SimpleNamespace(get_logger=logging.getLogger)},
    )
    return modules.TraceMLTrainerCallback


def test_trainer_results_are_the_same_with_the_callback(job: Any, hugging_face: Any) -> None:
    job.agent.verdict = VERDICT
    plain, report = HuggingFace(), Report()
    watched = HuggingFace(Silent(), report, hugging_face())
    assert watched.train() == plain.train()
    for prefix in ("eval", "test", "valid"):
        assert watched.evaluate(prefix) == plain.evaluate(prefix)
    assert [any(key.startswith("traceml/") for key in row) for row in watched.state.log_history] == [
        *(True, False, False, False, False)
    ], "no more than the log of the step"
    assert [{*values} for values in job.logged] == [{"loss", "learning_rate", "grad_norm"}], "as without us"
    assert "traceml/late_rank" in report.rows[0], "the callbacks that report are given it"
    assert "traceml/late_rank" not in set().union(*report.rows[1:])
    assert job.declared == {"total_steps": 40}
    assert not job.instrumentation.errors


def test_callback_raises_nothing_into_the_hugging_face_trainer(
    job: Any, hugging_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unequal(Silent):
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("compared")

        __hash__ = None  # type: ignore[assignment]

    watched = HuggingFace(Unequal(), hugging_face())
    watched.call_event("on_train_begin")
    watched.state.log_history = None
    job.agent.verdict = VERDICT
    watched.call_event("on_log", logs=SimpleNamespace())
    del watched.state.global_step
    watched.call_event("on_step_end")
    assert dict(job.instrumentation.errors) == {"adapter: RuntimeError": 1, "adapter: AttributeError": 1}
    monkeypatch.setattr(bootstrap, "_agent", None)
    watched.call_event("on_step_end")
    watched.call_event("on_train_begin")


class Lightning:
    """A Trainer as a callback sees it: it logs every second step, and `log_dict` can be refused."""

    log_every_n_steps = 2
    estimated_stepping_batches = 8
    is_global_zero, current_epoch = True, 0

    def __init__(self, *loggers: Any) -> None:
        self.global_step, self.loggers, self.rows = 0, [*loggers, self], []  # type: ignore[var-annotated]
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))

    @property
    def _logger_connector(self) -> Any:
        stepped = self.fit_loop.epoch_loop._batches_that_stepped
        return SimpleNamespace(should_update_logs=(stepped + 1) % self.log_every_n_steps == 0)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def log_dict(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("not with `training_step(dataloader_iter)`")

    def fit(self, callback: Any, batches: int, accumulate: int = 2) -> None:
        callback.on_train_start(self, self)
        callback.on_train_epoch_start(self, self)
        for batch in range(1, batches + 1):
            self.global_step += batch % accumulate == 0
            callback.on_train_batch_end(self, self, None, None, batch)
            self.fit_loop.epoch_loop._batches_that_stepped = self.global_step


@pytest.fixture
def lightning(stand_in: Any) -> Any:
    def refuse(_: str) -> None:
        raise UserWarning("warnings are errors here")

    names = {"Callback": object, "utilities": SimpleNamespace(rank_zero_warn=lambda _: None)}
    modules = stand_in("lightning", lightning={}, lightning__pytorch=names)
    modules.refuse = refuse
    return modules


def test_lightning_logs_the_verdict_at_its_interval_without_tensors(job: Any, lightning: Any) -> None:
    job.agent.verdict = VERDICT
    trainer = Lightning()
    trainer.fit(lightning.TraceMLCallback(), 16)
    assert [step for step, _ in trainer.rows] == [1, 3, 5, 7], "of 8 steps every second"
    assert trainer.rows[-1][1]["traceml/micro_batches"] == 2.0
    assert {type(value) for _, metrics in trainer.rows for value in metrics.values()} == {float}
    assert job.declared == {"total_steps": 8}
    assert not job.instrumentation.errors


def test_batches_are_the_steps_of_several_optimizers(job: Any, lightning: Any) -> None:
    """`global_step` and `max_steps` count each optimizer's steps; rows are numbered as loggers do."""

    class Manual(Lightning):
        optimizers, max_steps = ("generator", "discriminator"), 16

        def fit(self, callback: Any, batches: int, accumulate: int = 1) -> None:
            callback.on_train_start(self, self)
            for batch in range(batches):
                loops.gan(job)
                self.global_step += 2 * loops.STEPS
                self.fit_loop.epoch_loop._batches_that_stepped += loops.STEPS - 1
                callback.on_train_batch_end(self, self, None, None, batch)
                self.fit_loop.epoch_loop._batches_that_stepped += 1

    Manual().fit(lightning.TraceMLCallback(), 2)
    job.recorder.replay()
    assert [row["step"] for row in job.rows()] == [step for step in range(2 * loops.STEPS) for _ in range(2)]
    assert job.declared == {} and not job.instrumentation.errors


def test_callback_raises_nothing_into_the_lightning_trainer(
    job: Any, lightning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.agent.verdict = VERDICT
    trainer = Lightning(SimpleNamespace())  # a logger that cannot log
    callback = lightning.TraceMLCallback()
    trainer.fit(callback, 4)
    assert len(trainer.rows) == 1, "the other logger can"
    assert dict(job.instrumentation.errors) == {"adapter: AttributeError": 1}
    monkeypatch.setattr(lightning._lightning.utilities, "rank_zero_warn", lightning.refuse)
    Lightning().fit(lightning.TraceMLCallback(), 2)
    assert job.instrumentation.errors["adapter: UserWarning"] == 1
    monkeypatch.setattr(bootstrap, "_agent", None)
    callback.on_train_batch_end(None, None)
    callback.on_train_start(None, None)


def test_lightning_callback_works_with_the_pytorch_lightning_package(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    old: dict[str, Any] = {"Callback": object}
    assert stand_in("lightning", pytorch_lightning=old)._lightning.__name__ == "pytorch_lightning"


# -- with the frameworks themselves ---------------------------------------------------------------------


def hugging_faces_trainer(tmp_path: Path, callbacks: list[Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    import torch

    class Net(torch.nn.Linear):
        def forward(self, x: Any = None, labels: Any = None) -> Any:
            out = super().forward(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    data = [{"x": torch.ones(8), "labels": torch.ones(1)} for _ in range(24)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        logging_steps=2,
        save_steps=4,
        eval_strategy="epoch",
    )
    return transformers.Trainer(
        Net(8, 1), arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks
    )


def test_hugging_face_trainer_logs_the_verdict(job: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import traceml_ray

    plain = hugging_faces_trainer(tmp_path / "plain", [])
    without = [plain.train().metrics, plain.evaluate()]
    numbers, job.events[:] = job.recorder.open_stage().step, []
    trainer = hugging_faces_trainer(tmp_path, [traceml_ray.TraceMLTrainerCallback()])
    job.agent.verdict = VERDICT
    result = [trainer.train().metrics, trainer.evaluate()]
    assert [list(line) for line in result] == [list(line) for line in without]
    logged = trainer.state.log_history
    assert {"traceml/late_rank" in row for row in logged if "learning_rate" in row} == {True}
    assert not any("traceml/late_rank" in row for row in logged if "learning_rate" not in row)
    assert [row for row in logged if "learning_rate" in row][-1]["traceml/micro_batches"] == 2.0
    assert (
        "traceml/step_ms"
        in json.loads((tmp_path / "checkpoint-12/trainer_state.json").read_text())["log_history"][0]
    )
    job.recorder.finish()
    assert [row["step"] for row in job.rows()] == list(range(numbers + trainer.state.global_step))
    spans = [*job.recorder.sums.collect(), *job.recorder.sums.collect()]
    assert {CHECKPOINT, EVALUATION} <= {span.name for span in spans}
    assert [event.message for event in job.events] == ["epoch 1 begins", "epoch 2 begins"]
    assert not job.instrumentation.errors


def test_lightning_trainer_logs_the_verdict(job: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    import torch

    import traceml_ray

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch).mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.net(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Log(lightning.loggers.logger.DummyLogger):  # type: ignore[misc, name-defined]
        rows: ClassVar[list[Any]] = []

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            if "traceml/late_rank" in metrics:
                self.rows.append((step, metrics))

    job.agent.verdict = VERDICT
    loader = torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=2)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        logger=Log(),
        callbacks=[traceml_ray.TraceMLCallback()],
    )
    trainer.fit(Net(), loader, loader)
    assert trainer.global_step == 8
    assert trainer.callback_metrics == {}, "what it returns is what it was"
    assert [step for step, _ in Log.rows] == list(range(8))
    assert Log.rows[-1][1]["traceml/late_rank"] == 1.0
    assert Log.rows[-1][1]["traceml/micro_batches"] == 2.0
    job.recorder.finish()
    assert [row["step"] for row in job.rows()] == list(range(8))
    spans = [*job.recorder.sums.collect(), *job.recorder.sums.collect()]
    assert EVALUATION in {span.name for span in spans}
    assert [event.message for event in job.events] == ["epoch 1 begins", "epoch 2 begins"]
    assert not job.instrumentation.errors
