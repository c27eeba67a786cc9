"""
Says what belongs to one incident, and when its bundle is to be written. Free of I/O.

When one rank fails its peers fail after it, and their last batches come a moment later: a bundle is written
when that has settled. What comes after it, within `SAME_S`, belongs to the same incident: the bundle is
written anew once, when that time is over or the session ends.

A person who requests a bundle always gets one. Requests that follow each other quickly share the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Least time between two bundles that were requested: a request that comes earlier waits for it."""
MAX_PAUSE_S = 3600.0
"""
Errors that a script catches may come in every step: the first makes a bundle, the next may after a minute,
and each time after twice as long, at most this.
"""
MAX_CAUSES = 64
"""Of one incident, that are kept; and as many requests."""
MAX_FAILED = 64
"""Requests of which the failure is kept."""
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
    stacks_for: Cause | None = None
    """The cause for which ranks are asked for their stacks,"""
    stacks_until: float = 0.0
    """and until when they are."""
    written: int = 0
    """How many of its causes are in the bundle."""

    @property
    def until(self) -> float:
        """Until when what happens belongs to it."""
        return self.began + SAME_S

    @property
    def requested(self) -> bool:
        """Whether a request waits for its bundle to be written."""
        return self.changed and any(cause.request is not None for cause in self.causes[self.written :])


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
        self._caught_from = -MAX_PAUSE_S
        """From when on what is caught makes a new bundle,"""
        self._request_from = -MAX_PAUSE_S
        """and from when on what is requested has one written."""
        self._failed: dict[str, str] = {}
        """By request: why its bundle could not be made."""

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
        if found is None:
            found = self.open = Incident(now, now)
        requested = found.requested
        kept = sum((other.request is None) == (cause.request is None) for other in found.causes)
        if kept < MAX_CAUSES:
            found.causes.append(cause)
        elif cause.request is not None:
            self.fail(cause.request, f"{MAX_CAUSES} others are in the same bundle; ask again in a minute")
            return
        self._known.add(cause.key)
        if cause.request is None:
            self._happened(found, cause, now)
        elif not requested:  # else it shares the bundle that is under way
            self._requested(found, cause, now)
        found.changed = True

    def _happened(self, found: Incident, cause: Cause, now: float) -> None:
        if found.name is None:
            found.due = now + (STACKS_S if cause.reason == "hang" else SETTLE_S)
        if found.stacks_for is None and cause.reason not in ("hang", "terminated"):  # there they come anyway
            found.stacks_for, found.stacks_until = cause, now + ASK_S

    def _requested(self, found: Incident, cause: Cause, now: float) -> None:
        found.due = now + SETTLE_S
        if len(found.causes) == 1:  # no bundle is to be written but for this request
            found.due = max(found.due, self._request_from)
        found.stacks_for, found.stacks_until = cause, now + ASK_S

    def _may_begin(self, cause: Cause, now: float) -> bool:
        if cause.reason != "oom" or cause.fatal:
            return True
        if now < self._caught_from:
            return False
        self._caught_from = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return True

    def fail(self, request: str, why: str) -> None:
        """Note why a request gets no bundle."""
        self._failed[request] = why
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def failure(self, request: str) -> str | None:
        """Return why a request gets no bundle; None while that is not so."""
        return self._failed.get(request)

    def is_due(self) -> bool:
        """Whether the bundle of the open incident is to be written now. Closes one that is over."""
        found, now = self.open, self.clock()
        if found is not None and not found.changed and now >= found.until:
            self.open = None
        return found is not None and found.changed and now >= min(found.due, found.until)

    def written(self, causes: Sequence[Cause], name: str | None, why: str = "") -> None:
        """
        Note that the bundle of the open incident was written, with these of its causes. None: it was not, and
        `why`; then it is not tried again for these.
        """
        found = self.open
        if found is None:
            return
        found.name, found.written = name or found.name, len(causes)
        found.changed = len(found.causes) > len(causes)  # more came while it was written
        found.due = self.clock() + SETTLE_S if found.changed else found.until
        requests = [cause.request for cause in causes if cause.request is not None]
        if requests:
            self._request_from = self.clock() + REQUEST_S
        if name is None:
            for request in requests:
                self.fail(request, why)
        if len(requests) == len(found.causes):
            self.open = None  # the next request is for a bundle of its own
        self.is_due()

    def commands(self) -> list[wire.Command]:
        """Return what to ask the ranks for: of a hang, they are asked anyway."""
        found = self.open
        if found is None or found.stacks_for is None or self.clock() >= found.stacks_until:
            return []
        return [wire.Command("dump", {"id": f"{ASKED}{found.stacks_for.t_ns:x}"})]
