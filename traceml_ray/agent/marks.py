"""
The marks of a training thread, as numbers.

DATA_BEGIN: the iterator waited for is the one of the wait before. DATA_EXHAUSTED: there was nothing more to
wait for. BACKWARD_FAILED: it has raised. SCALER_BEGIN: a `GradScaler` step begins; CLOSURE_BEGIN: an
optimizer step that is given a closure. BRACKET_BEGIN: SYNC_BEGIN of FSDP on a device, where all of its waits
have marks. COST says when the mark before it was done being made. From SPANS on there are two for each name
of `SpanSums`: a span of that name begins, and ends.
"""

from __future__ import annotations

from traceml_ray.agent.span_sums import MAX_NAMES

(
    DATA_BEGIN,
    DATA_END,
    DATA_EXHAUSTED,
    FORWARD_BEGIN,
    EVAL_MODE_FORWARD_BEGIN,
    NO_GRAD_FORWARD_BEGIN,
    BACKWARD_BEGIN,
    GRADIENTS_DONE,
    BACKWARD_END,
    SYNCED_BACKWARD_END,
    BACKWARD_FAILED,
    SYNC_BEGIN,
    SYNC_END,
    OPTIMIZER_BEGIN,
    SCALER_BEGIN,
    CLOSURE_BEGIN,
    OPTIMIZER_END,
    REDUCED,
    COLLATED,
    BRACKET_BEGIN,
    COST,
    SPANS,
) = range(22)
END = SPANS + 2 * MAX_NAMES
"""Marks are below this; times are all above."""

EVENTS = -(1 << 62)
"""EVENTS - n, before the time of a mark: event n of the device's clock was recorded there."""
OPTIMIZERS = -(1 << 61)
"""OPTIMIZERS - n, before the mark of its step: from here on it is optimizer n (its id) that steps."""
BATCHES = 2 * EVENTS
"""BATCHES - n, by itself: the batch that was waited for last is of size n, see `batch_size`."""
