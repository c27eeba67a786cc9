"""
Profiles of jobs on torch.distributed.rpc: ranks without steps of their own, which others have work for them.

Such a rank records from before the first step of the others until it hears that they are done; what is looked
at of its trace are their steps. Where no rank has steps, all record for as many seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from traceml_ray.store.profiles import OVER, Profile, ProfileStep, RankProfile

STEP_S = 1.0
"""How long is recorded in place of a step where no rank has any."""
HEAR_S = 10.0
"""So long it may take until a rank hears that the others are done."""

Edges = dict[int, tuple[int, int]]
"""Begin and end of steps by their numbers, ns on the aggregator's clock."""


def is_over(profile: Profile, since_s: Mapping[int, float]) -> bool:
    """
    Return whether ranks without steps have recorded what they should.

    Args:
        profile: as far as it is.
        since_s: for how long each rank has been in its present state.
    """
    going = [rank for rank in profile.ranks if rank.state not in OVER]
    serving = [rank for rank in going if rank.serves and rank.state == "recording"]
    if not serving or any(rank.state in ("asked", "armed") or _records(rank) for rank in going):
        return False
    if any(rank.steps for rank in profile.ranks if not rank.serves):
        return True
    return all(since_s[rank.rank] >= profile.n_steps * STEP_S for rank in serving)


def was_late(profile: Profile, rank: RankProfile) -> bool:
    """Return whether a rank without steps has begun to record when the others did theirs already."""
    own = [each for each in profile.ranks if not each.serves and each.steps]
    edges = _steps_of(own)
    if not (rank.serves and rank.steps and edges):
        return False
    ((_, began_ns, _),) = _edges(rank)
    return began_ns > min(begin_ns for begin_ns, _ in edges.values())


def share_steps(profile: Profile) -> None:
    """Give ranks without steps those of the others, or the time that all have recorded."""
    serving = [rank for rank in profile.captured if rank.serves]
    own = [rank for rank in profile.captured if not rank.serves and rank.steps]
    edges = _steps_of(own) if own else _together(serving)
    if serving and not own:
        profile.first_step = None
    for rank in serving:
        offset_ns = rank.clock_offset_ns or 0
        rank.steps = [
            ProfileStep(step, begin_ns - offset_ns, end_ns - offset_ns, None)
            for step, (begin_ns, end_ns) in edges.items()
        ]


def _records(rank: RankProfile) -> bool:
    return rank.state == "recording" and not rank.serves


def _steps_of(ranks: list[RankProfile]) -> Edges:
    found: Edges = {}
    for rank in ranks:
        for step, begin_ns, end_ns in _edges(rank):
            first_ns, last_ns = found.get(step, (begin_ns, end_ns))
            found[step] = min(first_ns, begin_ns), max(last_ns, end_ns)
    return found


def _together(ranks: list[RankProfile]) -> Edges:
    """Return the time, as step 0, in which all have recorded; else nothing."""
    edges = [edge for rank in ranks for edge in _edges(rank)]
    begin_ns = max((begin for _, begin, _ in edges), default=0)
    end_ns = min((end for _, _, end in edges), default=0)
    return {0: (begin_ns, end_ns)} if begin_ns < end_ns else {}


def _edges(rank: RankProfile) -> list[tuple[int, int, int]]:
    offset_ns = rank.clock_offset_ns or 0
    return [(step.step, step.begin_ns + offset_ns, step.end_ns + offset_ns) for step in rank.steps]
