"""Takes what a script logs on its training thread, and sends it as sums over steps."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from traceml_ray.agent.recorder import Recorder
from traceml_ray.errors import Errors, sendable
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.logged.copies import SLOTS, DeviceCopies
from traceml_ray.signals.logged.records import MAX_NAME_CHARS, MAX_NAMES, LoggedValues

_FIRST_S, _SOON_S, _LONGEST_S = 1.0, 10.0, 300.0
"""Between two records of a name: a share of the time since the first, within these bounds."""
_SOON, _LATER = 0.25, 0.005
ROOM = 1 << 14
"""Calls that are kept until the agent has read them; the oldest of more are lost, and counted."""


class _Sum:
    """The values of one name since the last record, step by step."""

    def __init__(self) -> None:
        self.step: int | None = None
        """The newest step, whose last value may still change."""
        self.value = math.nan
        self._over: dict[str, Any] = {}

    def add(self, step: int, value: float) -> None:
        if self.step is not None and step > self.step:
            self._over = _with(self._over, self.step, self.value)
        self.step, self.value = step if self.step is None else max(step, self.step), value

    def record(self, name: str) -> LoggedValues:
        assert self.step is not None
        return LoggedValues(name, **_with(self._over, self.step, self.value))


def _with(before: Mapping[str, Any], step: int, value: float) -> dict[str, Any]:
    """Return the fields of a record with one more step."""
    finite = math.isfinite(value)
    known = [
        one for one in (before.get("low"), before.get("high"), value if finite else None) if one is not None
    ]
    first, since = before.get("first_not_finite"), before.get("not_finite_since")
    return {
        "first_step": before.get("first_step", step),
        "last_step": step,
        "steps": before.get("steps", 0) + 1,
        "low": min(known, default=None),
        "high": max(known, default=None),
        "not_finite": before.get("not_finite", 0) + (not finite),
        "first_not_finite": step if first is None and not finite else first,
        "not_finite_since": None if finite else step if since is None else since,
        "last": value,
    }


class MetricLog(Collector):
    """
    Of one process. `log` may be called by any thread; all else is the agent's thread's.

    Args:
        recorder: knows the step of a moment.
        errors: counts what cannot be logged.
        clock: monotonic seconds.
    """

    def __init__(
        self, recorder: Recorder, errors: Errors, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recorder, self._errors, self._clock = recorder, errors, clock
        self._calls: deque[tuple[int, dict[str, Any]]] = deque()
        self._lost = 0
        self._dropped: deque[dict[str, Any]] = deque()
        """What was lost: its places are free once the values have arrived."""
        self._copies = DeviceCopies()
        self._names: dict[str, str] = {}
        """The names that are kept, as they are sent, by the name that was given."""
        self._sums: dict[str, _Sum] = {}
        self._began: float | None = None
        self._due = 0.0

    @classmethod
    def of_rank(cls, rank: Rank) -> MetricLog:
        """Return that of a rank."""
        return cls(rank.recorder, rank.errors)

    def log(self, values: dict[str, Any]) -> None:
        """
        Take values by name; those that need no conversion first. `values` is not used by anyone else.
        Raises TypeError, OverflowError or ValueError for one that cannot be logged; the others are.
        """
        failed: Exception | None = None
        for name, value in values.items():
            if type(value) is not float:
                try:
                    values[name] = self._as_number(value)
                except Exception as error:
                    values[name], failed = None, TypeError(f"{str(name)[:MAX_NAME_CHARS]!r}: {error}")
        if not self._recorder.at_step(self._note, values):
            self._lose(values)
        if failed is not None:
            raise failed

    def _as_number(self, value: Any) -> Any:
        """Return a value as a float, or as a place where the value of a device's tensor arrives later."""
        if isinstance(value, Real):
            return float(value)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._copies.number_of(value)
        if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
            return float(value.item())
        raise TypeError(f"{type(value).__name__} is not a number")

    def _note(self, step: int, values: dict[str, Any]) -> None:
        """Called as the log of marks is replayed, by whichever thread does that."""
        if len(self._calls) < ROOM:
            self._calls.append((step, values))
        else:
            self._lose(values)

    def _lose(self, values: dict[str, Any]) -> None:
        self._lost += 1
        if len(self._dropped) < SLOTS:
            self._dropped.append(values)

    def collect(self, final: bool) -> list[LoggedValues]:
        """Return a record of each name that has new values, little more often than is needed to draw them."""
        lost, self._lost = self._lost, 0
        self._errors.count("logged values lost: no room", lost)
        self._read(final)
        now = self._clock()
        if not self._sums or not (final or now >= self._due):
            return []
        self._began = began = now if self._began is None else self._began
        gap = max(_FIRST_S, min(_SOON_S, _SOON * (now - began)), _LATER * (now - began))
        self._due = now + min(_LONGEST_S, gap)
        records = [one.record(name) for name, one in self._sums.items()]
        self._sums = {}
        return records

    def _read(self, final: bool) -> None:
        """Add up what was logged, in order, as far as it has arrived from the devices."""
        for _ in range(len(self._dropped)):
            for value in self._dropped.popleft().values():
                self._copies.read(value)
        while self._calls:
            step, values = self._calls[0]
            if not final and any(self._copies.is_pending(value) for value in values.values()):
                return
            self._calls.popleft()
            for name, value in values.items():
                number = self._copies.read(value)
                if number is not None and (kept := self._kept(name)) is not None:
                    self._sums.setdefault(kept, _Sum()).add(step, number)
                elif number is None and value is not None:
                    self._errors.count("logged values lost: not copied from the device")

    def _kept(self, name: Any) -> str | None:
        """Return the name as it is sent; None, and counted, for one too many."""
        kept = self._names.get(name)
        if kept is None:
            kept = sendable(str(name))[:MAX_NAME_CHARS]
            if len(self._names) >= MAX_NAMES and kept not in self._names.values():
                self._errors.note("log", ValueError(f"more than {MAX_NAMES} names: {kept!r} is not kept"))
                return None
            if len(self._names) < 2 * MAX_NAMES:
                self._names[name] = kept
        return kept
