"""Answers questions about the session that runs: what its file cannot say comes from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from traceml_ray import wire
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.errors import Errors
from traceml_ray.monitor.file_copies import Snapshots
from traceml_ray.monitor.live_steps import LiveSteps
from traceml_ray.monitor.live_verdict import LiveJudge
from traceml_ray.reports.answers import Answers
from traceml_ray.reports.files import write_reports
from traceml_ray.store import query
from traceml_ray.store.histories import RunSteps
from traceml_ray.store.profiles import remove_profile
from traceml_ray.store.query import Request
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.runs import has_ended, is_over
from traceml_ray.store.writer import SessionWriter

_FRESH = (query.Summary, query.Runs, query.Nodes, query.Ranks, query.Snapshot)
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
        self._by_kind[query.Memory] = self._memory
        self._by_kind[query.Snapshot] = self._snapshot
        self._by_kind[query.ReadFile] = lambda asked: self.snapshots.read(asked.name, asked.offset, asked.n)
        self._by_kind[query.Discard] = lambda asked: self.snapshots.remove(asked.name)

    def _used_for(self, requests: list[Request[Any]]) -> None:
        self._used()
        if any(isinstance(request, (query.Summary, query.Snapshot)) for request in requests):
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

    def _memory(self, asked: query.Memory) -> Any:
        found = None if self._over(asked.run) else self._judge.memory_now(asked.run)
        return self._read(asked) if found is None else found

    @contextmanager
    def _history(self, run: str | None, read_on: bool) -> Iterator[RunSteps]:
        if read_on and self._over():  # nobody judges any more
            self._judge.feed()
        # Of a run that has ended, the last rows may not have been judged: the file has them all.
        live = None if run is None or has_ended(self._writer.meta, run) else self._live.of(run)
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
        with self._writer.lock:
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
