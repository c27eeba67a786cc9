"""How a training process ends, and what is sent of it."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback

from traceml_ray.errors import error_text, sendable
from traceml_ray.masking import masked_text
from traceml_ray.stages import DATA
from traceml_ray.wire import messages as wire

_CALLS = 30
"""Largest number of calls of a traceback that are sent: the last ones."""
_TRACEBACK_CHARS = 6000
_MESSAGE_CHARS = 2000
_WHERE_CHARS = 64
_OF_DATA = {"traceml_ray.agent.patch.dataloader", "traceml_ray.agent.patch.iterators"}
"""Modules whose frames wait for batches."""


def event(
    opened: wire.OpenStage, error: BaseException | None, kind: str = "exit", **data: wire.Value
) -> wire.Event:
    """Return the event of how the training thread ended, in `opened`: as `kind`, or by an exception."""
    message, stage = "", opened.stage
    if error is not None:
        stage = _raised_in(error, stage)
        kind, data = "exception", {"type": type(error).__name__, "traceback": _traceback(error)}
        message = masked_text(error_text(error)[:_MESSAGE_CHARS])
    return wire.Event(kind, time.time_ns(), opened.step, stage, message, data)


def out_of_memory(opened: wire.OpenStage, error: BaseException, where: str) -> wire.Event:
    """Return event `oom`: memory ran out in `where`, and the script may go on."""
    data: dict[str, wire.Value] = {"where": sendable(where)[:_WHERE_CHARS], "type": type(error).__name__}
    data["traceback"] = _traceback(error)
    message = masked_text(error_text(error)[:_MESSAGE_CHARS])
    return wire.Event("oom", time.time_ns(), opened.step, opened.stage, message, data)


def _raised_in(error: BaseException, opened: int) -> int:
    """Return in which stage `error` was raised: one that came through a loader has left `data` by now."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in _OF_DATA:
            return DATA
    return opened


def _traceback(error: BaseException) -> str | None:
    """Return its last calls, as Python prints them; None where they cannot be had."""
    try:
        lines = traceback.format_exception(error, limit=-_CALLS)
    except Exception:  # the script's own classes may answer with anything
        return None
    text = sendable("".join(lines))[-2 * _TRACEBACK_CHARS :]
    return masked_text(text)[-_TRACEBACK_CHARS:]


def end_as_interrupted() -> None:
    """
    Have a process that an unhandled KeyboardInterrupt ends die of SIGINT, as it would have without us.

    Python notes that such an exception came out of the code of a whole file or string; any `exec` of a string
    at exit (a dataclass that is imported then) makes it forget that, and exit with 1.
    """
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
