"""
The state of a session in this process: the newest answers, renewed once a tick. Only `traceml_ray.analysis`
computes anything about training; this module and the views do not. Times are in ms. None (NaN in arrays):
unknown.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from traceml_ray.analysis.shapes import StepColumns
from traceml_ray.analysis.step_stats import MAX_BINS
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.errors import Errors, error_text
from traceml_ray.signals.view import SLOW_RANKS
from traceml_ray.store import query
from traceml_ray.store.query import A, QueryError, Request
from traceml_ray.store.results import RunInfo, Status
from traceml_ray.store.step_shapes import DeathInfo

from .run_state import SLOW_S, RunState
from .source import Source

_MAX_KEPT = 64
_MAX_RUNS = 3
"""Largest number of runs polled at a time: the newest, and those viewed in the last `_VIEWED_S` seconds."""
_VIEWED_S = 60.0
"""Time for which a run is polled after it was last viewed, in s."""
_SLICE_S = 0.5
"""Longest time for which one tick may read rows of a long run, in s."""
_QUICK_S, _SHARE = 0.25, 5
"""
A source that takes longer than `_QUICK_S` s to answer is left alone for `_SHARE` times as long as
it took.
"""
_OF_STEPS = query.GetCell, query.GetSpans, query.GetStep
"""Questions about certain steps. The next tick asks about other steps."""
_ROUNDS = 3
"""Rounds of questions for one view, because a question may depend on an earlier answer."""
_K = TypeVar("_K")
_V = TypeVar("_V")


def keep_newest(kept: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Store a value and drop the oldest ones beyond `_MAX_KEPT`."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > _MAX_KEPT:
        kept.popitem(last=False)


_Wanted = dict[Request[Any], None]
"""Questions, in order."""


class _Answer(NamedTuple):
    version: int
    """Version of the session to which the answer belongs."""
    value: Any
    came_s: float
    """Time at which the answer arrived, in s of `SessionPoll.timer`."""


_NO_ANSWER = _Answer(-1, None, float("-inf"))


class SessionPoll:
    """
    The data from which views are made. Any thread may call `poll` and `make`. No thread holds `lock` while it
    asks the source, so a slow source delays only those who need its answer.

    Args:
        source: the session.
        clock: wall clock in ns.
        timer: measures how long the source takes, s.
        thresholds: thresholds for the session's steps (warm-up, first window, coverage).
    """

    def __init__(
        self,
        source: Source,
        *,
        clock: Callable[[], int] = time.time_ns,
        timer: Callable[[], float] = time.perf_counter,
        thresholds: Thresholds | None = None,
    ) -> None:
        self.source = source
        self.version = self.answered = 0
        """
        `version`: number of changes of the session so far. `answered`: number of answered
        questions of views.
        """
        self.errors = Errors()
        """Errors of this poller, by place."""
        self.status: Status | None = None
        """Newest status of the session. None before the first answer."""
        self.runs: list[RunInfo] = []
        self.poll_ms: deque[float] = deque(maxlen=300)
        self.stale_since_ns: int | None = None
        self.trouble = ""
        """Why the source does not answer; "" if it does."""
        self.clock = clock
        self.lock = threading.RLock()
        """Held while the state of this object is read or changed."""
        self._answers: OrderedDict[Request[Any], _Answer] = OrderedDict()
        """Newest answers to questions of views."""
        self._wanted: _Wanted = {}
        """Questions of the views that were made last."""
        self._used: dict[Request[Any], float] = {}
        """Questions of open views, with the time at which each is due again (in s of `timer`)."""
        self.timer = timer
        self._limits = thresholds or Thresholds()
        self._polled: dict[str, RunState] = {}
        self._polling = threading.Lock()
        self._asked_runs = self._rest_until = 0.0
        self._over = False
        """Whether everything of an ended session has been read."""

    def poll(self) -> bool:
        """Update everything; return whether anything changed. Never raises."""
        with self._polling:
            return self._poll()

    def _poll(self) -> bool:
        began = self.timer()
        if began < self._rest_until or (self._over and self._caught_up()):
            return False
        try:
            over = self.source.stored
            changed = self._ask(began)
            self._over = over and self._caught_up()
            if self.stale_since_ns is not None or self.trouble:
                self.stale_since_ns, self.trouble, changed = None, "", True
        except QueryError as error:
            changed = self._failed(error)
        except Exception as error:
            self.errors.note("poll", error)
            changed = self._failed(QueryError(error_text(error)))
        took = self.timer() - began
        before = self.poll_ms[-1] / 1e3 if self.poll_ms else 0.0
        slow = min(took, before) - _QUICK_S  # the first answer has more to read
        self._rest_until = began + took + (_SHARE * slow if slow > 0 and self._caught_up() else 0)
        self.poll_ms.append(1e3 * took)
        if changed:
            with self.lock:
                self.version += 1
            self._renewed()
        return changed

    def _renewed(self) -> None:
        """Called for each new version: open views ask their questions again."""
        with self.lock:
            self._used = {}

    def make(self, make: Callable[[], _V]) -> tuple[int, _V]:
        """
        Return the result of `make`, called with `lock`, and the version that it describes. If `make` asked
        questions, it is called again once they are answered.
        """
        for _ in range(_ROUNDS):
            with self.lock:
                value, version = make(), self.version
                wanted, self._wanted = self._wanted, {}
            if not self._fetch(wanted):
                break
        return version, value

    def renew(self) -> None:
        """Make all views again: there is something new that the source has not reported."""
        with self.lock:
            self.version += 1

    def ask(
        self, request: Request[A], settled: Callable[[A], bool] | None = None, every_s: float = 0.0
    ) -> A | None:
        """
        Return the newest answer to a question of a view. None: no answer yet. The function that makes the
        view calls this with `lock` held. If the answer is outdated, the question is asked afterwards and the
        view is made again. An answer that is `settled` is never outdated; in a live session, neither is one
        not older than `every_s`.
        """
        previous = self._answers.get(request, _NO_ANSWER)
        answer: A | None = previous.value
        if settled and answer is not None and settled(answer):
            return answer
        due = previous.came_s + every_s
        self._used[request] = min(due, self._used.get(request, due))
        if previous.version < self.version and self._is_due(due):
            self._wanted[request] = None
        return answer

    def _is_due(self, due: float) -> bool:
        return due <= self.timer() or self.source.stored

    def deaths(self, run: RunState) -> Sequence[DeathInfo]:
        """Return the ranks of a run that died, the first cause first; see `ask` for when it is known."""
        return self.ask(query.GetDeaths(run.id)) or () if run.died else ()

    def _question(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """
        Ask the source without holding `lock`. `watching` tells it that an open view asks, which does not
        count as use by a person.
        """
        return query.ask(self.source.reply, requests, watching=True)

    def _fetch(self, wanted: _Wanted) -> bool:
        """Ask the questions of views. Return whether there are answers; False while the source is silent."""
        if not wanted or self.stale_since_ns is not None or self.trouble:
            return False
        version = self.version
        try:
            answers = self._question(self._as_asked(wanted))
        except query.QueryError as error:
            self.errors.note("view", error, type(next(iter(wanted))).__name__)
            self.trouble = str(error)
            return False
        with self.lock:
            self._keep_answers(wanted, answers, version)
        return True

    def _as_asked(self, wanted: _Wanted) -> list[Request[Any]]:
        """Return the questions in the form that is sent: only for columns that are missing here."""
        held = {request: self._answers.get(request, _NO_ANSWER).value for request in wanted}
        return [
            replace(request, since=value.next) if isinstance(value, StepColumns) else request
            for request, value in held.items()
        ]

    def _keep_answers(self, wanted: _Wanted, answers: Sequence[Any], version: int) -> bool:
        """Store the answers that belong to `version`; return whether any is new. Called with `lock` held."""
        new, now = False, self.timer()
        self.answered += 1
        for request, answer in zip(wanted, answers, strict=True):
            before = self._answers.get(request, _NO_ANSWER).value
            merged = joined(before, answer) if isinstance(answer, StepColumns) else answer
            new |= before is None or (
                merged is not before and query.encode([merged]) != query.encode([before])
            )
            keep_newest(self._answers, request, _Answer(version, merged, now))
        return new

    @property
    def is_over(self) -> bool:
        """Whether the session is known to have ended."""
        return self.status is not None and self.status.status != "running"

    @property
    def newest(self) -> RunState | None:
        """The newest run, which is shown if none is selected."""
        return self._polled.get((self.status and self.status.run) or "")

    def _ask(self, now: float) -> bool:
        """Ask for everything new. Several questions are sent in one message."""
        with self.lock:
            for run in [*self._polled.values()]:
                if run is not self.newest and now - run.viewed_at > _VIEWED_S:
                    del self._polled[run.id]
            followed = [*self._polled.values()]
        slow = self.status is not None and self.status.ranks >= SLOW_RANKS
        runs = not slow or self.newest is None or now - self._asked_runs > SLOW_S
        asked: list[Request[Any]] = [query.GetStatus(), *([query.GetRuns()] if runs else [])]
        parts = [(run, run.questions(now, self.source.stored)) for run in followed]
        with self.lock:
            used = dict.fromkeys(
                request
                for request, due in self._used.items()
                if not isinstance(request, _OF_STEPS) and self._is_due(due)
            )
            of_views = self._as_asked(used)
        every = [*asked, *(q for _, part in parts for q in part), *of_views]
        answers = self._question(every)
        status, position = answers[0], len(asked)
        changed = bool(status != self.status)
        with self.lock:
            self.status = status
            if runs:
                changed |= self.runs != answers[1]
                self.runs, self._asked_runs = answers[1], now
            for run, part in parts:
                changed |= run.update(part, answers[position : position + len(part)])
                position += len(part)
            changed |= self._keep_answers(used, answers[position:], self.version + 1)
        newest = status.run
        if newest is not None and newest not in self._polled:
            changed |= self._follow(newest, now)
        for run in [*self._polled.values()]:
            changed |= self._catch_up(run, now)
        return changed

    def _follow(self, run_id: str, now: float) -> bool:
        """Start polling a run."""
        run = RunState(run_id, self._limits)
        for again in (0.0, SLOW_S + 1):  # samples can be asked for once the nodes are known
            questions = run.questions(now + again, self.source.stored)
            answers = self._question(questions)
            with self.lock:
                run.update(questions, answers)
        run.viewed_at = now
        with self.lock:
            self._polled[run_id] = run
            others = {
                other.viewed_at: name for name, other in self._polled.items() if other is not self.newest
            }
            while len(self._polled) > _MAX_RUNS:
                del self._polled[others.pop(min(others))]
        return True

    def _catch_up(self, run: RunState, began: float) -> bool:
        """Read more rows of a run for a limited time, if more rows are stored than one answer holds."""
        changed, more = False, True
        while more and not run.is_read_to_end and self.timer() - began < _SLICE_S:
            (times,) = self._question([query.GetTimes(run.id)])
            with self.lock:
                more = run.update_times(times)
            changed |= more
        return changed

    def _caught_up(self) -> bool:
        return all(run.is_read_to_end for run in [*self._polled.values()])

    def selected(self, named: str | None) -> RunState | None:
        """
        Return the run with that id or name and keep polling it. Called without `lock`. Raises QueryError if
        there is no such run, or it cannot be read.
        """
        if named is None or not self.runs:
            return self.newest
        run_id = next((run.id for run in reversed(self.runs) if named in (run.id, run.name)), None)
        if run_id is None:
            raise QueryError(f"no run has that name in session {self.source.target!r}")
        now = self.timer()
        if run_id not in self._polled:
            self._follow(run_id, now)
            self._catch_up(self._polled[run_id], now)
        run = self._polled.get(run_id)
        if run is not None:
            run.viewed_at = now
        return run

    def _failed(self, error: QueryError) -> bool:
        """Record that there was no answer. The known state is kept."""
        before = self.stale_since_ns, self.trouble
        if self.status is not None and self.stale_since_ns is None:
            self.stale_since_ns = self.clock()
        self.trouble = str(error)
        return before != (self.stale_since_ns, self.trouble)


def joined(before: StepColumns | None, answer: StepColumns) -> StepColumns | None:
    """
    Return the columns `before` extended by the new columns of `answer`, limited to the newest `MAX_BINS`. An
    answer that continues other columns changes nothing; the next answer is then complete.
    """
    if answer.since is None:
        return answer
    if before is None or before.token != answer.token:
        return before
    kept = int(np.searchsorted(before.last, answer.since))
    columns: dict[str, Any] = {}
    for name in StepColumns.__struct_fields__:
        old, new = getattr(before, name), getattr(answer, name)
        if name == "z":
            columns[name] = np.concatenate([old[:, :kept], new], axis=1)[:, -MAX_BINS:]
        elif isinstance(new, np.ndarray):
            columns[name] = np.concatenate([old[:kept], new])[-MAX_BINS:]
    return replace(before, **columns)
