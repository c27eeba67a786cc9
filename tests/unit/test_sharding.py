"""Who holds how much of a model that FSDP2 divides: from what ranks say to summary, report and page."""

from __future__ import annotations

import contextlib
import csv
import json
import sqlite3
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from played import Played, look
from plotly.io.json import to_json_plotly
from sessions import Rank, records_of
from torch.distributed import fsdp

from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.patch import data_parallel
from traceml_ray.agent.patch.fsdp import ShardTraffic, part_of_fsdp2
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.analysis.roles import mode
from traceml_ray.cli import main
from traceml_ray.dash_app.app import Refresher
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.signals.sharding.judge import models
from traceml_ray.signals.sharding.records import SHARDING, Sharding, UnevenShard
from traceml_ray.signals.sharding.view import about_model, per_step, sharding_of
from traceml_ray.store.excerpt import cut
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter
from traceml_ray.terminal.panel import panel
from traceml_ray.terminal.snapshot import Choice, take_snapshot
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import StoredSource
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

MB = 1_000_000


def sharding(rank: int = 0, **fields: Any) -> Sharding:
    """Two shards of a model of ten rows of a megabyte, on a mesh of 2 × 2."""
    usual = Sharding(
        *(2, 5 * MB, 10 * MB, 0, 5 * MB, 2, rank % 2, 2, [2, 2], ["replicate", "shard"]),
        *({"stored": "float32", "computed": "bfloat16", "reduced": "float32"}, {"yes": 1, "no": 1}),
        steps=4,
        step_ns=400,
        unsharded_ns=100,
        gathered_bytes=48 * MB,
        gathers=12,
        unsharded_peak_bytes=5 * MB,
        wait_steps=4,
        gather_wait_ns=8_000_000,
        reduce_wait_ns=0,
    )
    return msgspec.structs.replace(usual, **fields)


class Divided(Played):
    """All ranks say how their model is divided; rank 0 has more of it, for 3 rows cannot be halved."""

    def _batch(self, rank: Rank, rows: Any, **fields: Any) -> bytes:
        rank_number = rank.identity.global_rank
        part = UnevenShard("embed.weight", 3, 2 - rank_number % 2, (2 - rank_number % 2) * MB)
        sent = sharding(
            rank_number,
            shard_bytes=(2 - rank_number % 2) * MB,
            full_bytes=3 * MB,
            uneven=[part],
            uneven_count=1,
        )
        return super()._batch(rank, rows, **{"sharding": [sent], "strategy": "fsdp2+hsdp", **fields})


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    played = Divided(tmp_path_factory.mktemp("divided"), 4, late=None)
    for _ in range(8):
        played.play(5)
    played.end()
    return played.folder


@pytest.mark.parametrize(
    ("strategies", "expected"),
    [
        ([], None),
        ([None, "single"], "single"),
        (["ddp", "single", None], "ddp"),
        (["fsdp2", "fsdp2+hsdp"], "hsdp"),
        (["fsdp", "ddp"], "fsdp"),
        (["ddp+tp+pp"], "ddp+tp+pp"),
        (["fsdp2+pp", "fsdp2+tp"], "fsdp2+tp+pp"),
        (["pp"], "pp"),
        (["deepspeed+all_reduce (inferred)"], "deepspeed"),
        (["all_reduce (inferred)"], "all_reduce (inferred)"),
        (["fsdp2+ep"], "fsdp2+ep"),
    ],
)
def test_mode_of_a_job_is_that_of_all_its_ranks(strategies: list[str | None], expected: str | None) -> None:
    assert mode(strategies) == expected


