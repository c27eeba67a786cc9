"""Collects what a script logs on its training thread, and sends it as sums over steps."""

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
"""Time between two records of a name, in s: a share of the time since the first, within these bounds."""
_SOON, _LATER = 0.25, 0.005
ROOM = 1 << 14
"""Number of calls that are kept until the agent has read them. Beyond it the oldest are lost, and counted."""


class _Sum:
    """The values of one name since the last record, step by step."""

    def __init__(self) -> None:
        self.step: int | None = None
        """The newest step, whose value may still be replaced."""
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
    """Return the fields of a record extended by one step."""
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
    Values that one process logs. Any thread may call `log`; only the agent's thread uses the rest.

    Args:
        recorder: knows the current step.
        errors: counts values that cannot be logged.
        clock: monotonic seconds.
    """

    def __init__(
        self, recorder: Recorder, errors: Errors, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recorder, self._errors, self._clock = recorder, errors, clock
        self._calls: deque[tuple[int, dict[str, Any]]] = deque()
        self._lost = 0
        self._dropped: deque[dict[str, Any]] = deque()
        """Entries that were dropped. Their slots are free once the values have arrived."""
        self._copies = DeviceCopies()
        self._names: dict[str, str] = {}
        """Name as given → name as sent, for the names that are kept."""
        self._sums: dict[str, _Sum] = {}
        self._began: float | None = None
        self._due = 0.0

    @classmethod
    def of_rank(cls, rank: Rank) -> MetricLog:
        """Make the log of a rank."""
        return cls(rank.recorder, rank.errors)

    def log(self, values: dict[str, Any]) -> None:
        """
        Log values by name; first those that need no conversion. The caller must not use `values` afterwards.

        Raises TypeError, OverflowError or ValueError for a value that cannot be logged; the other values are
        logged.
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
        """Return a value as a float, or as the slot where the value of a device's tensor will arrive."""
        if isinstance(value, Real):
            return float(value)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._copies.number_of(value)
        if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
            return float(value.item())
        raise TypeError(f"{type(value).__name__} is not a number")

    def _note(self, step: int, values: dict[str, Any]) -> None:
        """Add values to a step. Called when the log of marks is replayed, by whichever thread replays it."""
        if len(self._calls) < ROOM:
            self._calls.append((step, values))
        else:
            self._lose(values)

    def _lose(self, values: dict[str, Any]) -> None:
        self._lost += 1
        if len(self._dropped) < SLOTS:
            self._dropped.append(values)

    def collect(self, final: bool) -> list[LoggedValues]:
        """Return a record for each name with new values, not much more often than drawing needs."""
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
        """Add up the logged values, in order, as far as they have arrived from the devices."""
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
        """Return the name as sent. None, and counted, if there are too many names."""
        kept = self._names.get(name)
        if kept is None:
            kept = sendable(str(name))[:MAX_NAME_CHARS]
            if len(self._names) >= MAX_NAMES and kept not in self._names.values():
                self._errors.note("log", ValueError(f"more than {MAX_NAMES} names: {kept!r} is not kept"))
                return None
            if len(self._names) < 2 * MAX_NAMES:
                self._names[name] = kept
        return kept
