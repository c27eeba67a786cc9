"""
Times the stages on the device's clock. The training thread records an event at each mark; the agent's thread
reads the events later.

Events are numbered. Event n uses slot n of a ring; a slot is reused once no row needs its event. A row that
the device cannot time (a graph capture, no free event, an error, too late) keeps only its times on the CPU's
clock, and is counted. An error ends the device clock for good; later rows use the CPU's clock.

`Cuts` follows what `Partition` does, to know which events bound the stages of the open row. The functions on
rows are pure, with times in ns: they return the time per stage and the lead of the host. Events recorded on
an idle stream (beats) measure the offset between the device's clock and the CPU's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from traceml_ray.agent.marks import EVENTS
from traceml_ray.agent.ring import StepRing
from traceml_ray.errors import error_text
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_DEVICE_CLOCK,
    FLAG_EXCLUDED,
    FLAG_INSEPARABLE,
    FORWARD,
    LEAD_BYTES,
    LEAD_UNKNOWN,
    N_STAGES,
    POST_SYNC,
    PREPARE,
    SEGMENT_BITS,
    SYNC_WAIT,
)

NO_EVENT = -1
FOREIGN = N_STAGES
"""Provisional stage: a data wait that may later be assigned to an evaluation."""
SAMPLED = N_STAGES + 1
"""Not a stage. Marks a row in which every wait inside forward and backward has its own events."""


class Cut(NamedTuple):
    """A stretch of one stage between two events, by number. NO_EVENT where no event could be recorded."""

    stage: int
    since: int
    until: int


class Cuts:
    """Records which events bound the stages of the open row, as the stage changes."""

    __slots__ = ("_sampled", "last", "list")

    def __init__(self) -> None:
        self.list: list[Cut] = []
        self._sampled = False
        self.last = NO_EVENT
        """Number of the event at the last mark."""

    def to(self, stage: int, event: int) -> None:
        """End a stretch of `stage` at `event`."""
        if event != self.last or event == NO_EVENT:
            self.list.append(Cut(stage, self.last, event))
        self.last = event

    def sample(self) -> None:
        """Mark the row as SAMPLED."""
        if not self._sampled:
            self.list.append(Cut(SAMPLED, self.last, self.last))
            self._sampled = True

    def pop(self) -> list[Cut]:
        """Return the cuts of the row that ends, and start a new row."""
        taken, self.list, self._sampled = _relabelled(self.list, FOREIGN, DATA), [], False
        return taken

    def foreign(self) -> None:
        """Mark the data wait that just ended: its loader does not feed training."""
        if self.list and self.list[-1].stage == DATA:
            self.list[-1] = self.list[-1]._replace(stage=FOREIGN)

    def commit(self) -> None:
        """Mark all data waits of this row: their loaders feed training."""
        self.list = _relabelled(self.list, FOREIGN, DATA)

    def reclassify(self) -> None:
        """See `Partition.reclassify`."""
        for stage in (FOREIGN, PREPARE, FORWARD):
            self.list = _relabelled(self.list, stage, POST_SYNC)


def without_forward(cuts: list[Cut]) -> list[Cut]:
    """Return the cuts of a row that has no forward mark: forward starts where the data wait ended."""
    return _relabelled(cuts, PREPARE, FORWARD)


def first_event(cuts: list[Cut]) -> int:
    """Return the oldest event of `cuts`; NO_EVENT if there is none."""
    return next((event for cut in cuts for event in cut[1:] if event != NO_EVENT), NO_EVENT)


def _relabelled(cuts: list[Cut], stage: int, becomes: int) -> list[Cut]:
    return [cut._replace(stage=becomes) if cut.stage == stage else cut for cut in cuts]


_KEPT_NS = 60_000_000_000
_FEW = 3
"""With fewer beats than this the offset is unknown: each of them may have been delayed."""
_SLOPE_NS = 1_000_000_000
"""Shortest time span of beats from which a drift is estimated, in ns."""
_MAX_SCATTER_NS = 1_000_000
"""Largest scatter of beats, in ns. Above it our stream is not idle: it shares a queue with others."""


class ClockOffset:
    """
    The straight line below all offsets (device - CPU, ns) of the last minute.

    The device may reach a beat late, never early. So the offset is the line that no beat lies below and that
    is closest to the beats: the edge of the lower hull above their mean time.
    """

    def __init__(self) -> None:
        self._beats: deque[tuple[int, int]] = deque()
        self._line: tuple[int, float, float] | None = None
        """(time, offset at that time, slope)."""

    def add(self, cpu_ns: int, offset_ns: int) -> None:
        """Add the offset of a beat that was recorded at `cpu_ns`."""
        beats = self._beats
        beats.append((cpu_ns, offset_ns))
        while beats[0][0] < cpu_ns - _KEPT_NS:
            beats.popleft()
        self._line = self._fit() if len(beats) >= _FEW else None

    def at(self, cpu_ns: int) -> int | None:
        """Return the offset at `cpu_ns`. None if it is not known."""
        if self._line is None or abs(cpu_ns - self._beats[-1][0]) > _KEPT_NS:
            return None
        time, offset, slope = self._line
        return round(offset + slope * (cpu_ns - time))

    def _fit(self) -> tuple[int, float, float] | None:
        beats = self._beats
        time, offset = min(beats, key=lambda beat: beat[1])
        slope = 0.0
        if beats[-1][0] - beats[0][0] >= _SLOPE_NS:
            middle = sum(beat[0] for beat in beats) / len(beats)
            hull = _lower_hull(beats)
            for (a, low), (b, high) in pairwise(hull):
                if a <= middle <= b:
                    time, offset, slope = a, low, (high - low) / (b - a)
        over = sorted(beat[1] - (offset + slope * (beat[0] - time)) for beat in beats)
        return (time, offset, slope) if over[len(over) // 2] <= _MAX_SCATTER_NS else None


def _lower_hull(points: deque[tuple[int, int]]) -> list[tuple[int, int]]:
    hull: list[tuple[int, int]] = []
    for x, y in points:
        while len(hull) > 1:
            (ax, ay), (bx, by) = hull[-2:]
            if (by - ay) * (x - ax) < (y - ay) * (bx - ax):
                break
            hull.pop()
        hull.append((x, y))
    return hull


LATE_NS = 100_000
LATE_SHARE = 0.05
"""
The device counts as caught up with its host where the lead is below this share of the median row of one
micro-batch, or below LATE_NS. With gradient accumulation a host can be a whole stage ahead, although that is
a small share of the row.
"""
LONG_NS = 16_000_000_000
"""Up to this length the device's float of ms is exact to 1 µs. A longer row is read from mark to mark."""


