"""The questions that a session answers in Python. Running and stored sessions answer the same ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from traceml_ray.document import drawing
from traceml_ray.interactive.html import page_of_session
from traceml_ray.interactive.plots import figure_of
from traceml_ray.interactive.rows import RowList
from traceml_ray.interactive.steps import MOST_ROWS, StepTable, at_most, chosen_ranks, joined
from traceml_ray.reports.comparison import (
    Comparison,
    ask_side,
    ask_stored,
    compared,
    limits_of,
    read_whole,
)
from traceml_ray.reports.document import ChartData, of_summary
from traceml_ray.settings import Settings
from traceml_ray.signals.check.judge import CheckResult
from traceml_ray.signals.check.view import GetCheck
from traceml_ray.signals.collectives.judge import CollectiveTimes
from traceml_ray.signals.collectives.view import GetCollectives
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.goodput.answer import Goodput
from traceml_ray.signals.goodput.view import GetGoodput
from traceml_ray.signals.layers.judge import Layers
from traceml_ray.signals.layers.view import GetLayers
from traceml_ray.signals.logged.judge import LoggedMetric
from traceml_ray.signals.logged.view import GetLogged
from traceml_ray.signals.memory.view import GetMemory, RunMemory
from traceml_ray.signals.output.last_lines import LastOutput
from traceml_ray.signals.output.view import GetOutput
from traceml_ray.signals.throughput.judge import Throughput
from traceml_ray.signals.throughput.view import GetThroughput
from traceml_ray.store import query
from traceml_ray.store.profiles import ProfileInfo
from traceml_ray.store.rank_processes import of_run
from traceml_ray.store.results import BundleInfo, EventRow, LiveVerdict, NodeInfo, RankInfo, RunInfo, Status
from traceml_ray.store.step_rows import StepRows
from traceml_ray.store.summary_shape import Summary


class SessionQuestions:
    """
    The questions that a session answers. A subclass sends them (`_reply`), and raises the error if there is
    no answer (`_refuse`).
    """

    id: str
    """Name of the session."""
    folder: Path
    """Path of the session's files."""

    def _reply(self, message: bytes) -> bytes:
        """Return the answer to an encoded question, see `store.query`."""
        raise NotImplementedError

    def _refuse(self, why: str) -> NoReturn:
        """Raise the error for a question without an answer."""
        raise NotImplementedError

    def nodes(self) -> RowList[NodeInfo]:
        """
        Return the nodes of the cluster, also lost ones, with the ranks on each. The list is a table, like
        that of `ranks`.
        """
        return RowList(self._ask(query.GetNodes()), NodeInfo)

    def ranks(self, run: str | None = None, *, every_attempt: bool = False) -> RowList[RankInfo]:
        """
        Return the process of each rank in the run, with its number of stored rows. After a restart these are
        the processes of the attempt that the numbers cover; with `every_attempt`, those of all attempts, the
        oldest first.

        The list is also a table: `ranks.stored` is an array, `ranks.to_pandas()` a DataFrame.
        """
        processes = [process for process in self._ask(query.GetRanks(run)).values() if process.identity]
        if every_attempt and processes and (identity := processes[0].identity):
            processes = of_run(self._ask(query.GetProcesses()), identity.job_id)
        infos = [
            RankInfo(**msgspec.structs.asdict(process.identity), stored=process.stored)
            for process in processes
            if process.identity
        ]
        return RowList(infos, RankInfo)

    def runs(self) -> RowList[RunInfo]:
        """Return the runs of this session, one for each `fit()` or launch, the oldest first."""
        return RowList(self._ask(query.GetRuns()), RunInfo)

    def steps(
        self,
        first: int = 0,
        last: int | None = None,
        *,
        ranks: str | int | Iterable[int] | None = None,
        run: str | None = None,
        most: int = MOST_ROWS,
    ) -> StepTable:
        """
        Return the rows of steps `first` to `last`: one row for each step, segment and rank, sorted in this
        order. The columns are arrays by name (`steps.rank`, `steps.data_ns`); `to_pandas()` returns a
        DataFrame. Times are int64 ns.

        Args:
            first: the first step.
            last: the last step; None: the newest.
            ranks: numbers, or text such as "0,4-7"; None: all.
            run: a run's id or name.
            most: largest number of rows, a million by default (70 MB, and three times that while they are
                read).

        Raises ValueError if there are more than `most` rows (the message names the arguments that reduce
        them), and for ranks that the run does not have.
        """
        known = self._ask(query.GetRanks(run))
        chosen = chosen_ranks(ranks, known)
        wanted = len(chosen or ()) or sum(process.identity is not None for process in known.values())
        return joined([*at_most(self._parts(first, last, chosen, run), most, wanted, self.id)])

    def iter_steps(
        self,
        first: int = 0,
        last: int | None = None,
        *,
        ranks: str | int | Iterable[int] | None = None,
        run: str | None = None,
    ) -> Iterator[StepTable]:
        """
        Yield the rows of `steps` in parts of about 200,000 rows, in the order in which they were stored,
        which is nearly the order of steps. For sessions that do not fit into memory.
        """
        chosen = chosen_ranks(ranks, self._ask(query.GetRanks(run)))
        for part in self._parts(first, last, chosen, run):
            if len(part.step):
                yield joined([part])

    def _parts(
        self, first: int, last: int | None, chosen: tuple[int, ...] | None, run: str | None
    ) -> Iterator[StepRows]:
        if first < 0 or (last is not None and last < first):
            raise ValueError(f"steps from {first} to {last}: choose 0 <= first <= last")
        since = 0
        while True:
            part = self._ask(query.GetStepRows(run, first=first, last=last, ranks=chosen, since=since))
            yield part
            if part.end:
                return
            since = part.cursor

    def events(self, run: str | None = None, most: int = 10_000) -> RowList[EventRow]:
        """
        Return the newest `most` events of the run and of nodes (restarts, deaths, notes), the oldest first.
        The list is also a table, like the one of `ranks`.
        """
        return RowList(self._ask(query.GetEvents(run, brief=True, most=most)).items, EventRow)

    def summary(self, run: str | None = None) -> Summary:
        """
        Return the summary (`traceml_ray/summary/1`) of the run.

        For a session that has ended it is the content of `summary.json` and covers all steps. While a session
        runs, the summary of a long run covers the newest steps only (`steps.covers` says which).
        """
        return self._ask(query.GetSummary(run))

    def verdict(self, run: str | None = None) -> LiveVerdict | None:
        """
        Return the current verdict; after the run's end, the verdict on the whole run. None before the first
        verdict.
        """
        return self._ask(query.GetVerdict(run))

    def memory(self, run: str | None = None) -> RunMemory:
        """Return which rank's memory grew first, and all other results of the memory analysis."""
        return self._ask(GetMemory(run))

    def findings(self, run: str | None = None) -> RowList[Finding]:
        """
        Return the current findings of the run. Those of the verdict come first, then those of other signals
        (memory, layers, sharding, experts, nodes), the costliest first; at equal cost the most severe comes
        first. There are at most a hundred. `explains` names a finding that this one may explain. The list is
        also a table, like the one of `ranks`.
        """
        return RowList(self._ask(query.Findings(run)), Finding)

    def logged(self, run: str | None = None) -> list[LoggedMetric]:
        """
        Return the numbers that the script has logged (`traceml_ray.log`), in the order in which their names
        were first used.
        """
        return self._ask(GetLogged(run))

    def collectives(self, run: str | None = None) -> CollectiveTimes:
        """
        Return bytes, time and bandwidth of each kind of collective, those that move the most bytes first.
        `why` gives the reason where the time is not known.
        """
        return self._ask(GetCollectives(run))

    def check(self, run: str | None = None) -> CheckResult:
        """
        Return what the newest check of the nodes of the run says: what is slower than its peers (`slow`), and
        all that was measured (`levels`). Without a check there are no levels.
        """
        return self._ask(GetCheck(run))

    def throughput(self, run: str | None = None) -> Throughput:
        """
        Return samples, tokens and FLOPs per second, and the time left. They cover the newest steps; after the
        end of a run, all steps. `why` gives the reason for each value that is not known.
        """
        read_whole(self._ask, run, live=True)
        return self._ask(GetThroughput(run))

    def goodput(self, run: str | None = None) -> Goodput:
        """
        Return where the time of all ranks of the run went, over all its attempts: productive steps, and all
        that is not. `seconds` adds up to `rank_s`. `why` gives the reason for each value that is not known.
        """
        read_whole(self._ask, run, live=True)
        return self._ask(GetGoodput(run))

    def output(self, rank: int, most: int = 40, run: str | None = None) -> LastOutput:
        """Return the last printed lines of a rank: `most` lines of stdout and as many of stderr."""
        return self._ask(GetOutput(run, rank, most))[0]

    def layers(self, *, run: str | None = None) -> Layers:
        """Return the measured time and memory of each layer of the model."""
        return self._ask(GetLayers(run))

    def compare(
        self,
        baseline: str | os.PathLike[str],
        *,
        run: str | None = None,
        baseline_run: str | None = None,
        least_pct: float | None = None,
    ) -> Comparison:
        """
        Return whether a run, with the steps so far, is better or worse than a stored session. `baseline` is
        the name of a session in the same folder, or a path; it is read on this machine. See
        `traceml_ray.compare`, also for the errors about `baseline`.
        """
        stored = ask_stored(ask_side, baseline, baseline_run, Settings.load(out=str(self.folder.parent)))
        with self._answered():
            this_side = ask_side(self._reply, run)
        return compared(stored, this_side, limits_of(least_pct))

    def bundles(self) -> list[BundleInfo]:
        """Return the bundles of incidents (a rank that died, a hang, …), the oldest first."""
        return self._ask(query.GetBundles())

    def profiles(self) -> list[ProfileInfo]:
        """Return the profiles of the session, the oldest first."""
        return self._ask(query.GetProfiles()).done

    def status(self) -> Status:
        """
        Return the state of the session itself: where its rows are, and the swallowed
        exceptions by place.
        """
        return self._ask(query.GetStatus())

    def plot(self, name: str = "ranks", *, run: str | None = None) -> Any:
        """
        Return a chart of the run as a figure of Plotly, as the web app draws it. The first chart of a stored
        run reads all of its steps.

        Args:
            name: `ranks` (busy time of each rank by step), `steps` (median and worst rank by step), `stages`
                (where the time of a step goes), `skew`, `change` (before the onset and since), `memory` or
                `layers`.
            run: a run's id or name.

        Raises ValueError for another name, which lists these, ImportError where plotly is not installed.
        """
        return figure_of(self._ask, name, run, self.id)

    def _repr_html_(self) -> str:
        """Return verdict, numbers and heatmap of the newest run as HTML for a notebook."""
        return page_of_session(self._chart_data(), repr(self).strip("<>"))

    def _chart_data(self) -> ChartData:
        summary = self._ask(query.GetSummary())
        run = summary.run
        chart_data = of_summary(summary)
        if run is None:
            return chart_data
        times = read_whole(self._ask, run, live=True)
        columns = self._ask(query.GetColumns(run, whole=True))
        if not len(columns.first):
            return chart_data
        silent = dict.fromkeys(summary.session.silent_ranks, "no report")
        timeline = self._ask(query.GetTimeline(run))
        ordered = drawing.ordered(columns, silent)
        return chart_data._replace(times=times, columns=ordered, timeline=timeline)

    def _ask(self, request: query.Request[query.A]) -> query.A:
        with self._answered():
            return query.ask_one(self._reply, request)

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        """Raise this session's own error if a question in the block has no answer."""
        try:
            yield
        except query.QueryError as error:
            why = str(error)
        else:
            return
        self._refuse(why)
