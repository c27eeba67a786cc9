"""The interface of a probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ProbeError(Exception):
    """A probe cannot measure here. The message is a sentence for a person."""


class ProbeSubject(NamedTuple):
    """What a probe measures. The fields are those of a `records.Measure`."""

    probe: str
    subject: str
    unit: str
    like: str
    device: int | None = None
    note: str = ""


class ProbeTrial(NamedTuple):
    """Result of one trial on one subject."""

    value: float
    others: float | None = None
    """Share (0..1) of the time in which other processes had the cores. It is taken out of the value."""


class Probe(Protocol):
    """Measures one subject, or several together, again and again."""

    subjects: Sequence[ProbeSubject]
    weight: float
    """Its share of the time of a round, relative to other probes."""

    def trial(self, seconds: float) -> Sequence[ProbeTrial]:
        """
        Measure for about `seconds`; return the result for each subject. Raises ProbeError, or what torch
        raises.
        """

    def close(self) -> None:
        """Release memory and files."""
