"""Named parts of stages on their way: which are open, which are over, and what each took of the open row."""

from __future__ import annotations

from traceml_ray.agent.details import Details
from traceml_ray.wire import BACKWARD, DATA, FORWARD, N_STAGES, POST_SYNC, PREPARE

_MAX_OPEN = 32
_MAX_CLOSED = 1024


class Stretch:
    """A named stretch: the stage it began in, and its time in each since the row began."""

    __slots__ = ("began", "foreign_ns", "number", "paused", "size", "stage", "sums")

    def __init__(self, number: int, stage: int, began: int) -> None:
        self.number, self.stage, self.began = number, stage, began
        self.size = self.foreign_ns = 0
        self.sums = [0] * N_STAGES
        self.paused = False
        """What happens now is not part of it."""

    def fold(self) -> None:
        """See `Recorder._fold`."""
        sums = self.sums
        sums[POST_SYNC] += self.foreign_ns + sums[PREPARE] + sums[FORWARD]
        sums[DATA] -= self.foreign_ns
        self.foreign_ns = sums[PREPARE] = sums[FORWARD] = 0
        if self.stage in (PREPARE, FORWARD):
            self.stage = POST_SYNC


class Stretches:
    """
    Those of the open row. `open` ones are in the order in which they began; `over` ones wait to be handed
    out to `details`: until a backward begins, what they are part of may yet be folded.
    """

    __slots__ = ("_since", "details", "lost", "open", "over")

    def __init__(self) -> None:
        self.details = Details()
        self.open: list[Stretch] = []
        self.over: list[Stretch] = []
        self.lost = 0
        """Those that were open when too many others began."""
        self._since = 0

    def forget(self) -> None:
        """Forget the open row."""
        self.open, self.over, self._since = [], [], 0

    def fold(self) -> None:
        """See `Recorder._fold`."""
        for stretch in (*self.open, *self.over):
            stretch.fold()

    def spread(self, stage: int, now: int) -> None:
        """The time since the mark before was in every one that is open."""
        for stretch in self.running():
            stretch.sums[stage] += now - self._since
        self._since = now

    def running(self) -> list[Stretch]:
        """Return those that time goes to, the innermost last."""
        return [stretch for stretch in self.open if not stretch.paused]

    def begin(self, number: int, stage: int, now: int) -> Stretch:
        """One of this number (see `Details`) begins."""
        self.spread(stage, now)
        stretch = Stretch(number, stage, now)
        self.open.append(stretch)
        if len(self.open) > _MAX_OPEN:  # the oldest was never ended
            del self.open[0]
            self.lost += 1
        return stretch

    def end(self, stretch: Stretch, stage: int, now: int) -> bool:
        """`stretch` ends. True when so many are over that they have to be handed out."""
        self.spread(stage, now)
        if stretch in self.open:
            self.open.remove(stretch)
            if all(other.number != stretch.number for other in self.open):  # not inside one of the same name
                self.over.append(stretch)
        return len(self.over) > _MAX_CLOSED

    def drop(self, stretch: Stretch | None) -> None:
        """One that never ended counts for nothing."""
        if stretch in self.open:
            self.open.remove(stretch)

    def innermost_ns(self, now: int) -> int | None:
        """Return how long the innermost one has been open in this row, None where there is none."""
        running = self.running()
        return sum(running[-1].sums) + max(0, now - self._since) if running else None

    def cut(self, step: int, apart: bool) -> None:
        """A row ends: what is open has been a part of it, too; of those of one name the outermost."""
        seen = set()
        for stretch in self.open:
            if stretch.number not in seen and any(stretch.sums):
                self._hand_out(stretch, step, apart)
            seen.add(stretch.number)
            stretch.sums, stretch.foreign_ns = [0] * N_STAGES, 0

    def extend(self, step: int, apart: bool) -> None:
        """See `Recorder._extend`: the row ends now, and what was after its backward belongs to that."""
        for stretch in (*self.open, *self.over):
            stretch.sums[BACKWARD] += stretch.sums[POST_SYNC]
            stretch.sums[POST_SYNC] = 0
        self.cut(step, apart)
        self.hand_out(step, apart)

    def hand_out(self, step: int, apart: bool) -> None:
        """Add those that are over to the sums of `details`, as of `step`; `apart`: each by itself."""
        for stretch in self.over:
            self._hand_out(stretch, step, apart)
        self.over = []

    def _hand_out(self, stretch: Stretch, step: int, apart: bool) -> None:
        """Add what it took of the open row; it counts once in each stage it was in."""
        name = self.details.names[stretch.number]
        for stage, ns in enumerate(stretch.sums):
            if ns:
                self.details.add(name, stage, step, ns, stretch.size, apart)
                stretch.size = 0
        if not any(stretch.sums):
            self.details.add(name, stretch.stage, step, 0, stretch.size, apart)
