"""What a rank reports about how FSDP2 divides its model."""

from __future__ import annotations

from typing import Annotated

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import FEW, Count, Part


class UnevenShard(Part, frozen=True):
    """A parameter that cannot be divided evenly among the ranks, and this rank's part of it."""

    name: str
    rows: Count
    """Size of the dimension along which the parameter is divided."""
    own_rows: Count
    """Size of this rank's part in that dimension."""
    own_bytes: Count


class Sharding(Part, frozen=True):
    """
    How FSDP2 has divided a model among ranks, the part that this rank holds, and the traffic of its steps.

    Counted values (`steps` and everything after it) cover whole steps since the model was divided.
    """

    groups: Count
    """Number of groups of parameters that are gathered together: modules given to `fully_shard`."""
    shard_bytes: Count
    """Size of this rank's parts of the parameters, in bytes."""
    full_bytes: Count
    """Size of the undivided parameters by their global shapes, in bytes."""
    offloaded_bytes: Count
    """Part of `shard_bytes` that is in host memory because of `CPUOffloadPolicy`, in bytes."""
    gradient_bytes: Count
    """Size of the gradients of this rank's parts while they exist, in bytes."""
    shards: Count
    """Number of ranks among which a parameter is divided."""
    position: Count
    """Number of this rank's part, from 0."""
    replicas: Count
    """Number of ranks that hold the same part (HSDP); 1: no replicas."""
    mesh_shape: Annotated[list[Count], FEW]
    mesh_dims: Annotated[list[str], FEW]
    """Names of the mesh's dimensions; empty if they have none."""
    dtypes: Annotated[dict[str, str], FEW]
    """
    Data types of the parameters (`stored`), of the gathered parameters (`computed`), of gradients while they
    are reduced (`reduced`).
    """
    resharded: Annotated[dict[str, Count], FEW]
    """
    Number of groups by what happens after their forward: `yes`, `no`, or the number of ranks to which they
    are resharded.
    """
    uneven: Annotated[list[UnevenShard], FEW] = []
    """Parameters that cannot be divided evenly, those that differ most between ranks first."""
    uneven_count: Count = 0
    """Number of parameters that cannot be divided evenly."""
    optimizer_bytes: Count | None = None
    """Size of the optimizers' state on this rank, in bytes."""
    after_forward_bytes: Count | None = None
    """Memory allocated on the device at the end of the root's forward, in bytes."""
    forward_peak_bytes: Count | None = None
    """Largest memory allocated on the device during the root's forward, in bytes."""
    steps: Count = 0
    step_ns: Count = 0
    gathers: Count = 0
    gathered_bytes: Count = 0
    """Size of the buffers that parameters were gathered into, in bytes."""
    reductions: Count = 0
    reduced_bytes: Count = 0
    """Size of the buffers whose gradients were reduced and scattered, in bytes."""
    all_reduced_bytes: Count = 0
    """Size of the shards that replicas reduced among themselves (HSDP), in bytes."""
    unsharded_peak_bytes: Count = 0
    """Largest size of undivided parameters at one time, in bytes."""
    unsharded_ns: Count = 0
    """Time in which there were undivided parameters, in ns of the host's clock."""
    unsharded_mean_bytes: Count = 0
    """Mean size of undivided parameters over the step, in bytes."""
    gather_wait_ns: Count | None = None
    """Time in all-gathers of parameters, in ns."""
    reduce_wait_ns: Count | None = None
    """Time in reductions of gradients, in ns."""
    wait_steps: Count = 0
    """Number of steps in which these two were measured."""


SHARDING = Kind(
    "sharding", Sharding, "states of shards", table="shard", exported="shards", keep=1, bundle="all"
)
