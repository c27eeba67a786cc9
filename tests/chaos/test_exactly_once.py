"""An aggregator killed again and again, by SIGKILL, under load: every row is stored, and stored once."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from private_ray import Rank, live_session, members, private_ray
from ray_cluster import until

RANKS = 4
LONGEST_S = 3.0
"""That an aggregator lives: from its process being there, in which it may not have begun yet."""


@contextlib.contextmanager
def load(ranks: list[Rank]) -> Iterator[None]:
    """Have them all send, some 50 batches a second each, while the block runs; then wait for the relay."""
    over = threading.Event()

    def send(rank: Rank) -> None:
        while not over.wait(0.02):
            rank.send()
            rank.take_replies()
        rank.send(final=True)

    threads = [threading.Thread(target=send, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for rank in ranks:
        rank.settle()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [pytest.param(4), pytest.param(50, marks=pytest.mark.long)])
def test_aggregator_killed_at_random_neither_loses_nor_duplicates_rows(kills: int) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    moments = random.Random(seed)
    with private_ray() as cluster, live_session(cluster) as session:
        ranks = [Rank(session.socket, number) for number in range(RANKS)]
        with load(ranks):
            killed: set[psutil.Process] = set()
            for number in range(kills):
                alive = until(lambda: set(members(cluster, "Aggregator")) - killed, f"number {number}")
                time.sleep(moments.uniform(0, LONGEST_S))
                for process in alive:
                    killed.add(process)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            until(lambda: set(members(cluster, "Aggregator")) - killed, "it comes back")
        produced = sum(rank.produced for rank in ranks)
        until(lambda: session.ledger().get("stored") == produced, f"{produced} rows are stored", 60)
        assert session.finish().ok
        for rank in ranks:
            assert session.keys(rank.number) == [step << 8 for step in range(rank.produced)]
        assert session.ledger()["dropped"] == {"agent": 0, "relay": 0, "aggregator": 0}
