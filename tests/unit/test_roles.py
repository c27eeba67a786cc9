"""Ranks that do different work: pipelines, tensor-parallel layers, workers that only serve over RPC."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from played import Played, look
from sessions import Rank, Relay, aggregation, written_summary
from simulated_pipeline import Pipeline, Slow, elapsed_ms, windows
from torch import nn
from unit.sample_windows import judge
from unit.test_recorder import Loop

from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.analysis.history import Replay
from traceml_ray.analysis.roles import bubbles, role_of
from traceml_ray.analysis.uneven_work import loads, sentence
from traceml_ray.analysis.verdict import DEFAULTS
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.signals.experts.records import RouterTokens
from traceml_ray.signals.experts.routers import Routers
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_INSEPARABLE,
    FLAG_NO_PEERS,
    FORWARD,
    POST_SYNC,
    STAGES,
)
from traceml_ray.store.session_file import SessionFile
from traceml_ray.views.source import StoredSource
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

LONG = Pipeline(work=(2.0, 5.0), micro=4)
"""The second stage is what takes long."""


@pytest.mark.parametrize(
    ("mesh", "stages", "role"),
    [
        ({"pp": [1, 2], "dp": [0, 2]}, [1], "pp=1"),
        ({"dp_replicate": [0, 2], "dp_shard": [1, 2], "tp": [3, 4]}, [], "tp=3"),
        ({"pp": [0, 1], "dp": [0, 2], "tp": [1, 2]}, [], "tp=1"),
        ({"dp": [1, 2]}, [1], "stage=1"),
        ({}, [0, 2], "stage=0+2"),
        ({"replicate": [1, 2], "shard": [0, 4]}, [], None),
    ],
)
def test_role_is_the_place_in_all_dimensions_that_are_not_data_parallel(
    mesh: dict[str, Any], stages: list[int], role: str | None
) -> None:
    assert role_of({"mesh": mesh, "stages": stages, "of_stages": 4 if stages else 0}) == role


@pytest.mark.parametrize(
    ("mesh", "peers", "role"),
    [
        ({"workers": [3, 4]}, 4, None),
        ({"a": [1, 2], "b": [1, 2]}, 4, None),
        ({"a": [1, 2], "b": [1, 2]}, 2, "a=1 b=1"),
        ({"workers": [3, 4]}, None, "workers=3"),
        ({"dp_shard_cp": [3, 4]}, 4, "dp_shard_cp=3"),
        ({"dp": [1, 2], "cp": [1, 2]}, 4, "cp=1"),
    ],
)
def test_dimension_of_any_name_is_data_parallel_where_all_its_ranks_exchange_gradients(
    mesh: dict[str, Any], peers: int | None, role: str | None
) -> None:
    assert role_of({"mesh": mesh}, peers) == role


# -- the verdict -----------------------------------------------------------------------------------


def named(job: Pipeline, slow: Slow | None) -> tuple[str, str | None, tuple[int, ...]]:
    verdict = judge(windows(job, slow, 1)[0])
    return verdict.label, verdict.stage, verdict.ranks


@pytest.mark.parametrize("exchange_first", [False, True])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("rank", "stage"), [(1, FORWARD), (2, BACKWARD), (0, DATA), (3, POST_SYNC)])
def test_slow_rank_is_named_among_its_replicas(
    schedule: str, exchange_first: bool, rank: int, stage: int
) -> None:
    job = Pipeline(work=(2.0, 2.5, 2.0), schedule=schedule, exchange_first=exchange_first)
    slow = Slow(rank, stage, 0.4 * job.step_ms)
    assert named(job, slow) == ("straggler", STAGES[stage], (rank,))


def test_cost_is_what_the_run_loses_though_another_role_waits_for_the_rank() -> None:
    job = Pipeline(exchange_first=True)
    (calm,), (late,) = windows(job, None, 1), windows(job, Slow(1, FORWARD, 16.0), 1)
    verdict = judge(late)
    assert verdict.ranks == (1,) and verdict.why.startswith(
        "In role pp=0 (ranks 0 and 1): rank 1 (node-1) is "
    )
    assert (verdict.gain_pct or 0) / 100 == pytest.approx(1 - elapsed_ms(calm) / elapsed_ms(late), abs=0.03)


def test_lateness_that_hides_in_the_bubble_costs_nothing_and_names_nobody() -> None:
    slow = Slow(1, FORWARD, 8.0)
    (calm,), (late,) = windows(LONG, None, 1), windows(LONG, slow, 1)
    assert elapsed_ms(late) / elapsed_ms(calm) < 1.05
    assert judge(late).label == "healthy" and judge(late).rank is None


@given(
    st.lists(st.floats(0.5, 5), min_size=2, max_size=4),
    st.integers(2, 3),
    st.sampled_from([2, 4]),
    st.sampled_from(["GPipe", "1F1B"]),
    st.booleans(),
    st.sampled_from([0.02, 0.05, 0.15]),
)
def test_even_replicas_are_healthy_however_uneven_the_stages(
    work: list[float], replicas: int, micro: int, schedule: str, exchange_first: bool, noise: float
) -> None:
    job = Pipeline(tuple(work), replicas, micro, schedule, exchange_first=exchange_first, noise=noise)
    assert judge(windows(job, None, 1)[0]).label == "healthy"


def test_bubble_of_each_role_is_the_share_that_it_waits_for_the_others() -> None:
    (window,) = windows(replace(LONG, noise=0.0), None, 1)
    first, second = judge(window).roles
    assert (first.role, first.size, second.role) == ("pp=0", 2, "pp=1")
    of_long = 1 - LONG.step_ms_of(1) / (elapsed_ms(window) / 50)
    assert second.bubble == pytest.approx(of_long, abs=0.02) and (first.bubble or 0) > 2 * (
        second.bubble or 0
    )


def test_where_waits_are_not_seen_nobody_is_named() -> None:
    slow = Slow(1, FORWARD, 16.0)
    assert named(Pipeline(unmarked=True), slow)[0] == "accounting_only"
    (window,) = windows(Pipeline(), slow, 1)
    inseparable = replace(window, flags=window.flags | FLAG_INSEPARABLE)
    assert judge(inseparable).why.startswith(
        "In role pp=0 (ranks 0 and 1): These ranks are stages of a pipeline"
    )
    assert bubbles(inseparable) is None and judge(inseparable).roles[0].bubble is None


def test_stages_without_replicas_are_not_judged_and_their_bubble_is_told() -> None:
    (window,) = windows(Pipeline(replicas=1), None, 1)
    whole = replace(window, flags=window.flags | FLAG_NO_PEERS, groups=(None, None))
    verdict = judge(whole)
    assert (verdict.label, verdict.rank) == ("accounting_only", None)
    assert "no other rank does the same work. They wait for each other for " in verdict.why


def test_whole_run_names_the_rank_once() -> None:
    (window,) = windows(Pipeline(work=(20.0, 20.0)), Slow(3, BACKWARD, 100.0), 1, steps=120)
    replay = Replay(120)
    replay.add(window)
    judged = replay.done()
    assert [(one.ranks, one.stage) for one in judged.episodes.episodes] == [((3,), "backward")]
    assert judged.run_verdict().ranks == (3,)


# -- rows ------------------------------------------------------------------------------------------


def test_row_is_two_where_a_rank_waits_for_other_roles_and_exchanges() -> None:
    loop = Loop()
    for _ in range(3):
        loop.data(2)
        loop.sync(7)
        loop.forward(4)
        loop.sync(8)
        loop.backward(5, 6)
        loop.optimizer(1)
        loop.recorder.exchange.see("pp")
        loop.recorder.replay()
    rows = loop.rows()
    assert [(key & 255, flags & FLAG_NO_PEERS) for key, flags, _ in rows[1:]] == [
        (0, FLAG_NO_PEERS),
        (1, 0),
    ] * 2
    (_, _, first), (_, _, second) = rows[-2:]
    assert first == [1, 2, 0, 4, 5, 15] and second == [0, 0, 0, 0, 0, 6]


@pytest.mark.parametrize("why", ["sharded", "on a device", "no split"])
def test_rows_are_coupled_where_waits_cannot_be_told_apart(why: str) -> None:
    loop = Loop()
    exchange = loop.recorder.exchange
    exchange.see("pp")
    if why == "sharded":
        exchange.shard()
    elif why == "on a device":
        exchange.couple("tp")
    for _ in range(2):
        loop.data(2)
        loop.forward(4)
        loop.backward(5, 6, split=why != "no split")
        loop.optimizer(1)
    assert {flags & FLAG_INSEPARABLE for _, flags, _ in loop.rows()} == {FLAG_INSEPARABLE}


# -- sessions --------------------------------------------------------------------------------------


def pipeline_batch(rank: Rank, rows: np.ndarray, first: int) -> bytes:
    """A batch of a rank of the simulated pipeline: two rows a step."""
    n, number = len(rows), rank.identity.global_rank
    steps = np.arange(first, first + n // 2, dtype="<i8") << 8
    flags = bytes([FLAG_NO_PEERS, 0] * (n // 2))
    place = wire.Placement({"pp": [number // 2, 2], "dp": [number % 2, 2]}, [number // 2], 2)
    return rank.batch(
        n, rows=rows.astype("<i8").tobytes(), keys=np.stack([steps, steps + 1], 1).tobytes(), flags=flags,
        group=(number // 2 * 2, 2), strategy="ddp+pp", placement=place,
    )  # fmt: skip


def test_roles_and_bubbles_are_in_verdict_summary_and_report_live_and_stored(tmp_path: Path) -> None:
    (window,) = windows(Pipeline(work=(20.0, 20.0)), Slow(3, BACKWARD, 100.0), 1, steps=60)
    aggregator, relay = aggregation(tmp_path / "demo", world_size=4, nnodes=1), Relay()
    ranks = [Rank(number, 4, node_id="node-0") for number in range(4)]
    for first in range(0, 60, 10):
        rows = window.d[2 * first : 2 * first + 20].transpose(1, 0, 2)
        batches = [pipeline_batch(rank, rows[index], first) for index, rank in enumerate(ranks)]
        aggregator.ingest(relay.message(*batches))
        assert aggregator.commit()
        aggregator.judge()
    live = aggregator.verdict
    assert live is not None and (live.label, live.ranks, live.stage) == ("straggler", (3,), "backward"), (
        live.why
    )
    aggregator.finish(wire.Finish(codec.VERSION, 0))
    with SessionFile(tmp_path / "demo" / "session.sqlite") as file:
        summary = written_summary(file, DEFAULTS)
    assert [(one["role"], one["size"]) for one in summary["roles"]] == [("pp=0", 2), ("pp=1", 2)]
    assert summary["ranks"]["3"]["role"] == "pp=1" and summary["verdict"]["ranks"] == [3]
    assert summary["steps"]["exchanges"] == 1
    report = (tmp_path / "demo" / "report.txt").read_text()
    assert "bubble" in report and "In role pp=1 (ranks 2 and 3): rank 3" in report.replace(
        "\n           ", " "
    )


class Router(nn.Module):
    """Gives every second token to expert 2, the others to 0 and 1."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(len(tokens), 1), torch.tensor([[0, 1], [2, 2]]).repeat(len(tokens) // 2, 1)