def test_ranks_that_hold_more_are_named_with_the_parameter_that_makes_it() -> None:
    rows = [3, 3, 3, 1]
    ranks = {
        rank: sharding(
            shards=4,
            shard_bytes=n_rows * MB,
            uneven=[UnevenShard("w", 10, n_rows, n_rows * MB)],
            uneven_count=1,
        )
        for rank, n_rows in enumerate(rows)
    }
    (one,) = models(ranks)
    assert one.imbalance is not None  # three have as much: the one that has less stands out
    assert (one.imbalance.ranks, one.imbalance.bytes, one.imbalance.ratio) == ([3], MB, 3.0)
    assert "w has 10 rows for 4 ranks" in one.imbalance.why and "3, 3, 3 and 1" in one.imbalance.why
    assert "multiple of 4" in one.imbalance.next

    ranks[0] = sharding(shard_bytes=4 * MB)
    ranks |= {rank: sharding(shard_bytes=2 * MB) for rank in (1, 2, 3)}
    (one,) = models(ranks)
    assert one.imbalance is not None
    assert (one.imbalance.ranks, one.imbalance.median_bytes, one.imbalance.ratio) == ([0], 2 * MB, 2.0)


def test_rank_without_any_part_has_no_ratio_and_equal_shards_no_imbalance() -> None:
    (one,) = models({0: sharding(shard_bytes=MB), 1: sharding(shard_bytes=MB), 2: sharding(shard_bytes=0)})
    assert one.imbalance is not None and one.imbalance.ratio is None and one.imbalance.ranks == [2]
    (one,) = models({0: sharding(shard_bytes=100), 1: sharding(shard_bytes=105)})
    assert one.imbalance is None


