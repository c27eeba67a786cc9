"""How much a job gets through: as counted by hand, live as stored; what would be a guess is not known."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played import QUIET, Played
from sessions import LIMITS, run_message, stored, written_summary

from traceml_ray.reports.comparison import read_whole
from traceml_ray.reports.files import text_of
from traceml_ray.signals.throughput.judge import MOST, WorkHistory, peak_tflops
from traceml_ray.signals.throughput.records import StepWork
from traceml_ray.signals.throughput.view import GetThroughput
from traceml_ray.store import query
from traceml_ray.store.session import prepare
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import summary_of
from traceml_ray.wire import messages as wire

STEP_S = sum(QUIET) / 1e3
H200: dict[str, Any] = {"device": "NVIDIA H200", "dtype": "bfloat16"}


class Job(Played):
    """A job of two ranks whose steps take 20 ms, to the ns; `work`: fields of `StepWork`."""

    def __init__(self, folder: Path) -> None:
        self.held = prepare(folder.parent, folder.name)
        super().__init__(folder, 2, late=None, jitter_ms=0.0, per_node=2)
        self.work: dict[str, Any] = {}

    def second(
        self, steps: int = 5, *, samples: int | None = 4, tokens: int | None = 64, **more: Any
    ) -> None:
        amounts = (None if amount is None else amount * steps for amount in (samples, tokens))
        last = self.step + steps - 1
        work = StepWork(self.step, last, steps, steps, *amounts, **self.work)
        self.play(steps, work=[work], **more)

    def numbers(self, whole: bool | None = None) -> Any:
        """The answer, which is the same live and stored."""
        asked = GetThroughput("job", whole)
        live, kept = (query.ask_one(send, asked) for send in (self.aggregator.query, stored(self.folder)))
        for name in live.__struct_fields__:
            np.testing.assert_equal(getattr(live, name), getattr(kept, name), err_msg=name)
        return live

    def close(self) -> None:
        self.aggregator.close()
        self.held.release()


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = Job(tmp_path / "demo")
    yield made
    made.close()


def test_rates_are_those_of_all_ranks_as_counted_by_hand(job: Job) -> None:
    job.work = {**H200, "flops": 10**12, "flops_step": 2, "total_steps": 1000}
    for _ in range(20):
        job.second()
    numbers = job.numbers(whole=True)
    assert numbers.samples_per_s == pytest.approx(2 * 4 / STEP_S)
    assert numbers.tokens_per_s == pytest.approx(2 * 64 / STEP_S)
    assert numbers.rank_tokens_per_s.tolist() == pytest.approx([64 / STEP_S] * 2)
    assert (numbers.step_flops, numbers.flops_from, numbers.flops_step) == (2e12, "counted", 2)
    assert numbers.mfu_pct == pytest.approx(100 * 2e12 / STEP_S / (2 * 989.4e12))
    assert numbers.efficiency_pct == pytest.approx(100)
    assert numbers.eta_s == pytest.approx((1000 - 100) * STEP_S)
    assert numbers.line_tokens_per_s.tolist() == pytest.approx([128 / STEP_S] * 99)
    assert numbers.why == {}


def test_rate_is_of_the_newest_steps_and_the_line_of_each(job: Job) -> None:
    for second in range(40):
        job.second(tokens=64 if second < 20 else 32)
    assert job.numbers(whole=False).tokens_per_step == 64
    assert job.numbers(whole=True).tokens_per_step == pytest.approx((89 * 128 + 100 * 64) / 189)
    line = job.numbers(whole=True).line_tokens_per_s * STEP_S
    assert (line[50], line[150]) == (pytest.approx(128), pytest.approx(64))
    job.play(20, work=[])  # of these steps nothing is said yet
    assert job.numbers(whole=False).tokens_per_step == 64


@pytest.mark.parametrize(
    ("work", "play", "name", "why"),
    [
        ({}, {"strategy": "ddp+tp"}, "samples", "one replica of the model have the same samples (tp)"),
        ({}, {"silent": (1,)}, "tokens", "rank 1 of 2 did not report"),
        (
            {},
            {"samples": None, "missing": {"samples": "no tensor"}},
            "samples",
            "no tensor; set it with traceml_ray.count",
        ),
        ({}, {}, "mfu", "--flops"),
        ({"flops": 9}, {"silent": (1,)}, "mfu", "counted on 1 of 2 ranks"),
        (
            {**H200, "flops": 9, "dtype": "float64"},
            {},
            "mfu",
            "the peak of NVIDIA H200 in float64 is not known",
        ),
        ({"flops": 9, "device": "cpu", "dtype": "float32"}, {}, "mfu", "the peak of cpu in float32"),
        (
            {"job_flops": 9, "device": "NVIDIA H200"},
            {},
            "mfu",
            "the data type of the computation is not known",
        ),
        ({"job_flops": 9}, {}, "mfu", "the ranks' devices are not known"),
    ],
)
def test_what_would_be_a_guess_is_not_known_and_says_why(
    job: Job, work: dict[str, Any], play: dict[str, Any], name: str, why: str
) -> None:
    job.work = work
    for _ in range(20):
        job.second(**play)
    numbers = job.numbers(whole=True)
    assert why in numbers.why[name]
    known = {"samples": "samples_per_s", "tokens": "tokens_per_s", "mfu": "mfu_pct"}
    assert getattr(numbers, known[name]) is None


def test_ranks_of_one_replica_count_once_where_their_roles_are_known(job: Job) -> None:
    job.of_rank = lambda rank: {"placement": wire.Placement({"tp": [rank, 2]})}  # type: ignore[method-assign]
    job.work = {**H200, "flops": 10**12}
    for _ in range(20):
        job.second(strategy="ddp+tp")
    numbers = job.numbers(whole=True)
    assert (numbers.samples_per_step, numbers.step_flops) == (4, 2e12)
    assert numbers.line_samples_per_s.tolist() == pytest.approx([4 / STEP_S] * 99)


@pytest.mark.parametrize(("name", "samples"), [("workers", 8), ("dp_shard_cp", None)])
def test_samples_of_a_mesh_with_a_name_of_its_own_are_those_of_all_ranks_or_not_known(
    job: Job, name: str, samples: int | None
) -> None:
    job.of_rank = lambda rank: {  # type: ignore[method-assign]
        "placement": wire.Placement({name: [rank, 2]}), "group": (0, 2)
    }  # fmt: skip
    for _ in range(20):
        job.second()
    numbers = job.numbers(whole=True)
    assert numbers.samples_per_step == samples
    assert samples or f"`{name}` of the device mesh" in numbers.why["samples"]


def test_what_was_told_counts_instead_of_what_was_counted(job: Job) -> None:
    job.work = {"flops": 5, "job_flops": 10**10, "peak_tflops": 0.5, "device": "cpu", "device_id": "one"}
    for _ in range(10):
        job.second()
    numbers = job.numbers(whole=True)
    assert (numbers.step_flops, numbers.flops_from, numbers.devices) == (1e10, "told", 1)
    assert numbers.mfu_pct == pytest.approx(100 * 1e10 / STEP_S / 0.5e12)


def test_summary_and_report_have_the_same_numbers_and_no_time_left_at_the_end(job: Job) -> None:
    job.work = {**H200, "flops": 10**12, "flops_step": 2, "total_steps": 1000}
    for _ in range(20):
        job.second()
    live = job.numbers(whole=True)
    job.end()
    job.held.release()
    with SessionFile(job.folder / "session.sqlite") as file:
        summary = written_summary(file, LIMITS)
    block = summary["throughput"]
    assert block["tokens_per_s"] == pytest.approx(live.tokens_per_s, abs=1e-4)
    assert block["per_rank_samples_per_s"] == {"0": 4 / STEP_S, "1": 4 / STEP_S}
    assert block["eta_s"] is None and job.numbers().eta_s is None
    report = text_of(summary_of(summary), job.folder)
    assert "6,400 tokens/s, 400 samples/s of all ranks" in report
    assert "5.1 % of the 1,979 TFLOP/s in bfloat16 of 2 × NVIDIA H200: 2 TFLOPs a step, counted in" in report


def test_session_file_without_work_opens_and_goes_on(tmp_path: Path) -> None:
    job = Job(tmp_path / "demo")
    for _ in range(10):
        job.play(work=[])
    job.end()
    job.close()
    with sqlite3.connect(job.folder / "session.sqlite") as connection:
        connection.execute("DROP TABLE step_work")
    numbers = query.ask_one(stored(job.folder), GetThroughput())
    assert (numbers.samples_per_s, numbers.mfu_pct) == (None, None)
    assert numbers.steps_per_s == pytest.approx(1 / STEP_S)
    again = Job(job.folder)
    again.second()
    assert again.aggregator.errors == {}
    again.close()


def test_nonsense_in_the_file_is_said_to_be_damage(job: Job) -> None:
    job.second()
    with sqlite3.connect(job.folder / "session.sqlite") as connection:
        connection.execute("UPDATE step_work SET first_step = 'x', flops = 'many'")
    with pytest.raises(query.QueryError, match="the session file is damaged"):
        query.ask_one(stored(job.folder), GetThroughput())


def test_of_a_job_without_steps_nothing_is_known_and_it_says_why(job: Job) -> None:
    def why(run: str | None = "job") -> str:
        numbers = query.ask_one(job.aggregator.query, GetThroughput(run))
        assert numbers.steps == 0 and numbers.samples_per_s is None
        return str(numbers.why["steps"])

    assert why(None) == "no rank has reported a step yet"
    job.play(0)
    assert why() == "no rank has reported a step yet"
    job.second(1, silent=(1,))
    assert why() == "rank 1 of 2 did not report yet"
    job.begin(job_id="other")
    job.second(1)
    assert why("other") == "the ranks have not closed two steps together yet"


def test_run_that_has_just_ended_is_known_to_its_last_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session goes on; nobody has judged what came last."""
    job.work = {"total_steps": 1000}
    job.play(0)
    monkeypatch.setattr(job.aggregator, "judge", lambda: None)
    asked = GetThroughput("job")
    assert query.ask_one(job.aggregator.query, asked).steps == 0
    for _ in range(20):
        job.second()
    finals = [rank.batch(0, final=True) for rank in job.ranks]
    job.aggregator.ingest(job.relays[0].message(*finals))
    assert run_message(job.aggregator, "job", status="finished").state == "written"
    read_whole(partial(query.ask_one, job.aggregator.query), "job", live=True)
    numbers = job.numbers()
    assert numbers.steps == 100 - 1 - LIMITS.warmup_steps, "the first one has no beginning"
    assert (numbers.samples_per_s, numbers.eta_s) == (pytest.approx(2 * 4 / STEP_S), None)
    with SessionFile(job.folder / "session.sqlite") as file:
        assert written_summary(file, LIMITS)["throughput"]["eta_s"] is None
    verdict = query.ask_one(job.aggregator.query, query.GetVerdict())
    assert verdict is not None and verdict.label == "healthy"


