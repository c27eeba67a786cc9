"""What a check measures of one node, or of the part of it that one rank uses."""

from __future__ import annotations

from typing import Annotated

import msgspec

from traceml_ray.signals.kind import Kind
from traceml_ray.signals.nodes.records import GpuSample
from traceml_ray.wire.codec import FEW, Count, Int64, Part

MOST_CHECKS = 8
"""Largest number of checks that are kept of each rank process."""
DURING = "during"
"""`Checked.kind` of the checks that are made while the job trains, and the value of the setting `confirm`."""
COMMAND = "check_node"
"""Name of the command that has a relay check its node during training."""
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Short = Annotated[str, msgspec.Meta(max_length=64)]


class Measure(Part, frozen=True):
    """The trials of one probe on one subject: a device, a group of cores, a disk or a link."""

    probe: _Short
    """Name of the probe, one of `judge.LIMITS`."""
    subject: _Text
    """What was measured, within its node: "GPU 3", "cores 0-7", "CPU", "/data"."""
    unit: _Short
    """Unit of `values`: "FLOP/s", "B/s", "Hz" or "share" (0..1). A higher value is better."""
    values: Annotated[list[float], FEW]
    """One value for each trial, in order of time."""
    like: _Text = ""
    """Only measures with equal `probe` and `like` are peers. It names the hardware: "NVIDIA H200"."""
    others: Annotated[list[float], FEW] | None = None
    """
    Share (0..1) of each trial in which other processes had the cores that the probe was ready to use. It is
    already taken out of the values. None: not known, or not applicable.
    """
    device: Count | None = None
    """Index of the GPU in its node (NVML's order)."""
    note: _Text = ""
    """What a reader must know of how it was measured."""
    rank: Count | None = None
    """Global rank that was measured, if the other measures of the check are not of this rank alone."""


class MachineState(Part, frozen=True):
    """State of a node during a check. None means "not known"."""

    cpu_name: _Text | None = None
    cores: Count | None = None
    """Number of cores that the process may use (affinity and cpuset)."""
    quota_cores: float | None = None
    """Number of cores that the CPU quota of the container allows. None: no quota, or not known."""
    throttled_ns: Count | None = None
    """CPU time that the quota withheld during the check."""
    throttled_periods: Count | None = None
    """Number of periods of the quota in which it withheld CPU time during the check."""
    steal: float | None = None
    """Share (0..1) of the time of the cores that the hypervisor gave to other machines during the check."""
    cpu_mhz: float | None = None
    """Mean clock of the cores during the check (cpufreq)."""
    cpu_max_mhz: float | None = None
    governor: _Short | None = None
    """Governor of the clock of the CPU: "performance", "powersave"."""
    gpus: Annotated[list[GpuSample], FEW] | None = None
    """Each GPU while it multiplied, or while the job used it, as NVML reports it."""
    others_cores: float | None = None
    """Number of cores that processes which belong to no rank kept busy, in a check during training."""


class Checked(Part, frozen=True):
    """One check of a node, or of the part of it that a rank uses."""

    t_ns: Int64
    """When the check began (ns, clock of the node)."""
    node: _Text
    """Label of the node, unique in the check."""
    host: _Text = ""
    """Identifies the machine: the boot id of its kernel. Nodes with the same `host` share a machine."""
    rank: Count | None = None
    """Global rank that was checked. None: a node without ranks."""
    state: MachineState = MachineState()
    measures: Annotated[list[Measure], FEW] = []
    errors: Annotated[list[_Text], FEW] = []
    """Sentences: what could not be measured, and why."""
    seconds: float | None = None
    """How long the check took."""
    number: Count = 0
    """Number of the check in its process."""
    kind: Annotated[str, msgspec.Meta(max_length=16)] = "check"
    """When it was made: `check` (before training), `restart` or `during` (confirms a verdict)."""
    about: Count | None = None
    """Rank of the straggler that it is to confirm, in a check during training."""


CHECKS = Kind(
    "check",
    Checked,
    "checks",
    table="checked",
    exported="checks",
    keep=MOST_CHECKS,
    slot=lambda record: record.number,
    node_times=("t_ns",),
    bundle="all",
)
