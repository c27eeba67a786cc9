"""
The end of a run, decided in one place: for whom to wait, for how long, and when to write the files.

The aggregator owns the end. Relays, and the controller of Ray Train, report that a node or a run is over,
repeat the report and follow the answer. If no answer arrives in time, the launcher or `Session.stop` takes
the session over (`store.fence`) and writes its end from the file. All the time-outs are in the table below,
in seconds, and `tests/unit/test_finish.py` adds them up: whatever hangs, a run ends less than `BAR_S` later
than without a monitor. This module does no I/O and is cheap to import, because the launcher imports it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from traceml_ray.errors import error_text
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

BAR_S = 3.0
"""
Most time that the monitor may add to the end of a run, in s. `make chaos` holds every fault to
this limit.
"""

# -- the aggregator --

OTHERS_S = 1.8
"""
Time for which the aggregator waits for nodes or ranks that may still deliver. Ended ones are held up no
longer.
"""
QUIET_S = 2.5
"""Time after which a silent relay is no longer waited for. A relay samples its node each second."""
LATE_S = 60.0
"""
Time for which a session without a launcher waits for a silent node. Live ranks report each second, and an end
that is delayed (by a last checkpoint) takes some tens of seconds.
"""
RELAYS_S = 1.0
"""
Time for which the aggregator waits for relays to hand over what they hold: slightly above
`HAND_OVER_S`.
"""
HAND_OVER_S = 0.8
"""Time that a relay may take to hand over what it holds: one commit and a round trip."""
LINGER_S = 0.5
"""Time for which the aggregator still answers after everything is written: several times `ASK_S`."""
GOODBYE_S = 0.2
"""Time between the aggregator's answer to `stop` and its exit, so that the answer can be sent."""

# -- callers of the aggregator: a relay for its launcher, Ray Train's controller, a driver --

ASK_S = 0.05
"""Interval between two questions whether everything is written. An answer costs a millisecond."""
WORD_S = 2.0
"""
Longest time until the aggregator replies that everything is written, that it waits for others, or that it
makes a report: two commits. For a relay this includes flushing. It is halved if the aggregator had stored
nothing for a second when the end came, because then it hangs.
"""
ANSWER_S = 1.0
"""Time within which a live aggregator answers, however large the job."""
STARTING_S = 2.5
"""The same for an aggregator that was just started and has not answered yet: its process must start first."""
LEAVE_S = 0.5
"""Time that relays may take to leave what they hold in files if the aggregator hangs."""
EXIT_S = 2.7
"""Time for which an exiting driver that ends its cluster waits for its session. Then the file is used."""

# -- the relay --

DRAIN_S = 1.0
"""Time for which ranks that are still connected may go on sending; counts as part of `WORD_S`."""
SIGN_S = 0.25
"""Interval at which the relay sends the launcher a sign of life: about four times in `SILENT_S`."""

# -- the launcher --

SILENT_S = 1.2
"""
A relay that is silent for this long hangs: even with all cores busy, a live relay is not silent
this long.
"""
LAUNCHER_S = 2.4
"""
Longest time for all questions together: `WORD_S` plus the time to leave what is not stored in files. Also the
longest time for the launcher's own work after the files are written: it reads some and removes others.
"""
HELPER_S = 2.0
"""Time for which a helper may go on making actors on a cluster that stays; counts as part of `LAUNCHER_S`."""
REPORT_S = 30.0
"""
Time to wait for a report that is being made. The largest session takes 9 s. The replies show that this is not
a hang, and the launcher would take as long to make the report itself.
"""
KILL_S = 0.3
"""Time that processes may take to exit after SIGKILL. Those that hang in the kernel never exit."""
DISK_S = 0.6
"""Time for which a process may only wait for the disk. After that, the disk is considered to hang."""
LOCKED_S = 0.2
"""Time for which a session file may stay locked. A commit takes milliseconds, so its writer was stopped."""


def failed(error: Exception) -> wire.Finished:
    """Return the answer to a request for an end whose files cannot be written."""
    return wire.Finished(codec.VERSION, "failed", error_text(error))


class End:
    """
    The end of a session, whose nodes leave one by one, or of one of its runs, whose ranks leave one by one.

    Its files are written when nothing is missing any more, `OTHERS_S` after the end was requested, or at once
    if a person has ordered it. They are written again when the missing ones have arrived. `clock`: returns
    monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ordered = False
        """Whether a person has requested the end. Then no node is waited for."""
        self.written: int | None = None
        """Number of nodes or ranks missing when the files were written. None: not written yet."""
        self.reporting = False
        """Whether the report is being made."""
        self.failed = ""
        """Why the files could not be written, until that has been answered."""
        self._clock = clock
        self._asked: float | None = None

    def ask(self, ordered: bool = False, waited_s: float = 0.0) -> None:
        """Request the end, or repeat the request. `waited_s`: time already spent waiting, in s."""
        self._asked = self._clock() - waited_s if self._asked is None else self._asked
        self.ordered |= ordered

    @property
    def open(self) -> bool:
        """Whether the end was requested and the files are not complete yet."""
        return self._asked is not None and not self.failed and self.written != 0

    def due(self, missing: int) -> bool:
        """Whether to write the files now, with `missing` nodes or ranks missing."""
        if not self.open or self._asked is None:
            return False
        if self.written is None:
            return self.ordered or not missing or self._clock() >= self._asked + OTHERS_S
        return self.written > 0 and not missing

    def over(self, quiet_s: float) -> bool:
        """Whether nothing more is expected, after `quiet_s` seconds without a message."""
        return self.written is not None and (self.ordered or not self.written or quiet_s > LATE_S)

    def answer(self, missing: int, names: str = "") -> wire.Finished:
        """Return the answer to a request for the end. `names`: the names of those that are missing."""
        if self.failed:
            why, self.failed = self.failed, ""
            return wire.Finished(codec.VERSION, "failed", why)
        if self.written is not None:
            return wire.Finished(codec.VERSION, "written", names if self.written else "", self.written)
        waiting = 0 if self.due(missing) else missing
        return wire.Finished(codec.VERSION, "writing" if self.reporting else "waiting", names, waiting)
