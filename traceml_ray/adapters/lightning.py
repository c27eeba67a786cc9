"""`TraceMLCallback` for Lightning's Trainer, of `lightning` or of `pytorch_lightning`."""

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
    `Trainer(callbacks=[traceml_ray.TraceMLCallback()])`: steps as `trainer.global_step` counts them, with
    several optimizers as the loggers do (one a batch), epochs as events, validation as span `evaluation`, and
    the verdict in the Trainer's loggers; checkpoints are seen without it (`torch.save`). In a process that is
    not watched it does nothing.

    Rank 0 logs `traceml/step_ms` (mean of the window judged), `traceml/cost_pct` (of the step),
    `traceml/late_rank` (-1: none is named) and `traceml/micro_batches` (a step), once there is a verdict.
    What goes wrong in it is counted, not raised.
    """

    def __init__(self) -> None:
        self._marks = Marks()

    @hook
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count on from a checkpoint."""
        self._marks.step(_done(trainer, 0))
        if not _has_several_optimizers(trainer) or trainer.max_steps == -1:
            self._marks.total(trainer.estimated_stepping_batches)  # `max_steps`, or what the epochs come to

    @hook
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note it in the run."""
        if trainer.is_global_zero:
            self._marks.epoch(trainer.current_epoch + 1, _done(trainer, 0))

    @hook
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Count a micro-batch, and the step where it ends one; log the verdict where Lightning logs."""
        self._marks.micro_batch()
        if not self._marks.step(_done(trainer, 1)):
            return
        sentence = self._marks.new_verdict()
        if sentence is not None:
            _lightning.utilities.rank_zero_warn(sentence)
        # Not by `log_dict`: that makes tensors on the device, and metrics that only rank 0 has.
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
        """End it."""
        self._marks.end(EVALUATION)

    @hook
    def _log(self, logger: Any, figures: dict[str, float], step: int) -> None:
        logger.log_metrics(dict(figures), step=step)


def _has_several_optimizers(trainer: Any) -> bool:
    return len(getattr(trainer, "optimizers", ())) > 1


def _done(trainer: Any, in_batch: int) -> int:
    """Return how many steps are done; `in_batch` is what the batch that ends now adds to their number."""
    if not _has_several_optimizers(trainer):
        return int(trainer.global_step)
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped) + in_batch
