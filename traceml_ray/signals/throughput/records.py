"""Work of a rank's steps: samples, tokens, FLOPs."""

from __future__ import annotations

import zlib

from traceml_ray.signals.kind import Kind
from traceml_ray.wire.codec import Count, Part

MAX_SIZES = 512
"""Largest number of steps in one `StepSizes`."""


class StepWork(Part, frozen=True):
    """What some steps of a rank were trained on, and facts about its work. `None` is "not known"."""

    first_step: Count
    last_step: Count
    steps: Count
    """Number of these steps that had a batch; 0: only the other fields are known."""
    batches: Count
    samples: Count | None = None
    """Number of samples in all these steps together."""
    tokens: Count | None = None
    flops: float | None = None
    """FLOPs of this rank in one step, counted once."""
    job_flops: float | None = None
    """FLOPs of all ranks in one step, as declared by the script."""
    flops_step: Count | None = None
    """Step in which the FLOPs were counted. It took longer."""
    dtype: str | None = None
    """Data type of most FLOPs: bfloat16, tf32, …"""
    device: str | None = None
    """Name of the rank's device; `cpu` without one."""
    device_id: str | None = None
    """Distinguishes the device from others with that name."""
    peak_tflops: float | None = None
    """Peak of one device in TFLOP/s, as declared by the script."""
    total_steps: Count | None = None


class StepSizes(Part, frozen=True):
    """Batch sizes of a rank's steps `first_step` to `last_step`, step by step."""

    first_step: Count
    last_step: Count
    body: bytes
    """
    n × int64 samples, then n × int64 tokens (n: the steps, at most MAX_SIZES), little-endian, compressed by
    zlib; -1 is "not known".
    """

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.last_step - self.first_step + 1

    def values(self) -> bytes:
        """Return the decompressed bytes. Raises ValueError if they are damaged, or have too many steps."""
        if not 0 < self.steps <= MAX_SIZES:
            raise ValueError(f"sizes of batches of {self.steps:,} steps, limit {MAX_SIZES:,}")
        decoder = zlib.decompressobj()
        try:
            data = decoder.decompress(self.body, 16 * self.steps)
        except zlib.error as error:
            raise ValueError(f"sizes of batches are damaged: {error}") from error
        if len(data) != 16 * self.steps or not decoder.eof:
            raise ValueError(f"{len(data)} bytes of sizes of batches of {self.steps:,} steps")
        return data


def _whole(sizes: StepSizes) -> None:
    sizes.values()


WORK = Kind("work", StepWork, "sizes of batches", table="step_work", exported="work")
SIZES = Kind(
    "sizes",
    StepSizes,
    "sizes of batches by step",
    table="step_sizes",
    exported="batch_sizes",
    bundle="steps",
    index="last_step",
    of_rows=True,
    check=_whole,
)
