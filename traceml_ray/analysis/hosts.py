"""
The host's part of rows that are timed by device events: where a device waited for its own host, and the time
that the hosts need.

All of it is our own method; see `docs/method.md`, "On a device clock".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traceml_ray.analysis.thresholds import HOSTS
from traceml_ray.analysis.window import Bool, Float, Int64, UInt8
from traceml_ray.stages import BACKWARD, FORWARD, LEAD_UNKNOWN, N_STAGES, POST_SYNC, SYNC_WAIT

LATE, FULL, SURE = range(3)
_BITS = 1 << np.arange(N_STAGES, dtype=np.uint8)
_SOME = 256
"""Number of ranks that show what is usual."""
_KERNELS = (POST_SYNC, FORWARD, BACKWARD)
"""Stages in which a device that is not waited for always has work."""


@dataclass(frozen=True)
class Hosts:
    """
    The host's part of a window of device rows; K rows, R ranks. `leads` uint8 (K, R, 3), bit s for stage s.

    `late`: the device had caught up with its host at both ends of the stage. `full`: the launch queue was
    full, so the host's time is the device's. `sure`: the host left the stage before the device began it, so
    it did not wait for the device in the stage. `usual` int64 ns (R, 6): median time of each rank's host in
    each stage. `ref` (6,): time of a host that is not late, the lower median over ranks. It is at most the
    time of any host that is not ahead of its device, because a host that is ahead may wait for room in its
    launch queue. `certain` (6,): no host waits for its device in the stage in another way.
    """

    leads: UInt8
    usual: Int64
    ref: Int64
    certain: Bool
    late_share: Float
    """Share of the rows in which each rank's host was late in each stage (R, 6)."""
    row_ref: Int64
    """Reference of each row's segment, in ns (K, 6). `usual` and `ref` are for whole steps."""
    floor_ns: Int64
    """
    Time that the hosts need for each row independent of the devices, in ns (K,): the sum of the `certain`
    stages.
    """
    pace_ns: Int64
    """
    `floor_ns` plus the stages in which a late host can only be working, in ns (K,). 0 if no host is late.
    """
    follows: Bool
    """Where the device waits for its host although it is at least a kernel behind it (R, 6)."""
    unknown: Bool
    """Where it is not known whether host or device waits for the other (R, 6)."""
    inside: bool = False
    """
    Whether ranks also wait for each other inside forward and backward. These stages then end before the next
    stage begins.
    """

    def late(self, stage: int) -> Bool:
        """Return the rows in which the host was late in `stage` (K, R)."""
        late: Bool = self.leads[:, :, LATE] & _BITS[stage] != 0
        return late

    def unsure(self, starts: Int64) -> UInt8:
        """
        Return the stages in which the host may still have been when its device began them (bits; for each
        step, S × R).
        """
        unsure: UInt8 = np.bitwise_or.reduceat(~self.leads[:, :, SURE], starts, axis=0)
        return unsure

    def starved(self, stage: int) -> Bool:
        """
        Return where the device may have waited for its host in `stage`, and most of its peers have not (K,
        R). The device had caught up with its host by the end of the stage: the host is late in the stage or,
        if no host waits for its device there, in the next one, or the device `follows` it. And the host had
        not left the stage before the device began it.

        If most hosts are late in the stage, the reference is a host whose device waits too. If most were late
        when it began, no host had a lead to use up.
        """
        late = self.late(stage)
        most = _most(late) | (_most(self.late(stage - 1)) if stage else False)
        caught_up = late | self.follows[:, stage]
        if self.certain[stage] and not (self.inside and stage >= FORWARD):
            caught_up |= self.late(stage + 1)
        starved: Bool = caught_up & (self.leads[:, :, SURE] & _BITS[stage] == 0) & ~most[:, None]
        return starved


