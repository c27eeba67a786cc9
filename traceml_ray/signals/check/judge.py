"""
Judges a check: which node, device or group of cores is slower than its peers.

Peers are measures of the same probe on the same hardware. Each has a **level**, the median of its trials, so
that a trial that other work disturbed does not matter. A subject is slow if its level is below that of its
peers by the least difference worth naming, and by more than chance: more than the spread of the peers'
levels and the error of its own level explain. It must be slow in nearly all of its trials: what is slow now
and then is disturbed, not slow by itself.

With few peers their spread is hardly known. It is then taken to be at least what is usual for the probe
(`ProbeLimit.usual`), and the test is Student's. The chance of a wrong name is that of a whole check, however
many subjects and probes it has (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from traceml_ray.signals.check.records import Checked

Float = np.ndarray[Any, np.dtype[np.float64]]

ALPHA = 0.001
"""Probability that a check of healthy machines names anything."""
LEAST_TRIALS = 5
"""Smallest number of trials that show a level."""


class ProbeLimit(NamedTuple):
    """Limits of a probe."""

    about: str
    """What the probe measures, in words."""
    least: float
    """Least difference worth naming, as a share (0..1) of the peers' level."""
    usual: float
    """Usual spread of healthy peers: standard deviation as a share of their level."""


LIMITS: dict[str, ProbeLimit] = {
    "gpu_matmul": ProbeLimit("matrix multiplication on the GPU", 0.07, 0.01),
    "gpu_memory": ProbeLimit("memory of the GPU", 0.07, 0.01),
    "to_device": ProbeLimit("copies from the host to the GPU", 0.15, 0.025),
    "to_host": ProbeLimit("copies from the GPU to the host", 0.15, 0.025),
    "cpu_matmul": ProbeLimit("matrix multiplication on all cores", 0.10, 0.015),
    "core_matmul": ProbeLimit("matrix multiplication on a group of cores", 0.10, 0.015),
    "host_memory": ProbeLimit("memory of the host", 0.15, 0.025),
    "disk_read": ProbeLimit("reading from disk", 0.40, 0.08),
    "all_reduce": ProbeLimit("all-reduce of two nodes", 0.25, 0.04),
    "all_gather": ProbeLimit("all-gather of two nodes", 0.25, 0.04),
}
"""Limits by probe."""


class Level(msgspec.Struct, kw_only=True):
    """One subject in the table of a check."""

    node: str
    subject: str
    probe: str
    unit: str
    rank: int | None = None
    device: int | None = None
    value: float | None
    """Median of the trials, in `unit`. None: too few trials."""
    usual: float | None = None
    """Level of its peers, in `unit`. None: it has no peers."""
    lower: float | None = None
    """Share (0..1) by which it is below its peers; negative: above."""
    spread: float | None = None
    """Spread of its trials, as a share of the median."""
    trials: int = 0
    others: float | None = None
    """Mean share of the trials in which other processes had the cores."""
    peers: int = 0
    """Number of peers, without itself."""
    sees: float | None = None
    """Smallest difference that this check could name here, as a share."""
    state: Literal["slow", "alike", "unsure", "no peers"] = "no peers"
    why: str = ""
    """Why it is not sure; "" if it is."""


class Slow(msgspec.Struct, kw_only=True):
    """A part of a node, or a link, that is slower than its peers."""

    what: Literal["node", "device", "cores", "disk", "link"]
    nodes: list[str]
    """The node; of a link its two ends."""
    part: str
    """Part of the node: "GPU 3", "CPU", "cores 0-7", "/data"; of a link "link"; "network"."""
    rank: int | None = None
    device: int | None = None
    probe: str
    """The probe that shows most."""
    lower: float
    """Share (0..1) by which it is below its peers."""
    value: float
    usual: float
    unit: str
    peers: int
    confidence: Literal["medium", "high"] = "high"
    also: dict[str, float] = {}
    """By how much it is below its peers in other probes, by probe."""
    cause: str = ""
    """What its state says about why, in a sentence; "": nothing."""
    why: str = ""
    next: str = ""


class CheckResult(msgspec.Struct, kw_only=True):
    """What a check says."""

    slow: list[Slow] = []
    """The parts and links that are slower than their peers, the worst first."""
    levels: list[Level] = []
    unsure: list[str] = []
    """Sentences: what could not be decided, and why."""
    notes: list[str] = []
    """Sentences about states that matter, such as a CPU quota."""
    errors: list[str] = []
    """Sentences: what could not be measured."""
    nodes: int = 0
    seconds: float | None = None


def judged(checks: Sequence[Checked], alpha: float = ALPHA) -> CheckResult:
    """
    Return what the checks of all nodes say together.

    Args:
        checks: one or more of each node; all of the same time.
        alpha: probability that a check of healthy machines names anything.
    """
    raise NotImplementedError


# -- what is below its peers ----------------------------------------------------------------------
