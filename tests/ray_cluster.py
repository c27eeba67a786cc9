"""A private Ray cluster of several nodes on this machine, for tests, without authentication."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from traceml_ray.launchers.lean_ray import disable_agents

OBJECT_STORE_BYTES = 78 * 1024 * 1024
SYSTEM_CONFIG = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
"""
By default Ray takes about 20 s to detect a lost node, and its workers have a niceness of 15. Next to tests
that keep all cores busy, they would take minutes to start.
"""


def until(done: Callable[[], Any], what: str, seconds: float = 240) -> Any:
    """Wait for the first true result of `done` and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := done():
            return result
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds} s")


class FakeCluster:
    """
    A cluster. The head has this machine's address, the other nodes 127.0.0.2, … This process is a driver on
    the head.
    """

    def __init__(self, folder: Path, cpus: int, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        self._folder = folder
        self._count = 0
        self._cluster = Cluster(shutdown_at_exit=False)
        self.head = self.add(
            cpus, _system_config=SYSTEM_CONFIG, include_dashboard=False, no_monitor=True, **head
        )
        self.address = str(self._cluster.address)

    def add(self, cpus: int = 2, **more: Any) -> Any:
        """Add a node with `cpus` CPUs; return the node. `remove` accepts it."""
        self._count += 1
        if self._count > 1:
            more.setdefault("node_ip_address", f"127.0.0.{self._count}")
        return self._cluster.add_node(
            num_cpus=cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            temp_dir=str(self._folder / "ray"),
            include_log_monitor=False,
            **more,
        )

    @property
    def others(self) -> list[Any]:
        """All nodes except the head."""
        return list(self._cluster.worker_nodes)

    def remove(self, node: Any, *, graceful: bool = False) -> None:
        """End a node, as if its machine were gone."""
        self._cluster.remove_node(node, allow_graceful=graceful)

    def close(self) -> None:
        """End every node."""
        for node in [*self.others, self.head]:
            with contextlib.suppress(Exception):
                node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


@contextlib.contextmanager
def fake_cluster(nodes: int = 1, cpus: int = 2, *, lean: bool = False, **head: Any) -> Iterator[FakeCluster]:
    """
    Start a cluster, connect to it, and end it afterwards. Meanwhile the environment has the variables it
    needs.

    Args:
        nodes: number of nodes.
        cpus: number of CPUs of each node.
        lean: start without Ray's agents, which saves a core-second per node. Then no actor can have its own
            runtime environment.
        head: parameters of the head node of `ray.cluster_utils.Cluster`.
    """
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("PYTHONUSERBASE", os.environ.get("PYTHONUSERBASE", ""))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        # An actor of Ray Train for each attempt, a second of a core: does a cloud take nodes away?
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        patch.setenv("RAY_TRAIN_METRICS_ENABLED", os.environ.get("RAY_TRAIN_METRICS_ENABLED", "0"))
        import ray
        from ray._private import services

        patch.setattr("ray._private.utils.write_ray_address", lambda *_: None)  # hide it from others
        if lean:
            for name in ("start_ray_process", "start_api_server"):
                patch.setattr(services, name, getattr(services, name))  # restored at the end
            disable_agents()
        cluster = FakeCluster(folder, cpus, **head)
        try:
            for _ in range(nodes - 1):
                cluster.add(cpus)
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.close()
            for process in set(psutil.Process().children(recursive=True)) - before:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            shutil.rmtree(folder, ignore_errors=True)


def is_actor(process: psutil.Process, name: str) -> bool:
    """
    Return whether a process is an actor of class `name`. While an actor is being created, its name comes
    first.
    """
    return re.match(f"ray::(.*:)?({name})", "".join(process.cmdline()[:1])) is not None


def actor_processes(name: str) -> list[psutil.Process]:
    """Return the processes of Ray actors of class `name` that descend from this process."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if is_actor(process, name):
                processes.append(process)
    return processes
