"""A row by its events: times per stage, and how far its host was ahead. Pure; times in ns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from traceml_ray.agent.cuts import NO_EVENT, Cut
from traceml_ray.stages import BACKWARD, N_STAGES, SYNC_WAIT

LATE_NS = 100_000
LATE_SHARE = 0.05
"""
The device has caught up with its host where the lead is below this share of the median row, of one
micro-batch: where many are accumulated, a host can be a whole stage ahead and yet by little of the row. Or it
is below LATE_NS.
"""
LONG_NS = 16_000_000_000
"""The device's float of ms is exact to 1 us up to here; beyond it a row is read from mark to mark."""


def is_whole(cuts: Sequence[Cut]) -> bool:
    """Return whether each of `cuts` has its events, and begins where the one before ends."""
    return bool(cuts) and all(
        (NO_EVENT not in (cut.since, cut.until)) and (before is None or before.until == cut.since)
        for before, cut in pairwise((None, *cuts))
        if cut is not None
    )


def read(cuts: Sequence[Cut], elapsed: Callable[[int, int], int | None]) -> tuple[list[int], int] | None:
    """
    Return the times at which `cuts` end, since the first began, and by how much they had to be moved.

    They are made to grow: marks may be on different streams, whose events are in no order. None: not all of
    the events are done.
    """
    times: list[int] = []
    now = moved = 0
    for cut in cuts:
        far = now > LONG_NS
        found = elapsed(cut.since if far else cuts[0].since, cut.until)
        if found is None:
            return None
        found += now if far else 0
        moved += max(0, now - found)
        now = max(now, found)
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
    """Return the lead, ns, below which a device has caught up with its host, in a row of `cuts`."""
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
    Return the bits of `late`, `full` and `sure` (see `wire.RankBatch.leads`), a bit a stage.

    Args:
        cuts: of the row.
        times: at which they end, since the first began.
        hosts: returns of an event when it was recorded, on the CPU's clock, and whether the queue was full.
        ahead_ns: when the row began on the device, by the CPU's clock.
        late_ns: the device has caught up where the lead is below this.
    """
    caught, spent = [0] * N_STAGES, [0] * N_STAGES
    full, unsure = 0, 0
    began = 0
    for cut, until in zip(cuts, times, strict=True):
        (since_host, since_full), (until_host, until_full) = hosts(cut.since), hosts(cut.until)
        lead, lead_after = ahead_ns + began - since_host, ahead_ns + until - until_host
        weight = until - began + 1  # stages of no length have a bit, too
        spent[cut.stage] += weight
        held = since_full or until_full  # a host that waits for room in its queue is ahead, by little or not
        caught[cut.stage] += weight * (lead < late_ns and lead_after < late_ns and not held)
        full |= (since_full or until_full) << cut.stage
        unsure |= (lead <= until_host - since_host) << cut.stage
        began = until
    late = sum((0 < spent[stage] <= 2 * caught[stage]) << stage for stage in range(N_STAGES))
    seen = sum((spent[stage] > 0) << stage for stage in range(N_STAGES))
    return late, full, seen & ~unsure
