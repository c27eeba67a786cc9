"""The evidence that the rules of the verdict use: excess over peers, exposed excess, gain of a fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from traceml_ray.analysis.chance import beyond_chance
from traceml_ray.analysis.hosts import Hosts, following, host_bound, hosts_of, merged_leads
from traceml_ray.analysis.labels import Pattern
from traceml_ray.analysis.roles import cross_role_wait_ns, several, waited_apart_ns
from traceml_ray.analysis.thresholds import HOSTS, Thresholds
from traceml_ray.analysis.window import Bool, Float, Int64, UInt8, Window
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_NO_BACKWARD,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_PEERS,
    FLAG_NO_SPLIT,
    FORWARD,
    POST_SYNC,
    PREPARE,
    SEGMENT_BITS,
    SYNC_WAIT,
)

_BEFORE, _AFTER, _LEAST = 0.3, 0.7, 3


@dataclass(frozen=True)
class Timing:
    """
    When the first cause is late.

    `late` (S,) has one entry per step of the window. `began` is the index of the first late step; None: it is
    before the window. `goes_on`: the cause has not stopped since.
    """

    late: Bool
    began: int | None
    goes_on: bool

    @property
    def since(self) -> Bool:
        """Which steps (S,) are at or after the beginning."""
        return self.late[self.began or 0 :]


def late_steps(series: Float) -> Bool:
    """
    Return the late steps (S,) of a series of excess: those above half of the typical excess of a late step.

    The typical excess is the size that splits the sum of all excess in halves (the median weighted by size).
    Neither a majority of punctual steps nor a few huge ones move it.
    """
    ordered = np.sort(np.maximum(series, 0.0))
    passed = np.cumsum(ordered)
    typical = ordered[np.searchsorted(passed, passed[-1] / 2)]
    late: Bool = series > 0.5 * typical
    return late


def onset(late: Bool) -> int | None:
    """
    Return the index at which `late` (S,) changes from mostly False to mostly True, or None.

    Least squares over all single splits. A split counts if at most 30 % of the steps before it are late, at
    least 70 % from it on, and three or more steps follow. Only whether a step is late is used, not by how
    much, so one huge step moves nothing.
    """
    count = len(late)
    if count < 2 * _LEAST:
        return None
    before = np.arange(1, count)
    passed = np.cumsum(late)[:-1]
    low = passed / before
    high = (late.sum() - passed) / (count - before)
    score = np.where(high > low, (high - low) ** 2 * before * (count - before), -1.0)
    best = int(np.argmax(score))
    if score[best] < 0 or low[best] > _BEFORE or high[best] < _AFTER or count - before[best] < _LEAST:
        return None
    return best + 1


@dataclass(frozen=True)
class Frontier:
    """
    The slowest path through a window, in int64 ns.

    `exposed` (K, 6) is how far each stage of each step moved the frontier. `slack` (K, R, 6) is how far each
    rank's own clock is behind the frontier's end; `leaders` (K, R, 6) is True where it is 0. `total_ns` is
    the elapsed time of the window, exactly the sum of `exposed`.
    """

    exposed: Int64
    leaders: Bool
    slack: Int64
    total_ns: int


def chain(d: Int64, behind: Int64 | None = None) -> Frontier:
    """
    Return the frontier over the columns of `d`, int64 ns (K, R, 6), with K ≥ 1 and R ≥ 1.

    C[r, j] = Σ_{i≤j} d[r, i], F[j] = max_r C[r, j], exposed[j] = F[j] − F[j−1]. The columns of all
    steps form one chain, because ranks leave a sync at slightly different moments: starting
    each step from zero would overstate the elapsed time.

    `behind` (R,) is the slack in which an earlier piece of the same run ended
    (`slack[-1, :, -1]`); with it, pieces reduced one by one give what the whole would give.

    Accounting: StageFrontier, arXiv 2606.06751; the chaining is ours.
    """
    steps, ranks, stages = d.shape
    clock = np.cumsum(d.transpose(1, 0, 2).reshape(ranks, steps * stages), axis=1)
    if behind is not None:
        clock -= behind[:, None]
    front = clock.max(axis=0)
    np.subtract(front, clock, out=clock)
    slack = clock.reshape(ranks, steps, stages).transpose(1, 0, 2)
    exposed = np.diff(front, prepend=0).reshape(steps, stages)
    return Frontier(exposed=exposed, leaders=slack == 0, slack=slack, total_ns=int(front[-1]))


_Merges = tuple[tuple[Bool, tuple[int, ...]], ...]
"""
For each merge: the rows (K,) it applies to, and the stages that are one there. The first stage has all their
time.
"""
_COPIED = 256
"""Number of ranks transposed at a time, so that the source fits the processor's cache."""
_PUNCTUAL = 0.25
"""Ranks whose usual excess in a stage is below this share of a cause's excess are its peers there."""
_KINDS_RANKS = 5
_KINDS_GAP = 0.05
"""Two kinds of ranks differ by at least this share of the step."""
_KINDS_APART = 2.0
"""Two kinds of ranks differ by at least this multiple of the spread within a kind."""
_FEW_RANKS = 3
_TOGETHER = 0.3
"""Correlation of the times of two ranks above which one is taken to depend on the other."""
_HOLDS = 0.6
"""Share of an excess that a stage must have taken to contain the excess."""


