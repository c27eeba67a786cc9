"""One session over several nodes: who is where, and what becomes of it when nodes come and go."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray_cluster import FakeCluster, actor_processes, fake_cluster, until

import traceml_ray

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster(nodes=2, cpus=2) as made:
        yield made


def train(config: dict[str, Any]) -> None:
    """Train with DDP until the file `stop` is there, one rank slow in data; all ranks agree on the end."""
    import os
    import time

    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    class Slow(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            while True:
                time.sleep(config["ms"][rank % len(config["ms"])] / 1e3)
                yield torch.ones(64)

    for batch in torch.utils.data.DataLoader(Slow(), batch_size=1):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        over = torch.tensor([float(os.path.exists(config["stop"]))])  # noqa: PTH110 - shipped by value
        dist.broadcast(over, 0)
        if over:
            break
    weights = [parameter.detach().sum() for parameter in model.parameters()]
    ray.train.report({"weights": float(sum(weights)), "rank": rank})
    dist.barrier()


def fit(workers: int, ms: list[float], stop: Path, storage: Path, failures: int = 0) -> Future[Result]:
    """Start a run in a thread; it ends when `stop` is there."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"stop": str(stop), "ms": ms},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name="spread", storage_path=str(storage), failure_config=FailureConfig(max_failures=failures)
        ),
    )
    return ThreadPoolExecutor(1).submit(trainer.fit)


def label(session: Any) -> tuple[Any, ...]:
    verdict = session.verdict()
    return (verdict.label, verdict.stage, verdict.rank) if verdict else ()


def test_session_of_two_nodes_survives_lost_actors_and_nodes(cluster: FakeCluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with traceml_ray.start(session="two", out=tmp_path) as session:
        running = fit(4, [0, 0, 0, 60], stop, tmp_path)  # every CPU of the cluster
        until(lambda: running.done() or label(session) == ("straggler", "data", 3), "the verdict", 100)

        nodes = {node.node_id: node for node in session.nodes()}
        assert len(nodes) == 2
        assert [len(node.ranks) for node in nodes.values()] == [2, 2]
        ranks = session.ranks()
        triples = sorted((who.global_rank, who.local_rank, who.node_rank) for who in ranks)
        assert [rank for rank, _, _ in triples] == list(range(4))
        for node_rank in range(2):
            here = [who for who in ranks if who.node_rank == node_rank]
            assert sorted(who.local_rank for who in here) == [0, 1]
            assert len({who.node_id for who in here}) == 1

        for relay in actor_processes("NodeRelay")[:2]:
            relay.kill()
        for aggregator in actor_processes("Aggregator"):
            aggregator.kill()
        until(lambda: _alive(session) == 2, "relays and aggregator come back")
        joined = cluster.add(1)
        began = time.monotonic()
        until(lambda: _alive(session) == 3, "a relay on the node that joined")
        took = time.monotonic() - began
        print(f"relay on a joined node reports after {took:.1f} s")
        cluster.remove(joined)
        until(lambda: _alive(session) == 2, "the node is gone")
        back = cluster.add(1, node_ip_address=joined.node_ip_address)  # the same machine, a new node
        until(lambda: _alive(session) == 3, "a relay on the node that came back")
        both = [_node(session, node.node_id) for node in (joined, back)]
        assert [node.alive for node in both] == [False, True]
        assert both[0].address == both[1].address
        assert both[0].label != both[1].label

        until(lambda: running.done() or label(session) == ("straggler", "data", 3), "the verdict again")
        stop.touch()
        result = running.result(60)
        assert result.error is None
        summary = traceml_ray.to_builtins(session.summary())
        check_ledger(summary)
        assert [run.status for run in session.runs()] == ["finished"]
        kinds = [event["kind"] for event in summary["events"]]
        assert kinds.count("node_joined") == 2
        assert kinds.count("node_lost") == 1
        verdict = summary["verdict"]
        assert (verdict["label"], verdict["stage"], verdict["rank"]) == ("straggler", "data", 3)
        where = next(who.node_id for who in ranks if who.global_rank == 3)
        assert nodes[where].address in verdict["node"]  # the hostnames are all the same


@pytest.mark.long
def test_lost_node_keeps_its_rows_and_the_restart_is_a_new_attempt(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    cluster.add(2)
    with traceml_ray.start(session="lost", out=tmp_path) as session:
        running = fit(3, [10], stop, tmp_path, failures=2)
        until(lambda: running.done() or _stored(session) > 100, "rows", 100)
        used = {who.node_id for who in session.ranks()}
        assert len(used) == 3
        gone = next(node.node_id for node in cluster.others if node.node_id in used)
        before = _stored(session)
        cluster.remove(next(node for node in cluster.others if node.node_id == gone))
        until(lambda: not _node(session, gone).alive, "the node is lost", 40)
        until(lambda: running.done() or session.ranks()[0].attempt == 1, "a second attempt", 100)
        assert _stored(session) >= before
        until(lambda: _attempt_rows(session) > 50, "its rows", 60)
        stop.touch()
        assert running.result(60).error is None
        summary = traceml_ray.to_builtins(session.summary())
        check_ledger(summary)
        assert {rank["attempt"] for rank in summary["ranks"].values()} == {1}
        assert summary["verdict"]["label"] not in ("rank_lost", "telemetry_limited")
        [restart] = [event for event in summary["events"] if event["kind"] == "restart"]
        assert restart["data"]["attempt"] == 1
        assert restart["data"]["seconds"] > 0


def check_ledger(summary: dict[str, Any]) -> None:
    """Nothing is lost without a word; after the end, nothing is in flight."""
    ledger = summary["ledger"]
    assert ledger["produced"] == ledger["stored"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
    assert ledger["in_flight"] == 0
    assert ledger["stored"] > 0.8 * ledger["produced"]


def _alive(session: Any) -> int:
    """Count the nodes that are there and have reported in the last seconds; 0 while there is no answer."""
    try:
        nodes = session.nodes()
    except traceml_ray.StartError:
        return 0
    now = time.time_ns()
    return sum(node.alive and now - (node.last_seen_ns or 0) < 3e9 for node in nodes)


def _node(session: Any, node_id: str) -> Any:
    return next(node for node in session.nodes() if node.node_id == node_id)


def _stored(session: Any) -> int:
    return int(session.status().ledger.stored)


def _attempt_rows(session: Any) -> int:
    return min((who.stored for who in session.ranks() if who.attempt == 1), default=0)
