"""
Reaches the nodes of a Ray cluster for a check: one actor on each, which reserves no CPU and no GPU, so that
it starts also where a job has taken all of them.

The actor starts a process that measures. Ray hides the GPUs from an actor that reserves none, and lets it use
one core: the process has the environment of the node instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.files import write_file
from traceml_ray.ray.actors import Attachment, bare, cluster_nodes
from traceml_ray.ray.connection import attach
from traceml_ray.signals.check.agent import FILE as CHECKS_FILE
from traceml_ray.signals.check.coordinator import Coordinator, Outcome
from traceml_ray.signals.check.nodes import NoAnswerError, TaskProcess, reply_of
from traceml_ray.signals.check.records import Checked
from traceml_ray.signals.check.tasks import Plan, Task, TaskReply, task_of
from traceml_ray.wire.codec import ready

_SET_BY_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_SPARE_S = 5.0
_AGAIN_S = 0.2
ATTACH_S = 30.0
"""How long a cluster may take to answer, in s."""


class CheckActor:
    """The actor on a node. Messages are JSON: none of our objects are pickled."""

    def __init__(self) -> None:
        self._process = TaskProcess(node_environment(os.environ, _parent_environment()))

    def ask(self, task: bytes, limit_s: float) -> bytes:
        """Have a task done. The reply is JSON; a node that cannot do it replies with an error."""
        return msgspec.json.encode(reply_of(self._process, task_of(task), limit_s))

    def leave(self, session: str, checks: bytes) -> None:
        """Leave checks for the ranks of this node, if the session has a relay here. Raises OSError."""
        from traceml_ray.ray.in_ray import spool_of

        folder = Path(spool_of(session))
        if folder.is_dir():
            write_file(folder / CHECKS_FILE, checks)


def node_environment(environ: Mapping[str, str], parent: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an actor with the variables that Ray has changed as its raylet has them."""
    kept = {name: value for name, value in environ.items() if name not in _SET_BY_RAY}
    return kept | {name: parent[name] for name in _SET_BY_RAY if name in parent}


def _parent_environment() -> dict[str, str]:
    """Return the environment of the raylet. {} if it cannot be read."""
    try:
        pairs = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


class RayNode:
    """
    A node of the cluster.

    Args:
        name: its label.
        node: as `ray.nodes` describes it.
        reserved: what jobs have reserved there, in words; "": nothing.
        runtime_env: runtime environment of the actor.
    """

    def __init__(
        self, name: str, node: Mapping[str, Any], reserved: str, runtime_env: dict[str, Any]
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.name, self.address, self.reserved = name, str(node["NodeManagerAddress"]), reserved
        where: Any = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        make: Any = ray.remote(CheckActor)
        options = {"runtime_env": runtime_env} if runtime_env else {}
        self._actor = make.options(
            num_cpus=0, max_restarts=0, scheduling_strategy=where, enable_task_events=False, **options
        ).remote()

    def ask(self, task: Task, limit_s: float) -> TaskReply:
        """Have a task done. Raises NoAnswerError."""
        import ray

        try:
            asked = self._actor.ask.remote(msgspec.json.encode(task), limit_s)
            reply = msgspec.json.decode(ray.get(asked, timeout=limit_s + _SPARE_S), type=ready(TaskReply))
        except ray.exceptions.GetTimeoutError:
            raise NoAnswerError(f"it did not answer within {text.duration(limit_s + _SPARE_S)}") from None
        except (ray.exceptions.RayError, msgspec.MsgspecError) as error:
            raise NoAnswerError(_reason(error)) from None
        return reply

    def leave(self, session: str, checks: Sequence[Checked]) -> None:
        """Have the ranks of the node store checks. Raises what Ray raises."""
        import ray

        if checks:
            ray.get(self._actor.leave.remote(session, msgspec.json.encode(checks)), timeout=_SPARE_S)

    def end(self) -> None:
        """End the actor."""
        import ray

        ray.kill(self._actor, no_restart=True)


def _reason(error: Exception) -> str:
    """Return the last line of an error of Ray; the lines before are a traceback of the node."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def ray_nodes(
    runtime_env: dict[str, Any] | None = None, only: Collection[str] | None = None
) -> list[RayNode]:
    """
    Return the nodes of the cluster that this process is attached to, in the order of their labels. `only`:
    ids of the wanted nodes.
    """
    alive = [node for node in cluster_nodes() if node["Alive"]]
    free = _available()
    return [
        RayNode(name, node, reserved(node["Resources"], free.get(node["NodeID"], {})), runtime_env or {})
        for name, node in labelled(alive)
        if only is None or node["NodeID"] in only
    ]


def labelled(nodes: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the nodes with unique labels: the host name, and the address where several have the same."""
    hosts = [str(node["NodeManagerHostname"]) for node in nodes]
    names = [
        host if hosts.count(host) == 1 else f"{host} {node['NodeManagerAddress']}"
        for host, node in zip(hosts, nodes, strict=True)
    ]
    unique = [
        name if names.count(name) == 1 else f"{name} {str(node['NodeID'])[:6]}"
        for name, node in zip(names, nodes, strict=True)
    ]
    return sorted(zip(unique, nodes, strict=True), key=lambda pair: pair[0])


def reserved(total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Return in words what jobs have reserved on a node: "8 of 8 CPUs and 1 of 4 GPUs"; "": nothing."""
    parts = [
        f"{text.number(total[name] - free.get(name, 0.0))} of {text.number(total[name])} {name}s"
        for name in ("CPU", "GPU")
        if total.get(name, 0.0) > free.get(name, 0.0)
    ]
    return " and ".join(parts)


def wait_until_free(node_ids: Collection[str], limit_s: float) -> None:
    """Wait until jobs have nothing reserved on nodes, for at most `limit_s` seconds: Ray is told late."""
    deadline = time.monotonic() + limit_s
    nodes = [node for node in cluster_nodes() if node["NodeID"] in node_ids]
    while time.monotonic() < deadline:
        free = _available()
        if not any(reserved(node["Resources"], free.get(node["NodeID"], {})) for node in nodes):
            return
        time.sleep(_AGAIN_S)


def _available() -> dict[str, dict[str, float]]:
    """Return the free resources of each node, by node id. {} if this Ray does not tell."""
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return {}
    free: dict[str, dict[str, float]] = bare(available_resources_per_node)()
    return free


def check_at(address: str, plan: Plan, advance: Callable[[str, float], object]) -> Outcome:
    """
    Attach this process to the cluster at `address` (host:port), and check all nodes of it. Raises what
    `attach` raises.
    """
    attach(Attachment(address), ATTACH_S)
    return check_cluster(plan, advance)


def check_cluster(
    plan: Plan, advance: Callable[[str, float], object], runtime_env: dict[str, Any] | None = None
) -> Outcome:
    """Check all nodes of the cluster that this process is attached to."""
    nodes = ray_nodes(runtime_env)
    try:
        return Coordinator(nodes, plan, advance).run()
    finally:
        for node in nodes:
            node.end()