@dataclass(frozen=True)
class Cause:
    """A stage and the ranks that are late out of it, as indices in the window, not rank numbers."""

    stage: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """
    A window's rows made comparable between ranks.

    `d` int64 ns (K, R, 6). `waits` (K, 6) marks the stages in which a rank waits for others, `synced` (K,)
    the rows that end in a gradient exchange. Time in `d` is never lost: if a mark is missing on some rank,
    the stages that it separates are added up on every rank. The same holds for `host`. `leads` then covers
    all merged stages.
    """

    d: Int64
    waits: Bool
    synced: Bool
    host: Int64 | None = None
    leads: UInt8 | None = None


def comparable(window: Window) -> Rows:
    """Return the rows with merged stages merged alike on every rank, step by step."""
    d, flags, host, leads = window.d, window.flags, window.host, window.leads
    waits = np.zeros((len(window.keys), d.shape[2]), dtype=bool)
    waits[:, SYNC_WAIT] = True
    synced: Bool = (flags & (FLAG_NO_PEERS | FLAG_NO_BACKWARD) == 0).any(axis=1)
    if not flags.any():
        return Rows(d, waits, synced, host, leads)
    no_split = (flags & FLAG_NO_SPLIT != 0).any(axis=1) & synced
    waits[no_split, BACKWARD] = True
    no_data, no_forward = mixed(window, FLAG_NO_DATA), mixed(window, FLAG_NO_FORWARD)
    merges: _Merges = (
        (no_split, (BACKWARD, SYNC_WAIT)),
        (no_data & no_forward, (POST_SYNC, DATA, PREPARE, FORWARD)),
        (no_data & ~no_forward, (POST_SYNC, DATA, PREPARE)),
        (no_forward & ~no_data, (FORWARD, PREPARE)),
    )
    if any(steps.any() for steps, _ in merges):
        d, host = _added(d, merges), host if host is None else _added(host, merges)
        leads = leads if leads is None else merged_leads(leads, merges)
    return Rows(d, waits, synced, host, leads)


def _added(times: Int64, merges: _Merges) -> Int64:
    """
    Return a copy of `times` (K, R, 6) in which the first of the merged stages has the time of
    all of them.
    """
    times = times.copy(order="K")
    for steps, (into, *others) in merges:
        for other in others:
            times[steps, :, into] += times[steps, :, other]
            times[steps, :, other] = 0
    return times


