"""
Answers questions about the session that runs: what its file cannot say comes from memory.

Copies of the session file for downloads, and the files that may be read from outside.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.errors import Errors
from traceml_ray.files import read_part
from traceml_ray.monitor.live_steps import LiveSteps
from traceml_ray.monitor.live_verdict import LiveJudge
from traceml_ray.reports.answers import Answers
from traceml_ray.reports.files import write_reports
from traceml_ray.store import query
from traceml_ray.store.history_reader import RunSteps
from traceml_ray.store.profiles import remove_profile
from traceml_ray.store.query import OfRun, QueryError, Request
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.runs import has_ended, is_over
from traceml_ray.store.session import REPORTS
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import messages as wire

_PREFIX = "snapshot-"
_MOST = 3
"""Copies at the same time; another one replaces the oldest."""


class Snapshots:
    """In the session folder `folder`. Copies that an earlier aggregator left are removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.remove()

    def make(self, session: SessionFile) -> str:
        """Copy the session file as it stands; return the name of the copy."""
        for old in sorted(self._copies(), key=lambda path: path.stat().st_mtime_ns)[: 1 - _MOST]:
            old.unlink(missing_ok=True)
        path = self._folder / f"{_PREFIX}{secrets.token_hex(4)}.sqlite"
        path.touch(mode=0o600)
        try:
            session.copy_to(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path.name

    def read(self, name: str, offset: int, n: int) -> bytes:
        """
        Return at most `n` bytes of a copy or of a report, b"" beyond its end.

        Raises QueryError for any other name, and for a file that is not there (yet, or any more).
        """
        if name not in REPORTS and name not in {path.name for path in self._copies()}:
            raise QueryError(f"there is no file called {name!r} to be read")
        try:
            return read_part(self._folder / name, offset, n)
        except FileNotFoundError:
            raise QueryError(f"there is no {name} at present: reports are written at the end") from None

    def remove(self, name: str | None = None) -> None:
        """Remove the copy of that name; None: all of them."""
        for path in self._copies():
            if name in (None, path.name):
                path.unlink(missing_ok=True)

    def _copies(self) -> list[Path]:
        return list(self._folder.glob(f"{_PREFIX}*.sqlite"))


_FRESH = (query.GetSummary, query.GetRuns, query.GetNodes, query.GetRanks, query.Snapshot)
"""Their answers contain everything that has arrived."""


class LiveAnswers(Answers):
    """
    Args:
        limits: of the session.
        writer: of the session file.
        judge: has the verdicts as they stand.
        steps: the histories of the live runs.
        errors: the aggregator's, by place.
        flush: has the relays hand over what they hold, before a summary or a snapshot.
        commit: writes what is pending.
        used: called for questions that do not come from an open page.
        request: asks for a bundle, by an id, and returns why there will be none; with the writer's lock.
        profile: asks for a profile, likewise.
    """

    def __init__(
        self,
        limits: Thresholds,
        writer: SessionWriter,
        judge: LiveJudge,
        steps: LiveSteps,
        errors: Errors,
        *,
        flush: Callable[[], object],
        commit: Callable[[], bool],
        used: Callable[[], None],
        request: Callable[[str], str | None],
        profile: Callable[[wire.ProfileRequest, str], str | None],
        layers: Callable[[wire.LayersRequest, str], str | None],
    ) -> None:
        super().__init__(writer.path.parent, limits, errors)
        self.snapshots = Snapshots(writer.path.parent)
        self._writer, self._judge, self._live = writer, judge, steps
        self._flush, self._commit, self._used = flush, commit, used
        self._request, self._profile, self._layers = request, profile, layers
        self._by_kind[query.Dump] = self._dump
        self._by_kind[query.StartProfile] = self._start_profile
        self._by_kind[query.StartLayers] = self._start_layers
        self._by_kind[query.RemoveProfile] = lambda asked: remove_profile(self.folder, asked.id)
        self._by_kind[query.Snapshot] = self._snapshot
        self._by_kind[query.ReadFile] = lambda asked: self.snapshots.read(asked.name, asked.offset, asked.n)
        self._by_kind[query.Discard] = lambda asked: self.snapshots.remove(asked.name)

    def _used_for(self, requests: list[Request[Any]]) -> None:
        self._used()
        if any(isinstance(request, (query.GetSummary, query.Snapshot)) for request in requests):
            self._flush()
        if any(isinstance(request, _FRESH) for request in requests):
            self._commit()

    def _known(self) -> tuple[list[RankProcess], Mapping[str, Any], Mapping[str, int]]:
        with self._writer.lock:
            return list(self._writer.processes.values()), dict(self._writer.meta), dict(self._errors)

    def _over(self, run: str | None = None) -> bool:
        return is_over(self._writer.meta, run)

    def _verdict_now(self, run: str | None) -> Any:
        return self._judge.answer(run)

    def _judged_live(self, asked: OfRun[Any]) -> Any:
        return self._judge.judged_now(asked)

    @contextmanager
    def _history(self, run: str | None, read_on: bool) -> Iterator[RunSteps]:
        if read_on and self._over():  # nobody judges any more
            self._judge.feed()
        # Of a run that has ended, the last rows may not have been judged: the file has them all.
        live = None if run is None or has_ended(self._writer.meta, run) else self._live.get(run)
        if live is None:
            with super()._history(run, read_on) as stored:
                yield stored
        else:
            with self._live.lock.reading():
                yield live

    def _dump(self, asked: query.Dump) -> None:
        with self._writer.lock:
            why = self._request(asked.id)
        if why is not None:
            raise query.QueryError(f"no bundle: {why}")

    def _start_profile(self, asked: query.StartProfile) -> None:
        why = self._profile(asked.request, asked.id)
        if why is not None:
            raise query.QueryError(f"no profile: {why}")

    def _start_layers(self, asked: query.StartLayers) -> None:
        with self._writer.lock:
            why = self._layers(asked.request, asked.id)
        if why is not None:
            raise query.QueryError(f"no layers: {why}")

    def _snapshot(self, _: query.Snapshot) -> str:
        """Copy the session file as it stands, with everything that has come; the reports are of the same."""
        with self._file() as file:
            put, errors = self._writer.put, self._errors
            write_reports(self._files, file, self._limits, quick=True, put=put, errors=errors)
            return self.snapshots.make(file)
