"""How a driver asks a session: its aggregator while it runs, then its file where that is on this node."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray import __version__
from traceml_ray.errors import cause_of
from traceml_ray.ray.config import About, ActorConfig
from traceml_ray.ray.discovery import find_aggregator, is_same_actor
from traceml_ray.reports.answers import Answers
from traceml_ray.results import Status
from traceml_ray.session import SessionFolder
from traceml_ray.session_state import DATABASE
from traceml_ray.store import query
from traceml_ray.typed import ready

QUESTION_S = 20.0
"""How long a question may take to be answered."""
_AGAIN_S = 0.2
"""Between two tries, while Ray makes the aggregator anew."""


class StartError(RuntimeError):
    """A session that cannot be started, reached or stopped; the message says which, why, and what to do."""


class EndedError(StartError):
    """A session that has ended, or cannot be asked any more; its files may be there."""


class SessionCalls:
    """
    Calls one session; any thread may. It is the same session for good: another one that takes its name is
    never called.

    Args:
        name: of the session.
        aggregator: the handle of its actor.
        wait_s: how long the first answer may take, which is awaited here. Raises StartError.
    """

    def __init__(self, name: str, aggregator: Any, wait_s: float | None = None) -> None:
        import ray

        self.name, self.aggregator = name, aggregator
        about = msgspec.json.decode(self._once("about", wait_s=wait_s), type=ready(About))
        if about.version != __version__:
            raise StartError(
                f"session {name!r} is run by traceml-ray {about.version}, this is {__version__}: "
                "choose another name, or stop that one first"
            )
        self.folder, self.node_id = Path(about.folder), about.node_id
        self.config = msgspec.json.decode(about.config, type=ready(ActorConfig))
        self.has_ended = False
        """It was found to have ended."""
        self.is_here = about.node_id == ray.get_runtime_context().get_node_id()
        """Its files are on this node."""
        self._started_at = about.started_at
        self._stored = Answers(self.folder, self.config.settings.thresholds)

    def ask(self, message: bytes) -> bytes:
        """Return the answer to an encoded question, see `store.query`. Raises StartError."""
        try:
            return self.call("query", message)
        except EndedError as error:
            return self._file(error).reply(message)

    def call(self, method: str, *args: bytes, wait_s: float | None = None) -> bytes:
        """
        Return what a method of the aggregator returns; one that Ray makes anew meanwhile is asked again.
        Raises StartError, EndedError.
        """
        import ray

        deadline = time.monotonic() + (QUESTION_S if wait_s is None else wait_s)
        while True:
            try:
                return self._once(method, *args, wait_s=wait_s)
            except StartError as error:
                if not isinstance(error.__cause__, ray.exceptions.RayActorError):
                    raise
                if self.is_gone():
                    self.has_ended = True
                    raise EndedError(f"session {self.name!r} has ended{self._files()}") from error
                if time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_S)

    def is_gone(self) -> bool:
        """Return whether the session has ended; another one may have its name by now."""
        now = find_aggregator(self.name)
        return now is None or not is_same_actor(now, self.aggregator)

    def _once(self, method: str, *args: bytes, wait_s: float | None) -> bytes:
        import ray

        if not ray.is_initialized():  # a call would start a cluster
            raise EndedError(
                f"session {self.name!r} cannot be asked: Ray was shut down in this process{self._files()}"
            )
        seconds = QUESTION_S if wait_s is None else wait_s
        try:
            answer: bytes = ray.get(getattr(self.aggregator, method).remote(*args), timeout=seconds)
        except ray.exceptions.RayActorError as error:
            raise StartError(f"session {self.name!r} cannot be reached: {cause_of(error)}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise StartError(f"session {self.name!r} did not answer within {seconds:g} s") from error
        return answer

    def _files(self) -> str:
        """Return where its files are, to be read there."""
        there = "" if self.is_here else f" on node {self.node_id}"
        return f"; its files are in {self.folder}{there}: traceml-ray report {self.folder}"

    def check_file(self) -> None:
        """Raise EndedError where the file of this session is not on this node (any more)."""
        self._file(EndedError(f"session {self.name!r} cannot be asked{self._files()}"))

    def is_finished(self) -> bool:
        """Return whether its files are written to the end. Raises EndedError where they are not here."""
        self.check_file()
        return self._status()["status"] != "running" and SessionFolder(self.folder).summary_json.is_file()

    def _file(self, ended: EndedError) -> Answers:
        """Return what answers from its file. Raises `ended`, or another one, where that is not here."""
        if not self.is_here:
            raise ended
        if not (self.folder / DATABASE).is_file():
            raise EndedError(f"session {self.name!r} has ended, and its folder {self.folder} is gone")
        try:
            started_at = self._status().get("started_at")
        except query.QueryError as error:
            raise EndedError(f"session {self.name!r} has ended, and cannot be read: {error}") from None
        if started_at != self._started_at:
            raise EndedError(
                f"session {self.name!r} has ended, and {self.folder} is another one's by now; this one was "
                f"moved aside: traceml-ray sessions --sessions {self.folder.parent}"
            )
        return self._stored

    def _status(self) -> Status:
        return query.ask_one(self._stored.reply, query.Status())
