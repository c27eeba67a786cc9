"""A run of any length, reduced piece by piece: its step times, and its verdicts as they were when it ran."""

from __future__ import annotations

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.history import Replay
from traceml_ray.analysis.tally import Tally
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Window


class Running:
    """
    What `tally` and `replay` come to of the pieces so far, all of the same ranks, in bounded memory.

    `first_step` is the first step that all ranks have; `tally` leaves out the warm-up after it.
    """

    def __init__(self, thresholds: Thresholds, baseline: Baseline | None = None) -> None:
        self.tally = Tally(thresholds)
        self.replay = Replay(None, thresholds, baseline)
        self.first_step: int | None = None
        self._warmup_steps = thresholds.warmup_steps

    @property
    def warm_step(self) -> int:
        """The first step after warm-up."""
        return (self.first_step or 0) + self._warmup_steps

    def add(self, window: Window) -> None:
        """Add the steps that follow."""
        if len(window.keys):
            self.first_step = window.first_step if self.first_step is None else self.first_step
            self.replay.add(window)
            self.tally.add(window.since(self.warm_step))
