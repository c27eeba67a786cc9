"""`TraceMLTrainerCallback` for Hugging Face's Trainer (and those made of it: TRL, Sentence Transformers)."""

from __future__ import annotations

import sys
from typing import Any

from transformers import DefaultFlowCallback, TrainerCallback
from transformers.utils import logging

from traceml_ray.adapters.marks import CHECKPOINT, EVALUATION, Marks, hook

_NO_METRICS = ("epoch", "total_flos", "step")
"""What the Trainer adds to its log, which is none of the script's numbers."""


class TraceMLTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """
    `Trainer(…, callbacks=[traceml_ray.TraceMLTrainerCallback()])`: steps as `state.global_step` counts them,
    epochs as events, evaluation and checkpoints as spans, and the verdict in the Trainer's log of a training
    step, so that it reaches what `report_to` names. In a process that is not watched it does nothing.

    Rank 0 logs `traceml/step_ms` (mean of the window judged), `traceml/cost_pct` (of the step),
    `traceml/late_rank` (-1: none is named) and `traceml/micro_batches` (a step), once there is a verdict.
    What goes wrong in it is counted, not raised.
    """

    def __init__(self) -> None:
        self._marks = Marks()

    @hook
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go before the callbacks that hand the log on."""
        self._marks.step(state.global_step)
        self._marks.total(state.max_steps)
        frame, handler = sys._getframe(1), None  # of `hook`, for one
        while handler is None and frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_name == "call_event":
                handler = frame.f_locals.get("self")
        callbacks = getattr(handler, "callbacks", None)
        if (
            isinstance(callbacks, list) and self in callbacks
        ):  # a new list: the handler is going through that one
            others = [one for one in callbacks if one is not self]
            flow = sum(isinstance(one, DefaultFlowCallback) for one in others[:1])  # decides when to save
            handler.callbacks = [*others[:flow], self, *others[flow:]]  # type: ignore[union-attr]

    @hook
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note it in the run."""
        if state.is_world_process_zero:
            self._marks.epoch(int(state.epoch or 0) + 1, state.global_step)

    @hook
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End what has not been ended: a save that was called off."""
        self._marks.end(CHECKPOINT)
        self._marks.end(EVALUATION)

    @hook
    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a micro-batch of several."""
        self._marks.micro_batch()

    @hook
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a step."""
        self._marks.micro_batch()
        self._marks.step(state.global_step)
        self._before_save(control)

    @hook
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin what the end of an epoch brings."""
        self._before_save(control)

    @hook
    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an evaluation, with its first step."""
        self._marks.begin(EVALUATION)

    @hook
    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End it."""
        self._marks.end(EVALUATION)
        if control.should_save:
            self._marks.begin(CHECKPOINT)

    @hook
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of a checkpoint."""
        self._marks.end(CHECKPOINT)

    @hook
    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """End it, as `on_evaluate`."""
        self._marks.end(EVALUATION)

    @hook
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Pass on in rank 0 what is logged of a training step, and add the verdict to it."""
        if _of_a_step(logs) and state.is_world_process_zero:
            self._marks.log({name: one for name, one in logs.items() if name not in _NO_METRICS})
        sentence = self._marks.new_verdict()
        if sentence is not None:
            logging.get_logger("transformers").warning(sentence)
        figures = self._marks.figures()
        if figures and _of_a_step(logs):
            logs.update(figures)  # `report_to`'s callbacks are given the same object
            if state.log_history and _of_a_step(state.log_history[-1]):
                state.log_history[-1].update(figures)

    def _before_save(self, control: Any) -> None:
        if control.should_save and not control.should_evaluate:  # else after the evaluation
            self._marks.begin(CHECKPOINT)


def _of_a_step(logs: Any) -> bool:
    """Return whether `logs` is about training steps, not the result of `evaluate()` or `train()`."""
    return isinstance(logs, dict) and "loss" in logs and "learning_rate" in logs
