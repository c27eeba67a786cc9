"""Samples of a node and its devices, and the meaning of NVIDIA's critical error numbers (XID)."""

from __future__ import annotations

from typing import Annotated

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import FEW, Count, Int64, Part


class GpuProcess(Part, frozen=True):
    """A process that computes on a device. `parents` are its parent, its parent's parent, and so on."""

    pid: Count
    mem_bytes: Count | None
    name: str | None = None
    parents: Annotated[list[Count], FEW] = []


class GpuSample(Part, frozen=True):
    """One device as NVML reports it. Byte counters and `processes` are not in every sample."""

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
    """Number of errors since the driver was loaded."""
    pcie_rx_bytes: Count | None = None
    pcie_tx_bytes: Count | None = None
    nvlink_rx_bytes: Count | None = None
    nvlink_tx_bytes: Count | None = None
    processes: Annotated[list[GpuProcess], FEW] | None = None
    xid: Annotated[list[Count], FEW] | None = None
    """Numbers of the critical errors since the last sample. None: not known."""


class NodeSample(Part, frozen=True):
    """A sample of a node. The bytes of disk, network and swap, and `cpu_throttled_ns`, are counters."""

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
    """Share (0..1) of the time since the last sample in which some task waited for a CPU."""
    psi_memory: float | None = None
    """Share (0..1) of the time since the last sample in which some task waited for memory."""
    psi_io: float | None = None
    """Share (0..1) of the time since the last sample in which some task waited for the disk."""
    cpu_throttled_ns: Count | None = None
    """CPU time that the container's quota has withheld, in ns."""


NODE = Kind(
    "node",
    NodeSample,
    "samples of nodes",
    table="node_sample",
    exported="node_samples",
    scope="node",
    bundle="seconds",
    index="node_id, id",
)


_MEANINGS = {
    8: "the GPU stopped processing",
    13: "graphics engine exception, mostly of the program: an illegal access",
    31: "GPU memory page fault, mostly of the program: an illegal address",
    32: "corrupted command stream",
    43: "the GPU stopped processing for a program that failed",
    45: "cleanup after an earlier error",
    48: "uncorrectable (double-bit) ECC error",
    61: "internal microcontroller warning",
    62: "internal microcontroller halt",
    63: "memory row remapped or page retired",
    64: "memory row or page could not be remapped or retired",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of corrected ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor (GSP) did not answer",
    120: "error of the GPU's system processor (GSP)",
    140: "unrecovered ECC error",
}


def meaning(xid: int) -> str:
    """Return the number with its meaning: "XID 79: the GPU has fallen off the bus"."""
    return f"XID {xid}: " + _MEANINGS.get(xid, "see NVIDIA's XID list")
