"""What passes through the aggregator between the sink `trackers` and the rank 0 of each run."""

from __future__ import annotations

from traceml_ray.wire.messages import Figures, TrackerState


class TrackerExchange:
    """Keeps the newest figures for the rank 0 of each run, and what it has said of its trackers."""

    def __init__(self) -> None:
        self.figures: dict[str, Figures] = {}
        """Newest figures by run. They are in each reply to a relay; a rank uses them once."""
        self._states: dict[str, list[TrackerState]] = {}

    def pass_on(self, run: str, figures: Figures) -> list[TrackerState]:
        """Have the rank 0 of `run` get figures. Return how its trackers are doing, as far as it has said."""
        self.figures = {run: figures}  # an older run has ended
        return self._states.get(run, [])

    def note(self, run: str, states: list[TrackerState]) -> None:
        """Note what a rank of `run` says of its trackers."""
        self._states[run] = states
