"""Answers every question about a session (`store.query`). Live and stored sessions use the same functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.errors import Errors, error_text
from traceml_ray.reports.files import page_of, text_of
from traceml_ray.reports.manifest import bundle_infos
from traceml_ray.reports.run_facts import RunFacts, deaths_of
from traceml_ray.reports.step_answers import OF_STEPS, step_of
from traceml_ray.reports.stored_totals import spans_of
from traceml_ray.reports.summary import nodes_of, report_of, runs_of, summaries, summarize
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.view import Records, Run
from traceml_ray.signals.views import OF_QUESTION, findings_of, questions_on_findings
from traceml_ray.store import profiles, query, results
from traceml_ray.store.bundles import read_bundle
from traceml_ray.store.history_reader import RunSteps, StoredHistories
from traceml_ray.store.query import OfRun, Page, QueryError, Request
from traceml_ray.store.rank_processes import (
    RankProcess,
    by_run,
    count,
    current_ranks,
    is_over,
    newest,
    of_run,
    run_names,
    world_size,
)
from traceml_ray.store.schema import SessionFileError, legible
from traceml_ray.store.session import SINKS, SessionFolder, holder, read_json
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.step_rows import MOST as MOST_ROWS
from traceml_ray.store.step_rows import read_step_rows
from traceml_ray.store.summary_shape import Summary, summary_of
from traceml_ray.wire.codec import ready

QUESTIONS = (*query.REQUESTS.values(), *OF_QUESTION)
"""All questions and commands."""
_MAX_REPORTS = 3
"""Largest number of finished runs whose summaries are kept in memory."""
_NEVER = 1 << 62
_OF_META = (
    *("session", "status", "started_at", "ended_at", "exit_code", "launcher", "command", "settings"),
    *("world_size", "nnodes", "strategy", "ending"),
)
"""Fields of the session file that are also fields of its status."""
_MAX_NAMED = 20
"""Largest number of runs that an error message lists if the requested run does not exist."""


class Answers:
    """
    Answers questions from the session file, with the data of the last commit. Several threads may use it.

    Args:
        folder: folder of the session.
        limits: thresholds of the session.
        errors: counts the questions that failed.
    """

    def __init__(self, folder: Path, limits: Thresholds, errors: Errors | None = None) -> None:
        self.folder = folder
        self._files = SessionFolder(folder)
        self._limits = limits
        self._errors = Errors() if errors is None else errors
        self._histories = StoredHistories(lambda run: SessionFile(self._files.sqlite, run=run), limits)
        self._records = Records()
        self._report = lru_cache(_MAX_REPORTS)(self._made_report)
        self._runs: set[str] = set()
        self._by_kind: dict[type[Request[Any]], Callable[[Any], Any]] = {
            query.GetStatus: self._status,
            query.GetVerdict: self._verdict,
            query.GetSummary: self._summary,
            query.Findings: self._findings,
            query.GetDeaths: self._deaths,
            **dict.fromkeys(OF_QUESTION, self._signal),
            query.GetReportPage: self._page,
            query.GetBundles: lambda _: bundle_infos(self.folder),
            query.ReadBundle: lambda request: read_bundle(
                self.folder, request.bundle, request.name, request.offset, request.n
            ),
            query.GetProfiles: lambda _: profiles.listed(self.folder),
            query.ReadProfile: lambda request: profiles.read_part(
                self.folder, request.profile, request.name, request.offset, request.n
            ),
            **dict.fromkeys(OF_STEPS, self._steps),
            **dict.fromkeys(_OF_FILE, self._read),
        }

    def reply(self, message: bytes) -> bytes:
        """
        Return the answer to an encoded message (`query.ask`). Never raises: an error is returned as an
        answer.
        """
        try:
            requests, watching = query.decode(message, QUESTIONS)
            if not watching:
                self._used_for(requests)
            return query.encode([self.answer(request) for request in requests], session=str(self.folder))
        except QueryError as error:
            return query.encode_error(str(error))
        except Exception as error:
            self._errors.note("query", error)
            return query.encode_error(
                str(error) if isinstance(error, SessionFileError) else error_text(error)
            )

    def answer(self, request: Request[query.A]) -> query.A:
        """Return the answer to a request. Raises `QueryError`, `SessionFileError`."""
        answer = self._by_kind.get(type(request))
        if answer is None:
            name = type(request).__name__
            if holder(self.folder) is not None:
                raise QueryError(
                    f"{name} needs the monitor of the session, which cannot be reached from here: only the "
                    f"file of the session is read, in {self.folder}"
                )
            raise QueryError(
                f"{name} needs a running session; this one has ended, its files are in {self.folder}"
            )
        if isinstance(request, OfRun):
            request = msgspec.structs.replace(request, run=self._run(request.run))
        result: query.A = answer(request)
        return result

    def report_text(self, run: str | None = None) -> str:
        """Return the report of a whole run as text. Raises `QueryError`, `SessionFileError`."""
        with self._file(self._run(run)) as file:
            return text_of(summarize(file, self._limits), self.folder)

    def check(self) -> None:
        """Open the session file. Raises `SessionFileError` if it cannot be opened."""
        with self._file():
            pass

    def close(self) -> None:
        """Close the session file until the next question."""
        self._histories.close()

    def _used_for(self, requests: list[Request[Any]]) -> None:
        """Note questions that do not come from an open page. They count as use of the session."""

    def _known(self) -> tuple[list[RankProcess], Mapping[str, Any], Mapping[str, int]]:
        """Return the rank processes, the facts of the session as a whole, and its errors."""
        with self._file() as file:
            meta = file.meta()
            return file.processes(), meta, meta.get("errors", {})

    def _over(self, run: str | None = None) -> bool:
        """
        Return whether the session has ended. With `run`, also True if that run has ended while the session
        continues.
        """
        with self._file() as file:
            meta = file.meta()
        return holder(self.folder) is None or is_over(meta, run)

    def _run(self, name: str | None) -> str | None:
        """Return the id of the requested run, given by id or name; None: the newest. Raises `QueryError`."""
        if name in self._runs:
            return name
        processes, meta, _ = self._known()
        if name is None:
            return newest(processes, meta)
        names = run_names(processes, meta)
        self._runs = {*names}
        same = [run for run, known in names.items() if name in (run, known)]
        if not same:
            known = ", ".join(f"{names[run]} ({run})" for run in [*names][-_MAX_NAMED:]) or "none"
            raise QueryError(f"there is no run {name!r} in {self.folder}; the newest there: {known}")
        return same[-1]

    def _verdict_now(self, run: str | None) -> results.LiveVerdict | None:
        """Return the current verdict of a running run."""
        with self._file(run) as file:
            verdicts, _ = file.verdicts()
        if not verdicts:
            return None
        return msgspec.convert({**verdicts[-1], "episodes": None, "brief": None}, ready(results.LiveVerdict))

    def _judged_live(self, asked: OfRun[Any]) -> Any:
        """
        Return the result of a signal's live judge for a running run; None: the signal has
        no live judge.
        """
        return None

    def _history(self, run: str | None, read_on: bool) -> AbstractContextManager[RunSteps]:
        """
        Yield the step history of a run. With `read_on`, it includes the rows stored since
        the last question.
        """
        return self._histories.of(run, read_on)

    @contextmanager
    def _file(self, run: str | None = None) -> Iterator[SessionFile]:
        """Open the session file for a short time (0.2 ms), for one run."""
        with SessionFile(self._files.sqlite, run=run) as file, legible(file.path):
            yield file

    def _read(self, asked: Any) -> Any:
        with self._file(getattr(asked, "run", None)) as file:
            return _OF_FILE[type(asked)](file, asked)

    def _status(self, _: query.GetStatus) -> results.Status:
        processes, meta, errors = self._known()
        run = newest(processes, meta)
        verdict = self._verdict(query.GetVerdict(run)) if run is not None else None
        return results.Status(
            **{name: meta[name] for name in _OF_META if name in meta},
            run=run,
            ranks=len(current_ranks(by_run(processes).get(run or "", []))),
            ledger=count(processes),
            errors=dict(errors),
            sinks=self._sinks(meta),
            verdict=verdict.label if verdict else None,
        )

    def _sinks(self, meta: Mapping[str, Any]) -> list[results.SinkState]:
        """Return the states of the sinks: those they have left, if the session is over and they left any."""
        if is_over(meta):
            with suppress(OSError, ValueError):
                return read_json(self.folder / SINKS, list[results.SinkState])
        return msgspec.convert(meta.get("sinks", []), ready(list[results.SinkState]))

    def _verdict(self, asked: query.GetVerdict) -> results.LiveVerdict | None:
        if not self._over(asked.run):
            return self._verdict_now(asked.run)
        summary = self._reported(asked.run)
        exposed = [stage.exposed_ms for stage in summary.stages] or None
        more = {name: getattr(summary, name) for name in ("suspects", "roles", "episodes", "brief")}
        return results.LiveVerdict(**asdict(summary.verdict), **more, exposed_ms=exposed)

    def _findings(self, asked: query.Findings) -> list[Finding]:
        """Return the findings of the summary. For a running run, compute them from the current data."""
        if self._over(asked.run):
            return self._reported(asked.run).findings
        questions = questions_on_findings(asked.run)
        answers = {name: self.answer(question) for name, question in questions.items()}
        verdict = self._verdict_now(asked.run)
        return findings_of(verdict, verdict.episodes if verdict else None, answers)

    def _summary(self, asked: query.GetSummary) -> Summary:
        if not asked.whole and holder(self.folder) is None:
            return self._reported(asked.run)
        with self._file(asked.run) as file:
            return summarize(file, self._limits) if asked.whole else next(summaries(file, self._limits))

    def _page(self, asked: query.GetReportPage) -> bytes:
        with self._file(asked.run) as file:
            return page_of(report_of(file, self._limits), self.folder)

    def _deaths(self, asked: query.GetDeaths) -> Any:
        with self._file(asked.run) as file:
            return deaths_of(RunFacts(file, self._limits))

    def _signal(self, asked: Any) -> Any:
        view, over = OF_QUESTION[type(asked)], self._over(asked.run)
        live = None if over else self._judged_live(asked)
        with self._file(asked.run) as file:
            read = self._records.besides(view, file)
            processes = of_run(self._known()[0], asked.run) if view.of_steps else ()
            self._records.read(file, view.states)  # before the history is held: nobody waits for the disk
            if not view.of_steps:
                ranks = file.ranks()
                world = world_size(ranks, file.meta().get("world_size"))
                with self._records.lock if view.states else nullcontext():
                    run = Run(file, self._records, None, ranks, world, over, over, read=read, live=live)
                    return view.answer(run, asked)
            with self._history(asked.run, False) as steps, self._records.lock:
                ended = bool(steps.ranks) and all(process.ended for process in steps.ranks.values())
                whole, over = over, over or ended
                run = Run(
                    file, self._records, steps.history, steps.ranks, steps.world, over, whole,
                    processes=processes, read=read, live=live,
                )  # fmt: skip
                return view.answer(run, asked)

    def _reported(self, run: str | None) -> Summary:
        """Return the summary that was written at the end if it covers that run; otherwise compute one."""
        path = self._files.summary_json
        return self._report(run, path.stat().st_mtime_ns if path.is_file() else None)

    def _made_report(self, run: str | None, _written: int | None) -> Summary:
        with self._file(run) as file:
            known = run, file.meta().get("status", "running")
            with suppress(OSError, ValueError, msgspec.ValidationError):  # somebody else may have written it
                every = read_json(self._files.summary_json, dict[str, Any])
                summary = summary_of(every)
                if (summary.run, summary.session.status) == known:
                    return summary
            return next(summaries(file, self._limits))

    def _steps(self, asked: Any) -> Any:
        whole = getattr(asked, "whole", None)
        whole = self._over(asked.run) if whole is None else whole
        with self._history(asked.run, isinstance(asked, query.GetTimes)) as run_steps:
            return OF_STEPS[type(asked)](run_steps, asked, whole)


def _time(asked: Any) -> tuple[int, int] | None:
    """Return the requested time span of the session, ns; None: its newest samples."""
    if not asked.first_ns and asked.last_ns is None:
        return None
    return asked.first_ns, _NEVER if asked.last_ns is None else asked.last_ns


_OF_FILE: dict[type[Request[Any]], Callable[[SessionFile, Any], Any]] = {
    query.GetRuns: lambda file, _: runs_of(file),
    query.GetNodes: lambda file, _: nodes_of(file),
    query.GetRanks: lambda file, _: file.ranks(),
    query.GetProcesses: lambda file, _: file.processes(),
    query.GetLedger: lambda file, _: file.ledger(),
    query.GetVerdicts: lambda file, asked: Page(*file.verdicts(asked.since)),
    query.GetEvents: lambda file, asked: Page(*file.events(asked.since, brief=asked.brief, most=asked.most)),
    query.GetNodeSamples: lambda file, asked: file.node_samples(asked.nodes, asked.last, _time(asked)),
    query.GetProcessSamples: lambda file, asked: file.process_samples(
        asked.processes, asked.last, _time(asked)
    ),
    query.GetMemorySamples: lambda file, asked: file.memory_rows(asked.processes, asked.last, _time(asked)),
    query.GetSpans: lambda file, asked: spans_of(file, asked.rank, asked.first, asked.last),
    query.GetStepRows: lambda file, asked: read_step_rows(
        file, asked.since, asked.first, asked.last, asked.ranks, min(asked.most, MOST_ROWS)
    ),
    query.GetStep: lambda file, asked: step_of(file, asked.step),
}
