"""Named spans inside a stage, and waits for peers, as the training thread begins and ends them."""

from __future__ import annotations

from collections.abc import Callable

from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.span_sums import MAX_NAME_CHARS

Begun = tuple[int, str | None]
"""The number of a span's name, and the name of the span around it."""


class Spans:
    """Begins and ends spans on the training thread; raises nothing."""

    def __init__(self, recorder: Recorder, failed: Callable[[str, BaseException], None]) -> None:
        self.innermost: str | None = None
        """The name of the span that the training thread is in; `end` puts back that of the one around it."""
        self._recorder = recorder
        self._failed = failed

    def begin(self, name: str, group: str | None = None) -> Begun | None:
        """Begin a span, a collective in a process group; None when there is none to end: another thread."""
        try:
            if not self._recorder.mine():
                return None
            name = str(name)[:MAX_NAME_CHARS]
            number = self._recorder.sums.number(name, group)
            if number is None or not self._recorder.span_begin(number):
                return None
            outer, self.innermost = self.innermost, name
            return number, outer
        except Exception as error:
            self._failed("span", error)
            return None

    def end(self, begun: Begun, size: int = 0) -> None:
        """End what `begin` began; `size` bytes were moved."""
        try:
            number, self.innermost = begun
            self._recorder.span_end(number, size)
        except Exception as error:
            self._failed("span", error)

    def sync_begin(self) -> bool:
        """Begin a wait for peers; True when `sync_end` has to follow."""
        try:
            return self._recorder.sync_begin()
        except Exception as error:
            self._failed("sync", error)
            return False

    def sync_end(self) -> None:
        """End what `sync_begin` began."""
        try:
            self._recorder.sync_end(True)
        except Exception as error:
            self._failed("sync", error)