pieces = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 9), st.one_of(st.none(), st.integers(0, 99))), max_size=30
)


@given(pieces, st.integers(0, 40), st.integers(0, 40))
def test_mean_of_steps_is_that_of_each_one(given_pieces: list[Any], first: int, more: int) -> None:
    """Of processes in pieces of constant size, the mean is that of the single steps that are inside."""
    work, sizes_of = WorkHistory(), {0: [], 1: [], 2: []}  # type: ignore[var-annotated]
    for process, steps, size in given_pieces:
        begin = len(sizes_of[process])
        row = StepWork(begin, begin + steps - 1, steps, steps, None if size is None else size * steps)
        work.add(process, row)
        sizes_of[process] += [np.nan if size is None else float(size)] * steps
    means = work.per_step([0, 1, 2], first, first + more).samples
    for process, sizes in sizes_of.items():
        inside = sizes[first : first + more + 1]
        if inside:
            np.testing.assert_allclose(means[process], np.mean(inside))
    common = min(map(len, sizes_of.values()))
    together = work.at([0, 1, 2], np.arange(common)).samples
    np.testing.assert_allclose(together, np.sum([sizes[:common] for sizes in sizes_of.values()], axis=0))


def test_pieces_have_a_bound_and_sums_stay() -> None:
    work = WorkHistory()
    for step in range(5 * MOST):
        work.add(1, StepWork(step, step, 1, 1, step, 7))
        work.per_step([1], 0, step)
    assert len(work._rows()) <= MOST
    mean = work.per_step([1], 0, 5 * MOST)
    assert (mean.samples[0], mean.tokens[0]) == (pytest.approx((5 * MOST - 1) / 2), 7)
    assert work.per_step([1], 5 * MOST - 3, 5 * MOST - 1).samples[0] == 5 * MOST - 2


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA B200", "float8_e4m3fn", 4500),
        ("NVIDIA GeForce RTX 4090", "float16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "float16", None),
        ("NVIDIA A100-SXM4-40GB MIG 2g.10gb", "bfloat16", None),
        ("Tesla V100-PCIE-16GB", "float16", 112),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("NVIDIA A10G", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_peak_of_a_device_is_known_by_its_name_or_not_at_all(
    device: str, dtype: str, peak: float | None
) -> None:
    assert peak_tflops(device, dtype) == peak
