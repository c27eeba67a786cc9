"""Relay and aggregator as actors of a private Ray cluster; ranks are played over the relay's socket."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_ray import (
    ROWS,
    Rank,
    Session,
    ask_helper,
    live_session,
    make_session,
    members,
    private_ray,
)
from ray_cluster import until

from traceml_ray.launchers.cluster import PrivateRay, free_port
from traceml_ray.launchers.helper import HelperReply
from traceml_ray.reports.summary import nodes_of
from traceml_ray.store.session import DATABASE
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire


@pytest.fixture(scope="module")
def cluster() -> Iterator[PrivateRay]:
    with private_ray() as ray:
        yield ray


@pytest.fixture
def session(cluster: PrivateRay, request: pytest.FixtureRequest) -> Iterator[Session]:
    with live_session(cluster, **getattr(request, "param", {})) as made:
        yield made


def test_actors_store_what_ranks_send_and_end_on_request(cluster: PrivateRay, session: Session) -> None:
    rank = Rank(session.socket)
    for _ in range(4):
        rank.send()
    rank.settle()
    until(lambda: session.ledger().get("stored") == 4 * ROWS, "stored while it runs")
    with SessionFile(session.folder / DATABASE) as file:
        assert [node.hostname for node in nodes_of(file)] == [socket.gethostname()]
    rank.send(final=True)
    assert session.finish() == wire.Finished(codec.VERSION, "written")
    assert session.keys() == [step << 8 for step in range(5 * ROWS)]
    assert (session.folder / "summary.json").exists()
    until(lambda: not members(cluster, "NodeRelay") and not members(cluster, "Aggregator"), "actors end")


def test_relay_killed_returns_on_its_socket_without_loss(cluster: PrivateRay, session: Session) -> None:
    rank = Rank(session.socket)
    for _ in range(20):
        rank.send()
        time.sleep(0.02)
    (old,) = members(cluster, "NodeRelay")
    old.kill()
    for _ in range(20):
        rank.send()
    rank.settle()
    rank.send(final=True)
    rank.settle()
    assert session.finish().ok
    keys, ledger = session.keys(), session.ledger()
    assert keys == sorted(set(keys))
    assert ledger["produced"] == rank.produced
    assert ledger["stored"] == len(keys) == rank.produced
    assert ledger["in_flight"] == 0


def test_live_session_on_the_cluster_is_not_taken_over(cluster: PrivateRay, session: Session) -> None:
    reply = ask_helper(cluster, session.actors)
    assert not reply.ok
    assert session.actors.session in reply.detail


def test_missing_cluster_is_reported_within_the_deadline(cluster: PrivateRay) -> None:
    made = make_session()
    address = f"127.0.0.1:{free_port()}"
    reply = ask_helper(cluster, made.actors, address, deadline_s=3)
    assert not reply.ok
    assert address in reply.detail
    shutil.rmtree(made.folder.parent)


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"RAY_AUTH_TOKEN": "x" * 32}, "refuses the token of RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_MODE": "disabled"}, "requires a token: set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": "/no/such"}, "(RAY_AUTH_TOKEN_PATH) has none"),
    ],
)
def test_cluster_that_refuses_the_token_is_named(
    cluster: PrivateRay, environ: dict[str, str], why: str
) -> None:
    made = make_session()
    reply = ask_helper(cluster, made.actors, **environ)
    assert not reply.ok and why in reply.detail
    shutil.rmtree(made.folder.parent)


def test_relay_that_is_killed_while_the_session_starts_is_made_again(cluster: PrivateRay) -> None:
    made, replies = make_session(), list[HelperReply]()
    asking = threading.Thread(target=lambda: replies.append(ask_helper(cluster, made.actors, deadline_s=200)))
    asking.start()
    (relay,) = until(lambda: members(cluster, "NodeRelay"), "the relay")
    relay.kill()
    asking.join(240)
    assert replies == [HelperReply(True)]
    rank = Rank(made.socket)
    rank.send(final=True)
    rank.settle()
    assert made.finish().ok and made.ledger()["stored"] == rank.produced
    until(lambda: not members(cluster, "NodeRelay") and not members(cluster, "Aggregator"), "actors end")
    shutil.rmtree(made.folder.parent)


def test_relay_that_cannot_listen_leaves_no_actors(cluster: PrivateRay) -> None:
    made = make_session()
    made.folder.parent.chmod(0o755)
    reply = ask_helper(cluster, made.actors)
    assert not reply.ok
    assert "0700" in reply.detail
    until(lambda: not members(cluster, "Aggregator"), "actors end")
    shutil.rmtree(made.folder.parent)


@pytest.mark.parametrize("session", [{"idle_ttl": 1.0}], indirect=True)
def test_actors_without_traffic_end_themselves(cluster: PrivateRay, session: Session) -> None:
    until(lambda: not members(cluster, "NodeRelay") and not members(cluster, "Aggregator"), "actors end")
    assert not session.ledger()["produced"]


def test_monitor_uses_little_memory_and_leaves_the_home_folder_alone(
    cluster: PrivateRay, session: Session
) -> None:
    Rank(session.socket).send()
    everyone = members(cluster)
    pss = {process.pid: process.memory_full_info().pss for process in everyone}
    assert sum(pss.values()) < 550e6
    listening = [c.laddr.ip for p in everyone for c in p.net_connections("inet") if c.status == "LISTEN"]
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    user = Path(cluster.environ["HOME"]) / "user"
    assert list(user.iterdir()) == []
    assert not (Path(cluster.environ["HOME"]) / ".ray").exists()


def test_token_is_in_no_argument_log_or_session_file(cluster: PrivateRay, session: Session) -> None:
    token = cluster.environ["RAY_AUTH_TOKEN"]
    everyone = members(cluster)
    assert len(everyone) > 5
    assert not [process for process in everyone if token in " ".join(process.cmdline())]
    rank = Rank(session.socket)
    rank.send(final=True)
    rank.settle()
    assert session.finish().ok
    written = [path for path in cluster.folder.parent.rglob("*") if path.is_file()]
    written += [path for path in session.folder.rglob("*") if path.is_file()]
    assert {"ray.log", "session.sqlite", "report.txt", "summary.json"} <= {path.name for path in written}
    assert [path for path in written if token.encode() in path.read_bytes()] == []
