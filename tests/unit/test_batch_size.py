"""How large batches are: read off their tensors where that is no guess, or told; summed up by step."""

from __future__ import annotations

import threading
import zlib
from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import traceml_ray
from traceml_ray.agent import bootstrap
from traceml_ray.agent.batch_size import ROOM, BatchSizes, Counted, SizeLog, packed, understood, written
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.marks import BATCHES
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.analysis.uneven_work import amounts, unpacked
from traceml_ray.errors import Errors
from traceml_ray.settings import Settings
from traceml_ray.signals.throughput.agent import WorkReport
from traceml_ray.signals.throughput.records import StepSizes, StepWork

IDS, LABELS, IMAGES = torch.zeros(4, 16, dtype=torch.long), torch.zeros(4), torch.zeros(4, 3, 8, 8)
Pair = namedtuple("Pair", "x y")


class Graphs:
    """A batch as PyTorch Geometric makes it: attributes are in a store, and counting graphs may cost much."""

    def __init__(self, **store: Any) -> None:
        self.__dict__["_store"] = SimpleNamespace(x=torch.zeros(99, 3), batch=torch.zeros(99), **store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_store"], name)


class GraphBatch(Graphs):
    @property
    def num_graphs(self) -> int:
        raise AssertionError("it looks for the largest number in a tensor")

    batch_size = num_graphs


class DglGraph:
    def __init__(self, graphs: int | None) -> None:
        self._batch_num_nodes = (
            None if graphs is None else {"_N": torch.ones(graphs), "b": torch.ones(graphs)}
        )

    @property
    def batch_size(self) -> int:
        raise AssertionError("not asked")


@dataclass
class Fields:
    x: Any
    y: Any


def sequences(*lengths: int, kind: Any = None, ordered: bool = True) -> Any:
    parts = [torch.zeros(length, dtype=kind) if kind else torch.zeros(length, 2) for length in lengths]
    return torch.nn.utils.rnn.pack_sequence(parts, enforce_sorted=ordered)


def size(batch: Any) -> tuple[int | None, int | None]:
    return understood(BATCHES - BatchSizes().mark(batch))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IMAGES, (4, None)),
        ([IMAGES, LABELS], (4, None)),
        ((IMAGES, {"label": LABELS, "weight": LABELS}), (4, None)),
        (Pair([IMAGES, IMAGES], LABELS), (4, None)),
        ({"input_ids": IDS, "attention_mask": IDS}, (4, 64)),
        (UserDict({"labels": IDS, "input_ids": IDS}), (4, 64)),  # as BatchEncoding is one
        ({"input_ids": torch.zeros(100, dtype=torch.long), "cu_seqlens": torch.zeros(5)}, (None, 100)),
        ([IDS, IDS], (4, 64)),  # tokens, and the same one later
        ([IDS, LABELS], (4, None)),  # features that are integers
        ([torch.zeros(4, 2), torch.zeros(4, 2)], (4, None)),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4)}, (4, None)),  # Ray Data
        ({"input_ids": np.zeros((4, 16), dtype=np.int64)}, (4, 64)),
        ([IMAGES[0], IMAGES[1], IMAGES[2]], (None, None)),  # one tensor a sample, or three of a batch
        (([torch.zeros(3, 8, 9), torch.zeros(3, 9, 8)], [torch.zeros(2, 4)]), (None, None)),  # detection
        (GraphBatch(_num_graphs=5, ptr=torch.zeros(6)), (5, None)),
        ((GraphBatch(_num_graphs=5), torch.zeros(99)), (5, None)),  # targets of nodes
        (GraphBatch(ptr=torch.zeros(6)), (5, None)),
        (GraphBatch(), (None, None)),
        (Graphs(batch_size=7), (7, None)),  # seed nodes of a `NeighborLoader`
        (Graphs(), (None, None)),  # one graph
        (DglGraph(4), (4, None)),
        ([DglGraph(4), torch.zeros(4)], (4, None)),
        (DglGraph(None), (None, None)),
        (sequences(3, 2), (2, None)),
        ((sequences(1, 4, 2, ordered=False), torch.zeros(3)), (3, None)),
        (sequences(3, 2, kind=torch.long), (2, 5)),
        (Fields(IMAGES, LABELS), (4, None)),
        (Fields(GraphBatch(_num_graphs=3), LABELS), (3, None)),
        ({"input_ids": [[1, 2, 3], [4]], "labels": [[1, 2, 3], [4]]}, (2, 4)),  # of different lengths
        ({"input_ids": [IDS[0], IDS[1][:5]]}, (2, 21)),
        ([{"input_ids": IDS[0]}, {"input_ids": IDS[0]}, {"input_ids": IDS[0][:3]}], (3, 35)),
        ([{"input_ids": IDS}, {"input_ids": IDS}], (None, None)),
        (["a", "b"], (None, None)),
        (SimpleNamespace(batch_size="large"), (None, None)),
        (torch.tensor(1.0), (None, None)),
        (None, (None, None)),
    ],
)
def test_size_of_a_batch_is_read_off_its_tensors_or_not_known(batch: Any, expected: tuple[Any, Any]) -> None:
    assert size(batch) == expected


