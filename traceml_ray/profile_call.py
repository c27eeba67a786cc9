"""`traceml_ray.profile`: asks the session for a profile, from a rank that is watched or from a driver."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import msgspec

from traceml_ray import wire
from traceml_ray.agent import bootstrap
from traceml_ray.profile_messages import REQUEST_EVENT

if TYPE_CHECKING:
    from typing import Self

    from traceml_ray.live_session import Session
    from traceml_ray.store.profiles import Profile


class profile:  # noqa: N801 - used as a function is
    """
    Profile some steps of the running job with torch's profiler: all of `ranks` record the same steps.

    `traceml_ray.profile(steps=3)` asks for it and returns at once; as `with traceml_ray.profile(): …` it
    waits at the end of the block for what came of it, in a driver. A rank that is watched asks for it and
    never waits: training goes on, and the profile is in the session's folder. All ranks may ask for the same.
    In a process that has no session and is not watched it does nothing.

    The steps that are recorded begin some seconds later; a driver may ask before its run has begun.

    Args:
        ranks: `all`, or ranks and ranges of them: `0,4-7`. Of more than 64 the lowest.
        steps: how many, 1 to 50.
        memory: record what each operation allocates,
        stacks: where in the code it is called (slow),
        shapes: the shapes of its inputs.

    Raises ValueError for arguments that cannot be used, and in a driver StartError when its session does not
    answer.
    """

    def __init__(
        self,
        ranks: str = "all",
        steps: int = 3,
        *,
        memory: bool = False,
        stacks: bool = False,
        shapes: bool = False,
    ) -> None:
        fields = {"ranks": ranks, "steps": steps, "memory": memory, "stacks": stacks, "shapes": shapes}
        request, self._id = wire.ProfileRequest.checked(fields), secrets.token_hex(8)
        self._session: Session | None = None
        agent = bootstrap.current()
        if agent is not None:
            run = None if agent.identity is None else agent.identity.job_id
            data = msgspec.structs.replace(request, run=run).event_data(self._id)
            agent.add_event(wire.Event(REQUEST_EVENT, time.time_ns(), data=data))
            return
        from traceml_ray.driver import session_here

        self._session = session_here()
        if self._session is not None:
            self._session.request_profile(self._id, request)

    def result(self, timeout: float = 300.0) -> Profile | None:
        """
        Wait for what came of it; None in a process that is a rank, or has no session.

        Its `ranks` say what became of each. Raises StartError when it is not there after `timeout` s.
        """
        return None if self._session is None else self._session.wait_for_profile(self._id, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, calls: object) -> None:
        if error is None:
            self.result()
