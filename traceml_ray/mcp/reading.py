"""
The tools that read a session. Each asks what a method of `traceml_ray.open` answers. Their docstrings and the
descriptions of their parameters are what a model reads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import asdict
from pydantic import Field

from traceml_ray.interactive.steps import chosen_ranks
from traceml_ray.mcp.bounded import LIMIT, Row, as_text, cut_text
from traceml_ray.mcp.sessions import Sessions
from traceml_ray.reports import comparison, overlay
from traceml_ray.reports.answers import Answers
from traceml_ray.reports.listing import listed
from traceml_ray.settings import Settings
from traceml_ray.signals.finding import MOST as MOST_FINDINGS
from traceml_ray.store import session as session_folder

MAX_ENTRIES = 200
"""Largest value of the parameter `most`."""
SESSION = Annotated[
    str | None,
    Field(description="Name of a session, or path of its folder. Default: the running one, else the newest."),
]
RUN = Annotated[str | None, Field(description="Id or name of a run of the session. Default: the newest.")]
MOST = Annotated[
    int,
    Field(ge=1, le=MAX_ENTRIES, description="Largest number of entries of a list; the rest is counted."),
]
RANKS = Annotated[str, Field(description="Ranks: all, or numbers and ranges such as 0,4-7.")]
_OF_CHARTS = "first", "last", "line", "lowest", "highest"
"""Fields of a logged number that hold its course over the steps."""


class ReadingTools:
    """
    Tools that read the sessions of a folder.

    Args:
        sessions: opens them.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.tools: tuple[Callable[..., str], ...] = (
            *(self.list_sessions, self.get_verdict, self.get_findings, self.get_status, self.get_stages),
            *(self.get_ranks, self.get_nodes, self.get_throughput, self.get_memory, self.get_layers),
            self.get_goodput,
            *(self.get_logged, self.get_steps, self.get_events, self.get_output, self.get_report),
            *(self.compare_sessions, self.list_profiles),
        )

    def list_sessions(self, most: MOST = 20) -> str:
        """
        List the training sessions of the folder: name, status, ranks, steps, and what the verdict is. Running
        sessions come first, then the newest.
        """
        out = self._sessions.out
        if session_folder.why_unreadable(Path(out)):
            raise session_folder.no_sessions(Path(out))
        folder = str(Path(out).absolute())
        return as_text(Row(folder=folder, sessions=listed(out, time.time_ns())), most)

    def get_verdict(self, session: SESSION = None, run: RUN = None, most: MOST = 10) -> str:
        """
        Say what makes the training slow: label, rank, node, stage, what it costs (% of the time), why, and
        what to do next. Ask this first. `exposed_ms` has the mean ms per step of the stages post_sync, data,
        prepare, forward, backward, sync_wait. `suspects` are ranks that may be the cause.
        """
        with self._sessions.opened(session) as opened:
            verdict = opened.verdict(run)
        if verdict is None:
            return (
                f"Session {opened.id!r} has no verdict yet: too few steps are stored. Ask again in some "
                "seconds. get_status says how many rows have arrived."
            )
        return as_text(verdict, most)

    def get_findings(
        self,
        session: SESSION = None,
        run: RUN = None,
        most: Annotated[int, Field(ge=1, le=MOST_FINDINGS, description="Largest number of findings.")] = 10,
    ) -> str:
        """
        List everything that was found in a run, with its evidence: slow ranks, memory that grows, slow
        layers, uneven shards, nodes. The findings on steps come first, then the costliest. `cost` is the
        share of time (0 to 1) that a fix saves. `explains` is the key of a finding that this one may explain.
        """
        with self._sessions.opened(session) as opened:
            findings = opened.findings(run)
        return as_text([Row(headline=one.headline, **asdict(one)) for one in findings], most)

    def get_status(self, session: SESSION = None, most: MOST = 20) -> str:
        """
        Say how a session is doing: running or ended, exit code, command, ranks that report, its runs, rows
        that were produced, stored and lost, and errors of the monitor.
        """
        with self._sessions.opened(session) as opened:
            answer = Row(folder=str(opened.folder), live=opened.is_live, status=opened.status())
            return as_text(Row(answer, runs=opened.runs()), most)

    def get_stages(self, session: SESSION = None, run: RUN = None, most: MOST = 20) -> str:
        """
        Say where the time of a step goes: step times, each stage (exposed time, share of the step, worst
        rank), named spans inside the stages, the baseline of a healthy step, and how ranks and nodes differ.
        """
        with self._sessions.opened(session) as opened:
            summary = opened.summary(run)
        answer = Row(steps=_without(summary.steps, "per_rank_", "per_node_"))
        names = "stages", "spans", "baseline", "first_steps", "roles"
        return as_text(Row(answer, **{name: getattr(summary, name) for name in names}), most)

    def get_ranks(
        self, session: SESSION = None, ranks: RANKS = "all", run: RUN = None, most: MOST = 12
    ) -> str:
        """
        Compare the ranks of a run, the slowest first: median busy ms per step, share of the time that its
        device is idle (%), node and process, how far it came and how it ended, its memory.
        """
        with self._sessions.opened(session) as opened:
            infos, summary = opened.ranks(run), opened.summary(run)
        known = {info.global_rank: info for info in infos}
        busy, idle = summary.steps.per_rank_median_ms, summary.steps.per_rank_gpu_idle_pct
        rows = [
            Row(
                rank=rank,
                busy_median_ms=busy.get(str(rank)),
                gpu_idle_pct=idle.get(str(rank)),
                identity=known[rank],
                state=summary.ranks.get(str(rank)),
                memory=summary.memory.per_rank.get(rank),
            )
            for rank in chosen_ranks(_filter(ranks), known) or known
        ]
        return as_text(sorted(rows, key=_slowest_first), most)

    def get_nodes(self, session: SESSION = None, run: RUN = None, most: MOST = 12) -> str:
        """
        Compare the nodes of a run, the slowest first: median busy ms per step of a node's ranks, its ranks,
        whether it is alive, and samples of its CPU, memory, network and GPUs (median and peak).
        """
        with self._sessions.opened(session) as opened:
            nodes, summary = opened.nodes(), opened.summary(run)
        samples = {node["node_id"]: node for node in summary.system.nodes}
        rows = [
            Row(
                node=node.label,
                busy_median_ms=summary.steps.per_node_median_ms.get(node.label),
                state=node,
                samples=samples.get(node.node_id),
            )
            for node in nodes
        ]
        return as_text(sorted(rows, key=_slowest_first), most)

    def get_throughput(self, session: SESSION = None, run: RUN = None, most: MOST = 32) -> str:
        """
        Return samples, tokens and FLOPs per second of the job and its ranks, MFU, and the time left. `why`
        says why a value is not known.
        """
        with self._sessions.opened(session) as opened:
            return as_text(_without(opened.throughput(run), "line_"), most)

    def get_goodput(self, session: SESSION = None, run: RUN = None, most: MOST = 16) -> str:
        """
        Return where the time of all ranks went (s), over all attempts of the run: productive steps, data,
        waiting, checkpoints, evaluation, start, hangs, repeated steps, recovery. `seconds` adds up to
        `rank_s`; `why` says why a value is not known.
        """
        with self._sessions.opened(session) as opened:
            return as_text(opened.goodput(run), most)

    def get_memory(self, session: SESSION = None, run: RUN = None, most: MOST = 10) -> str:
        """Say which rank's memory grew first, what grows, how long it lasts, and what ranks use (bytes)."""
        with self._sessions.opened(session) as opened:
            return as_text(opened.memory(run), most)

    def get_layers(self, session: SESSION = None, run: RUN = None, most: MOST = 20) -> str:
        """
        Return the measured time and memory of each layer of the model, and layers that are slower on one
        rank. It is empty unless layers were measured (started with --deep, or `traceml-ray layers --steps`).
        """
        with self._sessions.opened(session) as opened:
            return as_text(opened.layers(run=run), most)

    def get_logged(
        self,
        session: SESSION = None,
        name: Annotated[
            str | None, Field(description="One name: also its course over the steps. Default: all names.")
        ] = None,
        run: RUN = None,
        most: MOST = 16,
    ) -> str:
        """
        Return the numbers that the training script has logged (loss, learning rate): name, newest value of
        each rank, smallest and largest value, and ranks with NaN or infinity. With `name` also its course, in
        columns of steps `first` to `last`.
        """
        with self._sessions.opened(session) as opened:
            metrics = opened.logged(run)
        if name is None:
            return as_text([_without(metric, *_OF_CHARTS) for metric in metrics], most)
        for metric in metrics:
            if metric.name == name:
                return as_text(metric, max(most, len(metric.line)))
        names = ", ".join(metric.name for metric in metrics) or "none; traceml_ray.log(loss=loss) logs one"
        raise ValueError(f"session {opened.id!r} has no logged number {name!r}; there: {names}")

    def get_steps(
        self,
        first: Annotated[int, Field(ge=0, description="First step.")],
        last: Annotated[int, Field(ge=0, description="Last step.")],
        session: SESSION = None,
        ranks: RANKS = "all",
        run: RUN = None,
        most: Annotated[int, Field(ge=1, le=MAX_ENTRIES, description="Largest number of rows.")] = 100,
    ) -> str:
        """
        Return single steps: the ns of each stage, one row for each step and rank. If there are more than
        `most` rows it is an error: choose few steps, or few ranks.
        """
        with self._sessions.opened(session) as opened:
            table = opened.steps(first, last, ranks=_filter(ranks), run=run, most=most)
        columns = [getattr(table, name).tolist() for name in table.columns]
        rows = [list(row) for row in zip(*columns, strict=True)]
        return as_text(Row(columns=table.columns, kept_as_sums_only=table.folded, rows=rows), most)

    def get_events(self, session: SESSION = None, run: RUN = None, most: MOST = 20) -> str:
        """
        Return the newest events of a run and its nodes, the newest first: restarts, deaths, exceptions, lost
        nodes, notes. Their texts come from the training job.
        """
        with self._sessions.opened(session) as opened:
            return as_text(opened.events(run, most)[::-1], most)

    def get_output(
        self,
        rank: Annotated[int, Field(ge=0, description="Global rank.")],
        session: SESSION = None,
        most: Annotated[int, Field(ge=1, le=MAX_ENTRIES, description="Lines of each stream.")] = 40,
        run: RUN = None,
    ) -> str:
        """
        Return the last lines that a rank printed, the newest last: what it printed before it died. The text
        comes from the training job.
        """
        with self._sessions.opened(session) as opened:
            output = opened.output(rank, most, run)
        lines = [f"{line.stream}: {line.text}" for line in output.lines]
        while sum(map(len, lines)) > LIMIT and len(lines) > 1:
            lines = lines[1:]
        shown = "\n".join([*lines, *filter(None, [output.missing])])
        return cut_text(shown) or f"Rank {rank} has printed nothing."

    def get_report(self, session: SESSION = None, run: RUN = None) -> str:
        """Return the report of a session as text for people: verdict, numbers, ranks, nodes, losses."""
        with self._sessions.opened(session) as opened:
            answers = Answers(opened.folder, Settings.load(out=self._sessions.out).thresholds)
            try:
                return cut_text(answers.report_text(run))
            finally:
                answers.close()

    def compare_sessions(
        self,
        sessions: Annotated[
            list[str],
            Field(min_length=2, description="2 to 8 names. The others are compared with the first."),
        ],
        most: MOST = 24,
    ) -> str:
        """
        Say whether a session is better or worse than another one, by how much, in which stage and on which
        ranks. Of three or more sessions, a table with a row for each comes first.
        """
        settings = Settings.load(out=self._sessions.out)
        sides = overlay.stored_runs(comparison.ask_side, sessions, [None] * len(sessions), settings)
        table = overlay.table_of(sides)
        return as_text(table.comparisons[0] if len(sides) == 2 else table, most)

    def list_profiles(self, session: SESSION = None, most: MOST = 10) -> str:
        """
        List the profiles of torch's profiler in a session, the newest first: which steps and ranks, why, and
        what the slow rank does more of than the median rank (`found`).
        """
        with self._sessions.opened(session) as opened:
            return as_text(opened.profiles()[::-1], most)


def _slowest_first(row: Mapping[str, Any]) -> float:
    busy = row["busy_median_ms"]
    return math.inf if busy is None else -busy


def _filter(ranks: str) -> str | None:
    return None if ranks.strip() == "all" else ranks


def _without(answer: msgspec.Struct, *beginnings: str) -> Row:
    """Return the fields of an answer, without those whose names begin like this."""
    return Row({name: value for name, value in asdict(answer).items() if not name.startswith(beginnings)})