def test_tokens_of_nested_tensors_are_those_that_are_there() -> None:
    ids = torch.nested.nested_tensor([IDS[0], IDS[0][:3]], layout=torch.jagged)
    assert size({"input_ids": ids}) == (2, 19)


def test_batch_that_says_its_size_is_read_anew_each_time() -> None:
    sizes = BatchSizes()
    batches = [
        GraphBatch(_num_graphs=5),
        GraphBatch(_num_graphs=2),
        GraphBatch(),
        sequences(3, 2),
        sequences(1),
    ]
    sizes_read = [understood(BATCHES - sizes.mark(batch)) for batch in batches]
    assert sizes_read == [(5, None), (2, None), (None, None), (2, None), (1, None)]


def test_batches_that_change_their_looks_are_read_anew() -> None:
    sizes = BatchSizes()
    batches = [[IMAGES, LABELS], [IMAGES[:3], LABELS[:3]], {"input_ids": IDS}, [IDS], ["a"], [LABELS, IMAGES]]
    sizes_read = [understood(BATCHES - sizes.mark(batch)) for batch in batches]
    assert sizes_read == [(4, None), (3, None), (4, 64), (4, None), (None, None), (None, None)]
    assert "no tensor in a batch" in sizes.why
    sizes.forget()  # another loader
    assert understood(BATCHES - sizes.mark([LABELS, IMAGES])) == (4, None)


@pytest.mark.parametrize("sizes", [(0, 0), (5, None), (None, 7), (None, None), (1 << 31, 1 << 45)])
def test_size_in_the_log_is_what_was_written(sizes: tuple[int | None, int | None]) -> None:
    value = written(*sizes)
    assert value <= BATCHES and understood(BATCHES - value) == sizes


class Watched:
    """A loop of real loaders and a real model, whose agent's thread is the test."""

    def __init__(self) -> None:
        self.recorder = Recorder(StepRing(4096))
        self.patches = Instrumentation(self.recorder)
        self.patches.install()
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, *batches: Any) -> None:
        for (batch,) in batches:
            self.model(batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, loader: Any) -> None:
        with torch.no_grad():
            for (batch,) in loader:
                self.model(batch)


@pytest.fixture
def watched() -> Any:
    watched_rank = Watched()
    yield watched_rank
    watched_rank.patches.remove()
    assert not watched_rank.patches.errors


def loader(samples: int, batch_size: int) -> Any:
    data = torch.utils.data.TensorDataset(torch.ones(samples, 2))
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def test_samples_are_of_training_batches_only_and_of_each_micro_batch(watched: Watched) -> None:
    train, val = loader(22, 4), loader(12, 6)
    for _ in range(2):
        batches = iter(train)
        watched.step(next(batches))
        watched.step(next(batches), next(batches))  # accumulated
        watched.evaluate(val)
        for batch in batches:  # 4, 4, 2
            watched.step(batch)
    assert watched.recorder.drain_work() == Counted(0, 9, 10, 12, 44, None)
    assert watched.recorder.drain_work() is None


def test_what_the_script_says_replaces_what_its_batches_show(watched: Watched) -> None:
    for step, batch in enumerate(loader(8, 4)):
        watched.recorder.count(None, 10)
        watched.recorder.count(None, 20 + step)
        watched.step(batch)
    assert watched.recorder.drain_work() == Counted(0, 1, 2, 2, 8, 61)
    watched.recorder.count(3, None)
    watched.step([torch.ones(3, 2)])  # of no loader
    watched.step([torch.ones(3, 2)])
    assert watched.recorder.drain_work() == Counted(2, 2, 1, 0, 3, None)


def test_sizes_of_each_step_are_kept_and_sent_once(watched: Watched) -> None:
    now = 0.0
    report = WorkReport(
        watched.recorder, watched.patches.roots, Settings(), Errors(), dict[str, str](), lambda: now
    )
    batches = iter(loader(22, 4))
    watched.step(next(batches))
    watched.step(next(batches), next(batches))  # accumulated
    watched.step([torch.ones(3, 2)])  # of no loader
    watched.recorder.count(None, 10)
    watched.step(next(batches))
    work, sizes = report.collect(True)
    assert isinstance(work, StepWork) and isinstance(sizes, StepSizes)
    assert (sizes.first_step, sizes.last_step) == (0, 3)
    assert unpacked(sizes).tolist() == [[4, -1], [8, -1], [-1, -1], [4, 10]]
    for batch in batches:
        watched.step(batch)
    watched.step([torch.ones(3, 2)])
    report.declare(total_steps=9)
    assert [type(record) for record in report.collect(False)] == [StepWork]  # the sizes are not due yet
    now = 60.0
    (sizes,) = report.collect(False)
    assert isinstance(sizes, StepSizes) and unpacked(sizes).tolist() == [[4, -1], [2, -1]]
    assert report.collect(True) == []


