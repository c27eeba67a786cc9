"""What one file holds of one rank process and device, and how a file is refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from traceml_ray.analysis.memory.shapes import Collective

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_FILE_BYTES = 4 << 30
"""Of a file of samples; a larger one is refused before it is read."""


class RefusedFileError(ValueError):
    """A file that cannot be used; the message says what is wrong with it, without the file's name."""


class NoSamplesError(RefusedFileError):
    """A whole file, in which there is nothing about memory: in a folder it is passed over."""


@dataclass
class Recording:
    """
    Samples of one rank process on one device, from one file, in order of time.

    What the file does not say is None.
    """

    process: str
    """What tells this process from others, also in other files."""
    node: str
    """As it is shown; "" where it is not known."""
    device: int | None
    """None: the host."""
    t_ns: Ints
    """[n] on the wall clock of its node; where `wall` is False, since a moment that is not known."""
    columns: dict[str, Floats]
    """[n] by field of `MemorySample`; NaN is not known."""
    step: Ints | None = None
    """[n]; -1 is not known."""
    rank: int | None = None
    world_size: int | None = None
    run: str | None = None
    """Id of the job that it belongs to."""
    wall: bool = True
    bound_ns: int | None = None
    """Error bound of its node's clock; None: the clock was not compared with others."""
    first_step_ns: int | None = None
    collectives: list[Collective] = field(default_factory=list)
    """Which collectives the process was in; where it has several devices, with one of them."""
    path: Path = Path()
    """The file; of several, the first."""


@dataclass
class FileContents:
    """What one file, or one folder that belongs together, gave."""

    format: str
    """As a person reads it: `traceml-ray session`, `Stormlog events`, …"""
    recordings: list[Recording]
    notes: list[str] = field(default_factory=list)
    """What a reader has to know of it, each a sentence without the file's name."""


def column(values: Iterable[float | None]) -> Floats:
    """Return values as floats; None becomes NaN."""
    return np.array([np.nan if value is None else value for value in values], np.float64)
