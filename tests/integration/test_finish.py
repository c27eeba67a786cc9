"""The end of a launched job of two nodes on a cluster that stays: its actors, and launchers as they ask."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from private_ray import ROWS, Rank
from ray_cluster import FakeCluster, fake_cluster, until
from sessions import check_ledger

from traceml_ray.launchers.control import ask_finish
from traceml_ray.ray.actors import NAMESPACE, ActorConfig
from traceml_ray.ray.aggregator import ensure_aggregator
from traceml_ray.ray.membership import ensure_relay
from traceml_ray.settings import Settings
from traceml_ray.store.session import SessionError, holder, prepare
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster(nodes=2, cpus=1, lean=True) as made:
        yield made


class Job:
    """What the launchers of two nodes have made, and their ranks."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
        self.name = f"job-{secrets.token_hex(4)}"
        self.session = prepare(self.folder, self.name)
        self.nodes = [cluster.head.node_id, cluster.others[0].node_id]
        self.sockets = [self.folder / str(node) / "relay.sock" for node in range(2)]
        for node, path in enumerate(self.sockets):
            path.parent.mkdir(mode=0o700)
            if node == 0:
                ensure_aggregator(self._config(0), self.nodes[0])
            ray.get(ensure_relay(self._config(node), self.nodes[node]).ready.remote(), timeout=240)
        self.ranks = [Rank(path, number) for number, path in enumerate(self.sockets)]

    def _config(self, node: int) -> ActorConfig:
        place = {"socket": str(self.sockets[node]), "spool": str(self.sockets[node].parent)}
        return ActorConfig(self.name, Settings(session=self.name), folder=str(self.session.path), **place)

    def leave(self, node: int, code: int = 0) -> wire.Finished | None:
        """What the launcher of that node does at the end."""
        return ask_finish(self.sockets[node], wire.Finish(codec.VERSION, code, stop=node == 0, nodes=2))

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.session.summary_json.read_bytes())
        return summary

    def actors(self) -> list[str]:
        listed = ray.util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in listed if actor["name"].startswith(self.name)]


@pytest.fixture
def job(cluster: FakeCluster) -> Iterator[Job]:
    made = Job(cluster)
    try:
        yield made
    finally:
        for name in made.actors():
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        made.session.release()
        shutil.rmtree(made.folder)


def send(job: Job, node: int, times: int, *, final: bool = False) -> None:
    for number in range(times):
        job.ranks[node].send(final=final and number == times - 1)
    job.ranks[node].settle()


def test_node_that_ends_long_after_the_first_is_in_the_session(job: Job) -> None:
    send(job, 0, 3, final=True)
    send(job, 1, 3)
    answer = job.leave(0)
    assert answer == wire.Finished(codec.VERSION, "written", socket.gethostname(), 1)
    assert job.summary()["session"]["status"] == "finished"
    assert holder(job.session.path) == os.getpid()
    job.session.release()  # the launcher of the first node ends
    until(lambda: holder(job.session.path) not in (None, os.getpid()), "the aggregator holds the session")
    with pytest.raises(SessionError, match="already running"):
        prepare(job.folder, job.name)
    until(lambda: len(job.actors()) == 2, "the relay of the first node ends")
    send(job, 1, 5, final=True)
    assert job.leave(1, 7) == wire.Finished(codec.VERSION, "noted")
    until(lambda: not job.actors(), "all actors end")
    assert holder(job.session.path) is None
    summary = job.summary()
    assert (summary["session"]["status"], summary["session"]["exit_code"]) == ("failed", 7)
    assert summary["ledger"]["stored"] == check_ledger(job.session.path)["stored"] == 11 * ROWS
    assert not list(job.session.path.glob("*-wal"))


def test_nodes_that_end_together_leave_no_actor(job: Job) -> None:
    for node in range(2):
        send(job, node, 2, final=True)
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(job.leave, range(2))
    assert first == wire.Finished(codec.VERSION, "written")
    assert other is not None and other.state == "noted"
    until(lambda: not job.actors(), "all actors end")
    assert check_ledger(job.session.path)["stored"] == 4 * ROWS


def test_lost_node_is_not_waited_for_after_the_first_has_ended(cluster: FakeCluster, job: Job) -> None:
    lost = cluster.add(1)
    job.nodes[1] = lost.node_id
    job.sockets[1] = job.folder / "2" / "relay.sock"
    job.sockets[1].parent.mkdir(mode=0o700)
    ray.get(ensure_relay(job._config(1), lost.node_id).ready.remote(), timeout=240)
    job.ranks[1] = Rank(job.sockets[1], 1)
    send(job, 0, 3, final=True)
    send(job, 1, 3)
    assert job.leave(0, 0) == wire.Finished(codec.VERSION, "written", socket.gethostname(), 1)
    job.session.release()
    cluster.remove(lost)
    until(lambda: not [name for name in job.actors() if "aggregator" in name], "the aggregator ends", 30)
    summary = job.summary()
    assert summary["ledger"]["stored"] == 6 * ROWS
    assert "node_lost" in [event["kind"] for event in summary["events"]]