def test_load_of_experts_is_counted_where_a_router_is_watched() -> None:
    patcher, router = Patcher(), Router()
    routers = Routers(patcher)
    routers.watch(router, 4, "layer 1", None)
    for _ in range(3):
        router(torch.zeros(8, 1))
    with torch.no_grad():
        router(torch.zeros(8, 1))
    router.eval()(torch.zeros(8, 1))
    assert routers.counts() == {"layer 1": [12, 12, 24, 0]}
    (load,) = loads([routers.due(True), routers.due(True)])
    assert (load.tokens, load.most, load.times_mean, load.idle) == (96, 2, 2.0, 1)
    assert sentence(load) == "layer 1: expert 2 of 4 has 2 times the mean; 1 had no token"
    patcher.restore()
    router.train()(torch.zeros(8, 1))
    assert routers.counts() == {"layer 1": [12, 12, 24, 0]} and not patcher.errors


def test_router_that_shows_no_choice_is_counted_as_an_error_and_goes_on() -> None:
    patcher, layer = Patcher(), nn.Linear(2, 4)
    Routers(patcher).watch(layer, 4, "layer", None)
    assert layer(torch.zeros(3, 2)).shape == (3, 4)
    assert dict(patcher.errors) == {"router: TypeError": 1}


@pytest.mark.parametrize("chosen", [[[0, 1], [-1, 2]], [[0, 1], [4, 2]], [[4_000, 1], [-9, 17]]])
def test_index_of_no_expert_is_counted_apart(chosen: list[list[int]]) -> None:
    """A scatter out of range ends the process on CUDA; a CPU raises."""
    patcher, layer = Patcher(), nn.Linear(2, 4)
    routers = Routers(patcher)
    routers.watch(layer, 4, "layer", lambda _output: torch.tensor(chosen))
    for _ in range(2):
        layer(torch.zeros(3, 2))
    flat = [index for pair in chosen for index in pair]
    assert routers.counts() == {"layer": [2 * flat.count(expert) for expert in range(4)]}
    assert routers.outside == 2 * sum(index not in range(4) for index in flat)
    assert not patcher.errors