def is_whole(cuts: Sequence[Cut]) -> bool:
    """Return whether each of `cuts` has both of its events and begins where the one before ends."""
    return bool(cuts) and all(
        (NO_EVENT not in (cut.since, cut.until)) and (before is None or before.until == cut.since)
        for before, cut in pairwise((None, *cuts))
        if cut is not None
    )


def read_row(cuts: Sequence[Cut], elapsed: Callable[[int, int], int | None]) -> tuple[list[int], int] | None:
    """
    Return the times at which `cuts` end, since the first began, and by how much the times had to be moved.

    The times are made increasing: marks may be on different streams, whose events have no order. Returns None
    if some of the events are not done.
    """
    times: list[int] = []
    now = moved = 0
    for cut in cuts:
        far = now > LONG_NS
        elapsed_ns = elapsed(cut.since if far else cuts[0].since, cut.until)
        if elapsed_ns is None:
            return None
        elapsed_ns += now if far else 0
        moved += max(0, now - elapsed_ns)
        now = max(now, elapsed_ns)
        times.append(now)
    return times, moved


def stages_of(cuts: Sequence[Cut], times: Sequence[int]) -> list[int]:
    """Return the time per stage."""
    stages, before = [0] * N_STAGES, 0
    for cut, until in zip(cuts, times, strict=True):
        stages[cut.stage] += until - before
        before = until
    return stages