def test_stages_of_a_pipeline_are_models_by_themselves() -> None:
    ranks = {
        rank: sharding(full_bytes=(rank // 2 + 1) * MB, shard_bytes=(rank // 2 + 1)) for rank in range(4)
    }
    assert [one.ranks for one in models(ranks)] == [[0, 1], [2, 3]]
    assert all(one.imbalance is None for one in models(ranks))


def test_summary_report_and_page_say_who_holds_what(divided: Path) -> None:
    summary = json.loads((divided / "summary.json").read_text())
    assert summary["session"]["strategy"] == "hsdp"
    block = summary["sharding"]
    (one,) = block["models"]
    assert one["imbalance"]["ranks"] == [0, 2] and one["uneven"][0]["per_rank"]["1"] == 1
    of_rank = block["per_rank"]["0"]
    assert (of_rank["shard_bytes"], of_rank["gathered_bytes"], of_rank["gather_wait_ms"]) == (
        2 * MB,
        12 * MB,
        2.0,
    )
    assert (of_rank["unsharded_share"], of_rank["optimizer_bytes"], of_rank["forward_peak_bytes"]) == (
        0.25,
        None,
        None,
    )

    text = " ".join((divided / "report.txt").read_text().split())
    assert "hsdp" in text and "Ranks 0 and 2 hold 2 MB each" in text
    assert "2 replicas of each shard (mesh: replicate 2 × shard 2)" in text
    assert "float32, gathered as bfloat16, gradients reduced as float32" in text
    assert "Per step 12 MB gathered in 3 all-gathers, whole parameters take" in text
    page = (divided / "report.html").read_text()
    assert "How the model is divided" in page and "embed.weight has 3 rows" in page

    pages = SessionPages(StoredSource(divided))
    pages.poll()
    assert look(pages, "memory")["session"]["strategy"] == "hsdp"
    shown = to_json_plotly(Refresher(pages).refresh("/memory", "", {}))
    assert "Shards (FSDP2" in shown and "embed.weight" in shown


def test_live_session_answers_as_its_file_does(tmp_path: Path) -> None:
    played = Divided(tmp_path / "live", 4, late=None)
    for _ in range(3):
        played.play(5)
    pages = SessionPages(played.source)
    pages.poll()
    look(pages, "memory")
    pages.poll()
    assert "2 replicas of each shard" in str(look(pages, "memory")["beside"]["sharding"][0].blocks[0].pairs)

    poll = SessionPoll(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(2):
        poll.poll()
        memory = Choice(pane="memory")
        shown = poll.make(lambda chosen=memory: take_snapshot(poll, poll.newest, chosen))[1]
    lines = " ".join(line.plain.strip() for line in panel(shown, memory, 120, 40))
    assert "HSDP" in lines and "SHARDS" in lines and "Ranks 0 and 2 hold 2 MB each" in lines


def test_of_many_ranks_a_page_asks_for_those_that_hold_most(divided: Path) -> None:
    with SessionFile(divided / "session.sqlite") as file:
        answer = sharding_of(file, file.ranks(), 2)
    assert answer is not None and [*answer.per_rank] == [0, 2]
    assert answer.models[0].ranks == [0, 1, 2, 3]
    assert per_step(answer, answer.models[0]).startswith("12 MB gathered in 3 all-gathers, ")


def test_model_in_words() -> None:
    (one,) = models({0: sharding(resharded={"2": 2}, offloaded_bytes=1, mesh_dims=[], mesh_shape=[4])})
    facts = about_model(one)
    assert facts[0] == "10 MB of parameters in 2 groups" and facts[-1] == "shards offloaded to the host"
    assert "(mesh: 4)" in facts[1] and facts[3] == "resharded to 2 ranks after forward"


def test_file_of_before_has_no_shards_and_takes_some(tmp_path: Path, divided: Path) -> None:
    """Files of this schema were written before there was a table for shards."""
    path = tmp_path / "session.sqlite"
    with SessionFile(divided / "session.sqlite") as stored:
        stored.copy_to(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE shard")
        connection.execute("DELETE FROM meta WHERE key = 'ending'")  # the session goes on
        connection.commit()
    with SessionFile(path) as old:
        assert (
            old.records_of(SHARDING) == {} and sharding_of(old, old.ranks()) is None and len(old.ranks()) == 4
        )
    cut(path, excerpt := tmp_path / "excerpt.sqlite", 60.0, 10)
    with SessionFile(excerpt) as old:
        assert old.records_of(SHARDING) == {}

    writer = SessionWriter(path)
    process = next(iter(writer.processes.values()))
    writer.add_record(SHARDING, process.id, sharding())
    writer.commit()
    writer.close()
    with SessionFile(path) as again:
        assert again.records_of(SHARDING) == {process.id: [sharding()]}


def test_shards_are_exported_with_a_column_for_each_field(divided: Path, tmp_path: Path) -> None:
    assert main(["export", str(divided), "--format", "csv", "-o", str(tmp_path / "tables")]) == 0
    with (tmp_path / "tables" / "shards.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["shard_bytes"] for row in rows] == [str((2 - row_number % 2) * MB) for row_number in range(4)]
    assert rows[1]["mesh_dims"] == '["replicate","shard"]' and '"embed.weight",3,1' in rows[1]["uneven"]
    assert rows[0]["optimizer_bytes"] == ""


def test_shards_are_in_an_excerpt(tmp_path: Path, divided: Path) -> None:
    cut(divided / "session.sqlite", tmp_path / "excerpt.sqlite", 60.0, 10)
    with SessionFile(divided / "session.sqlite") as whole, SessionFile(tmp_path / "excerpt.sqlite") as part:
        assert part.records_of(SHARDING) == whole.records_of(SHARDING) != {}


def test_batch_with_shards_goes_over_the_wire() -> None:
    rank = Rank(0, 1)
    batch = codec.decode(
        rank.batch(0, sharding=[sharding(uneven=[UnevenShard("w", 3, 1, 4)])]), wire.RankBatch
    )
    assert records_of(batch, SHARDING) == [sharding(uneven=[UnevenShard("w", 3, 1, 4)])]


@pytest.fixture
def ours() -> Iterator[Instrumentation]:
    made = Instrumentation(Recorder(StepRing(8)), Patcher())
    yield made
    made.patcher.restore()


def test_model_that_is_given_to_deepspeed_is_said_to_be(
    ours: Instrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DeepSpeedEngine:
        def __init__(self, model: object) -> None:
            self.module = model

    module, before = types.ModuleType(data_parallel.DEEPSPEED_MODULE), DeepSpeedEngine.__init__
    module.DeepSpeedEngine = DeepSpeedEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, data_parallel.DEEPSPEED_MODULE, module)
    ours.data_parallel.patch_deepspeed()
    assert ours.strategy == "single" and DeepSpeedEngine("model").module == "model"
    assert ours.strategy == "deepspeed"
    ours.patcher.restore()
    assert DeepSpeedEngine.__init__ is before


@pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="this torch has no fully_shard there")
def test_fully_shard_of_an_older_torch_is_found_where_it_was(
    ours: Instrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed._composable.fsdp as composable

    before = composable.fully_shard
    ours.data_parallel.patch_composable()
    assert composable.fully_shard is before  # that of today, which is patched elsewhere
    monkeypatch.delattr(fsdp, "fully_shard")
    ours.data_parallel.patch_composable()
    assert composable.fully_shard.__wrapped__ is before and not ours.missing
    ours.patcher.restore()
    assert composable.fully_shard is before


@pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="this torch has no fully_shard there")
def test_fsdp2_that_lacks_a_function_is_told_and_one_that_answers_otherwise_counted(
    ours: Instrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = part_of_fsdp2("_fsdp_param_group")
    assert groups is not None
    with monkeypatch.context() as other:
        other.delattr(groups.FSDPParamGroup, "_to_sharded")
        ours.data_parallel.patch_fsdp()
    assert "FSDPParamGroup._to_sharded" in ours.missing["fsdp: bytes"]

    monkeypatch.setattr(groups, "foreach_all_gather", lambda *_: ["no tensor"])
    before = groups.foreach_all_gather
    traffic = ShardTraffic(ours.recorder, ours.failed)
    traffic.patch(ours.patcher)
    assert groups.foreach_all_gather() == ["no tensor"]
    assert ours.errors == {"fsdp: bytes: AttributeError": 1}
    ours.patcher.restore()
    assert groups.foreach_all_gather is before


@pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="this torch has no fully_shard there")
def test_reductions_of_an_older_torch_are_counted_by_the_sizes_of_parameters(
    ours: Instrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns no buffer: here four ranks share ten rows of three, three rows each, and two replicas."""

    def foreach_reduce(
        fsdp_params: object, reduce_scatter_group: object, all_reduce_group: object, all_reduce_grads: bool
    ) -> tuple[object, ...]:
        return "an event", fsdp_params, reduce_scatter_group, all_reduce_group, all_reduce_grads

    groups = part_of_fsdp2("_fsdp_param_group")
    monkeypatch.setattr(groups, "foreach_reduce", foreach_reduce)
    traffic = ShardTraffic(ours.recorder, ours.failed)
    traffic.patch(ours.patcher)
    dtypes = {"reduce_dtype": None, "param_dtype": torch.bfloat16, "orig_dtype": torch.float32}
    one = types.SimpleNamespace(padded_sharded_param_size=torch.Size([3, 3]), **dtypes)
    four, two = (types.SimpleNamespace(size=lambda n=n: n) for n in (4, 2))
    traffic._begin()
    for _ in range(2):
        groups.foreach_reduce([one], four, two, True)  # type: ignore[union-attr]
        traffic._boundary = True
        traffic._begin()
    assert not ours.errors and traffic.closed.steps == 1  # the first one is not counted
    groups.foreach_reduce([one], four, all_reduce_group=two, all_reduce_grads=False)  # type: ignore[union-attr]
    traffic._boundary = True
    traffic._begin()
    moved = traffic.closed
    assert (moved.reductions, moved.reduced, moved.all_reduced) == (2, 2 * 4 * 9 * 2, 9 * 2)


@pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="this torch has no fully_shard there")
def test_hooks_that_dynamo_passes_over_are_not_wrapped(ours: Instrumentation) -> None:
    """It would trace the wrapper, and break the graph where it calls the hook."""
    state = part_of_fsdp2("_fsdp_state").FSDPState  # type: ignore[union-attr]
    group = part_of_fsdp2("_fsdp_param_group").FSDPParamGroup  # type: ignore[union-attr]
    hooks = [(state, name) for name in ("_pre_forward", "_post_forward", "_pre_backward")]
    hooks += [(group, name) for name in ("pre_backward", "post_backward")]
    before = [vars(owner)[name] for owner, name in hooks]
    inner = state._register_pre_backward_hook
    ours.data_parallel.patch_fsdp()
    assert [vars(owner)[name] for owner, name in hooks] == before
    assert state._register_pre_backward_hook is not inner and not ours.missing
