"""What an agent needs in a process that Ray started: its session, its channel to the relay and its name."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import ray

from traceml_ray.identity import RankIdentity
from traceml_ray.ray.actors import relay_folder


def spool_of(session: str) -> str:
    """Return the folder on this node for rows that a rank could not deliver."""
    return str(relay_folder(session, ray.get_runtime_context().get_node_id()))


def named(identity: Callable[[], RankIdentity]) -> Callable[[], RankIdentity]:
    """
    Return `identity` with what Ray knows: the name of the actor (or task), and the Ray job as the run if no
    run was given. The aggregator numbers a process that has no rank.
    """
    context = ray.get_runtime_context()
    name = ""
    if context.worker.mode == ray.WORKER_MODE:  # a driver has none, and Ray complains when it is asked
        name = (context.get_actor_name() if context.get_actor_id() else context.get_task_name()) or ""
    node_id, job_id = context.get_node_id(), context.get_job_id()

    def who() -> RankIdentity:
        process_identity = identity()
        return msgspec.structs.replace(
            process_identity,
            node_id=node_id,
            job_id=job_id if process_identity.job_id == "default" else process_identity.job_id,
            source="ray" if process_identity.source == "single" else process_identity.source,
            name=name[:64],
        )

    return who