def late_below(cuts: Sequence[Cut], median_ns: int) -> int:
    """Return the lead in ns below which the device has caught up with its host, in a row of `cuts`."""
    worked = [cut.stage == BACKWARD for cut in cuts if cut.stage != SYNC_WAIT]
    batches = sum(now and not before for before, now in pairwise((False, *worked)))
    return max(LATE_NS, round(LATE_SHARE * median_ns / max(batches, 1)))


def masks(
    cuts: Sequence[Cut],
    times: Sequence[int],
    hosts: Callable[[int], tuple[int, bool]],
    ahead_ns: int,
    late_ns: int,
) -> tuple[int, int, int]:
    """
    Return the bit masks `late`, `full` and `sure` (see `wire.RankBatch.leads`), one bit per stage.

    Args:
        cuts: the cuts of the row.
        times: when each cut ends, since the first began.
        hosts: returns for an event when it was recorded, on the CPU's clock, and whether the queue was full.
        ahead_ns: when the row began on the device, on the CPU's clock.
        late_ns: the device has caught up where the lead is below this.
    """
    caught, spent = [0] * N_STAGES, [0] * N_STAGES
    full, unsure = 0, 0
    began = 0
    for cut, until in zip(cuts, times, strict=True):
        (since_host, since_full), (until_host, until_full) = hosts(cut.since), hosts(cut.until)
        lead, lead_after = ahead_ns + began - since_host, ahead_ns + until - until_host
        weight = until - began + 1  # stages without any time have a bit, too
        spent[cut.stage] += weight
        held = since_full or until_full  # a host that waits for room in its queue is ahead, whatever the lead
        caught[cut.stage] += weight * (lead < late_ns and lead_after < late_ns and not held)
        full |= (since_full or until_full) << cut.stage
        unsure |= (lead <= until_host - since_host) << cut.stage
        began = until
    late = sum((0 < spent[stage] <= 2 * caught[stage]) << stage for stage in range(N_STAGES))
    seen = sum((spent[stage] > 0) << stage for stage in range(N_STAGES))
    return late, full, seen & ~unsure


EVENT_SLOTS = 8192
_MASK = EVENT_SLOTS - 1
_BEATS = EVENT_SLOTS, EVENT_SLOTS + 1
"""Slots of the events (beats) that compare the two clocks."""
_MADE_AHEAD = 2048
FULL_NS = 50_000
"""Recording an event takes longer than this only if the launch queue is full."""
MAX_ROWS_BEHIND = 64
MAX_EVENTS_BEHIND = 4096
MAX_WAIT_NS = 30_000_000_000
"""A row that is still not done after this time, though later rows are, will never be done."""
MAX_MOVED = 0.02
"""Largest share of a row by which the marks of several streams may be out of order."""
UNKNOWN = bytes([LEAD_UNKNOWN] * LEAD_BYTES)


class DeviceApi(Protocol):
    """
    The interface to a device.

    The training thread and autograd's thread call `capturing`, `record` and `elsewhere`; the agent's thread
    calls the rest. Times are in ns. Every method may raise.
    """

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        ...

    def record(self, slot: int) -> None:
        """Record the event of `slot` on the current stream."""
        ...

    def elsewhere(self) -> bool:
        """Return whether the current stream differs from the stream of the last recorded event."""
        ...

    def make(self, slots: int) -> None:
        """Make the events of the first `slots` slots."""
        ...

    def beat(self, slot: int) -> None:
        """Record the event of `slot` on a stream of our own."""
        ...

    def done(self, slot: int) -> bool:
        """Return whether the device has passed the event."""
        ...

    def elapsed_ns(self, since: int, until: int) -> int | None:
        """Return the time between the events of two slots. None if they are not both done."""
        ...


class _Row(NamedTuple):
    key: int
    flags: int
    times: list[int]
    cuts: list[Cut]
    put_ns: int


