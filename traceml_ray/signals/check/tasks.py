"""What a check is to do, what its processes are asked to do, and what they reply: one line of JSON each."""

from __future__ import annotations

from typing import Any

import msgspec

from traceml_ray.signals.check.records import Checked, Measure
from traceml_ray.wire.codec import ready


class Plan(msgspec.Struct, frozen=True):
    """What a check is to do."""

    seconds: float = 20.0
    """About how long each node measures, in s."""
    path: str = ""
    """File or folder, on each node, whose disk is read. "": no disk is read."""
    disturb: bool = False
    """Whether to measure also what a running job uses. It is slower meanwhile."""
    pairs: bool = True
    """Whether to measure the links between nodes."""


class Task(msgspec.Struct, frozen=True, tag=True):
    """Base of the tasks. The reply to each is a `TaskReply`."""


class Describe(Task, frozen=True):
    """Return which machine this is, and what is in use there. Loads no torch."""


class Begin(Task, frozen=True):
    """Prepare the probes of this node."""

    node: str
    """Label of the node."""
    rank: int | None = None
    path: str = ""
    """File or folder whose disk is read. "": no disk is read."""
    devices: tuple[int, ...] | None = None
    """GPUs to measure, in torch's order. None: all."""
    only: tuple[str, ...] | None = None
    """Names of the probes to run. None: all."""


class Round(Task, frozen=True):
    """Make one trial of each probe."""

    seconds: float


class Collect(Task, frozen=True):
    """End the probes, and return what they measured."""


class Listen(Task, frozen=True):
    """Be the place where the two processes of a pair meet. The reply has the port."""

    address: str


class Exchange(Task, frozen=True):
    """Exchange data with the other process of a pair. The reply of place 0 has the measures."""

    address: str
    port: int
    place: int
    """0: the process that listens. 1: the other one."""
    seconds: float
    gpu: bool = False
    """Whether the data are on the first GPU of each node (NCCL), instead of in memory of the host (gloo)."""


class NodeUse(msgspec.Struct, frozen=True):
    """The machine of a node, and what is in use there. None means "not known"."""

    host: str
    boot_id: str
    """Id of this boot of the machine. Nodes with the same id share a machine. "": not known."""
    cores: int
    """Number of cores that the process may use."""
    busy_cores: float | None = None
    """Number of those cores that other processes keep busy."""
    gpus: int = 0
    """Number of GPUs that the process may use, according to NVML."""
    free_gpus: tuple[int, ...] = ()
    """Those of them, in torch's order, on which no process computes."""
    cpu: str = ""
    """Model of the CPU. "": not known."""
    gpu: str = ""
    """Models of the GPUs. "": not known, or no GPU."""


class TaskReply(msgspec.Struct, frozen=True):
    """Result of a task. Its fields depend on the task."""

    error: str = ""
    """Why the task failed."""
    ended: bool = False
    """Whether the process that measures gave no answer, and was ended. `error` is the reason."""
    checked: Checked | None = None
    """Result of `Collect`."""
    measures: tuple[Measure, ...] = ()
    """Result of `Exchange` at place 0."""
    machine: NodeUse | None = None
    """Result of `Describe`."""
    port: int | None = None
    """Result of `Listen`."""


Tasks = Describe | Begin | Round | Collect | Listen | Exchange
_TASKS: Any = Tasks


def task_of(line: bytes) -> Tasks:
    """Return the task in a line of JSON. Raises `msgspec.MsgspecError`."""
    task: Tasks = msgspec.json.decode(line, type=ready(_TASKS))
    return task
