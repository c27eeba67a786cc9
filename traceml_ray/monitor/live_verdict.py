"""
The live judge: it gives the current verdict on every run, and judges each run separately. It also looks for
anomalies of the nodes that a verdict names, for as long as it names them.

Baselines and episodes are stored in the session file, so that a restarted aggregator can go on judging.
"""

from __future__ import annotations

import base64
import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import asdict

from traceml_ray.analysis.anomalies import Anomaly, Excerpt
from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.episodes import AtEnd, Brief, Episodes
from traceml_ray.analysis.history import RunJudge
from traceml_ray.analysis.labels import DEATHS
from traceml_ray.analysis.reasons import (
    SpanRates,
    has_reason,
    is_imbalance,
    span_rates,
    with_reason,
    with_spans,
)
from traceml_ray.analysis.roles import median_rank
from traceml_ray.analysis.step_stats import of_rows, span, trained_since
from traceml_ray.analysis.thresholds import MACHINE, Thresholds
from traceml_ray.analysis.track import Clock, Episode, FindingTrack, Recurring
from traceml_ray.analysis.uneven_work import Reason, amounts, loads
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.verdict_shapes import TimedEpisode
from traceml_ray.analysis.watching import Watch
from traceml_ray.analysis.window import Float, Int64, Window, missing_of
from traceml_ray.errors import Errors
from traceml_ray.monitor.bundling import Bundling, asked_for_bundle
from traceml_ray.monitor.hang_watch import HangWatch
from traceml_ray.monitor.live_steps import MAX_LIVE, LiveRanks, LiveRuns, LiveSteps, Recent, RunNow
from traceml_ray.reports.baseline import given
from traceml_ray.reports.deaths import FATAL, culprits, deaths, headline
from traceml_ray.reports.headlines import conclude
from traceml_ray.reports.machines import Machines, reference_rank, with_advice
from traceml_ray.reports.run_facts import moment
from traceml_ray.settings import SettingError, Settings
from traceml_ray.signals.collectives.records import CollectivesReport
from traceml_ray.signals.live import LiveSignal, Ranks
from traceml_ray.signals.views import confirmed, findings_of, with_causes
from traceml_ray.store.history_reader import Packer
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import (
    MAX_RUNS,
    RankProcess,
    generations,
    newest,
    node_key,
    rpc_only_ranks,
)
from traceml_ray.store.results import EventRow, LiveVerdict, live_verdict
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import Conclusion
from traceml_ray.store.writer import SessionWriter
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready

KEY = "judging"
"""Key of the episodes in the session's `meta`."""
SAVE_EVERY_NS = 10_000_000_000
"""Interval at which open episodes are written. An episode that begins or ends is written at once."""
MAX_HISTORIES = 16
FORM = 6
"""Version of the packed form. Raise it when one of the classes below changes (as in `history_reader`)."""
PACKER = Packer(
    FORM,
    16 << 20,
    Episodes,
    Brief,
    FindingTrack,
    Recurring,
    Clock,
    Episode,
    AtEnd,
    Watch,
    Verdict,
    Thresholds,
)


