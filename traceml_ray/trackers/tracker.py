"""What a tracker is: how to find the run that the script has open, and how to write figures into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.wire.messages import Figures

PREFIX = "traceml/"
"""All keys that are written begin with this."""
STEP = f"{PREFIX}step"
"""Key of the step axis: the newest step that all ranks had reported."""
VERDICT, WHY = f"{PREFIX}verdict", f"{PREFIX}why"
"""Keys of the label of the verdict, and of its sentences."""

ImportPatch = tuple[str, str, Callable[[Patcher], None]]
"""Module, name and patch: it is applied once the script has imported the module."""


class TrackerPlace(NamedTuple):
    """Where the figures are written."""

    run: str
    """Id of the run, as the tracker's API has it. "": it has none."""
    where: str
    """URL or folder, for people."""
    uri: str
    """Address under which the API finds the run, without a password. "": it does not need one, or cannot."""


class Tracker(Protocol):
    """
    One tracker. Only the script imports its package.

    `open_run` may be called by any thread and only reads memory. The other methods are called by one thread,
    may wait, and may raise anything.
    """

    name: str

    def open_run(self) -> Any | None:
        """Return the run that the script has open. None: it has none."""

    def place(self, run: Any) -> TrackerPlace:
        """Return where `run` is."""

    def write(self, run: Any, figures: Figures, changed: bool) -> None:
        """
        Write figures into `run`. The script's own steps and values stay as they are.

        Args:
            run: the open run.
            figures: the figures.
            changed: whether the verdict is another one than in the figures that this run got before.
        """


def values_of(figures: Figures) -> dict[str, float]:
    """Return the figures under the keys that a tracker gets."""
    return {f"{PREFIX}{name}": value for name, value in figures.values.items()}
