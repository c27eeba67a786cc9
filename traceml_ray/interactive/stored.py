"""
A stored session: opened by name or path. It answers the same questions as a running session, and is never
changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.interactive.questions import SessionQuestions
from traceml_ray.reports.answers import Answers
from traceml_ray.settings import Settings
from traceml_ray.store.bundles import FOLDER as BUNDLES
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session import DATABASE, SessionError, find, holder

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.11 has it


class StoredSession(SessionQuestions):
    """
    A stored session, opened by `traceml_ray.open`. Use it as a context manager to close its file.

    It answers the same questions as `Session`, with the same structs, from the file alone: Ray is not needed.
    It writes nothing and does not delay a running session; answers about a running session come from the rows
    stored so far. Any thread may ask. Raises SessionError (a ValueError) if a question has no answer.

    `id` is the session's name, `folder` the path of its files.
    """

    def __init__(self, folder: Path, limits: Thresholds) -> None:
        self.folder = folder
        self.id = folder.name
        if folder.parent.name == BUNDLES:
            self.id = f"{folder.parents[1].name}/{BUNDLES}/{folder.name}"
        self._answers: Answers | None = Answers(folder, limits)
        try:
            self._answers.check()
        except SessionFileError as error:
            raise SessionError(str(error)) from error

    @property
    def is_live(self) -> bool:
        """Return whether the session still runs, so that answers may change."""
        return holder(self.folder) is not None

    def close(self) -> None:
        """Close the session's file. Later questions raise SessionError."""
        if self._answers is not None:
            self._answers.close()
            self._answers = None

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session's file."""
        self.close()

    def __repr__(self) -> str:
        """Return what this object is, where its files are, and what to call on it."""
        state = "closed" if self._answers is None else "live" if self.is_live else "stored"
        what = ".verdict(), .findings(), .steps().to_pandas(), .plot()"
        return f"<traceml_ray session {self.id!r}, {state}: files in {self.folder}; try {what}>"

    def _reply(self, message: bytes) -> bytes:
        if self._answers is None:
            raise SessionError(f"session {self.id!r} is closed: traceml_ray.open() opens it again")
        return self._answers.reply(message)

    def _refuse(self, why: str) -> NoReturn:
        raise SessionError(f"session {self.id!r}: {why}")


def open(
    session: str | os.PathLike[str] | None = None, *, out: str | os.PathLike[str] | None = None
) -> StoredSession:
    """
    Open a stored session: `with traceml_ray.open("demo") as session: print(session.verdict())`.

    Args:
        session: a name in the folder of sessions, or the path of a session's folder, its `session.sqlite`, or
            the bundle of an incident. None: the running session, else the newest.
        out: the folder of sessions. Default: as in the settings, `traceml-sessions`.

    Raises:
        SessionError: there is no such session, there are two of that name, or its file cannot be read, for
            example because another version wrote it. It is a ValueError.
    """
    settings = Settings.load(out=None if out is None else os.fspath(out))
    name = None if session is None else os.fspath(session)
    if name is not None:
        _check_one(name, Path(settings.out))
    return StoredSession(find(name, settings.out), settings.thresholds)


def _check_one(name: str, out: Path) -> None:
    """Raise SessionError if two sessions have this name."""
    places = [path for path in (out / name, Path(name)) if (path / DATABASE).is_file()]
    if len(places) > 1 and not places[0].samefile(places[1]):
        both = " and ".join(str(path.absolute()) for path in places)
        raise SessionError(f"two sessions are called {name!r}: {both}; give the path of one of them")
