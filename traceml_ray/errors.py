"""
Exceptions that are swallowed. They are counted by place in the code, each cause is reported once, and in
debug mode they are raised. This module also recognises out-of-memory errors of the host or of a device.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping

from traceml_ray.wire.codec import WireError
from traceml_ray.wire.messages import Event

MAX_PLACES = 64
"""
Largest number of places that are counted separately. Kinds of exceptions come from other code, so their
number has no limit.
"""
_MESSAGE_CHARS = 300


def error_text(error: BaseException) -> str:
    """Return an exception as a line that can be sent, even if its own `__str__` fails."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return sendable(text)


def sendable(text: str) -> str:
    """Return `text` without the characters that UTF-8 cannot encode. Names of files may contain any bytes."""
    return text.encode("utf-8", "replace").decode()


class Errors(Counter[str]):
    """
    Number of swallowed exceptions by place and kind, as `status` and the Health page show them.

    Args:
        known: counts to continue from.
        debug: `swallow` raises, `note` prints a traceback (TRACEML_DEBUG=1).
    """

    def __init__(self, known: Mapping[str, int] | None = None, *, debug: bool = False) -> None:
        super().__init__(known or {})
        self.debug = debug
        self._causes: list[Event] = []

    def count(self, name: str, number: int = 1) -> bool:
        """Add `number` to the count `name`, which is fixed in the code. Return whether the name is new."""
        if not number:
            return False
        fresh = name not in self
        if fresh and len(self) >= MAX_PLACES:
            name, fresh = "other", False
        self[name] += number
        return fresh

    def note(self, place: str, error: BaseException, who: str = "") -> bool:
        """
        Count an exception in a thread that must continue. Return whether it is the first of its kind.

        `place` is fixed in the code. Variable text (`who` caused it, the error's text) is in the event for
        the first exception of a kind.
        """
        kind = error.reason if isinstance(error, WireError) else type(error).__name__
        fresh = self.count(f"{place}: {kind}")
        if fresh:
            where = f"{place} ({who})" if who else place
            message = f"swallowed in {where}: {error_text(error)}"[:_MESSAGE_CHARS]
            self._causes.append(Event("swallowed", time.time_ns(), message=message))
        if self.debug:
            sys.stderr.write("traceml-ray: " + "".join(traceback.format_exception(error)))
        return fresh

    def swallow(self, place: str, error: BaseException) -> None:
        """Count an exception that the user's code must not see. In debug mode, raise it."""
        if self.debug:
            self.count(f"{place}: {type(error).__name__}")
            raise error
        self.note(place, error)

    def causes(self) -> list[Event]:
        """Return one event for each new kind of exception, once."""
        causes, self._causes = self._causes, []
        return causes


def cause_of(error: Exception) -> str:
    """Return the cause of the failure to create an actor, without its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or [type(error).__name__])[-1]


_SAID = re.compile(
    r"outofmemoryerror|memoryerror|out of memory|cublas_status_alloc_failed"
    r"|defaultcpuallocator: (can't|not enough)",
    re.IGNORECASE,
)


def is_out_of_memory(text: str) -> bool:
    """Return whether an exception, given as `Type: text`, says that memory ran out."""
    return bool(_SAID.search(text))