def test_routers_of_one_name_are_told_apart_before_they_have_run() -> None:
    routers, layers = Routers(Patcher()), [nn.Linear(2, 4), nn.Linear(2, 4)]
    for number, layer in enumerate(layers):
        routers.watch(layer, 4, "router", lambda _output, number=number: torch.tensor([number]))
    for layer in layers:
        layer(torch.zeros(1, 2))
    assert routers.counts() == {"router": [1, 0, 0, 0], "router'": [0, 1, 0, 0]}


def test_load_of_experts_is_in_summary_and_report(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 2, per_node=2, late=None)
    for second in range(12):
        played.play(5, experts=[RouterTokens(0, "router", [second, second, 2 * second, 0])])
    played.end()
    with SessionFile(tmp_path / "demo" / "session.sqlite") as file:
        (load,) = written_summary(file, DEFAULTS)["experts"]
    assert (load["most"], load["times_mean"], load["tokens"]) == (2, 2.0, 88)
    report = (tmp_path / "demo" / "report.txt").read_text()
    assert "Experts    router: expert 2 of 4 has 2 times the mean; 1 had no token" in report


def test_file_that_was_written_before_placements_were_known_can_be_read(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 2, per_node=2, late=None)
    for _ in range(12):
        played.play(5)
    played.end()
    played.aggregator.close()
    path = tmp_path / "demo" / "session.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE rank_process DROP COLUMN placement")
    connection.close()
    with SessionFile(path) as file:
        assert (
            file.ranks()[0].role is None and written_summary(file, DEFAULTS)["verdict"]["label"] == "healthy"
        )


