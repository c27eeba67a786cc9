"""
Exceptions that are swallowed: counted by place, each cause told once, raised where somebody debugs. Which
errors say that memory ran out, of the host or of a device.
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
"""More than these are counted together: kinds of exceptions come from elsewhere."""
_MESSAGE_CHARS = 300


def error_text(error: BaseException) -> str:
    """Return an exception as a line that can be sent, whatever its own `__str__` does."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return sendable(text)


def sendable(text: str) -> str:
    """Return `text` without what has no UTF-8: names of files may hold anything."""
    return text.encode("utf-8", "replace").decode()


class Errors(Counter[str]):
    """
    Counts by place and kind, as `status` and the Health page show them.

    Args:
        known: counts to go on from.
        debug: `swallow` raises, `note` prints a traceback (TRACEML_DEBUG=1).
    """

    def __init__(self, known: Mapping[str, int] | None = None, *, debug: bool = False) -> None:
        super().__init__(known or {})
        self.debug = debug
        self._causes: list[Event] = []

    def count(self, name: str, number: int = 1) -> bool:
        """Count so many things under a name fixed in the code; return whether it is new."""
        if not number:
            return False
        fresh = name not in self
        if fresh and len(self) >= MAX_PLACES:
            name, fresh = "other", False
        self[name] += number
        return fresh

    def note(self, place: str, error: BaseException, who: str = "") -> bool:
        """
        Count an exception where a thread has to go on; return whether it is the first of its kind.

        `place` is fixed in the code. What varies (`who` caused it, the error's text) is in the event that the
        first of a kind makes.
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
        """Count an exception that the caller's caller is not to see; debugging, raise it."""
        if self.debug:
            self.count(f"{place}: {type(error).__name__}")
            raise error
        self.note(place, error)

    def causes(self) -> list[Event]:
        """Return what each new kind was about, once."""
        causes, self._causes = self._causes, []
        return causes


def cause_of(error: Exception) -> str:
    """Return what an actor that could not be made says of why, without its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or [type(error).__name__])[-1]


_SAID = re.compile(
    r"outofmemoryerror|memoryerror|out of memory|cublas_status_alloc_failed"
    r"|defaultcpuallocator: (can't|not enough)",
    re.IGNORECASE,
)


def is_out_of_memory(text: str) -> bool:
    """Return whether an exception, as `Type: text`, is of memory that ran out."""
    return bool(_SAID.search(text))
