"""
The end of a run, decided in one place: who is waited for, how long, and when the files are written.

The aggregator owns it. Relays and Ray Train's controller report that a node, or a run, is over, repeat that,
and follow the answer. Without an answer in time the launcher, or `Session.stop`, takes the session over
(`store.fence`) and writes its end from the file. Every time-out of that is in the table below, in seconds;
`tests/unit/test_finish.py` adds them up: whatever hangs, a run ends less than `BAR_S` later than without a
monitor. Free of I/O, and cheap to import: the launcher does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from traceml_ray.errors import error_text
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

BAR_S = 3.0
"""How much longer an end may take than without a monitor; `make chaos` holds every fault to it."""

# -- the aggregator --

OTHERS_S = 1.8
"""How long it waits for nodes, or ranks, that may still deliver: those that ended are held up no longer."""
QUIET_S = 2.5
"""A relay that has not reported for so long (it samples its node each second) is not waited for."""
LATE_S = 60.0
"""
How long a session whose launcher has gone waits for a node of which nothing comes: ranks that live report
each second, and an end that is held up (a last checkpoint) takes some tens of seconds.
"""
RELAYS_S = 1.0
"""How long it waits for relays that hand over what they hold: a little longer than `HAND_OVER_S`."""
HAND_OVER_S = 0.8
"""How long a relay may take for that: a commit, and the way there and back."""
LINGER_S = 0.5
"""How long it still answers when all is written: some times `ASK_S`."""
GOODBYE_S = 0.2
"""Between its answer to `stop` and its end: the answer has to be on its way."""

# -- callers of the aggregator: a relay for its launcher, Ray Train's controller, a driver --

ASK_S = 0.05
"""Between two questions whether all is written: an answer costs a millisecond."""
WORD_S = 2.0
"""
How long it may take until the aggregator replies that all is written, or that it waits for others or makes a
report: two commits. Of a relay, flushing is part of it, and half of it is all where the aggregator had stored
nothing for a second when the end came: then it hangs.
"""
ANSWER_S = 1.0
"""An aggregator that lives answers within that time, however large the job."""
STARTING_S = 2.5
"""The same for an aggregator that was just started and has not answered yet: a process has to start."""
LEAVE_S = 0.5
"""How long relays of an aggregator that hangs may take to leave what they hold in files."""
EXIT_S = 2.7
"""How long a driver that exits, and takes its cluster along, waits for its session; then comes the file."""

# -- the relay --

DRAIN_S = 1.0
"""How long ranks that are still connected may go on sending; counts as part of `WORD_S`."""
SIGN_S = 0.25
"""How often it sends the launcher a sign of life: some four times in `SILENT_S`."""

# -- the launcher --

SILENT_S = 1.2
"""A relay that is silent for so long hangs: it is not as busy as that even where all cores are."""
LAUNCHER_S = 2.4
"""
How long all of the asking may take: `WORD_S`, and the time to leave what is not stored in files. The same for
what it does itself once the files are written: read a few of them, remove others.
"""
HELPER_S = 2.0
"""How long a helper may go on making actors, on a cluster that stays; counts as part of `LAUNCHER_S`."""
REPORT_S = 30.0
"""
How long a report that is being made is waited for: that of the largest session takes 9 s. It is no hang (the
replies show that), and would take the launcher as long.
"""
KILL_S = 0.3
"""How long processes may take to be gone after SIGKILL; those that hang in the kernel never are."""
DISK_S = 0.6
"""How long a process may wait for the disk and do nothing else: then the disk hangs."""
LOCKED_S = 0.2
"""How long a session file may stay locked (a commit takes milliseconds): then its writer was stopped."""


def failed(error: Exception) -> wire.Finished:
    """Return the answer to whoever asks for an end of which the files cannot be written."""
    return wire.Finished(codec.VERSION, "failed", error_text(error))


class End:
    """
    The end of a session, whose nodes leave one by one, or of one of its runs, whose ranks do.

    Its files are written when none is missing any more, `OTHERS_S` after it was asked for, or at once where a
    person has ordered it. Then again when the missing ones have come. `clock`: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ordered = False
        """A person has asked for it: no node is waited for."""
        self.written: int | None = None
        """How many were missing when the files were written; None before."""
        self.reporting = False
        """The report is being made."""
        self.failed = ""
        """Why the files could not be written, until that is answered."""
        self._clock = clock
        self._asked: float | None = None

    def ask(self, ordered: bool = False, waited_s: float = 0.0) -> None:
        """Ask for it, once or again, having waited for so long."""
        self._asked = self._clock() - waited_s if self._asked is None else self._asked
        self.ordered |= ordered

    @property
    def open(self) -> bool:
        """Whether it was asked for, and the files are not written with everything yet."""
        return self._asked is not None and not self.failed and self.written != 0

    def due(self, missing: int) -> bool:
        """Whether the files are to be written now, with so many missing."""
        if not self.open or self._asked is None:
            return False
        if self.written is None:
            return self.ordered or not missing or self._clock() >= self._asked + OTHERS_S
        return self.written > 0 and not missing

    def over(self, quiet_s: float) -> bool:
        """Whether nothing more is waited for, when nothing has come for so long."""
        return self.written is not None and (self.ordered or not self.written or quiet_s > LATE_S)

    def answer(self, missing: int, names: str = "") -> wire.Finished:
        """Return the answer to whoever asks for the end; `names` of those that are missing."""
        if self.failed:
            why, self.failed = self.failed, ""
            return wire.Finished(codec.VERSION, "failed", why)
        if self.written is not None:
            return wire.Finished(codec.VERSION, "written", names if self.written else "", self.written)
        waiting = 0 if self.due(missing) else missing
        return wire.Finished(codec.VERSION, "writing" if self.reporting else "waiting", names, waiting)
