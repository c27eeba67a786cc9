"""What is sampled of rank processes, nodes and devices, and what they print, as it travels and is stored."""

from __future__ import annotations

from typing import Annotated, Literal

from traceml_ray.codec import FEW, Count, Int64, Part

MAX_SIZES = 512
"""Steps of one `StepSizes`."""


class ProcessSample(Part, frozen=True):
    """A sample of a rank's process. `None` is "not known", never 0."""

    t_ns: Int64
    cpu_pct: float | None
    rss_bytes: Count | None
    threads: Count | None
    read_bytes: Count | None
    write_bytes: Count | None


class MemorySample(Part, frozen=True):
    """
    Memory of a rank's process and of one of its devices. `None` is "not known", never 0.

    A process without a CUDA device has one sample, with `device` None and nothing of an allocator.
    """

    t_ns: Int64
    """On the wall clock of the rank's node."""
    step: Count | None
    """The newest step that has begun."""
    device: Count | None
    """Index as the process sees it."""
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    active_bytes: Count | None = None
    inactive_split_bytes: Count | None = None
    peak_bytes: Count | None = None
    """The most that was allocated since the sample before; of the first sample, until then."""
    retries: Count | None = None
    """Cumulative: allocations that succeeded after the cache was emptied,"""
    ooms: Count | None = None
    """and that failed."""
    process_bytes: Count | None = None
    """What the driver says this process has on the device."""
    device_used_bytes: Count | None = None
    device_total_bytes: Count | None = None
    rss_bytes: Count | None = None
    uss_bytes: Count | None = None
    """Not in every sample: the kernel takes long to count it."""
    limit_bytes: Count | None = None
    """Of host memory: the tightest limit of a cgroup, or what the machine has."""
    limit_used_bytes: Count | None = None
    """What is used of it, without the file cache that can be had back."""


class StepWork(Part, frozen=True):
    """What some steps of a rank were trained on, and what is known of its work. `None` is "not known"."""

    first_step: Count
    last_step: Count
    steps: Count
    """Of these, that have had a batch; 0: only the rest is known."""
    batches: Count
    samples: Count | None = None
    """Of all of them together."""
    tokens: Count | None = None
    flops: float | None = None
    """Of this rank in one step, as counted once."""
    job_flops: float | None = None
    """Of all ranks in one step, as told."""
    flops_step: Count | None = None
    """The step that they were counted in: it took longer."""
    dtype: str | None = None
    """Of what most FLOPs are computed with: bfloat16, tf32, …"""
    device: str | None = None
    """Name of its device; `cpu`."""
    device_id: str | None = None
    """Tells it from others of that name."""
    peak_tflops: float | None = None
    """Of one device, as told."""
    total_steps: Count | None = None


class StepSizes(Part, frozen=True):
    """How large the batches of a rank's steps `first_step` to `last_step` were, step by step."""

    first_step: Count
    last_step: Count
    body: bytes
    """
    n × int64 samples, then n × int64 tokens (n: the steps, at most MAX_SIZES), little-endian, compressed by
    zlib; -1 is "not known".
    """


class Output(Part, frozen=True):
    """The newest lines that a rank process wrote to stdout or stderr, since those before."""

    stream: Literal[1, 2]
    """As its file descriptor."""
    t_ns: Int64
    """When they were read, on the clock of the rank's node."""
    lines: Annotated[list[str], FEW] = []
    unfinished: str = ""
    """What stands after the last line break: a progress bar, a question."""
    skipped: Count = 0
    """Lines before these that are not kept: so many came at once."""
    by_relay: bool = False
    """Read from the file that the stream goes to; else seen by the agent, in Python."""


class GpuProcess(Part, frozen=True):
    """A process that computes on a device; `parents` are its parent, that one's parent, and so on."""

    pid: Count
    mem_bytes: Count | None
    name: str | None = None
    parents: Annotated[list[Count], FEW] = []


class GpuSample(Part, frozen=True):
    """One device as NVML sees it. Byte counters and `processes` are not asked for in every sample."""

    index: Count
    name: str | None
    util_pct: float | None
    mem_used_bytes: Count | None
    mem_total_bytes: Count | None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_mhz: float | None = None
    sm_max_mhz: float | None = None
    throttle: Annotated[list[str], FEW] | None = None
    """Why its clocks are not higher: `sw_power_cap`, `hw_thermal_slowdown`, `gpu_idle`, …"""
    ecc_uncorrected: Count | None = None
    """Since the driver was loaded."""
    pcie_rx_bytes: Count | None = None
    pcie_tx_bytes: Count | None = None
    nvlink_rx_bytes: Count | None = None
    nvlink_tx_bytes: Count | None = None
    processes: Annotated[list[GpuProcess], FEW] | None = None
    xid: Annotated[list[Count], FEW] | None = None
    """Numbers of the critical errors since the sample before; None: not known."""


class NodeSample(Part, frozen=True):
    """A sample of a node. Bytes of disk, network and swap, and `cpu_throttled_ns`, are counters."""

    t_ns: Int64
    cpu_pct: float | None
    cpu_count: Count | None
    load1: float | None
    mem_used_bytes: Count | None
    mem_total_bytes: Count | None
    disk_read_bytes: Count | None
    disk_write_bytes: Count | None
    net_rx_bytes: Count | None
    net_tx_bytes: Count | None
    gpus: Annotated[list[GpuSample], FEW] | None = None
    swap_in_bytes: Count | None = None
    psi_cpu: float | None = None
    """Share (0..1) of the time since the sample before in which some task waited for a CPU,"""
    psi_memory: float | None = None
    """for memory,"""
    psi_io: float | None = None
    """for the disk."""
    cpu_throttled_ns: Count | None = None
    """CPU time that the container's quota held back."""


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
