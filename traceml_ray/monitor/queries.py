"""Answers what is asked of a running session."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis.parts import MAX_PEERS
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import RankRows
from traceml_ray.errors import Errors
from traceml_ray.monitor.file_copies import Snapshots
from traceml_ray.monitor.histories import KEY
from traceml_ray.monitor.live_steps import LiveSteps
from traceml_ray.monitor.live_verdict import LiveJudge
from traceml_ray.reports.files import write_reports
from traceml_ray.reports.parts import StoredParts
from traceml_ray.reports.summary import nodes_of, runs_of, summaries
from traceml_ray.session import SessionFolder, read_json
from traceml_ray.settings import Settings
from traceml_ray.stages import STAGES
from traceml_ray.store.runs import by_run, newest, with_rows
from traceml_ray.store.runs import count as count_rows
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.step_answers import QUESTIONS, StepAnswers, encode
from traceml_ray.store.streams import shown
from traceml_ray.store.writer import SessionWriter

_MAX_ERROR = 1000
"""Characters of an error: it may repeat what was asked."""


class Answers:
    """
    Made to be asked by several threads at once. What stands in the session file is as of the last commit.

    Args:
        folder: of the session.
        settings: of the session.
        writer: of the session file.
        judge: has the verdicts as they stand.
        steps: the histories of the live runs.
        errors: the aggregator's, by place.
        commit: writes what is pending.
    """

    def __init__(
        self,
        folder: SessionFolder,
        settings: Settings,
        writer: SessionWriter,
        judge: LiveJudge,
        steps: LiveSteps,
        errors: Errors,
        commit: Callable[[], bool],
    ) -> None:
        self.snapshots = Snapshots(folder.path)
        self._folder = folder
        self._settings = settings
        self._writer = writer
        self._judge = judge
        self._errors = errors
        self._commit = commit
        self._steps = StepAnswers(
            lambda run: SessionFile(writer.path, run=run),
            settings.thresholds,
            self._reported,
            lambda run: (steps.of(run), steps.lock),
        )
        self._own = threading.local()
        self._readers: list[SessionFile] = []

    def close(self) -> None:
        """Let go of the session file until the next question: its writer can leave it in one piece."""
        self._own = threading.local()
        self._steps.close()
        while self._readers:
            self._readers.pop().close()

    def answer(self, request: bytes) -> tuple[bytes, bool]:
        """
        Return the answer, and whether who asks says that it is only `watching`, as a page that stays open.

        Answer msgpack `{"what": name, "since": cursor, "run": id, …}` with `{"result": …, "cursor": …}`.

        `what` is a method of `SessionFile`, `status`, `verdict`, `summary`, or one of steps (`StepAnswers`);
        rows come as little-endian bytes. `run` says of which run, without it the newest that has rows.
        `several` answers a list of questions (`asked`) with a list of answers, as of the last commit.
        `snapshot` makes a copy of the session file and answers its `name` and `size`, `file` (`name`,
        `offset`, `n`) reads from it or from a report, `unsnapshot` removes it. An error is an answer too:
        `{"error": text}`.
        """
        watching = False
        try:
            asked = msgspec.msgpack.decode(request, type=dict[str, Any])
            watching = asked.get("watching") is True
            return encode(self._answer(asked)), watching
        except Exception as error:
            self._errors.note("query", error)
            failed = {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR]}
            return msgspec.msgpack.encode(failed), watching

    def status(self) -> dict[str, Any]:
        """Return how the aggregator itself is doing: counts in rows, errors by place."""
        with self._writer.lock:
            streams = list(self._writer.streams.values())
            meta = {name: value for name, value in self._writer.meta.items() if name != KEY}
        runs = by_run(streams)
        run = newest(with_rows(runs), meta.get("runs", {}))
        verdict = self._judge.verdict(run) if run else None
        return {
            **meta,
            "run": run,
            "ranks": len(shown(runs.get(run or "", []))),
            "ledger": count_rows(streams),
            "errors": dict(self._errors),
            "verdict": verdict.label if verdict else None,
        }

    def _answer(self, asked: dict[str, Any], fresh: bool = True) -> dict[str, Any]:
        what = asked.get("what")
        if what == "several":
            return {"result": [self._answer(question, fresh=False) for question in asked["asked"]]}
        if what == "status":
            return {"result": self.status()}
        if what == "verdict":
            return {"result": self._judge.answer(asked.get("run"))}
        if what in QUESTIONS:
            with self._writer.lock:
                over = self._writer.meta.get("status", "running") != "running"
            return self._steps.answer({**asked, "run": asked.get("run") or self._judge.newest()}, over)
        if what == "file":
            offset, n = int(asked.get("offset", 0)), int(asked.get("n", 0))
            return {"result": self.snapshots.read(str(asked.get("name")), offset, n)}
        if what == "unsnapshot":
            self.snapshots.remove(asked.get("name"))
            return {"result": None}
        if fresh and what in ("summary", "runs", "nodes", "ranks"):
            self._commit()  # what has come until now is in the answer
        reader = self._reader()
        reader.run = asked.get("run")
        if what == "snapshot":
            return {"result": self._snapshot(reader)}
        return answer_from(reader, asked, self._settings.thresholds)

    def _reader(self) -> SessionFile:
        """Return this thread's reader of the session file."""
        reader: SessionFile | None = getattr(self._own, "reader", None)
        if reader is None:
            reader = self._own.reader = self._writer.reader()
            self._readers.append(reader)
        return reader

    def _reported(self, run: str | None) -> dict[str, Any] | None:
        """Return the report of a run that is over, as it was written."""
        try:
            summary = read_json(self._folder.summary_json, dict[str, Any])
        except (OSError, ValueError):
            return None
        return summary if summary.get("run") == run else None

    def _snapshot(self, reader: SessionFile) -> dict[str, str | int]:
        """Copy the session file as it stands, with everything that has come; the reports are of the same."""
        self._commit()
        write_reports(self._folder, reader, self._settings.thresholds, quick=True, put=self._writer.put)
        return self.snapshots.make(reader)


