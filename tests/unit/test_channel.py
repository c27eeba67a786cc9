"""SocketChannel against a real SEQPACKET listener that comes, goes, and is slow."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from traceml_ray.agent.channel import RECONNECT_S, SocketChannel
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.ray.actor_calls import ActorCalls
from traceml_ray.settings import Settings
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "relay.sock")


@pytest.fixture
def channel(path: str, clock: Clock) -> Iterator[SocketChannel]:
    channel = SocketChannel(path, clock)
    yield channel
    channel.close()


def listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    listener.settimeout(240)
    return listener


def test_channel_without_a_relay_refuses_without_an_error(channel: SocketChannel) -> None:
    assert not channel.offer(b"x")
    assert channel.replies() == []


def test_channel_retries_the_relay_at_intervals(channel: SocketChannel, clock: Clock, path: str) -> None:
    assert not channel.offer(b"x")
    with listen(path):
        assert not channel.offer(b"x")
        clock.now += RECONNECT_S
        assert channel.offer(b"x")


def test_packets_and_replies_keep_their_bounds(channel: SocketChannel, path: str) -> None:
    with listen(path) as listener:
        assert channel.offer(b"one") and channel.offer(b"two")
        peer, _ = listener.accept()
        with peer:
            assert (peer.recv(100), peer.recv(100)) == (b"one", b"two")
            peer.send(b"ack 1")
            peer.send(b"ack 2")
            assert channel.replies() == [b"ack 1", b"ack 2"]
            assert channel.replies() == []


def test_channel_refuses_while_the_relay_does_not_read(channel: SocketChannel, path: str) -> None:
    with listen(path) as listener:
        assert channel.offer(b"x" * 5000)
        peer, _ = listener.accept()
        with peer:
            sent = 1
            while channel.offer(b"x" * 5000):
                sent += 1
                assert sent < 10_000
            generation = channel.generation
            for _ in range(sent):
                assert len(peer.recv(10_000)) == 5000
            assert channel.offer(b"again")
            assert channel.generation == generation


def test_channel_to_a_relay_that_returned_is_a_new_generation(
    channel: SocketChannel, clock: Clock, path: str
) -> None:
    with listen(path) as listener:
        assert channel.offer(b"x")
        peer, _ = listener.accept()
        peer.close()
    Path(path).unlink()
    assert channel.replies() == []
    assert not channel.offer(b"y")
    first = channel.generation
    with listen(path):
        clock.now += RECONNECT_S
        assert channel.offer(b"y")
        assert channel.generation > first


def test_relay_that_returns_is_sent_the_oldest_batches_first(
    channel: SocketChannel, clock: Clock, path: str
) -> None:
    agent = RankAgent(Settings(session="s"), channel)
    with listen(path) as listener:
        agent.tick()
        agent.tick()
        peer, _ = listener.accept()
        peer.close()
    Path(path).unlink()
    clock.now += RECONNECT_S
    agent.tick()
    with listen(path) as listener:
        clock.now += RECONNECT_S
        agent.tick()
        peer, _ = listener.accept()
        with peer:
            numbers = [codec.decode(peer.recv(wire.MAX_BATCH_BYTES), wire.RankBatch).seq for _ in range(4)]
    assert numbers == [1, 2, 3, 4]


def test_channel_refuses_a_path_that_is_too_long(tmp_path: Path) -> None:
    channel = SocketChannel(str(tmp_path / ("x" * 200)))
    assert not channel.offer(b"x")
    channel.close()


def test_channel_that_cannot_open_a_socket_refuses_and_retries(
    channel: SocketChannel, clock: Clock, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen(path):
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", lambda *_: os.open("/nothing/there", os.O_RDONLY))
            assert not channel.offer(b"x")
        clock.now += RECONNECT_S
        assert channel.offer(b"x")
    assert channel.errors.total() == 1


def test_actor_calls_retry_the_lookup_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    calls = ActorCalls(lambda: "actor")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not calls.call("ingest", b"")
    (failed,) = calls.poll()
    assert isinstance(failed, RuntimeError)
    monkeypatch.setattr("traceml_ray.ray.actor_calls.LOOK_UP_S", 0.0)
    end = time.monotonic() + 240
    while not calls.handles_found and time.monotonic() < end:
        calls.call("ingest", b"")
        calls.poll()
        time.sleep(0.001)  # a thread of its own looks it up
    assert calls.handles_found == 1
