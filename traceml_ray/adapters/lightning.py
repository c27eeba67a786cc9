"""`TraceMLCallback` for Lightning's Trainer, of `lightning` or of `pytorch_lightning`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from traceml_ray.adapters.marks import EVALUATION, Marks

_USED = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
_lightning: Any = import_module(_USED)


class TraceMLCallback(_lightning.Callback):  # type: ignore[misc]
    """
    `Trainer(callbacks=[traceml_ray.TraceMLCallback()])`: steps as `trainer.global_step` counts them, epochs
    as events, validation as span `evaluation`, and the verdict in the Trainer's loggers; checkpoints are seen
    without it (`torch.save`). In a process that is not watched it does nothing.
    """

    def __init__(self) -> None:
        self._marks = Marks()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count on from a checkpoint."""
        self._marks.step(trainer.global_step)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note it in the run."""
        if trainer.is_global_zero:
            self._marks.epoch(trainer.current_epoch + 1, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Count a micro-batch, and the step where it ends one; log the verdict."""
        self._marks.micro_batch()
        if trainer.fit_loop._should_accumulate():
            return
        self._marks.step(trainer.global_step)
        figures = self._marks.figures()
        if figures:
            pl_module.log_dict(figures, on_step=True, on_epoch=False, rank_zero_only=True)
        news = self._marks.news()
        if news is not None:
            _lightning.utilities.rank_zero_warn(news)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the span."""
        self._marks.begin(EVALUATION)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End it."""
        self._marks.end(EVALUATION)
