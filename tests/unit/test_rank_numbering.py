"""Processes of Ray without ranks: numbered as they arrive, the same actor under the same number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import Clock, Rank, Relay, aggregation, ask, check_ledger, stored

from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.reports.files import text_of
from traceml_ray.reports.status import render_status
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import summary_of


def _process(name: str, *, job: str = "actors", life: str = "") -> Rank:
    """A process that says it is rank 0 of 1, as one does that has no rank."""
    return Rank(0, 1, job_id=job, source="ray", name=name, process_id=f"{job}-{name}-{life}")


def _come(aggregator: AggregatorCore, process: Rank, node: int = 0, **fields: Any) -> None:
    relay = Relay(node, f"{process.process_id}-{process.seq}")
    aggregator.ingest(relay.message(process.batch(5, **fields)))


def _triples(aggregator: AggregatorCore, job: str = "actors") -> dict[str, tuple[int, ...]]:
    """By actor name: rank, local rank, node rank, world size, local world size, nodes."""
    assert aggregator.commit()
    identities = [process.identity for process in ask(aggregator, "ranks", run=job).values()]
    names = ("global_rank", "local_rank", "node_rank", "world_size", "local_world_size", "nnodes")
    return {one.name: tuple(getattr(one, name) for name in names) for one in identities}


def test_processes_are_numbered_in_order_of_arrival_in_each_run(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    for name, node in (("a", 1), ("b", 0), ("c", 1)):
        _come(aggregator, _process(name), node)
    _come(aggregator, _process("d", job="other"), 0)
    expected = {"a": (0, 0, 0, 3, 2, 2), "b": (1, 0, 1, 3, 1, 2), "c": (2, 1, 0, 3, 2, 2)}
    assert _triples(aggregator) == expected
    assert _triples(aggregator, "other") == {"d": (0, 0, 0, 1, 1, 1)}
    aggregator.close()
    restarted = aggregation(tmp_path)
    _come(restarted, _process("e"), 2)
    triples = _triples(restarted)
    assert triples["e"] == (3, 0, 2, 4, 1, 3)
    assert [triples[name][:3] for name in "abc"] == [expected[name][:3] for name in "abc"]
    assert {sizes[3] for sizes in triples.values()} == {4}


def test_restarted_actor_keeps_its_rank(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path, clock := Clock())
    first, other = _process("learner"), _process("actor")
    _come(aggregator, first)
    _come(aggregator, other)
    twin = _process("learner", life="twin")
    _come(aggregator, twin)
    aggregator.ingest(Relay(0, "loss").message(lost=[first.process_id, twin.process_id]))
    clock.tick()
    again = _process("learner", life="again")
    _come(aggregator, again, node=1)
    assert aggregator.commit()
    ranks = ask(aggregator, "ranks", run="actors")
    assert {rank: process.process_id for rank, process in ranks.items()} == {
        0: first.process_id, 1: other.process_id, 2: again.process_id,
    }  # fmt: skip
    summary = ask(aggregator, "summary")
    assert (summary["ranks"]["2"]["processes"], summary["ranks"]["1"]["name"]) == (2, "actor")
    assert "learner" in text_of(summary_of(summary), tmp_path)
    assert "learner" in render_status(stored(tmp_path), tmp_path, None, clock())


def test_process_that_registers_again_keeps_its_rank(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    processes = [_process(""), _process("", life="2")]
    for _ in range(3):
        for process in processes:
            _come(aggregator, process)
    assert aggregator.commit()
    ranks = ask(aggregator, "ranks", run="actors")
    assert {rank: process.process_id for rank, process in ranks.items()} == {
        rank: process.process_id for rank, process in enumerate(processes)
    }
    assert check_ledger(tmp_path)["stored"] == 30


def test_process_that_joins_a_torch_group_takes_its_rank_there(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    processes = [_process(str(number)) for number in range(2)]
    for process in processes:
        _come(aggregator, process)
    for process, rank in zip(processes, (1, 0), strict=True):
        process.identity = Rank(rank, 2, job_id="actors", source="torch.distributed").identity
        _come(aggregator, process)
    assert aggregator.commit()
    ranks = ask(aggregator, "ranks", run="actors")
    assert [process.process_id for process in ranks.values()] == [
        processes[1].process_id,
        processes[0].process_id,
    ]


@pytest.mark.parametrize("restarted", [False, True])
@given(
    comers=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "b"]), st.booleans()), max_size=12)
)
@settings(max_examples=15, deadline=None)
def test_ranks_are_consecutive_numbers_from_0(
    tmp_path_factory: pytest.TempPathFactory, restarted: bool, comers: list[tuple[int, str, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("session")
    aggregator = aggregation(folder)
    for number, (node, name, ends) in enumerate(comers):
        _come(aggregator, _process(name, life=str(number)), node, final=ends)
        if restarted:
            assert aggregator.commit()
            aggregator.close()
            aggregator = aggregation(folder)
    aggregator.commit()
    with SessionFile(folder / "session.sqlite") as session:
        who = [process.identity for process in session.ranks().values() if process.identity]
    assert [one.global_rank for one in who] == list(range(len(who)))
    assert {one.world_size for one in who} <= {len(who)}
    aggregator.close()
