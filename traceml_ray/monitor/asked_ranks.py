"""The ranks of one profile: which of a run are meant, and how far each of them is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from traceml_ray import text, wire
from traceml_ray.identity import RankFilterError, rank_filter
from traceml_ray.monitor.live_runs import RunNow
from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile, RankProfile


@dataclass(eq=False)
class AskedRank:
    """State of one rank of the capture."""

    about: RankProfile
    process_id: str = ""
    heard: bool = False
    """It has answered the command of this number."""
    moved_s: float = 0.0
    """When it went on last."""
    again: int = 0
    """How often the rest of its trace was asked for,"""
    stalled: bool = False
    """and whether that is so now."""

    def end(self, state: Literal["refused", "failed"], reason: str) -> None:
        """Expect no trace of it any more."""
        self.about.state, self.about.reason = state, reason


def asked_ranks(profile: Profile, asked: wire.ProfileRequest, run: RunNow) -> dict[int, AskedRank]:
    """Return the ranks that are meant; those that cannot be profiled say why."""
    try:
        wanted = rank_filter(asked.ranks)
    except RankFilterError as error:
        profile.error = str(error)
        return {}
    numbers = [rank for rank in sorted(run.ranks) if rank in wanted]
    named = () if wanted.ranges is None else itertools.chain.from_iterable(wanted.ranges)
    unknown = [rank for rank in itertools.islice(named, profiles.MAX_RANKS) if rank not in run.ranks]
    found = {rank: _rank(rank, run) for rank in numbers[: 4 * profiles.MAX_RANKS]}
    going = [rank for rank in found.values() if rank.about.state == "asked"]
    for rank in going[profiles.MAX_RANKS :]:
        rank.process_id = ""
        rank.end("refused", f"a profile has {profiles.MAX_RANKS} ranks at most")
    unknown += to_come(asked, run)
    absent = {rank: AskedRank(RankProfile(rank, "refused", _absence(rank, run))) for rank in unknown}
    return dict(sorted((found | absent).items()))


def to_come(asked: wire.ProfileRequest, run: RunNow) -> list[int]:
    """Return the ranks, of those that a profile may have, that are meant and have not reported so far."""
    try:
        wanted = rank_filter(asked.ranks)
    except RankFilterError:
        return []
    first = range(min(run.world, profiles.MAX_RANKS))
    return [rank for rank in first if rank in wanted and rank not in run.ranks]


def _absence(rank: int, run: RunNow) -> str:
    return "it has not reported so far" if rank < run.world else "there is no such rank"


def _rank(rank: int, run: RunNow) -> AskedRank:
    process = run.ranks[rank]
    identity, about = process.identity, RankProfile(rank, "asked", process=process.id)
    about.node = run.labels.get(process.id)
    if identity is not None:
        about.node_id, about.hostname, about.pid = identity.node_id, identity.hostname, identity.pid
    clock = run.clocks.get(about.node_id or "")
    if clock is not None:
        about.clock_offset_ns, about.clock_bound_ns = clock
    if process.ended:
        about.state, about.reason = "refused", f"it has ended ({text.plain(process.end)})"
        return AskedRank(about)
    return AskedRank(about, process.process_id)