def hosts_of(
    host: Int64 | None, leads: UInt8 | None, segments: Int64, *, inside: bool = False
) -> Hosts | None:
    """
    Return the host's part of a window. None if there is none, or if it is not known how far the hosts were
    ahead.

    Rows of different `segments` (K,) of a step do different work.
    """
    if host is None or leads is None or not host.size:
        return None
    ranks = host.shape[1]
    unknown = leads[:, :, SURE] == LEAD_UNKNOWN
    if unknown.any():
        if 2 * unknown.mean(axis=0).max() >= 1:
            return None
        leads = np.where(unknown[:, :, None], np.uint8(0), leads)
    by_rank = np.ascontiguousarray(leads.transpose(1, 2, 0))
    sure = by_rank[:, SURE] & ~by_rank[:, FULL]
    counts = np.bincount(segments)
    kinds = [segments == segment for segment in np.flatnonzero(counts)]
    certain: Bool = np.all([_certain(sure if rows.all() else sure[:, rows]) for rows in kinds], axis=0)
    late_share = np.stack([(leads[:, :, LATE] & bit != 0).mean(axis=0) for bit in _BITS], axis=1)
    paced = (late_share[:, :SYNC_WAIT] >= HOSTS.late).any(axis=1)
    row_ref = np.zeros((len(host), N_STAGES), np.int64)
    usual, ref = np.zeros((ranks, N_STAGES), np.int64), np.zeros(N_STAGES, np.int64)
    for rows in kinds:
        mine = _usual(host if rows.all() else host[rows])
        middle = np.partition(mine, (ranks - 1) // 2, axis=0)[(ranks - 1) // 2]
        middle = np.minimum(middle, mine[paced].min(axis=0)) if paced.any() else middle
        row_ref[rows] = middle
        share = np.count_nonzero(rows) / counts.max()
        usual += np.rint(mine * share).astype(np.int64)
        ref += np.rint(middle * share).astype(np.int64)
    at_work = certain | (late_share[paced] >= HOSTS.share).any(axis=0)
    floor_ns, pace_ns = (
        row_ref[:, :SYNC_WAIT] @ (which[:SYNC_WAIT] & paced.any()) for which in (certain, at_work)
    )
    never = np.zeros(usual.shape, dtype=bool)
    return Hosts(
        leads=leads,
        usual=usual,
        ref=ref,
        certain=certain,
        late_share=late_share,
        row_ref=row_ref,
        floor_ns=floor_ns,
        pace_ns=pace_ns,
        follows=never,
        unknown=never,
        inside=inside,
    )


def _certain(sure: UInt8) -> Bool:
    """Return the stages (6,) in which enough rows of enough ranks are `sure` (R, K)."""
    surely = np.stack([(sure & bit != 0).sum(axis=1) for bit in _BITS], axis=1)
    certain: Bool = (surely.sum(axis=0) >= HOSTS.sure_rows) & ((surely > 0).mean(axis=0) >= HOSTS.sure_ranks)
    return certain


def _usual(host: Int64) -> Int64:
    """Return the lower median over rows of `host` (K, R, 6), ns (R, 6)."""
    times, half = np.ascontiguousarray(host.transpose(1, 2, 0)), (len(host) - 1) // 2
    times.partition(half, axis=2)
    return times[:, :, half].copy()


def merged_leads(leads: UInt8, merges: Sequence[tuple[Bool, tuple[int, ...]]]) -> UInt8:
    """Return `leads` with merged stages as one: late or full if one of them is, sure if all are."""
    leads = leads.copy(order="K")
    for rows, stages in merges:
        bits = _BITS[list(stages)]
        mine = leads[rows]
        for which in (LATE, FULL):
            mine[:, :, which] |= (mine[:, :, which] & bits.sum() != 0) * bits[0]
        sure = mine[:, :, SURE] & bits.sum() == bits.sum()
        mine[:, :, SURE] = (mine[:, :, SURE] & ~bits[0]) | sure * bits[0]
        leads[rows] = mine
    return leads


def _most(which: Bool) -> Bool:
    """Return the rows (K,) in which `which` (K, R) is True for the lower median rank."""
    most: Bool = which.shape[1] - which.sum(axis=1) <= (which.shape[1] - 1) // 2
    return most


def _bound(late_share: Float) -> Bool:
    """Return the ranks (R,) whose devices wait for their hosts."""
    bound: Bool = np.any(late_share[:, _KERNELS] >= HOSTS.late, axis=1)
    return bound


def host_bound(late_share: Float) -> bool:
    """
    Whether devices wait for their hosts: whether some rank's host is late in a stage with kernels in at least
    `HOSTS.late` of the rows. `late_share` is (R, 6).
    """
    return bool(_bound(late_share).any())


def following(
    host: Int64, d: Int64, unsure: UInt8, certain: Bool, excess: Float, suspects: Bool
) -> tuple[Bool, Bool]:
    """
    Return the stages among `suspects` (R, 6) in which the device waits for its host although no mark shows
    it, and those in which this is not known because most hosts wait for their devices. `host` and `d` are
    times of steps (S, R, 6), `unsure` is as in `Hosts`, `excess` (R, 6) is the lasting excess, ns.

    Such a device began the stage with too small a lead to finish it (`unsure`), and takes no longer than its
    host plus its last kernel. The rows do not show how long that kernel is. In a `certain` stage that most
    other devices begin with their lead, the kernel takes at most as long as these devices. If the excess over
    them is no longer than its host, that is sufficient. Elsewhere the device must take no longer than its
    host, and vary more: its time includes the host's time, and the lead at the beginning.
    """
    follows, unknown = np.zeros_like(suspects), np.zeros_like(suspects)
    for stage in np.flatnonzero(suspects.any(axis=0)):
        could = unsure & _BITS[stage] != 0
        often = could.mean(axis=0) >= HOSTS.share
        candidates = np.flatnonzero(suspects[:, stage] & often)
        alone = certain[stage] and 2 * np.count_nonzero(often) <= len(often)
        taken = excess[candidates, stage] if alone else np.median(d[:, candidates, stage], axis=0)
        candidates = candidates[taken <= np.median(host[:, candidates, stage], axis=0)]
        if not len(candidates):
            continue
        host_variance, its = (
            times[:, candidates, stage].var(axis=0, where=could[:, candidates]) for times in (host, d)
        )
        if certain[stage]:
            follows[candidates, stage] = (host_variance < its) | alone
            continue
        subset = slice(None, None, -(-len(often) // _SOME))
        usual, usual_its = (np.median(times[:, subset, stage].var(axis=0)) for times in (host, d))
        if usual < usual_its:
            follows[candidates, stage] = host_variance < its
        else:
            unknown[candidates, stage] = host_variance < HOSTS.held * its
    return follows, unknown


def held(host: Int64, d: Int64, hosts: Hosts) -> int | None:
    """
    Return the stage in which hosts wait for their devices although no mark shows it; both arrays are (K, R,
    6).

    At some point of its step, a host with a full launch queue waits until its device has made room, some
    steps behind. From that point to the same point of the next step it takes as long as the device, so that
    stage compensates the variation of the other stages. The host therefore waits in the stage for which the
    variance of the difference is well below the sum of the variances of its own times: in the median of the
    ranks whose host is not late, and, for the stage alone, if it varies more there than its device.
    """
    host, d = host[-HOSTS.compared_rows :], d[-HOSTS.compared_rows :]
    bound = _bound(hosts.late_share)
    shares = []
    for stage in range(SYNC_WAIT):
        waits = host[:, :, stage].var(axis=0) > d[:, :, stage].var(axis=0)
        waits &= hosts.late_share[:, stage] < HOSTS.late
        ahead = np.flatnonzero(~bound | waits)[: HOSTS.compared]
        shares.append(_apart(host[:, ahead], d[:, ahead], stage) if len(ahead) else np.inf)
    stage = int(np.argmin(shares))
    return stage if shares[stage] < HOSTS.held else None


def _apart(host: Int64, d: Int64, stage: int) -> float:
    """
    Return how much less the steps of hosts, each from the end of `stage` to its next end, vary when those of
    their devices are subtracted (from any mark to the same mark some steps before), as a share of the
    variation of the host's own times.
    """
    rows, ranks, _ = host.shape
    (excess, of_host), (_, of_device) = (
        (times, np.cumsum(times.reshape(rows * N_STAGES, ranks), axis=0).reshape(times.shape))
        for times in (rows.transpose(0, 2, 1).astype(np.float64) for rows in (host, d))
    )
    step, steps, mine = np.diff(of_host[:, stage], axis=0), np.diff(of_device, axis=0), excess[1:, stage]
    by_itself = np.maximum(mine.var(axis=0) + (step - mine).var(axis=0), 1.0)
    apart = [
        np.median((step[back:, None] - steps[: len(steps) - back]).var(axis=0) / by_itself, axis=1).min()
        for back in range(rows - HOSTS.sure_rows)
    ]
    return float(min(apart, default=np.inf))
