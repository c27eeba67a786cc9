"""
Probes: each measures one part of this machine for a given time. Torch is imported only by the probes that
need it. Only processes of a check run them, never a training process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from traceml_ray.signals.check.records import Checked


class ProbeError(Exception):
    """A probe cannot measure here. The message is a sentence for a person."""


class Probe(Protocol):
    """Measures one subject. `trial` may be called any number of times."""

    name: str
    """Name of the probe: a key of `judge.LIMITS`."""
    subject: str
    unit: str
    like: str
    device: int | None
    note: str

    def trial(self, seconds: float) -> tuple[float, float | None]:
        """
        Measure for about `seconds`. Return the value, and the share (0..1) of the time that other processes
        took (None: not known). Raises ProbeError, or what torch raises.
        """

    def close(self) -> None:
        """Release memory and files."""


class Prober:
    """
    All probes of this process's part of the machine, and the values of their trials.

    Use `with Prober(...) as prober:`, call `round` as often as there are trials (nodes on one machine take
    turns, round by round), then `checked`.

    Args:
        node: label of the node.
        rank: global rank, if the check is of a rank.
        path: file or folder whose disk is read. None: no disk.
        devices: indices of the GPUs (torch's order) to measure. None: all visible ones.
        only: names of the probes to run. None: all that this machine has.
    """

    def __init__(
        self,
        node: str,
        *,
        rank: int | None = None,
        path: Path | None = None,
        devices: Sequence[int] | None = None,
        only: Iterable[str] | None = None,
    ) -> None:
        raise NotImplementedError

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None: ...

    def round(self, seconds: float) -> None:
        """Make one trial of each probe, all together in about `seconds`."""

    def checked(self) -> Checked:
        """Return all trials so far, and the state of the machine meanwhile."""
        raise NotImplementedError


def check_here(
    node: str, seconds: float = 20.0, *, trials: int = 10, rank: int | None = None, path: Path | None = None
) -> Checked:
    """Check this machine alone, in about `seconds`."""
    raise NotImplementedError