class DeviceClock:
    """
    Adds the device's times to rows. Accepts rows in order and passes them to the ring in order; a row that
    the device cannot time keeps its times on the CPU's clock.

    Args:
        api: the device.
        ring: receives the rows.
        clock: the CPU's clock, in ns.
        streamed: returns whether a row without the device's times is inseparable (see `GradientExchange`).
    """

    def __init__(
        self, api: DeviceApi, ring: StepRing, clock: Callable[[], int], streamed: Callable[[], bool]
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Number of rows without the device's times and of marks without an event, by reason."""
        self.stopped = ""
        """Why the device clock has stopped. Empty while it runs."""
        self.sharded = False
        """Whether only SAMPLED rows count, because FSDP waits inside forward and backward."""
        self.next = 0
        """Number of the next event. The recording thread writes it."""
        self.recorded_ns = 0
        """Time that recording took on the training thread up to the newest reading, in ns."""
        self._weighed = 0
        """Number of events whose recording time is included in `recorded_ns`."""
        self.last_sampled = 0, NO_EVENT
        """(step, first event) of the newest row that was SAMPLED."""
        self.waited = [0, 0]
        """Time that FSDP waited, in ns: [in brackets that gather parameters, in other brackets]."""
        self.waited_steps = 0
        """Number of steps over which `waited` was summed."""
        self.medians: deque[int] = deque(maxlen=64)
        """Total times of the newest rows, in ns."""
        self._api = api
        self._ring = ring
        self._clock = clock
        self._streamed = streamed
        self._room = self._made = 0
        self._over = False
        """Whether recording has ended."""
        self._hosts = array("q", bytes(8 * EVENT_SLOTS))
        self._took = array("q", bytes(8 * EVENT_SLOTS))
        """Time that recording each event took on the training thread, in ns."""
        self._gathers = bytearray(EVENT_SLOTS)
        """Whether each event begins a bracket in which parameters are gathered."""
        self._rows: deque[_Row] = deque()
        self._begun = False
        """Whether the first row, which began before there were events, is over."""
        self._offset = ClockOffset()
        self._beat_ns: int | None = None
        """Time at which the beat in progress was recorded. None if there is none."""
        self._next_beat, self._last_beat = _BEATS
        self._device_ns: int | None = None
        """
        Device time of the newest finished beat, counted from the first beat, in ns. None before the first.
        """
        self._front = NO_EVENT, 0
        """(the oldest event that is not done, the time since when this is known)."""
        self._stamp = self.stamper(lambda _: None)

    # -- the training thread ---------------------------------------------------------------------

    def record(self) -> int:
        """Record an event on the current stream. Returns its number, or NO_EVENT if none can be recorded."""
        number = self.next
        self._stamp()
        return number if self.next > number else NO_EVENT

    def took_ns(self, event: int) -> int:
        """
        Return the time that recording this event took on the training thread. Only for the
        newest events.
        """
        return self._took[event & _MASK]

    def stamper(self, append: Callable[[int], object]) -> Callable[[], int]:
        """
        Return a clock for marks that also records an event and passes its number to `append`.

        It runs between two kernels with cold caches, so everything it needs is in local variables of one
        function.
        """
        clock, capturing, record = self._clock, self._api.capturing, self._api.record
        hosts, took = self._hosts, self._took

        def stamp() -> int:
            now = clock()
            try:
                number = self.next
                if self._over or number >= self._room or capturing():
                    self._skip(number)
                    return now
                slot = number & _MASK
                record(slot)
                hosts[slot], took[slot] = now, clock() - now
                self.next = number + 1
                append(EVENTS - number)
            except Exception as error:
                self.fail(error)
            return now

        return stamp

    def bracketing(self, gathers: bool) -> None:
        """Note what the bracket whose first event comes next waits for: gathers, or something else."""
        self._gathers[self.next & _MASK] = gathers

    def elsewhere(self) -> bool:
        """
        Return whether this thread's stream differs from that of the mark before, or is unknown. A wait for
        collectives on another stream does not make the stages wait.
        """
        try:
            return self._over or self._api.elsewhere()
        except Exception as error:
            self.fail(error)
            return True

    def _skip(self, number: int) -> None:
        if not self._over:
            full = number >= self._room
            self.counts["no event free for a mark" if full else "no event inside a graph capture"] += 1

    def fail(self, why: BaseException | str) -> None:
        """End the clock: the device is not called any more. Any thread may call this."""
        self._over = True
        if not self.stopped:
            self.stopped = why if isinstance(why, str) else error_text(why)

    def seal(self) -> None:
        """Stop recording. Events that are recorded can still be read."""
        self._over = True

    # -- rows: under the lock of the log -------------------------------------------------------------

    def put(self, key: int, flags: int, times: list[int], cuts: list[Cut]) -> None:
        """Add a row that is complete on the CPU's clock (ns per stage)."""
        self._rows.append(_Row(key, flags, times, cuts, self._clock()))

    def flush(self) -> None:
        """Pass on all waiting rows without the device's times."""
        why = "" if self.stopped else "device rows not read at the end"
        while self._rows:
            self._give_up(self._rows.popleft(), why)

    def _give_up(self, row: _Row, why: str) -> None:
        """Pass on a row with its times on the CPU's clock only, and count `why`."""
        if why:
            self.counts[why] += 1
        flags = row.flags | (FLAG_INSEPARABLE if self._streamed() else 0)
        self._ring.push(row.key, flags, row.times)

    # -- the agent's thread ------------------------------------------------------------------------

    def resolve(self, needed: int) -> None:
        """
        Pass on the rows that the device has finished. `needed`: the oldest event that an open
        row needs.
        """
        try:
            self._turn(needed)
        except Exception as error:
            self.fail(error)
        if self.stopped:
            self.flush()

    def _turn(self, needed: int) -> None:
        self._weigh()
        if not self.stopped:
            self._end_beat()
        while self._rows and not self.stopped and self._resolve(self._rows[0]):
            self._rows.popleft()
        if not self.stopped:
            self._make_room(first_event(self._rows[0].cuts) if self._rows else needed, needed)
            self._begin_beat()

    def _weigh(self) -> None:
        """Add the time that recording the newest events took."""
        end = self.next
        for number in range(max(self._weighed, end - EVENT_SLOTS), end):
            self.recorded_ns += self._took[number & _MASK]
        self._weighed = end

    @property
    def record_ns(self) -> float:
        """Mean time that recording an event takes on the training thread, in ns."""
        return self.recorded_ns / max(1, self._weighed)

    @property
    def waiting(self) -> int:
        """Number of rows that the device is not known to have finished."""
        return len(self._rows)

    def _resolve(self, row: _Row) -> bool:
        """
        Pass a row on if the device has finished it or never will. Returns whether the row was
        passed on.
        """
        cuts = [cut for cut in row.cuts if cut.stage < N_STAGES]
        if self.sharded and len(cuts) == len(row.cuts):
            self._give_up(row, "")
        elif not is_whole(cuts):
            self._give_up(row, "device rows without an event" if self._begun else "")
        elif (read := self._read(cuts)) is not None:
            self._hand_out(row, cuts, *read)
        elif self._overdue(row):
            self._give_up(row, "device rows late")
        else:
            return False
        self._begun = True
        return True

    def _read(self, cuts: list[Cut]) -> tuple[list[int], int] | None:
        if not self._done(cuts[-1].until):
            return None
        return read_row(cuts, self._elapsed)

    def _done(self, number: int) -> bool:
        return self._api.done(number & _MASK)

    def _elapsed(self, since: int, until: int) -> int | None:
        return self._api.elapsed_ns(since & _MASK, until & _MASK)

    def _overdue(self, row: _Row) -> bool:
        if len(self._rows) > MAX_ROWS_BEHIND or self.next - first_event(row.cuts) > MAX_EVENTS_BEHIND:
            return True
        if self._clock() - row.put_ns < MAX_WAIT_NS or len(self._rows) < 2:
            return False
        newest = self._rows[-1].cuts
        return bool(newest) and newest[-1].until != NO_EVENT and self._done(newest[-1].until)

    def _hand_out(self, row: _Row, cuts: list[Cut], times: list[int], moved: int) -> None:
        if moved > MAX_MOVED * times[-1]:
            self._give_up(row, "device rows out of order: several streams")
            return
        self.counts["device ns out of order"] += moved
        stages = stages_of(cuts, times)
        if row.flags & FLAG_EXCLUDED and not row.times[POST_SYNC]:
            stages[POST_SYNC] = 0
        self.medians.append(times[-1])
        if self.sharded:
            step = row.key >> SEGMENT_BITS
            self.waited_steps += step != self.last_sampled[0] or not self.waited_steps
            self.last_sampled = step, cuts[0].since
            self._add_waits(cuts, times)
        leads = self._leads(cuts, times)
        self._ring.push(row.key, row.flags | FLAG_DEVICE_CLOCK, stages, row.times, leads)

    def _add_waits(self, cuts: list[Cut], times: list[int]) -> None:
        for cut, since, until in zip(cuts, [0, *times], times, strict=False):
            if cut.stage == SYNC_WAIT:
                self.waited[not self._gathers[cut.since & _MASK]] += until - since

    def _leads(self, cuts: list[Cut], times: list[int]) -> bytes:
        first = cuts[0].since
        offset = self._offset.at(self._hosts[first & _MASK])
        since_beat = None
        if offset is not None and self._device_ns is not None:
            since_beat = self._api.elapsed_ns(self._last_beat, first & _MASK)
        if offset is None or since_beat is None or self._device_ns is None:
            return UNKNOWN
        late_ns = late_below(cuts, self.median_ns)
        began = self._device_ns + since_beat - offset
        return bytes(masks(cuts, times, self._recorded, began, late_ns))

    @property
    def median_ns(self) -> int:
        """Median total time of the newest rows, in ns. 0 before the first row."""
        return sorted(self.medians)[len(self.medians) // 2] if self.medians else 0

    @property
    def usual_ns(self) -> int | None:
        """Median total time of the newest 64 rows, in ns. None if there are fewer."""
        return self.median_ns if len(self.medians) == self.medians.maxlen else None

    def _recorded(self, number: int) -> tuple[int, bool]:
        return self._hosts[number & _MASK], self._took[number & _MASK] > FULL_NS

    def _make_room(self, oldest: int, needed: int) -> None:
        """Free the events older than the oldest that a row needs. Make more events if they run out."""
        if self._made < EVENT_SLOTS and self._made < self.next + _MADE_AHEAD:
            self._made = min(EVENT_SLOTS, self.next + 2 * _MADE_AHEAD)
            self._api.make(self._made)
        oldest = needed if oldest == NO_EVENT else min(oldest, needed)
        room = oldest + EVENT_SLOTS if self._made == EVENT_SLOTS else self._made
        self._room = max(self._room, room)

    # -- comparing the two clocks -------------------------------------------------------------------------

    def _begin_beat(self) -> None:
        if self._beat_ns is None:
            now = self._clock()
            self._api.beat(self._next_beat)
            self._beat_ns = now

    def _end_beat(self) -> None:
        if self._beat_ns is None or not self._api.done(self._next_beat):
            return
        if self._device_ns is None:
            self._device_ns = 0
        else:
            since = self._api.elapsed_ns(self._last_beat, self._next_beat)
            self._device_ns += since or 0
        self._offset.add(self._beat_ns, self._device_ns - self._beat_ns)
        self._beat_ns = None
        self._next_beat, self._last_beat = self._last_beat, self._next_beat

    # -- the device's position ----------------------------------------------------------------------------

    def device_position(self, step: int, open_cuts: list[Cut]) -> tuple[int, int, int] | None:
        """
        Return the device's position as (step, stage, ns in that stage) if it is behind its host, else None.

        Args:
            step: the step that is open on the host.
            open_cuts: the cuts of the row that is open on the host.
        """
        cuts = [(row.key >> SEGMENT_BITS, cut) for row in self._rows for cut in row.cuts]
        cuts += [(step, cut) for cut in open_cuts]
        cuts = [cut for cut in cuts if cut[1].stage < N_STAGES and cut[1].until != NO_EVENT]
        try:
            first = (
                0 if self.stopped else bisect_left(cuts, True, key=lambda cut: not self._done(cut[1].until))
            )
        except Exception as error:
            self.fail(error)
        if self.stopped or first == len(cuts):
            self._front = NO_EVENT, 0
            return None
        step, cut = cuts[first]
        if cut.until != self._front[0]:
            self._front = cut.until, self._clock()
        return step, cut.stage, self._clock() - self._front[1]
