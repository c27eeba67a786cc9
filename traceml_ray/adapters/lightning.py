"""`TraceMLCallback` for Lightning's Trainer, from `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from traceml_ray.adapters.marks import EVALUATION, Marks, hook

_OLD, _NEW = "pytorch_lightning", "lightning.pytorch"
_lightning: Any
try:
    _lightning = import_module(_OLD if _OLD in sys.modules else _NEW)
except ModuleNotFoundError:
    _lightning = import_module(_OLD)


class TraceMLCallback(_lightning.Callback):  # type: ignore[misc]
    """
    Use it as `Trainer(callbacks=[traceml_ray.TraceMLCallback()])`.

    It reports steps as `trainer.global_step` counts them; with several optimizers, as the loggers count them
    (one per batch). It reports epochs as events and validation as the span `evaluation`, and adds the verdict
    to the Trainer's loggers. Checkpoints are seen without it (`torch.save`). In a process that is not watched
    it does nothing.

    Once there is a verdict, rank 0 logs `traceml/step_ms` (mean of the judged window), `traceml/cost_pct`
    (percentage of the step), `traceml/late_rank` (-1: no rank is named) and `traceml/micro_batches` (per
    step). Errors in the callback are counted, not raised.
    """

    def __init__(self) -> None:
        self._marks = Marks()

    @hook
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue the step count of a checkpoint."""
        self._marks.step(_done(trainer, 0))
        if not _has_several_optimizers(trainer) or trainer.max_steps == -1:
            # `max_steps`, or the number of steps in the epochs
            self._marks.total(trainer.estimated_stepping_batches)

    @hook
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the epoch as an event of the run."""
        if trainer.is_global_zero:
            self._marks.epoch(trainer.current_epoch + 1, _done(trainer, 0))

    @hook
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """
        Count a micro-batch, and the step if the micro-batch completes one. Log the verdict where Lightning
        logs.
        """
        self._marks.micro_batch()
        if not self._marks.step(_done(trainer, 1)):
            return
        sentence = self._marks.new_verdict()
        if sentence is not None:
            _lightning.utilities.rank_zero_warn(sentence)
        # `log_dict` is not used: it makes tensors on the device, and metrics that only rank 0 would have.
        figures = self._marks.figures()
        if figures and trainer._logger_connector.should_update_logs:
            for logger in trainer.loggers:
                self._log(logger, figures, trainer.fit_loop.epoch_loop._batches_that_stepped)

    @hook
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the span."""
        self._marks.begin(EVALUATION)

    @hook
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the span."""
        self._marks.end(EVALUATION)

    @hook
    def _log(self, logger: Any, figures: dict[str, float], step: int) -> None:
        logger.log_metrics(dict(figures), step=step)


def _has_several_optimizers(trainer: Any) -> bool:
    return len(getattr(trainer, "optimizers", ())) > 1


def _done(trainer: Any, in_batch: int) -> int:
    """Return the number of steps done. `in_batch` is the number that the batch ending now adds."""
    if not _has_several_optimizers(trainer):
        return int(trainer.global_step)
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped) + in_batch