@dataclass(eq=False)
class SavedState:
    """
    Saved state of the newest runs: baseline, episodes and their cost so far, and how long the run was judged.

    A baseline named in the settings, or saved episodes, that cannot be read are counted in `errors`.
    """

    writer: SessionWriter
    settings: Settings
    clock: Callable[[], int]
    errors: Errors

    def __post_init__(self) -> None:
        self._kept: dict[str, tuple[object, int]] = {}
        """The last saved episodes and the time of saving, by run."""

    def baseline(self, run: str) -> Baseline | None:
        """Return the baseline kept for `run`, else the configured one. Reads a file the first time."""
        kept = self._kept_of(run, "baselines")
        return self._given if kept is None else msgspec.convert(kept, ready(Baseline))

    def resume(self, run: str, which: tuple[int, int], judge: RunJudge) -> dict[int, int]:
        """
        Restore the stored episodes of the generation with key `which` into `judge`, if they can be used.
        Return when each episode began (ns since the epoch), by its first step.
        """
        kept = self._kept_of(run, KEY)
        if kept is None or kept.get("which") != [*which]:
            return {}
        try:
            judge.resume(PACKER.unpack(base64.b64decode(kept["state"])))
            return dict(kept["began"])
        except Exception as error:
            self.errors.note("history", error)
            return {}

    def keep(self, run: str, which: tuple[int, int], judge: RunJudge, began: Mapping[int, int]) -> None:
        """
        Save the baseline of `run` and its episodes, if saving is due or there is a new finding. `began` has
        the time at which each episode began, as `resume` returns it.
        """
        baseline = None if judge.baseline is None else msgspec.to_builtins(judge.baseline)
        self._keep(run, "baselines", baseline, MAX_RUNS)
        named, now = judge.episodes.named, self.clock()
        before, at_ns = self._kept.get(run, (None, 0))
        if named != before or now - at_ns >= SAVE_EVERY_NS:
            self._kept[run] = named, now
            state = base64.b64encode(PACKER.pack(judge.state())).decode()
            times = [[step, t_ns] for step, t_ns in began.items()]
            self._keep(run, KEY, {"which": [*which], "state": state, "began": times}, MAX_HISTORIES)

    @cached_property
    def _given(self) -> Baseline | None:
        try:
            return given(self.settings)
        except SettingError as error:
            self.errors.note("baseline", error)
            return None

    def _kept_of(self, run: str, key: str) -> Any:
        with self.writer.lock:
            return self.writer.meta.get(key, {}).get(run)

    def _keep(self, run: str, key: str, value: Any, most: int) -> None:
        with self.writer.lock:
            kept = dict(self.writer.meta.get(key, {}))
            if kept.pop(run, None) == value:
                return
            kept[run] = value
            while len(kept) > most:
                del kept[next(iter(kept))]
            self.writer.set_meta(**{key: kept})


EVERY_NS = 1_000_000_000
_ROWS = 1024


@dataclass(eq=False)
class NodeEvidence:
    """
    Evidence from the nodes of one run. What was usual before the present ranks were named counts as usual
    while they are named.
    """

    writer: SessionWriter
    recent: Recent
    steps: LiveSteps
    clock: Callable[[], int]
    warmup_steps: int

    def __post_init__(self) -> None:
        self._trained: tuple[int | None, int] = None, 0
        self._named: object = None
        self._since_ns = 0
        self._examined_ns = 0
        self._machine: tuple[Anomaly, ...] | None = None

    def add(self, verdict: Verdict, ranks: dict[int, RankProcess], labels: dict[int, str]) -> Verdict:
        """
        Return `verdict` with its `machine` filled in. It is examined again after a second; for a death, only
        once.

        Args:
            verdict: the verdict on the run.
            ranks: the process of each of its ranks.
            labels: names of the rank processes' nodes.
        """
        rank, now = reference_rank(verdict, ranks), self.clock()
        trained_ns = self._trained_ns(ranks)
        if rank is None:
            self._named = None
            return verdict
        named = verdict.label, verdict.stages, verdict.ranks
        fresh = named != self._named
        due = now - self._examined_ns >= EVERY_NS and verdict.exit_reason is None
        if fresh or due:
            process = ranks[rank]
            with self.writer.lock:
                every = list(self.writer.processes.values())
            names = {node_key(process): labels[process.id] for process in every if process.id in labels}
            machines = Machines(self._sampled, ranks, every, names)
            keys, _, rows = self.steps.rows_of(process.id, _ROWS)
            with self.writer.lock:
                when = machines.when(verdict, of_rows(keys, rows))
            if when is None:
                return verdict
            if fresh:
                self._named, self._since_ns = named, when[0]
            first_ns = max(self._since_ns, when[1] - int(MACHINE.live_s * 1e9))
            self._examined_ns = now
            self._machine = machines.examine(verdict, first_ns, when[1], trained_ns, self._since_ns).machine
        return msgspec.structs.replace(verdict, machine=self._machine)

    def began_ns(self, rank: int | None, step: int, ranks: dict[int, RankProcess]) -> int | None:
        """
        Return when `rank` (None: all ranks) reached `step`, in ns since the epoch. None: its rows from that
        step on are not known.
        """
        process = ranks.get(min(ranks, default=-1) if rank is None else rank)
        if process is None or process.last_rows_ns is None:
            return None
        keys, _, rows = self.steps.rows_of(process.id, _ROWS)
        line = of_rows(keys, rows)
        if not len(line.first) or line.first[0] > step:
            return None
        when = span(line, process.last_rows_ns, step, None)
        return None if when is None else when[0]

    def _trained_ns(self, ranks: dict[int, RankProcess]) -> int:
        """
        Return the time at which the run passed its warm-up. It uses the first rows, which are
        dropped later.
        """
        process = ranks[min(ranks)] if ranks else None
        if process is None or process.last_rows_ns is None:
            return self.clock()
        if process.id != self._trained[0]:
            keys, _, rows = self.steps.rows_of(process.id, _ROWS)
            trained_ns = trained_since(of_rows(keys, rows), process.last_rows_ns, self.warmup_steps)
            if trained_ns == process.last_rows_ns:
                return trained_ns
            self._trained = process.id, trained_ns
        return self._trained[1]

    def _sampled(self, nodes: Sequence[str], first_ns: int, last_ns: int) -> dict[str, Excerpt]:
        machines = {}
        for node in nodes:
            with self.writer.lock:  # lock per node: a message never waits until all nodes are copied
                machines.update(self.recent.machines([node], first_ns, last_ns))
        return machines