def answer_from(reader: SessionFile, asked: dict[str, Any], thresholds: Thresholds) -> dict[str, Any]:
    """Answer what a session file alone can say, live or stored. Raises ValueError for any other question."""
    what, since = asked.get("what"), int(asked.get("since", 0))
    if what == "summary":
        return {"result": next(summaries(reader, thresholds))}  # of a very long run, its newest steps
    if what in ("runs", "nodes"):
        return {"result": (runs_of if what == "runs" else nodes_of)(reader)}
    if what == "rows":
        found, cursor = reader.rows(asked.get("only"), since, asked.get("last"), asked.get("most"))
        return {"result": [_packed(rows) for rows in found], "cursor": cursor}
    if what in ("process_of", "node_samples_of"):
        return {"result": getattr(reader, what)(asked["only"], int(asked["last"]))}
    if what == "parts":
        return {"result": _parts(reader, int(asked["rank"]), int(asked["first"]), int(asked["last"]))}
    if what == "events":
        result, cursor = reader.events(since, brief=bool(asked.get("brief")), most=asked.get("most"))
        return {"result": result, "cursor": cursor}
    if what in ("node_samples", "verdicts"):
        result, cursor = getattr(reader, what)(since)
        return {"result": result, "cursor": cursor}
    if what in ("meta", "ranks", "streams", "details", "ledger"):
        return {"result": msgspec.to_builtins(getattr(reader, what)())}
    raise ValueError(f"there is nothing called {what!r} to ask for")


def _parts(reader: SessionFile, rank: int, first: int, last: int) -> list[dict[str, Any]]:
    """Return the named parts of a rank per step, the longest first; in a small job, against the others'."""
    ranks = reader.ranks()
    known = ranks if len(ranks) <= MAX_PEERS else {rank: ranks[rank]} if rank in ranks else {}
    found = StoredParts(reader, known).find([*known], first, last)
    parts = []
    for (name, stage), rate in sorted(found.get(rank, {}).items(), key=lambda part: -part[1].ns):
        every = [rates[name, stage].ns / 1e6 if (name, stage) in rates else 0.0 for rates in found.values()]
        parts.append(
            {
                "stage": STAGES[stage],
                "name": name,
                "ms": rate.ns / 1e6,
                "median_ms": float(np.median(every)) if known is ranks else None,
                "times_per_step": rate.times,
                "bytes": rate.size / rate.times if rate.size and rate.times else None,
            }
        )
    return parts


def _packed(found: RankRows) -> dict[str, Any]:
    columns = {"keys": found.keys.tobytes(), "flags": found.flags.tobytes(), "rows": found.rows.tobytes()}
    who = {name: getattr(found, name) for name in ("rank", "node", "stream", "group", "strategy")}
    return {**who, **columns}