def mixed(window: Window, flag: int) -> Bool:
    """Return the rows (K,) in which some ranks carry `flag` and others do not."""
    has = window.flags & flag != 0
    partly: Bool = has.any(axis=1) & ~has.all(axis=1)
    return partly


def absurd(window: Window, thresholds: Thresholds) -> tuple[int, int] | None:
    """Return the indices (key, rank) of a row that is negative or longer than any step, or None."""
    limit = thresholds.max_step_ns
    d = window.d
    if not d.size or (d.min() >= 0 and d.max() <= limit // d.shape[2]):
        return None
    bad = _bad(d, limit)
    key, rank = (int(index) for index in np.unravel_index(int(np.argmax(bad)), bad.shape))
    return (key, rank) if bad[key, rank] else None


def sane(window: Window, thresholds: Thresholds) -> Bool:
    """Return the rows (K,) in which no rank's is `absurd`."""
    fine: Bool = np.logical_not(_bad(window.d, thresholds.max_step_ns).any(axis=1))
    return fine


def _bad(d: Int64, limit: int) -> Bool:
    """Return the rows (K, R) with an absurd stage, or whose sum is absurd."""
    bad: Bool = np.any((d < 0) | (d > limit), axis=2) | (d.sum(axis=2) > limit)
    return bad


@dataclass(frozen=True)
class Evidence:
    """
    Excess over peers in one window; K rows, S steps, R ranks.

    `ref` int64 ns (K, 6): for a local stage the lower median over ranks, for a waiting stage the minimum (the
    real cost of the exchange). `excess` int64 ns (K, R, 6) = d − ref, 0 for waiting stages. `by_step` (S, R,
    6): excess of whole steps. `persistent` (R, 6): median of `by_step` over steps ÷ mean step.
    `exposed_excess` (R, 6): the part of the excess that moved the frontier, shared among the leaders, ÷
    elapsed time. `local_ns` (K, R): sum of a rank's local stages, and its waiting for ranks of other roles.

    On a device clock, `hosts` is the part of the hosts, if it is known. A stage in which the host is late is
    then compared with the other hosts' time as well; `peers` is the evidence without that.
    """

    window: Window
    rows: Rows
    frontier: Frontier
    ref: Int64
    excess: Int64
    by_step: Int64
    persistent: Float
    exposed_excess: Float
    local_ns: Int64
    hosts: Hosts | None = None
    peers: Evidence | None = None
    beside: tuple[Cause, ...] = ()
    """Ranks that are late in this window. The cost of unequal work is computed beside theirs."""
    _beyond_ns: dict[Cause, Int64] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Results of `_beyond`: a cause is asked for alone, with others, and for its gain."""

    @property
    def total_ns(self) -> int:
        return self.frontier.total_ns

    @cached_property
    def step_ns(self) -> Int64:
        """Exposed time of each step, ns (S,)."""
        return self.window.by_step(self.frontier.exposed.sum(axis=1))

    @cached_property
    def by_pattern(self) -> dict[Pattern, Float]:
        """
        Lateness of each rank out of each stage (R, 6), as measured for each pattern. For `rotating`: the cost
        of unequal work.
        """
        exposed = self.exposed_excess
        together = np.broadcast_to(self.uneven(), exposed.shape)
        return {"lasting": self.persistent, "transient": exposed, "rotating": together}

    @property
    def host_steps(self) -> tuple[Int64, Int64]:
        """Host time and device time of each step, in ns (S, R, 6) each. Only valid if `hosts` is known."""
        host, d = self.rows.host, self.rows.d
        assert host is not None
        return self.window.by_step(host), self.window.by_step(d)

    @cached_property
    def host_bound(self) -> bool | None:
        """Whether devices wait for their hosts; None: not known."""
        hosts = self.hosts
        return None if hosts is None else host_bound(hosts.late_share) or bool(hosts.follows.any())

    def hosts_hold(self, cause: Cause) -> bool:
        """Whether the hosts of `cause`, not its devices, are slow: they cause at least half of the excess."""
        hosts, places = self.hosts, list(cause.places)
        if hosts is None:
            return False
        longer = float(np.median(hosts.usual[places, cause.stage] - hosts.ref[cause.stage]))
        often = hosts.late_share[places, :SYNC_WAIT].mean(axis=0)
        waits = bool(hosts.certain[cause.stage]) and often.max() >= HOSTS.late
        late = waits or often[cause.stage] >= HOSTS.share
        return bool(late) and longer >= HOSTS.share * float(np.median(self.series(cause)))

    @property
    def mean_step_ns(self) -> float:
        return self.total_ns / len(self.window.starts)

    def uneven(self, *causes: Cause) -> float:
        """Return what evening out the ranks' work saves, as a share of the time (0..1), see `uneven_ns`."""
        return max(0.0, float(self.uneven_ns(*causes).sum()) / self.total_ns)

    def replay_ns(self) -> int:
        """Return the elapsed time if every rank ran its local stages and all left each exchange together."""
        exchange = self.ref[self.rows.synced][self.rows.waits[self.rows.synced]].sum()
        return int(self._unfixed[0].sum()) + int(exchange)

    def waited_ns(self, *causes: Cause) -> Int64:
        """
        Return by how much `causes` make each row longer, ns (K,). `gain` is the sum of these as a share of
        the time.

        If rows have no exchange, all of it is attributed to the next row that has one.
        """
        waited = np.zeros(len(self.window.keys), dtype=np.int64)
        arrivals, last = self._unfixed
        waited[last] = arrivals - self._arrivals(self.fixed_ns(causes))
        if self.window.arrived is not None:
            late = np.zeros(self.local_ns.shape, np.int64)
            for cause in causes:
                late[:, cause.places] += self._beyond(cause)
            waited[last] = np.maximum(waited[last], cross_role_wait_ns(self.window, last, late))
        return waited

    def uneven_ns(self, *causes: Cause) -> Int64:
        """
        Return by how much each row is longer because ranks have unequal work, ns (K,), as if `causes` were
        fixed.

        It is the work of the last rank beyond the mean of all ranks, at the rows that have an exchange.
        """
        waited, local = np.zeros(len(self.window.keys), dtype=np.int64), self.fixed_ns(causes)
        _, last = self._unfixed
        even = np.broadcast_to(local.mean(axis=1, keepdims=True), local.shape).astype(np.int64)
        waited[last] = self._arrivals(local) - self._arrivals(even)
        return waited

    @cached_property
    def _unfixed(self) -> tuple[Int64, Int64]:
        """
        Time that the last rank works until each exchange, in ns (S,), and the indices of the rows with an
        exchange.
        """
        synced = self.rows.synced
        last = np.append(self._exchange_starts[1:] - 1, len(synced) - 1)
        return self._arrivals(self.local_ns), last

    @cached_property
    def _exchange_starts(self) -> Int64:
        """Indices of the rows that follow an exchange. Rows without an exchange add up until the next one."""
        return np.flatnonzero(np.concatenate(([True], self.rows.synced[:-1])))

    def fixed_ns(self, causes: tuple[Cause, ...]) -> Int64:
        """Return the work of each rank in each row, in ns (K, R), as if no cause were late."""
        local = self.local_ns
        for number, cause in enumerate(causes):
            local = local if number else local.copy(order="K")
            local[:, list(cause.places)] -= self._beyond(cause)
        return local

    def _beyond(self, cause: Cause) -> Int64:
        """
        Return by how much the ranks of a cause are later than chance makes others, in ns (K, ranks of the
        cause).
        """
        if (known := self._beyond_ns.get(cause)) is not None:
            return known
        usual = self.persistent[:, cause.stage]
        peers = np.ones(len(usual), dtype=bool)
        peers[list(cause.places)] = False
        punctual = peers & (usual < _PUNCTUAL * float(usual[list(cause.places)].min()))
        peers = punctual if punctual.any() else peers
        beyond = beyond_chance(self._times(cause, peers), cause.places, np.flatnonzero(peers))
        self._beyond_ns[cause] = beyond
        return beyond

    def _times(self, cause: Cause, peers: Bool) -> Int64:
        """
        Return the values by which ranks are compared in the stage of `cause`, ns (K, R): their excess.

        With two or three ranks the reference is mostly one of the peers, so their excess shows too little of
        their variation by chance. Then their times are compared, if one does not depend on the other.
        """
        excess = self.excess[:, :, cause.stage]
        one_a_step = self.rows.synced.all() and len(self.window.starts) == len(self.window.keys)
        if excess.shape[1] > _FEW_RANKS or self.hosts is not None or not peers.any() or not one_a_step:
            return excess
        times = self.rows.d[:, :, cause.stage]
        mine, theirs = (times[:, which].mean(axis=1) for which in (list(cause.places), peers))
        together = np.mean((mine - mine.mean()) * (theirs - theirs.mean()))
        return excess if abs(together) >= _TOGETHER * mine.std() * theirs.std() else times

    def _arrivals(self, local: Int64) -> Int64:
        """
        Return how long the last rank works until each exchange, ns (S,), from the work of the ranks in each
        row (K, R).
        """
        starts = self._exchange_starts
        if not self.rows.synced.all():
            local = np.add.reduceat(local, starts, axis=0)
        longest: Int64 = local.max(axis=1)
        if self.hosts is not None:
            exchange = np.where(self.rows.waits, self.ref, 0).sum(axis=1)
            least = np.maximum(self.hosts.floor_ns - exchange, 0)
            longest = np.maximum(longest, np.add.reduceat(least, starts))
        return longest

    def gain(self, *causes: Cause) -> float:
        """Return what fixing `causes` together saves, as a share of the elapsed time, 0..1."""
        return min(1.0, max(0, int(self.waited_ns(*causes).sum())) / self.total_ns)

    def seen_in(self, cause: Cause) -> int:
        """
        Return the stage in which the ranks of `cause` themselves have their excess, if a mark that other
        ranks lack has merged stages. It is the only merged stage that can hold the excess, else the stage
        that they are merged into.
        """
        series, places = self.series(cause), list(cause.places)
        late = late_steps(series)
        if self.rows.d is self.window.d or not late.any():
            return cause.stage
        own_ns, compared = (
            np.median(self.window.by_step(d[:, places].mean(axis=1))[late], axis=0)
            for d in (self.window.d, self.rows.d)
        )
        least = _HOLDS * float(np.median(series[late]))
        merged = [s for s in range(SYNC_WAIT) if s == cause.stage or (own_ns[s] > 0 and compared[s] == 0)]
        holds = [s for s in merged if own_ns[s] >= least]
        return holds[0] if len(holds) == 1 else cause.stage

    def compared_in(self, stage: int, places: Sequence[int]) -> int:
        """
        Return the stage of the compared rows that contains the time of `stage`, as `seen_in` names it, for
        the ranks at `places`. It is the stage that `stage` is merged into, if that holds for most of its
        time; else `stage` itself.
        """
        if self.rows.d is self.window.d or not len(places):
            return stage
        own_ns, compared = (d[:, list(places)].sum(axis=(0, 1)) for d in (self.window.d, self.rows.d))
        if compared[stage] >= own_ns[stage] - compared[stage]:
            return stage
        into = (POST_SYNC, FORWARD) if stage == PREPARE else (POST_SYNC,)
        return max(into, key=lambda s: int(compared[s] - own_ns[s]))

    def series(self, *causes: Cause) -> Float:
        """
        Return the excess of causes of the same ranks for each step, ns (S,), as the mean
        over these ranks.
        """
        stages = [cause.stage for cause in causes]
        series: Float = self.by_step[:, list(causes[0].places)][:, :, stages].sum(axis=2).mean(axis=1)
        return series


def gather(window: Window) -> Evidence:
    """
    Return the evidence in `window`, whose rows must be sane (`absurd` returns `None`), T > 0, R ≥ 1.

    Exposed time: StageFrontier, arXiv 2606.06751; excess and replay are ours.
    """
    rows = comparable(window)
    frontier = chain(rows.d)
    local: Bool = np.logical_not(rows.waits)
    by_rank = rows.d.transpose(1, 0, 2)
    waits_apart = local[:, :SYNC_WAIT].all()
    if waits_apart:
        local_ns = np.einsum("rks->rk", by_rank[:, :, :SYNC_WAIT])
    else:
        local_ns = (by_rank * local).sum(axis=2)
    ref = _reference(rows, _faster_kind(local_ns, frontier.total_ns))
    excess = by_rank - ref
    if waits_apart:
        excess[:, :, SYNC_WAIT] = 0
    else:
        excess *= local
    if several(window):
        local_ns = local_ns + waited_apart_ns(window, rows.synced).T
    by_step = _by_step(window, excess)
    evidence = Evidence(
        window=window,
        rows=rows,
        frontier=frontier,
        ref=ref,
        excess=excess.transpose(1, 0, 2),
        by_step=by_step,
        persistent=_persistent(window, frontier, by_step),
        exposed_excess=_exposed_excess(frontier, ref, local),
        local_ns=local_ns.T,
    )
    segments = window.keys & (1 << SEGMENT_BITS) - 1
    hosts = hosts_of(rows.host, rows.leads, segments, inside=window.waits_inside)
    return evidence if hosts is None else _with_hosts(evidence, hosts)


def _by_step(window: Window, excess: Int64) -> Int64:
    """Return an excess (R, K, 6) step by step (S, R, 6)."""
    several = len(window.starts) < len(window.keys)
    steps = np.add.reduceat(excess, window.starts, axis=1) if several else excess
    return steps.transpose(1, 0, 2)


def _persistent(window: Window, frontier: Frontier, by_step: Int64) -> Float:
    """Return the median over steps of `by_step` (S, R, 6), as a share of the mean step (R, 6)."""
    share: Float = _median(by_step.transpose(1, 2, 0)) / (frontier.total_ns / len(window.starts))
    return share


def _median(values: Int64) -> Float:
    """Return the median over the last axis: several times as fast as `np.median`, which finds two places."""
    values, count = values.copy(), values.shape[-1]
    values.partition(count // 2, axis=-1)
    above = values[..., count // 2].astype(np.float64)
    below = above if count % 2 else values[..., : count // 2].max(axis=-1)
    middle: Float = (below + above) / 2
    return middle


def _with_hosts(evidence: Evidence, hosts: Hosts) -> Evidence:
    """
    Return the evidence in which a device's wait for its own host is charged to the stages in which the host
    took longer than the other hosts do. If it took no longer, it is charged to no stage: one host is always
    last.
    """
    host, suspects = evidence.rows.host, evidence.persistent >= HOSTS.suspect
    lasts_ns: Float = evidence.persistent * evidence.mean_step_ns
    suspects &= hosts.usual - hosts.ref < HOSTS.share * lasts_ns
    if host is not None and suspects.any():
        unsure = hosts.unsure(evidence.window.starts)
        follows, unknown = following(*evidence.host_steps, unsure, hosts.certain, lasts_ns, suspects)
        hosts = replace(hosts, follows=follows, unknown=unknown)
    known = replace(evidence, hosts=hosts, peers=evidence)
    local: Bool = np.logical_not(evidence.rows.waits)
    stages = [int(s) for s in np.flatnonzero(local.any(axis=0)) if hosts.starved(int(s)).any()]
    waited = np.zeros(evidence.local_ns.shape, np.int64)
    for stage in stages:
        waited += np.where(hosts.starved(stage), np.maximum(evidence.excess[:, :, stage], 0), 0)
    places = np.flatnonzero(waited.sum(axis=0) >= HOSTS.waited * evidence.total_ns)
    if host is None or not len(places):
        return known
    changed, exposed_ref = evidence.excess[:, places].copy(), evidence.ref.copy()
    for stage in stages:
        starved = hosts.starved(stage) & local[:, stage, None]
        changed[:, :, stage] -= np.where(starved[:, places], np.maximum(changed[:, :, stage], 0), 0)
        leads = (starved & evidence.frontier.leaders[:, :, stage]).any(axis=1)
        exposed_ref[leads, stage] = np.maximum(exposed_ref[leads, stage], hosts.row_ref[leads, stage])
    whole = np.flatnonzero(local.all(axis=0))
    longer = np.maximum(host[:, places][:, :, whole] - hosts.row_ref[:, None, whole], 0)
    in_all = longer.sum(axis=2)
    share = np.minimum(waited[:, places], in_all) / np.maximum(in_all, 1)
    changed[:, :, whole] += np.rint(longer * share[:, :, None]).astype(np.int64)
    excess = evidence.excess.transpose(1, 0, 2).copy()
    excess[places] = changed.transpose(1, 0, 2)
    persistent = evidence.persistent.copy()
    by_step = _by_step(evidence.window, excess)
    persistent[places] = _persistent(evidence.window, evidence.frontier, by_step[:, places])
    return replace(
        known,
        excess=excess.transpose(1, 0, 2),
        by_step=by_step,
        persistent=persistent,
        exposed_excess=_exposed_excess(evidence.frontier, exposed_ref, local),
    )


def _faster_kind(local_ns: Int64, total_ns: int) -> Bool | None:
    """
    Return which ranks are of the faster kind, if there are two kinds and most ranks are of the slower one:
    the gap between the kinds is large compared with the differences within a kind. Else None.

    Args:
        local_ns: work of each rank in each row, ns (R, K).
        total_ns: elapsed time, ns.
    """
    ranks, rows = local_ns.shape
    if ranks < _KINDS_RANKS:
        return None
    usual = _median(local_ns)
    ordered = np.sort(usual)
    faster = ordered[: (ranks + 1) // 2]  # most ranks are slower: the gap is below the lower median
    cut = 1 + int(np.argmax(np.diff(faster)))
    gap = ordered[cut] - ordered[cut - 1]
    apart = max(ordered[cut - 1] - ordered[0], ordered[-1] - ordered[cut])
    if cut < 2 or gap < max(_KINDS_GAP * total_ns / rows, _KINDS_APART * apart):
        return None
    result: Bool = usual <= ordered[cut - 1]
    return result


def _reference(rows: Rows, faster: Bool | None = None) -> Int64:
    """
    Return the cost of each stage when no rank is late, in ns (K, 6). If there are two kinds of ranks, it is
    the cost for the `faster` kind.
    """
    steps, ranks, stages = rows.d.shape
    middle, columns = (ranks - 1) // 2, np.empty((steps, stages, ranks), np.int64)
    for first in range(0, ranks, _COPIED):
        columns[:, :, first : first + _COPIED] = rows.d[:, first : first + _COPIED].transpose(0, 2, 1)
    least = columns.min(axis=2)
    if faster is not None:
        columns = columns[:, :, faster]
        middle = (columns.shape[2] - 1) // 2
    columns.partition(middle, axis=2)
    return np.where(rows.waits, least, columns[:, :, middle])


def _exposed_excess(frontier: Frontier, ref: Int64, local: Bool) -> Float:
    """
    Return exposed time above the reference, shared among its leaders, as a share of the
    elapsed time: (R, 6).
    """
    above = np.where(local, np.maximum(frontier.exposed - ref, 0), 0)
    leaders = frontier.leaders
    total: Float = np.einsum("krs,ks->rs", leaders, above / leaders.sum(axis=1)) / frontier.total_ns
    return total
