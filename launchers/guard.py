"""Contains errors of a launcher's monitor: the job and its exit code must not change."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from traceml_ray.errors import error_text
from traceml_ray.text import log

Kinds = tuple[type[BaseException], ...]


@contextlib.contextmanager
def guarded(what: str, kinds: Kinds = (Exception, SystemExit)) -> Iterator[None]:
    """
    Catch exceptions of `kinds` that the block raises (SystemExit: raised by a library), and print each in one
    line after `what`. A signal that torchrun has made an exception of passes: it ends the job.
    """
    try:
        yield
    except kinds as error:
        if BaseException not in kinds and _is_signal(error):
            raise
        with contextlib.suppress(Exception):  # the error itself cannot be printed
            log(f"{what}: {'interrupted' if isinstance(error, KeyboardInterrupt) else error_text(error)}")


def _is_signal(error: BaseException) -> bool:
    """Return whether an error is torch's SignalException, which is an Exception. Imports no torch."""
    return any(
        (kind.__module__.partition(".")[0], kind.__name__) == ("torch", "SignalException")
        for kind in type(error).__mro__
    )


def at_the_end(what: str) -> contextlib.AbstractContextManager[None]:
    """
    Catch every exception, as `guarded` does: the job has ended, and its exit code is known.

    This includes the KeyboardInterrupt of a person, or the signal of a scheduler, that does not wait for our
    end.
    """
    return guarded(what, (BaseException,))


def in_time(work: Callable[[], None], limit_s: float) -> None:
    """
    Call `work` in a thread and raise what it raises. After `limit_s` seconds, leave it and raise
    TimeoutError.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="traceml-in-time", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"not done within {limit_s:g} s")
    for error in raised:
        raise error
