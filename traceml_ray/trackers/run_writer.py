"""Writes figures into the open run of each tracker, in a thread for each tracker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from traceml_ray.errors import Errors, error_text
from traceml_ray.text import masked_text
from traceml_ray.wire.messages import MAX_TRACKER_CHARS, Figures, TrackerState

from .aim_run import AimRun
from .comet_experiment import CometExperiment
from .mlflow_run import MlflowRun
from .summary_writer import SummaryWriter
from .tracker import ImportPatch, Tracker, TrackerPlace
from .wandb_run import WandbRun

TRACKERS: dict[str, Callable[[], Tracker]] = {
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "tensorboard": SummaryWriter,
    "comet": CometExperiment,
    "aim": AimRun,
}
AUTO = "auto"
"""In `log_to`: every tracker in which the script has a run open."""


class RunWriter:
    """
    Writes figures into the run that the script has open in one tracker. Its thread is started once there is
    such a run. If the tracker hangs, only the newest figures wait. Nothing waits for the thread.

    Args:
        tracker: the tracker.
        errors: counts what the tracker raises.
    """

    def __init__(self, tracker: Tracker, errors: Errors) -> None:
        self._tracker, self._errors = tracker, errors
        self._changed = threading.Condition()
        self._waiting: Figures | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._place = TrackerPlace("", "", "")
        self._sent = self._failed = self._dropped = 0
        self._error = ""
        self._last: tuple[TrackerPlace, str] | None = None
        """Where figures were written last, and the verdict that was written there."""

    def offer(self, figures: Figures) -> None:
        """Have figures written, if a run is open. Waits for nothing. May raise what `open_run` raises."""
        if self._thread is None:
            if self._tracker.open_run() is None:
                return
            self._thread = threading.Thread(
                target=self._run, name=f"traceml-{self._tracker.name}", daemon=True
            )
            self._thread.start()
        with self._changed:
            self._dropped += self._waiting is not None
            self._waiting = figures
            self._changed.notify_all()

    def stop(self) -> None:
        """Write no more. What is being written may still go on."""
        with self._changed:
            self._stopped, self._waiting = True, None
            self._changed.notify_all()

    def state(self) -> TrackerState | None:
        """Return how it is doing. None: no run has been open yet."""
        if self._thread is None:
            return None
        with self._changed:
            counts = self._sent, self._failed, self._dropped
            texts = (*self._place, self._error)
        run, where, uri, error = (text[:MAX_TRACKER_CHARS] for text in texts)
        return TrackerState(self._tracker.name, run, where, uri, *counts, error)

    def _run(self) -> None:
        while (figures := self._next()) is not None:
            try:
                written = self._write(figures)
            except Exception as error:
                self._errors.note(f"tracker {self._tracker.name}", error)
                with self._changed:
                    self._failed, self._error = self._failed + 1, masked_text(error_text(error))
            else:
                with self._changed:
                    self._sent, self._error = self._sent + written, ""

    def _next(self) -> Figures | None:
        """Wait for figures. None: it is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._stopped)
            figures, self._waiting = self._waiting, None
            return figures

    def _write(self, figures: Figures) -> bool:
        """Write figures. Return whether a run was open."""
        run = self._tracker.open_run()
        if run is None:
            return False
        place = self._tracker.place(run)
        with self._changed:
            self._place = place
        self._tracker.write(run, figures, changed=(place, figures.key) != self._last)
        self._last = place, figures.key
        return True


class TrackerLog:
    """
    The trackers of one process. Only the agent's thread calls `offer` and `news`.

    Args:
        log_to: names of trackers, as in `Settings.log_to`. None: none.
        errors: counts what the trackers raise.
    """

    def __init__(self, log_to: str | None, errors: Errors) -> None:
        names = (log_to or "").split(",")
        self._trackers = [make() for name, make in TRACKERS.items() if name in names or AUTO in names]
        self._writers = [RunWriter(tracker, errors) for tracker in self._trackers]
        self._errors = errors
        self._newest = 0
        self._reported: list[TrackerState] = []

    def patches(self) -> Sequence[ImportPatch]:
        """Return what is patched to know what the script opens."""
        return [patch for tracker in self._trackers for patch in getattr(tracker, "patches", list)()]

    def offer(self, figures: Figures) -> None:
        """Have figures written, unless they are not newer than the last."""
        if figures.made_ns <= self._newest:
            return
        self._newest = figures.made_ns
        for writer in self._writers:
            try:
                writer.offer(figures)
            except Exception as error:
                self._errors.note("trackers", error)

    def news(self) -> list[TrackerState]:
        """Return the state of each tracker in use, if any has changed since the last call; else []."""
        states = [state for writer in self._writers if (state := writer.state()) is not None]
        if states == self._reported:
            return []
        self._reported = states
        return states

    def stop(self) -> None:
        """Write no more. Does not wait."""
        for writer in self._writers:
            writer.stop()
