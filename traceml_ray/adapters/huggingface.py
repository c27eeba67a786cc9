"""`TraceMLTrainerCallback` for Hugging Face's Trainer (and those made of it: TRL, Sentence Transformers)."""

from __future__ import annotations

import sys
from typing import Any

from transformers import DefaultFlowCallback, TrainerCallback
from transformers.utils import logging

from traceml_ray.adapters.marks import CHECKPOINT, EVALUATION, Marks


class TraceMLTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """
    `Trainer(…, callbacks=[traceml_ray.TraceMLTrainerCallback()])`: steps as `state.global_step` counts them,
    epochs as events, evaluation and checkpoints as spans, and the verdict in the Trainer's log, so that it
    reaches what `report_to` names. In a process that is not watched it does nothing.
    """

    def __init__(self) -> None:
        self._marks = Marks()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go before the callbacks that hand the log on."""
        self._marks.step(state.global_step)
        handler = sys._getframe(1).f_locals.get("self")
        found = getattr(handler, "callbacks", None)
        if isinstance(found, list) and self in found:  # a new list: the handler is going through that one
            others = [one for one in found if one is not self]
            flow = sum(isinstance(one, DefaultFlowCallback) for one in others[:1])  # decides when to save
            handler.callbacks = [*others[:flow], self, *others[flow:]]  # type: ignore[union-attr]

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note it in the run."""
        if state.is_world_process_zero:
            self._marks.epoch(int(state.epoch or 0) + 1, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End what has not been ended: a save that was called off."""
        self._marks.end(CHECKPOINT)
        self._marks.end(EVALUATION)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a micro-batch of several."""
        self._marks.micro_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a step."""
        self._marks.micro_batch()
        self._marks.step(state.global_step)
        self._before_save(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin what the end of an epoch brings."""
        self._before_save(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an evaluation, with its first step."""
        self._marks.begin(EVALUATION)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End it."""
        self._marks.end(EVALUATION)
        if control.should_save:
            self._marks.begin(CHECKPOINT)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the span of a checkpoint."""
        self._marks.end(CHECKPOINT)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """End it, as `on_evaluate`."""
        self._marks.end(EVALUATION)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add the verdict to what is logged."""
        figures = self._marks.figures() or {}
        if figures and isinstance(logs, dict):
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)
        news = self._marks.news()
        if news is not None:
            logging.get_logger("transformers").warning(news)

    def _before_save(self, control: Any) -> None:
        if control.should_save and not control.should_evaluate:  # else after the evaluation
            self._marks.begin(CHECKPOINT)