def test_worker_that_only_serves_over_rpc_is_listed_and_not_missing(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 3, per_node=3, late=None)
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(20):
        played.clock.tick()
        rows, batches = played.rows(5), []
        for rank in played.ranks:
            name = ("trainer0", "stage1", "stage2")[rank.identity.global_rank]
            fields = {"placement": wire.Placement(worker=name), "strategy": "rpc"}
            steps = 0 if rank.identity.global_rank else 5
            sent = {"rows": rows[0].tobytes()} if steps else {"rows": b""}
            batches.append(rank.batch(steps, **sent, **fields))
        played.aggregator.ingest(played.relays[0].message(*batches))
        assert played.aggregator.commit()
        played.aggregator.judge()
        pages.poll()
    live = played.aggregator.verdict
    assert live is not None and (live.label, live.coverage) == ("healthy", 1.0), live.why
    assert live.why.startswith("Only rank 0 (host-0) takes steps. The other workers serve it over RPC")
    view = look(pages, "ranks")
    assert [row["state"] for row in view["chosen"].items] == ["running"] + 2 * ["serves RPC, no steps"]
    assert [row["role"] for row in view["chosen"].items][:2] == [
        "RPC trainer0",
        "RPC stage1, serves, no steps",
    ]
    played.end()
    stored = SessionPages(StoredSource(played.folder), clock=played.clock, timer=played.clock.timer)
    for _ in range(2):
        stored.poll()
        times = [row["busy_ms"] is None for row in look(stored, "ranks")["chosen"].items]
        stored.poll()
    assert times == [False, True, True]
    with SessionFile(tmp_path / "demo" / "session.sqlite") as file:
        summary = written_summary(file, DEFAULTS)
    assert summary["verdict"]["label"] == "healthy" and summary["session"]["silent_ranks"] == []
    assert [summary["ranks"][rank]["serves"] for rank in "012"] == [False, True, True]
    assert "RPC stage1, serves, no steps" in (tmp_path / "demo" / "report.txt").read_text()
