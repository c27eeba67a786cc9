"""
Sources of a session: its aggregator, queried through Ray, or its file. Both answer the same questions.

Only a separate thread attaches to Ray and may hang for any time. A question that this thread does not reach
in time is not asked.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Lock
from typing import Any

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.ray.actors import DEFAULT_SESSION, Attachment, find_aggregator
from traceml_ray.ray.actors import FILE as ATTACHMENT
from traceml_ray.ray.connection import attach, find_token
from traceml_ray.reports.answers import Answers
from traceml_ray.settings import Settings
from traceml_ray.store.query import QueryError
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session import (
    LIVE,
    Live,
    NoSessionError,
    SessionError,
    SessionStartingError,
    find,
    holder,
    live_state,
    read_json,
)

ASK_S = 2.0
"""Longest time for an answer, in s."""
ATTACH_S = 15.0
"""Longest time for the first answer, in s. It includes attaching to Ray."""
START = (
    "Start one with `python -m traceml_ray.launch --nproc-per-node 4 train.py` in place of torchrun, "
    "or with `traceml_ray.start()` after `ray.init()`."
)


class SourceError(QueryError):
    """No source answers; the message says why."""


def open_source(session: str | None, out: str, ray_address: str | None, *, file: bool = False) -> Source:
    """
    Return the session to view. With `ray_address`, it is on that cluster. Otherwise, with a name, it is the
    session of that name under `out` (or at that path). Without a name, it is the newest live session, else
    the one on the cluster of TRACEML_RAY_ADDRESS or RAY_ADDRESS, else the newest. A session that does not
    exist yet may still appear. `file`: use the session under `out`, without Ray even while it is live.

    Raises `SessionError` if the path is not a session.
    """
    if file:
        return LocalSource(session, out, attach=False)
    around = os.environ.get("TRACEML_RAY_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if not ray_address:
        try:
            folder = find(session, out, starting=True)
            around = around if session is None and holder(folder) is None else None
        except NoSessionError:
            if session is not None and os.sep in session:
                raise
    address = ray_address or around
    if address and address != "auto":
        return LiveSource(session or DEFAULT_SESSION, Attachment(address), out)
    return LocalSource(session, out)


class StoredSource(Answers):
    """Answers from the session file in `folder`, even while it is being written."""

    def __init__(self, folder: Path, thresholds: Thresholds | None = None) -> None:
        super().__init__(folder, thresholds or Settings.load().thresholds)
        self.target, self.out = str(folder), str(folder.parent)
        try:
            self.check()
        except SessionFileError as error:
            raise SourceError(str(error)) from error

    starting = None

    @property
    def stored(self) -> bool:
        """Whether no process writes to the session any more."""
        return holder(self.folder) is None


class LiveSource:
    """
    Asks the aggregator of `session` on the cluster that `where` describes. The aggregator may
    come and go.
    """

    stored, starting = False, None

    def __init__(self, session: str, where: Attachment, out: str) -> None:
        self.target, self.out = session, out
        self._where = where
        self._aggregator: Any = None
        self._attached = False
        self._ray = ThreadPoolExecutor(1, "traceml-ray-asks")

    def reply(self, message: bytes) -> bytes:
        """Answer a question. Raises `SourceError`."""
        asked = self._ray.submit(self._query, message)
        try:
            return asked.result(ASK_S if self._attached else ATTACH_S)
        except NoAnswer:
            asked.cancel()
            raise SourceError(f"session {self.target!r} did not answer in time") from None

    def close(self) -> None:
        """Ask no more questions. The process leaves Ray when it ends."""

    def _query(self, request: bytes) -> bytes:
        """Ask the aggregator. Runs in the thread that uses Ray."""
        self._attach()
        import ray

        if self._aggregator is None:
            self._aggregator = find_aggregator(self.target)
        if self._aggregator is None:
            where = f"on the Ray cluster at {self._where.address}"
            raise SourceError(f"There is no session {self.target!r} {where} yet; the search continues.")
        try:
            reply: bytes = ray.get(self._aggregator.query.remote(request), timeout=0.9 * ASK_S)
        except ray.exceptions.GetTimeoutError:
            raise SourceError(f"the aggregator of session {self.target!r} did not answer in time") from None
        except ray.exceptions.RayError as error:
            self._aggregator = None
            raise SourceError(f"the aggregator of session {self.target!r} is gone") from error
        return reply

    def _attach(self) -> None:
        if self._attached:
            return
        try:
            attach(self._where, ASK_S)
        except Exception as error:
            lines = str(error).strip().splitlines()[-1:]
            raise CannotAttach(f"cannot attach to Ray at {self._where.address}: {''.join(lines)}") from error
        self._attached = True


class CannotAttach(SourceError):  # noqa: N818
    """The Ray cluster cannot be reached, or refuses this process."""


class LocalSource:
    """
    A session under `out` on this machine, by name (None: the running one, else the newest). Its aggregator
    answers while it is live and accepts us (never without `attach`); otherwise its file does.
    """

    def __init__(self, session: str | None, out: str, *, attach: bool = True) -> None:
        self.target = session or f"the newest session under {out}"
        self.out = out
        self._session, self._may_attach = session, attach
        self._folder: Path | None = None
        self._now: StoredSource | LiveSource | None = None

    @property
    def stored(self) -> bool:
        """Whether the session is over."""
        return self._now is not None and self._now.stored

    @property
    def starting(self) -> Live | None:
        """State of the monitor of a live session, which may not answer yet. None: no session is live."""
        try:
            return live_state(self._folder or find(self._session, self.out, starting=True))
        except SessionError:
            return None

    def reply(self, message: bytes) -> bytes:
        """Answer a question. Raises `SourceError`."""
        now = self._now or self._choose()
        try:
            return now.reply(message)
        except SourceError as error:
            if not isinstance(now, LiveSource) or self._folder is None:
                raise
            if not isinstance(error, CannotAttach) and holder(self._folder) is not None:
                raise
            now.close()
            self._now = StoredSource(self._folder)
            return self._now.reply(message)

    def close(self) -> None:
        """Close the source."""
        if self._now is not None:
            self._now.close()

    def _choose(self) -> StoredSource | LiveSource:
        try:
            self._folder = folder = find(self._session, self.out)
        except SessionStartingError as error:
            raise SourceError(str(error)) from error
        except SessionError as error:
            raise SourceError(f"{error}. {START}") from error
        self.target = folder.name
        live = self._may_attach and holder(folder) is not None
        where = _attachment(folder) if live else None
        self._now = StoredSource(folder) if where is None else LiveSource(folder.name, where, self.out)
        return self._now


class PipeSource:
    """
    Asks the aggregator that started this process, over a pipe.

    Args:
        pipe: to the aggregator.
        folder: of the session.
    """

    stored, starting = False, None

    def __init__(self, pipe: Connection, folder: Path) -> None:
        self.target, self.out = folder.name, str(folder.parent)
        self._pipe = pipe
        self._asking = Lock()
        self.closed = Event()
        """Set once the aggregator is gone."""

    def reply(self, message: bytes) -> bytes:
        """Answer a question. Raises `SourceError`."""
        with self._asking:
            try:
                self._pipe.send_bytes(message)
                return self._pipe.recv_bytes()
            except (OSError, EOFError) as error:
                self.closed.set()
                raise SourceError(f"the aggregator of session {self.target!r} is gone") from error

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()


Source = StoredSource | LiveSource | LocalSource | PipeSource
"""
A session that any thread can query (`reply`, see `store.query`) and that can be closed (`close`). `target` is
its name for people, `out` the folder of past sessions, and `stored` says whether it is over. `starting` is
the state of the monitor of a running session that may not answer yet.
"""


def _attachment(folder: Path) -> Attachment | None:
    """Return how to attach to the cluster of a live session, as written by its launcher. None: unknown."""
    try:
        live = read_json(folder / LIVE, Live)
    except (OSError, ValueError):
        return None
    try:
        return read_json(Path(live.socket).with_name(ATTACHMENT), Attachment)
    except (OSError, ValueError):
        return Attachment(live.address, environ=_token_mode(folder)) if live.address else None


def _token_mode(folder: Path) -> dict[str, str | None]:
    """
    Return the variable that makes Ray send this user's token, if the environment does not decide that.

    A cluster that `ray.init()` starts requires a token by default. Ray itself sends the token to a local
    cluster that it has discovered, but never to an address that it is given. The folder of another user may
    name any address, so the token is not sent there.
    """
    if "RAY_AUTH_MODE" in os.environ or not find_token(os.environ)[0]:
        return {}
    try:
        ours = (folder / LIVE).stat().st_uid == os.getuid()
    except OSError:
        return {}
    return {"RAY_AUTH_MODE": "token"} if ours else {}
