"""What a rank says of how FSDP2 divides its model."""

from __future__ import annotations

from typing import Annotated

from traceml_ray.codec import FEW, Count, Part
from traceml_ray.signals.kind import Kind


class UnevenShard(Part, frozen=True):
    """A parameter that cannot be divided evenly among the ranks, and this rank's part of it."""

    name: str
    rows: Count
    """Size of the dimension along which it is divided,"""
    own_rows: Count
    """and how much of that is this rank's."""
    own_bytes: Count


class Sharding(Part, frozen=True):
    """
    How FSDP2 has divided a model among ranks, what this one holds of it, and what its steps move.

    What is counted (`steps` and all after it) is of whole steps since the model was divided.
    """

    groups: Count
    """Groups of parameters that are gathered together: modules given to `fully_shard`."""
    shard_bytes: Count
    """This rank's parts of the parameters,"""
    full_bytes: Count
    """and the whole parameters, by their global shapes."""
    offloaded_bytes: Count
    """Of `shard_bytes`, what lies in host memory because of `CPUOffloadPolicy`."""
    gradient_bytes: Count
    """What the gradients of these parts take while they exist."""
    shards: Count
    """Among so many ranks a parameter is divided,"""
    position: Count
    """of which this is the one of this number,"""
    replicas: Count
    """and so many hold the same part (HSDP); 1 where none does."""
    mesh_shape: Annotated[list[Count], FEW]
    mesh_dims: Annotated[list[str], FEW]
    """Names of the mesh's dimensions; empty where they have none."""
    dtypes: Annotated[dict[str, str], FEW]
    """
    Of the parameters (`stored`), as they are gathered (`computed`), of gradients while they are reduced
    (`reduced`).
    """
    resharded: Annotated[dict[str, Count], FEW]
    """Groups by what happens after their forward: `yes`, `no`, or to how many ranks they are resharded."""
    uneven: Annotated[list[UnevenShard], FEW] = []
    """Parameters that cannot be divided evenly, those that differ most between ranks first."""
    uneven_count: Count = 0
    """How many there are of them."""
    optimizer_bytes: Count | None = None
    """State of the optimizers on this rank."""
    after_forward_bytes: Count | None = None
    """Allocated on the device when the root's forward was over,"""
    forward_peak_bytes: Count | None = None
    """and the most until then, since the forward began."""
    steps: Count = 0
    step_ns: Count = 0
    gathers: Count = 0
    gathered_bytes: Count = 0
    """Of the buffers that parameters are gathered into."""
    reductions: Count = 0
    reduced_bytes: Count = 0
    """Of the buffers from which gradients are reduced and scattered,"""
    all_reduced_bytes: Count = 0
    """and of the shards that replicas reduce among themselves (HSDP)."""
    unsharded_peak_bytes: Count = 0
    """The most that whole parameters took at once,"""
    unsharded_ns: Count = 0
    """for how long there were any, on the clock of the host,"""
    unsharded_mean_bytes: Count = 0
    """and what they took on average over the step."""
    gather_wait_ns: Count | None = None
    """Time in all-gathers,"""
    reduce_wait_ns: Count | None = None
    """and in reductions,"""
    wait_steps: Count = 0
    """in so many steps."""


SHARDING = Kind(
    "sharding", Sharding, "states of shards", table="shard", exported="shards", keep=1, bundle="all"
)