def test_sizes_that_are_not_sent_for_long_have_a_bound_and_are_counted() -> None:
    log = SizeLog()
    for step in range(ROOM + 5):
        log.add(step, step, None)
    assert (len(log), log.lost) == (ROOM, 5)
    pieces = packed(log.drain())
    assert [(piece.first_step, piece.last_step) for piece in pieces[:2]] == [(5, 516), (517, 1028)]
    assert np.concatenate([unpacked(piece)[:, 0] for piece in pieces]).tolist() == [*range(5, ROOM + 5)]
    assert len(log) == 0 and packed(log.drain()) == []


amount = st.one_of(st.none(), st.integers(0, 1 << 40))


@given(st.dictionaries(st.integers(0, 3000), st.tuples(amount, amount), max_size=60), st.integers(1, 40))
def test_sizes_of_steps_are_what_was_noted(noted: dict[int, Any], every: int) -> None:
    log = SizeLog()
    for step in sorted(noted):
        log.add(step, *noted[step])
    pieces = packed(log.drain())
    steps = np.arange(0, 3001, every)
    amounts_read = amounts({7: pieces}, [3, 7], steps)
    for column, name in enumerate(("samples", "tokens")):
        wanted = [noted.get(step, (None, None))[column] for step in steps.tolist()]
        np.testing.assert_equal(amounts_read[name][:, 1], [np.nan if one is None else one for one in wanted])
        assert np.isnan(amounts_read[name][:, 0]).all()


@pytest.mark.parametrize(
    "piece",
    [
        StepSizes(0, 9, b"nonsense"),
        StepSizes(5, 4, b""),
        StepSizes(0, 1 << 40, zlib.compress(bytes(160))),
        StepSizes(0, 9, zlib.compress(bytes(159))),
        StepSizes(0, 9, zlib.compress(bytes(1 << 24))),
        StepSizes(0, 9, zlib.compress(bytes(160))[:-2]),
    ],
)
def test_damaged_sizes_are_refused(piece: StepSizes) -> None:
    with pytest.raises(ValueError, match="sizes of batches"):
        unpacked(piece)


def test_call_of_the_script_counts_raises_nothing_and_does_nothing_unwatched(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    traceml_ray.count(samples=7)
    values: dict[str, Any] = {}
    work = SimpleNamespace(declare=lambda **known: values.update(known))
    agent = SimpleNamespace(recorder=watched.recorder, instrumentation=watched.patches)
    agent.collector = lambda _: work
    monkeypatch.setattr(bootstrap, "_agent", agent)
    watched.step([torch.ones(3, 2)])  # from here on it is known which thread trains
    traceml_ray.count(samples=3, tokens=torch.tensor(9), flops_per_step=1e20, total_steps=50)
    other = threading.Thread(target=traceml_ray.count, args=(100,))
    other.start()
    other.join()
    traceml_ray.count(samples="many")  # type: ignore[arg-type]
    watched.step([torch.ones(3, 2)])
    assert watched.recorder.drain_work() == Counted(1, 1, 1, 0, 103, 9)
    assert values == {"job_flops": 1e20, "total_steps": 50}
    assert dict(watched.patches.errors) == {"count: ValueError": 1}
    watched.patches.errors.clear()


def test_script_that_continues_from_a_checkpoint_says_where(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = SimpleNamespace(recorder=watched.recorder, instrumentation=watched.patches)
    monkeypatch.setattr(bootstrap, "_agent", agent)
    traceml_ray.count(steps_done=torch.tensor(40))
    watched.step([torch.ones(3, 2)])
    traceml_ray.count(steps_done=7)  # smaller than the current one
    watched.step([torch.ones(3, 2)])
    assert watched.recorder.replay()
    assert watched.recorder.steps.rows.step == 42


def test_batch_of_unknown_size_makes_the_sum_unknown_and_says_why(watched: Watched) -> None:
    roots, missing = watched.patches.roots, dict[str, str]()
    report = WorkReport(watched.recorder, roots, Settings(total_steps=9), Errors(), missing, lambda: 0.0)
    kept = lambda rows: [torch.zeros(1), rows]  # noqa: E731
    odd = torch.utils.data.DataLoader([torch.ones(2)] * 8, batch_size=4, collate_fn=kept)
    for _, rows in odd:
        watched.step([torch.stack(rows)])
    first, sizes = report.collect(False)
    assert isinstance(first, StepWork) and isinstance(sizes, StepSizes)
    assert (first.steps, first.batches, first.samples) == (2, 2, None)
    assert missing == {"samples": "the tensors of a batch differ in dimension 0"}
    assert (first.total_steps, first.device) == (9, "cpu")
    assert report.collect(False) == []  # not due, nothing new
    watched.step([torch.ones(3, 2)])
    report.declare(total_steps=12)
    (work,) = report.collect(False)
    assert isinstance(work, StepWork)
    assert (work.steps, work.total_steps) == (0, 12)
