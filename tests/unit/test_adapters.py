"""The frameworks' callbacks: steps as the framework counts them, spans once, the verdict in its log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from integration import loops
from sessions import NoSamples, Rank, Relay, Straight, aggregation

from traceml_ray import wire
from traceml_ray.actors import relay
from traceml_ray.adapters.marks import CHECKPOINT, EVALUATION, Marks
from traceml_ray.agent import bootstrap
from traceml_ray.settings import Settings

VERDICT: dict[str, wire.Value] = {
    "label": "straggler",
    "why": "rank 1 is late",
    "stage": "data",
    "rank": 1,
    "cost_pct": 40.0,
    "mean_step_ms": 12.5,
}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[loops.Job]:
    """A watched process; what is told is in `told`, the verdict in `agent.verdict`."""
    job: Any = loops.Job()
    job.told = []
    job.instrumentation.errors.debug = False
    job.agent = SimpleNamespace(
        recorder=job.recorder, instrumentation=job.instrumentation, verdict={}, tell=job.told.append
    )
    monkeypatch.setattr(bootstrap, "_agent", job.agent)
    job.instrumentation.install()
    yield job
    job.instrumentation.remove()


def test_the_verdict_reaches_rank_0_and_no_other(tmp_path: Path) -> None:
    core, before = aggregation(tmp_path / "s"), Relay()
    ranks = [Rank(number) for number in (0, 1)]
    core.ingest(before.message(*(rank.batch(200) for rank in ranks)))
    core.judge()
    node = wire.NodeIdentity("n", "host-0", "127.0.0.1")
    made = relay.Relay(tmp_path / "r.sock", node, Straight(core), NoSamples(), Settings())
    try:
        made.take(ranks[0].batch(1))
        made.turn()
        made.turn()
        replies = [wire.decode(made.take(rank.batch(1)), wire.RankReply) for rank in ranks]
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
    job.recorder.settle()
    assert [row["step"] for row in job.rows()] == list(range(5000, 5000 + loops.STEPS))
    marks.step(7)
    loops.plain(job)
    job.recorder.settle()
    assert min(row["step"] for row in job.rows()) == 5000 + loops.STEPS, "numbers only grow"


def test_steps_that_the_marks_have_counted_too_cost_the_training_thread_nothing(job: Any) -> None:
    marks = Marks()
    marks.step(0)
    loops.plain(job)
    for done in range(1, loops.STEPS + 1):
        marks.step(done)
    assert job.rows() == [], "the marks are understood later, by another thread"
    job.recorder.settle()
    assert [row["step"] for row in job.rows()] == list(range(loops.STEPS))


def test_a_span_of_a_callback_and_ours_of_its_name_count_once(job: Any, tmp_path: Path) -> None:
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
    found = [*job.details.collect(), *job.details.collect()]
    assert sum(each.count for each in found if each.name == CHECKPOINT) == 2
    evaluated = sum(each.total_ns for each in found if each.name == EVALUATION)
    assert 0 < evaluated <= job.recorder.clock() - began, "not twice"
    assert not job.instrumentation.errors


def test_the_verdict_is_figures_and_a_sentence_when_it_is_another(job: Any) -> None:
    marks = Marks()
    assert (marks.figures(), marks.news()) == ({}, None)
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
    assert [marks.news(), marks.news()] == ["traceml-ray: straggler: rank 1 is late", None]
    job.agent.verdict = {**VERDICT, "label": "healthy", "rank": None, "cost_pct": None}
    assert marks.figures() == {
        "traceml/step_ms": 12.5,
        "traceml/late_rank": -1.0,
        "traceml/micro_batches": 2.0,
    }


def test_a_callback_raises_nothing_and_is_nothing_where_nobody_watches(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.agent.tell = job.agent.recorder = None
    Marks().step(1)
    Marks().epoch(1, 0)
    assert sum(job.instrumentation.errors.values()) == 2
    monkeypatch.setattr(bootstrap, "_agent", None)
    assert (Marks().step(1), Marks().figures(), Marks().begin("x")) == (None, None, None)


def test_hugging_faces_trainer_logs_the_verdict(job: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    import traceml_ray

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
    trainer = transformers.Trainer(
        Net(8, 1),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[traceml_ray.TraceMLTrainerCallback()],
    )
    job.agent.verdict = VERDICT
    trainer.train()
    assert trainer.state.log_history[0]["traceml/late_rank"] == 1.0
    assert trainer.state.log_history[-1]["traceml/micro_batches"] == 2.0
    assert (
        "traceml/step_ms"
        in json.loads((tmp_path / "checkpoint-12/trainer_state.json").read_text())["log_history"][0]
    )
    job.recorder.finish()
    assert [row["step"] for row in job.rows()] == list(range(trainer.state.global_step))
    found = [*job.details.collect(), *job.details.collect()]
    assert {CHECKPOINT, EVALUATION} <= {each.name for each in found}
    assert [event.message for event in job.told] == ["epoch 1 begins", "epoch 2 begins"]
    assert not job.instrumentation.errors


def test_lightnings_trainer_logs_the_verdict(job: Any, tmp_path: Path) -> None:
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
        logger=False,
        callbacks=[traceml_ray.TraceMLCallback()],
    )
    trainer.fit(Net(), loader, loader)
    assert trainer.global_step == 8
    assert float(trainer.callback_metrics["traceml/late_rank"]) == 1.0
    assert float(trainer.callback_metrics["traceml/micro_batches"]) == 2.0
    job.recorder.finish()
    assert [row["step"] for row in job.rows()] == list(range(8))
    found = [*job.details.collect(), *job.details.collect()]
    assert EVALUATION in {each.name for each in found}
    assert [event.message for event in job.told] == ["epoch 1 begins", "epoch 2 begins"]
    assert not job.instrumentation.errors
