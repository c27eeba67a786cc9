"""
Says what belongs to one incident, and when its bundle is to be written. Free of I/O.

When one rank fails its peers fail after it, and their last batches come a moment later: a bundle is written
when that has settled. What comes after it, within `SAME_S`, belongs to the same incident: the bundle is
written anew once, when that time is over or the session ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from traceml_ray import wire
from traceml_ray.monitor.hang_watch import STACKS_S
from traceml_ray.store.bundles import Cause

SETTLE_S = 2.0
"""After a cause, for what the other ranks still send, and for their stacks."""
SAME_S = 60.0
"""How long after its first cause what happens belongs to an incident."""
REQUEST_S = 5.0
"""Between two bundles that were requested."""
MAX_PAUSE_S = 3600.0
"""
Errors that a script catches may come in every step: the first makes a bundle, the next may after a minute,
and each time after twice as long, at most this.
"""
MAX_CAUSES = 64
"""Of one incident, that are kept."""
ASK_S = 10.0
"""How long ranks are asked for their stacks."""
ASKED = "bundle-"
"""How ids of commands begin that ask for stacks for a bundle."""


def asked_for_bundle(event: Mapping[str, Any]) -> bool:
    """Return whether that event answers a command for a bundle."""
    return str(event["data"].get("dump")).startswith(ASKED)


@dataclass(eq=False)
class Incident:
    """What happened within one incident; times in seconds of `Incidents.clock`."""

    began: float
    due: float
    causes: list[Cause] = field(default_factory=list)
    name: str | None = None
    """Of its bundle, once that is written."""
    changed: bool = True
    """Something has happened since it was written, or it is not."""

    @property
    def until(self) -> float:
        """Until when what happens belongs to it."""
        return self.began + SAME_S

    @property
    def asked(self) -> str:
        """Id of the command that asks for stacks."""
        return f"{ASKED}{self.causes[0].t_ns:x}"


@dataclass(eq=False)
class Incidents:
    """
    One per session; the caller holds the writer's lock.

    Args:
        clock: monotonic seconds.
        count: counts, by a name, what makes no bundle.
    """

    clock: Callable[[], float]
    count: Callable[[str], object]
    open: Incident | None = None

    def __post_init__(self) -> None:
        self._known: set[object] = set()
        self._pause_s = SAME_S
        self._caught_from = self._request_from = -MAX_PAUSE_S
        """From when on what is caught, or requested, makes a new bundle."""

    def know(self, causes: Iterable[Cause]) -> None:
        """Take what is in bundles already, as after a restart."""
        self._known.update(cause.key for cause in causes)

    def note(self, cause: Cause) -> None:
        """Take what has happened, once."""
        if cause.key in self._known:
            return
        now, found = self.clock(), self.open
        if found is None and not self._may_begin(cause, now):
            self.count(f"no bundle, too soon after the last: {cause.reason}")
            return
        self._known.add(cause.key)
        if found is None:
            found = self.open = Incident(now, now)
        if len(found.causes) < MAX_CAUSES:
            found.causes.append(cause)
        if found.name is None or cause.request is not None:
            found.due = now + (STACKS_S if cause.reason == "hang" else SETTLE_S)
        found.changed = True

    def _may_begin(self, cause: Cause, now: float) -> bool:
        if cause.request is not None:
            allowed, self._request_from = now >= self._request_from, now + REQUEST_S
        elif cause.reason == "oom" and not cause.fatal:
            allowed = now >= self._caught_from
            if allowed:
                self._caught_from = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        else:
            allowed = True
        return allowed

    def is_due(self) -> bool:
        """Whether the bundle of the open incident is to be written now. Closes one that is over."""
        found, now = self.open, self.clock()
        if found is not None and not found.changed and now >= found.until:
            self.open = None
        return found is not None and found.changed and now >= min(found.due, found.until)

    def written(self, name: str | None) -> None:
        """Note that the bundle of the open incident was written; None: it could not be, and is not again."""
        found = self.open
        if found is not None:
            found.name, found.changed, found.due = name or found.name, False, found.until
            if all(cause.request is not None for cause in found.causes):
                self.open = None  # who asked for it was told its name
            self.is_due()

    def commands(self) -> list[wire.Command]:
        """Return what to ask the ranks for: of a hang, they are asked anyway."""
        found = self.open
        if found is None or self.clock() >= found.began + ASK_S:
            return []
        if all(cause.reason in ("hang", "terminated") for cause in found.causes):
            return []
        return [wire.Command("dump", {"id": found.asked})]
