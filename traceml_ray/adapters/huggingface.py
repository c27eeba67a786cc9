"""
`TraceMLTrainerCallback` for Hugging Face's Trainer and trainers based on it (TRL, Sentence
Transformers).
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import DefaultFlowCallback, TrainerCallback
from transformers.utils import logging

from traceml_ray.adapters.marks import CHECKPOINT, EVALUATION, Marks, hook

_NO_METRICS = ("epoch", "total_flos", "step")
"""Entries that the Trainer adds to its log and that are not numbers of the script."""


class TraceMLTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """
    Use it as `Trainer(…, callbacks=[traceml_ray.TraceMLTrainerCallback()])`.

    It reports steps as `state.global_step` counts them, epochs as events, and evaluation and checkpoints as
    spans. It adds the verdict to the Trainer's log of a training step, so that the targets of `report_to`
    receive it. In a process that is not watched it does nothing.

    Once there is a verdict, rank 0 logs `traceml/step_ms` (mean of the judged window), `traceml/cost_pct`
    (percentage of the step), `traceml/late_rank` (-1: no rank is named) and `traceml/micro_batches` (per
    step). Errors in the callback are counted, not raised.
    """

    def __init__(self) -> None:
        self._marks = Marks()

    @hook
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move before the callbacks that pass the log on."""
        self._marks.step(state.global_step)
        self._marks.total(state.max_steps)
        frame, handler = sys._getframe(1), None  # for example the frame of `hook`
        while handler is None and frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_name == "call_event":
                handler = frame.f_locals.get("self")
        callbacks = getattr(handler, "callbacks", None)
        if (
            isinstance(callbacks, list) and self in callbacks
        ):  # a new list, because the handler is iterating over the old one
            others = [one for one in callbacks if one is not self]
            # this callback decides when to save
            flow = sum(isinstance(one, DefaultFlowCallback) for one in others[:1])
            handler.callbacks = [*others[:flow], self, *others[flow:]]  # type: ignore[union-attr]

    @hook
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the epoch as an event of the run."""
        if state.is_world_process_zero:
            self._marks.epoch(int(state.epoch or 0) + 1, state.global_step)

    @hook
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a span that was not ended: a save that was cancelled."""
        self._marks.end(CHECKPOINT)
        self._marks.end(EVALUATION)

    @hook
    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count one micro-batch of several."""
        self._marks.micro_batch()

    @hook
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a step."""
        self._marks.micro_batch()
        self._marks.step(state.global_step)
        self._before_save(control)

    @hook
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the span of what follows the end of an epoch."""
        self._before_save(control)

    @hook
    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an evaluation, at its first step."""
        self._marks.begin(EVALUATION)

    @hook
    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the evaluation."""
        self._marks.end(EVALUATION)
        if control.should_save:
            self._marks.begin(CHECKPOINT)

    @hook
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of a checkpoint."""
        self._marks.end(CHECKPOINT)

    @hook
    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """End the evaluation, as `on_evaluate`."""
        self._marks.end(EVALUATION)

    @hook
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """In rank 0, log the Trainer's numbers of a training step, and add the verdict to them."""
        if _of_a_step(logs) and state.is_world_process_zero:
            self._marks.log({name: one for name, one in logs.items() if name not in _NO_METRICS})
        sentence = self._marks.new_verdict()
        if sentence is not None:
            logging.get_logger("transformers").warning(sentence)
        figures = self._marks.figures()
        if figures and _of_a_step(logs):
            logs.update(figures)  # the callbacks of `report_to` receive the same object
            if state.log_history and _of_a_step(state.log_history[-1]):
                state.log_history[-1].update(figures)

    def _before_save(self, control: Any) -> None:
        if control.should_save and not control.should_evaluate:  # otherwise it begins after the evaluation
            self._marks.begin(CHECKPOINT)


def _of_a_step(logs: Any) -> bool:
    """Return whether `logs` is about training steps, not the result of `evaluate()` or `train()`."""
    return isinstance(logs, dict) and "loss" in logs and "learning_rate" in logs
