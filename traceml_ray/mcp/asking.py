"""
The tools that ask something of a running session: a profile, and the stacks of its ranks. The request goes to
the relay of this node, as `traceml-ray profile` and `traceml-ray dump` send it. Also reads what came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from traceml_ray import text
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.identity import rank_filter
from traceml_ray.launchers import control
from traceml_ray.mcp.bounded import Row, as_text
from traceml_ray.mcp.reading import MOST, RANKS, RUN, SESSION
from traceml_ray.mcp.sessions import Sessions
from traceml_ray.reports.answers import Answers
from traceml_ray.store import query
from traceml_ray.store.profiles import StoredProfile, profiles_of
from traceml_ray.store.results import EventRow
from traceml_ray.store.session import find
from traceml_ray.traces.key_averages import key_averages, sort
from traceml_ray.traces.sources import sources_of_profile
from traceml_ray.wire import messages as wire

_FLAG = "Slower, and a larger trace."
_WAIT_S = 50.0
"""Longest time to wait for a profile by default, in s. Many clients give up after a minute."""


class AskingTools:
    """
    Tools about what a running session is asked for.

    Args:
        sessions: opens sessions.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.reading: tuple[Callable[..., str], ...] = (self.get_profile,)
        self.tools: tuple[Callable[..., str], ...] = self.profile, self.dump_stacks

    def profile(
        self,
        session: SESSION = None,
        ranks: RANKS = "all",
        steps: Annotated[int, Field(ge=1, le=wire.MAX_PROFILE_STEPS, description="Number of steps.")] = 3,
        memory: Annotated[bool, Field(description=f"Record allocations. {_FLAG}")] = False,
        stacks: Annotated[bool, Field(description=f"Record where in the code it is. {_FLAG}")] = False,
        shapes: Annotated[bool, Field(description=f"Record shapes of inputs. {_FLAG}")] = False,
        run: RUN = None,
        timeout_s: Annotated[
            float,
            Field(ge=1, le=600, description="Longest time to wait (s). Later, list_profiles has the result."),
        ] = _WAIT_S,
        most: MOST = 16,
    ) -> str:
        """
        Record some steps of a running job with torch's profiler, the same steps on all ranks. It slows these
        steps of the training. Waits until the traces are stored. Then get_profile shows the operations.
        """
        fields = {"ranks": ranks, "steps": steps, "memory": memory, "stacks": stacks, "shapes": shapes}
        wanted = wire.ProfileRequest.checked({**fields, "run": run})
        stored = control.profile(self._folder(session), wanted, timeout_s)
        return as_text(Row(path=str(stored.path), profile=stored.profile), most)

    def get_profile(
        self,
        session: SESSION = None,
        profile_id: Annotated[str | None, Field(description="Default: the newest profile.")] = None,
        rank: Annotated[
            int | None, Field(description="Default: the rank that the verdict suspected, else the first.")
        ] = None,
        most: MOST = 20,
    ) -> str:
        """
        Return the operations of one rank in a stored profile, the longest first: calls, ms on the CPU and on
        the device, with and without the operations inside. list_profiles has the ids.
        """
        stored = _stored(self._folder(session), profile_id)
        profile, sources = stored.profile, sources_of_profile(stored)
        traced = [source.rank for source in sources if source.rank is not None]
        wanted = next((one for one in (rank, profile.suspect, *traced) if one is not None), None)
        chosen = [source for source in sources if source.rank == wanted]
        if not chosen:
            there = text.ranks(traced) or "none"
            raise ValueError(f"profile {profile.id} has no trace of rank {wanted}; there are: {there}")
        operations = sort(key_averages(chosen), "self_device_ms")
        if all(operation.self_device_ms is None for operation in operations):
            operations = sort(operations, "self_cpu_ms")
        answer = Row(id=profile.id, why=profile.why, extent=profile.extent, rank=wanted)
        return as_text(Row(answer, found=profile.found, operations=operations), most)

    def dump_stacks(self, session: SESSION = None, ranks: RANKS = "all", most: MOST = 8) -> str:
        """
        Ask every rank of a running job where it is in the code: the stacks of its threads. For a job that
        hangs or is slow. Takes some seconds; training goes on. Ranks with the same stacks are one entry; the
        fewest ranks come first. It also keeps a bundle of the last minutes in the session's folder.
        """
        wanted = rank_filter(ranks)
        bundle = control.dump(self._folder(session))
        grouped: dict[str, list[int]] = {}
        for rank, event in sorted(_stacks(bundle).items()):
            if rank in wanted:
                grouped.setdefault(event.message, []).append(rank)
        groups = sorted(grouped.items(), key=lambda group: len(group[1]))
        rows = [Row(count=len(same), ranks=text.ranges(same), stacks=message) for message, same in groups]
        return as_text(Row(bundle=str(bundle), stacks=rows), most)

    def _folder(self, session: str | None) -> Path:
        return find(session, self._sessions.out)


def _stored(folder: Path, name: str | None) -> StoredProfile:
    """Return a stored profile; None: the newest. Raises ValueError."""
    there = profiles_of(folder)
    matching = [stored for stored in there if name in (None, stored.profile.id)]
    if not matching:
        ids = text.listed([stored.profile.id for stored in there[-5:]]) or "none; `profile` records one"
        raise ValueError(f"session {folder.name!r} has no profile {name or ''}; there: {ids}")
    return matching[-1]


def _stacks(bundle: Path) -> dict[int, EventRow]:
    """Return the newest stacks of each rank in a bundle."""
    answers = Answers(bundle, Thresholds())
    try:
        events = answers.answer(query.GetEvents(brief=False)).items
    finally:
        answers.close()
    return {event.rank: event for event in events if event.kind == "stacks" and event.rank is not None}