MAX_WINDOWS = 32
"""Largest number of windows judged at a time. Short steps: all new windows. Many ranks: fewer windows."""
MAX_ROWS = 100_000
"""Largest number of rows in the windows before the newest."""
MAX_EPISODES = 50
"""Largest number of episodes of a run in one answer."""
MAX_FATAL = 4
"""Largest number of events of one kind on the death of one process. A process dies once."""


@dataclass(eq=False)
class LiveJudge:
    """
    Judges runs from data in memory. Changes of a verdict are stored with their run.

    Args:
        writer: writes the session file; its lock is held briefly.
        recent: the newest spans of every rank process and samples of every node.
        steps: the histories of the live runs.
        signals: the signals that are judged in addition to steps.
        settings: of the session.
        clock: wall clock in ns.
        errors: counts runs that cannot be judged.
        bundling: receives deaths and hangs.
    """

    writer: SessionWriter
    recent: Recent
    steps: LiveSteps
    signals: Sequence[LiveSignal]
    settings: Settings
    clock: Callable[[], int]
    errors: Errors
    bundling: Bundling

    def __post_init__(self) -> None:
        self.commands: list[wire.Command] = []
        """Commands for the ranks, sent with every reply to a relay."""
        self.brief: dict[str, dict[str, codec.Value]] = {}
        """Short verdict on each live run for the log of its rank 0, sent with every reply to a relay."""
        self._limits = self.settings.thresholds
        self.tail = self._limits.window_steps + MAX_WINDOWS * self._limits.stride_steps
        """Number of steps of each rank that are judged at a time when there are few ranks."""
        self.live_runs = LiveRuns(self.writer, self.recent)
        self._runs: dict[str, _LiveRun] = {}
        self._saved = SavedState(self.writer, self.settings, self.clock, self.errors)
        self._fatal: list[EventRow] = []
        self._fatal_seen: Counter[tuple[int | None, str]] = Counter()
        self._hang_watch = HangWatch(self.writer, self.steps, self.settings, self.clock)

    def verdict(self, run: str | None = None) -> Verdict | None:
        """Return the current verdict on `run` (None: the newest run). None: there is no verdict yet."""
        live_run = self._runs.get(run or self.newest() or "")
        return live_run.verdict if live_run else None

    def answer(self, run: str | None = None) -> LiveVerdict | None:
        """Return the current verdict as an answer, with the episodes of the run, the costliest first."""
        live_run = self._runs.get(run or self.newest() or "")
        if live_run is None or live_run.verdict is None:
            return None
        return live_verdict(live_run.verdict, *live_run.history)

    def newest(self) -> str | None:
        """Return the newest run that has rows. If no run has rows, return the newest run."""
        with self.writer.lock:
            return newest(self.writer.processes.values(), self.writer.meta)

    def note(self, event: EventRow) -> None:
        """
        Keep an event of a rank process if it is about a death or answers a command. Called with the writer's
        lock.
        """
        if event.kind in FATAL:
            self._fatal_seen[event.process, event.kind] += 1
            if self._fatal_seen[event.process, event.kind] <= MAX_FATAL:
                self._fatal.append(event)
        elif event.kind in ("stacks", "standing") and not asked_for_bundle(event):
            self._hang_watch.note(event)

    def note_collectives(self, process: int, report: CollectivesReport) -> None:
        """Keep what a rank process reports of its collectives. Called with the writer's lock."""
        self._hang_watch.reports.add(process, report)

    def resume(self, run: str, file: SessionFile, processes: Collection[int]) -> None:
        """
        After a restart, restore the stored events of a live run: events on deaths, and events for
        signals.
        """
        events = [event for event in file.events()[0] if event.process in processes]
        for event in events:
            self.note(event)
        for signal in self.signals:
            try:
                signal.resume(run, file, processes, events)
            except Exception as error:
                self.errors.swallow(signal.name, error)

    def _forget_deaths(self, known: LiveRanks) -> None:
        """Keep events on deaths only in the last generation of each run, and of processes of unknown rank."""
        if not self._fatal_seen:
            return
        last = {s.id for processes in known.runs.values() for s in generations(processes)[-1]}.union(
            known.unknown
        )
        self._fatal = [event for event in self._fatal if event.process in last]
        self._fatal_seen = Counter({who: n for who, n in self._fatal_seen.items() if who[0] in last})

    def feed(self) -> LiveRanks:
        """Add arrived rows to the histories of the live runs. An error is counted."""
        with self.writer.lock:
            known = self.live_runs.refresh()
            self._forget_deaths(known)
            arrived = self.steps.drain()
        try:
            self.steps.feed(arrived, known.ranks, known.labels, known.unknown)
        except Exception as error:
            self.errors.swallow("steps", error)
        for signal in self.signals:
            if records := signal.drain():
                with self.writer.lock:
                    for kind, process, record in records if not self.writer.at_rest else ():
                        self.writer.add_record(kind, process, record)
        return known

    def judge(self) -> None:
        """Judge the last steps that all live ranks of each run have reported. An error is counted."""
        known = self.feed()
        ranks = {run: self._ranks_of(run, known) for run in known.runs}
        for signal in self.signals:
            try:
                self._judge_signal(signal, ranks)
            except Exception as error:
                self.errors.swallow(signal.name, error)
        for run in known.runs:
            try:
                self._judge(run, known)
            except Exception as error:
                self.errors.swallow("judge", error)
        with self.writer.lock:
            self.commands = self._hang_watch.commands() + self.bundling.incidents.commands()
        states = {run: state for run in known.runs if (state := self._runs.get(run)) is not None}
        self.brief = {
            run: _brief(state.verdict, self._severe(run, state.verdict))
            for run, state in states.items()
            if state.verdict is not None
        }
        while len(self._runs) > 4 * MAX_LIVE:
            del self._runs[next(iter(self._runs))]

    def _judge(self, run: str, known: LiveRanks) -> None:
        processes, ranks, which, labels = known.runs[run], known.ranks[run], known.which[run], known.labels
        limits, run_steps = self._limits, self.steps.get(run)
        assert run_steps is not None
        state = self._runs.get(run)
        if state is None:
            evidence = NodeEvidence(self.writer, self.recent, self.steps, self.clock, limits.warmup_steps)
            state = self._runs[run] = _LiveRun(limits, evidence)
        with self.writer.lock:
            deadline = self.clock() - int(limits.report_timeout_s * 1e9)
            live = [rank for rank, process in ranks.items() if _reports(process, deadline)]
            world, serves = run_steps.world, rpc_only_ranks(ranks)
            missing = missing_of(world, {*live, *serves})
            live = [rank for rank in live if rank not in serves]
            seen = [(rank, ranks[rank].id, ranks[rank].stored) for rank in live]
            died = self._fatal or any(process.lost for process in processes)
            all_deaths = deaths([], self._fatal, processes) if died else []
        first = culprits(all_deaths)[0] if all_deaths else None
        if first and not (first.consequence and first.when.t_ns > deadline):
            # The cause of a failed collective may become known only a moment later.
            dead = headline(
                all_deaths,
                lambda death: labels.get(death.process.id) if death.process else None,
                ranks,
                world,
            )
            self._keep(run, state.evidence.add(dead, ranks, labels))
            with self.writer.lock:
                self.bundling.died(run, all_deaths)
            return
        hang = self._hang_watch.check(run, processes, ranks, labels)
        if hang is not None:
            self._keep(run, state.evidence.add(hang, ranks, labels))
            with self.writer.lock:
                self.bundling.hung(run, hang)
        if not live or seen == state.judged or (hang is not None and hang.lasted_s is None):
            return
        state.judged = seen
        if which != state.which:
            self._begin_generation(run, state, which)
        steps = max(limits.window_steps + limits.stride_steps, min(self.tail, MAX_ROWS // len(live)))
        expected = run_steps.training + sum(rank >= world for rank in live)
        window = run_steps.history.window(live, expected, missing, steps)
        rates = functools.partial(self._rates, ranks)
        verdict = with_spans(state.judge.update(window), window, rates, limits)
        verdict = self._with_reason(state, verdict, window, ranks)
        state.history = state.dated(self.clock(), ranks), state.judge.episodes.brief
        self._saved.keep(run, which, state.judge, state.began)
        verdict = with_advice(state.evidence.add(verdict, ranks, labels), ranks.values())
        self._keep(run, verdict, store=verdict.window_steps >= limits.first_window_steps)

    def _judge_signal(self, signal: LiveSignal, ranks: Mapping[str, Ranks]) -> None:
        """Judge a signal within a short time budget. What needs action becomes an event."""
        for run in signal.judge(ranks):
            events = signal.events(run, self.clock())
            with self.writer.lock:
                for rank, event in events:
                    self.writer.add_event(event, ranks[run].current.get(rank), run=run)

    def judged_now(self, asked: OfRun[Any]) -> Any:
        """
        Return the present findings of a signal in a live run (None: the newest). Returns None if the signal
        is not judged live, or the run is not live.
        """
        run, known = asked.run or self.newest() or "", self.live_runs.known
        signal = next((signal for signal in self.signals if signal.question is type(asked)), None)
        if signal is None or run not in known.runs:
            return None
        return signal.fresh(run, self._ranks_of(run, known))

    def running(self) -> list[RunNow]:
        """Return the judged runs as profiling needs them; the newest is last."""
        return self.live_runs.running(self.verdict, self.steps.step_s)

    def peer(self, run: str, verdict: Verdict) -> int | None:
        """Return the rank with which the ranks of a verdict are compared: the median of the other ranks."""
        run_steps, ranks = self.steps.get(run), sorted(self.live_runs.known.ranks.get(run, {}))
        if run_steps is None:
            return None
        with self.steps.lock.feeding():
            window = run_steps.history.window(ranks, len(ranks), (), self._limits.window_steps)
        return median_rank(window, verdict.ranks, verdict.stage)

    def _ranks_of(self, run: str, known: LiveRanks) -> Ranks:
        run_steps = self.steps.get(run)
        processes = {process.id: process for process in known.runs[run]}
        return Ranks(
            processes,
            known.labels,
            run_steps.world if run_steps is not None else None,
            known.ranks[run],
            self.live_runs.clocks(),
        )

    def _begin_generation(self, run: str, state: _LiveRun, which: tuple[int, int]) -> None:
        """Start judging the processes of another attempt or restart, with the run's baseline."""
        before = self._saved.baseline(run)
        if before is not None and state.which is not None:
            again = ", before its ranks restarted" if state.which[0] == which[0] else ""
            before = before.elsewhere(f"attempt {state.which[0]}{again}")
        state.judge, state.reason = RunJudge(self._limits, baseline=before), None
        # An earlier aggregator may already have run before the first generation that this one judges.
        state.began = {} if state.which is not None else self._saved.resume(run, which, state.judge)
        state.which = which

    def _rates(
        self, processes: dict[int, RankProcess], ranks: Sequence[int], first: int, last: int
    ) -> dict[int, SpanRates]:
        """Return the rates of the spans of some ranks, see `analysis.reasons.Find`."""
        with self.writer.lock:
            sums_of_rank = {rank: self.recent.spans(processes[rank].id) for rank in ranks}
        return {rank: span_rates(sums, first, last) for rank, sums in sums_of_rank.items() if sums}

    def _with_reason(
        self, state: _LiveRun, verdict: Verdict, window: Window, processes: dict[int, RankProcess]
    ) -> Verdict:
        """
        Return `verdict`, and the verdicts in its `also`, with their reasons if known. An error is
        counted.
        """
        if any(map(has_reason, verdict.also)):
            also = tuple(self._with_reason(state, one, window, processes) for one in verdict.also)
            verdict = msgspec.structs.replace(verdict, also=also)
        if not has_reason(verdict):
            return verdict

        def sizes(ranks: Sequence[int], steps: Int64) -> dict[str, Float]:
            with self.writer.lock:
                pieces = {rank: self.recent.sizes(processes[rank].id) for rank in ranks}
            return amounts(pieces, ranks, steps)

        try:
            with self.writer.lock:
                routers = [self.recent.tokens(process.id) for process in processes.values()]
            uneven = loads(routers)
            verdict = with_reason(verdict, window, sizes, uneven, state.reason)
        except Exception as error:
            self.errors.swallow("reason", error)
        state.reason = verdict.reason if is_imbalance(verdict) else state.reason
        return verdict

    def _keep(self, run: str, verdict: Verdict, store: bool = True) -> None:
        state = self._runs[run]
        verdict, has_cause = self._with_signals(run, verdict)
        state.verdict = verdict
        # Which of two stages is larger may change in every window.
        what = verdict.label, frozenset(verdict.stages), verdict.ranks
        beside = frozenset(
            (one.label, frozenset(one.stages), one.ranks, one.confirmed) for one in verdict.also
        )
        about = has_cause, _reason(verdict), verdict.confirmed, beside
        named = *what, verdict.span, verdict.lasted_s, verdict.stacks, *about
        if store and named != state.stored:
            state.stored = named
            with self.writer.lock:
                self.writer.add_verdict(self.clock(), msgspec.json.encode(verdict), run)

    def _with_signals(self, run: str, verdict: Verdict) -> tuple[Verdict, bool]:
        """
        Return a verdict with what signals know of it: whether they confirm it, or the cause of a death; and
        whether they know a cause.
        """
        latest = {signal.name: signal.latest(run) for signal in self.signals}
        known = {name: answer for name, answer in latest.items() if answer is not None}
        if verdict.label not in DEATHS:
            return confirmed(verdict, known), False
        with_cause = with_causes(verdict, known)
        return with_cause, with_cause is not verdict

    def _severe(self, run: str, verdict: Verdict) -> Conclusion | None:
        """Return the certain finding of a signal if it is more severe than `verdict`."""
        worst = {signal.name: signal.worst(run) for signal in self.signals}
        answers = {name: answer for name, answer in worst.items() if answer is not None}
        if not answers:
            return None
        first = conclude(verdict, findings_of(verdict, None, answers))
        return first if first.subject != "steps" else None


class _LiveRun:
    """State of the judging of one run."""

    def __init__(self, limits: Thresholds, evidence: NodeEvidence) -> None:
        self.judge = RunJudge(limits)
        self.evidence = evidence
        self.reason: Reason | None = None
        """The last reason that was found for an imbalance."""
        self.which: tuple[int, int] | None = None
        """Key of the generation being judged, see `rank_processes.Generation`."""
        self.judged: list[Any] | None = None
        self.stored: tuple[Any, ...] | None = None
        self.verdict: Verdict | None = None
        self.history: tuple[list[TimedEpisode], Brief] = [], Brief()
        """Episodes of the run, and findings that were not named. Read by other threads."""
        self.began: dict[int, int] = {}
        """When each episode began (ns since the epoch), by its first step."""

    def dated(self, now_ns: int, ranks: dict[int, RankProcess]) -> list[TimedEpisode]:
        """
        Return the episodes, the costliest first, with the time at which each began. The time is determined
        once, when the episode is named, from the rows as in the summary, and kept.
        """
        episodes = self.judge.episodes
        shown = episodes.episodes[:MAX_EPISODES]
        for episode in shown:
            step = episode.from_step
            for_ns = episodes.named_for_ns(step)
            if episode.goes_on and for_ns is not None and step not in self.began:
                self.began[step] = self.evidence.began_ns(episode.rank, step, ranks) or now_ns - for_ns
        first = {episode.from_step for episode in shown}
        self.began = {step: t_ns for step, t_ns in self.began.items() if step in first}
        return [
            TimedEpisode(**asdict(episode), started_at=moment(self.began.get(episode.from_step)))
            for episode in shown
        ]


def _reports(process: RankProcess, deadline: int) -> bool:
    """Whether the rank has reported since `deadline`, or has ended normally."""
    return process.final or (not process.ended and process.last_seen_ns >= deadline)


def _reason(verdict: Verdict) -> str | None:
    return verdict.reason.what if verdict.reason is not None else None


def _brief(verdict: Verdict, severe: Conclusion | None) -> dict[str, codec.Value]:
    """
    Return the part of a verdict that a rank's own log can use. A rank that is only watched is not named
    there. `first` is the finding that is more severe than the verdict, and `first_why` its reason.
    """
    named = verdict.meaning.kind != "watching"
    values = {name: getattr(verdict, name) if named else None for name in ("stage", "rank", "cost_pct")}
    first = {"first": severe.headline[:200], "first_why": severe.why[:400]} if severe else {}
    about = {"mean_step_ms": verdict.mean_step_ms, "why": verdict.why[:400]}
    return {"label": verdict.label, **values, **about, **first}
