"""
The board: what of a session is kept in this process, brought up to date once a tick, however many look.

Nothing is computed about training here or in the views but by `traceml_ray.analysis`; times are ms, and
what is not known is None (NaN in arrays).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.errors import Errors
from traceml_ray.store.streams import Stream, world_size

from . import sessions, views
from .columns import Steps, unpacked
from .header import header
from .source import Source, SourceError, StoredSource

MAX_EVENTS = 2000
_MAX_RUNS = 3
"""Runs that are followed at the same time: the newest, and those that somebody looks at."""
_LOOKED_AT_S = 60.0
_MAX_VIEWS = 64
_MAX_OTHERS = 2
"""Past sessions that are open at the same time."""
_FEW_BATCHES, _MANY_BATCHES = 1 << 7, 1 << 14
"""Batches of rows that are asked for at once, so many that about"""
_ROWS = 1 << 15
"""rows come."""
_HISTORY, _PER_RANK = 1 << 18, 64
"""How many batches before the newest the history of a live run begins; in a large job, of each rank."""
_SLICE_S = 0.5
"""How long one tick reads on in a long run."""
_SLOW_RANKS, _SLOW_S = 256, 5.0
"""From so many ranks on, who they are is asked this often only."""
_QUICK_S, _SHARE = 0.25, 5
"""A source that takes longer to answer is left alone for so many times as long."""


class Run:
    """One run as it is kept: its steps, and what was said of its ranks, nodes, events and verdicts."""

    def __init__(self, run: str, limits: Thresholds, start: int) -> None:
        self.id = run
        self.limits = limits
        self.looked_at = 0.0
        self.verdict: dict[str, Any] | None = None
        self.ranks: dict[int, Stream] = {}
        self.nodes: list[dict[str, Any]] = []
        self.labels: dict[str, str] = {}
        """How nodes are shown, by id."""
        self.samples: dict[str, dict[str, Any]] = {}
        """The newest of each node, by its id."""
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.verdicts: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.whole = False
        """All that is stored has been read."""
        self._start = start
        self._patience_ns = int(limits.report_timeout_s * 1e9)
        self._late: set[int] = set()
        """Ranks that came late, and because of which everything has been read anew."""
        self._batches = _FEW_BATCHES
        self._cursors = {"events": 0, "verdicts": 0}
        self._asked_who = float("-inf")
        self.begin()

    def begin(self) -> None:
        """Forget the steps, and read them anew."""
        self.steps = Steps(self.limits)
        self._cursor = self._start
        self.whole = False

    def question(self) -> dict[str, Any]:
        """Return how to ask for the rows that come next; `take_rows` takes the answer."""
        return {"what": "rows", "run": self.id, "since": self._cursor, "most": self._batches}

    def questions(self, now: float) -> list[dict[str, Any]]:
        """Return what to ask; `take` takes the answers."""
        asked: list[dict[str, Any]] = [{"what": "verdict"}, self.question()]
        few = {"brief": True, "most": MAX_EVENTS}
        asked += [{"what": name, "since": since, **few} for name, since in self._cursors.items()]
        if not self.ranks or len(self.ranks) < _SLOW_RANKS or now - self._asked_who > _SLOW_S:
            self._asked_who = now
            asked += [{"what": "ranks"}, {"what": "nodes"}]
            asked.append({"what": "node_samples_of", "only": [n["node_id"] for n in self.nodes], "last": 1})
        return [{**question, "run": self.id} for question in asked]

    def take(self, asked: list[dict[str, Any]], answers: list[dict[str, Any]]) -> bool:
        """Take the answers; return whether anything is new."""
        new = False
        said = {question["what"]: answer for question, answer in zip(asked, answers, strict=True)}
        for name in self._cursors:
            self._cursors[name] = said[name]["cursor"]
            getattr(self, name).extend(said[name]["result"])
            new |= bool(said[name]["result"])
        verdict = said["verdict"]["result"] or (self.verdicts[-1] if self.verdicts else None)
        new |= verdict != self.verdict
        self.verdict = verdict
        if "ranks" in said:
            nodes = said["nodes"]["result"]
            ranks = msgspec.convert(said["ranks"]["result"], dict[int, Stream])
            new |= (ranks, nodes) != (self.ranks, self.nodes)
            self.ranks, self.nodes = ranks, nodes
            self.labels = {node["node_id"]: node["label"] for node in nodes}
            self.samples = {sample["node_id"]: sample for sample in said["node_samples_of"]["result"]}
        return self.take_rows(asked[1], answers[1]) or new

    def take_rows(self, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
        """Take rows; return whether any step is whole now."""
        if asked["since"] != self._cursor:
            return False  # another thread was quicker
        found = unpacked(answer["result"])
        count = sum(len(rows.keys) for rows in found)
        self.whole = self._cursor >= 0 and answer["cursor"] < self._cursor + asked["most"]
        self._cursor = answer["cursor"]
        if not self.whole:
            self._batches = int(np.clip(self._batches * _ROWS // max(1, count), _FEW_BATCHES, _MANY_BATCHES))
        late = self.steps.late(found) - self._late
        if late or self.steps.replaced(found):
            self._late = self._late | late if late else set()
            self.begin()
            return True
        self.steps.take(found)
        known = set(self.steps.last_key)
        holding = self.reporting() | (known - self.ranks.keys()) if self.whole else known
        return self.steps.advance(holding, len(self._awaited() - known), self.world)

    def _awaited(self) -> set[int]:
        """Return the ranks that have rows or may soon have some: of a young job, all."""
        streams = self.ranks.values()
        latest = max((stream.last_seen_ns for stream in streams), default=0)
        young = latest - min((stream.first_seen_ns for stream in streams), default=0) < self._patience_ns
        everyone = set(range(self.world)) if young else set()
        return everyone | {rank for rank, stream in self.ranks.items() if stream.stored}

    @property
    def world(self) -> int:
        """How many ranks the job has, as far as they have said so."""
        return world_size(self.ranks, None)

    def reporting(self) -> set[int]:
        """Return the ranks that may still deliver: neither ended nor silent for long while others are not."""
        latest = max((stream.last_seen_ns for stream in self.ranks.values()), default=0)
        since = latest - self._patience_ns
        seen = {rank for rank, stream in self.ranks.items() if stream.last_seen_ns >= since}
        return {rank for rank in seen if not self.ranks[rank].ended}


_Key = tuple[str, str | None, bytes]
"""Of a page: its name, run and selection."""


class Board:
    """
    What all browsers look at. `poll` is called by one thread, `view` by any.

    Args:
        source: the session.
        clock: wall clock in ns.
        thresholds: of the session's steps (warm-up, first window, coverage).
    """

    def __init__(
        self,
        source: Source,
        *,
        clock: Callable[[], int] = time.time_ns,
        thresholds: Thresholds | None = None,
    ) -> None:
        self.source = source
        self.version = 0
        self.errors = Errors()
        """What went wrong in here, by place."""
        self.status: dict[str, Any] = {}
        self.runs: list[dict[str, Any]] = []
        self.poll_ms: deque[float] = deque(maxlen=300)
        self.stale_since_ns: int | None = None
        self.trouble = ""
        """Why the source does not answer."""
        self.clock = clock
        self._limits = thresholds or Thresholds()
        self._followed: dict[str, Run] = {}
        self.lock = threading.RLock()
        """Held while what is here is read or changed."""
        self._views: OrderedDict[_Key, tuple[int, dict[str, Any]]] = OrderedDict()
        self._looked_at: set[_Key] = set()
        self._answers: OrderedDict[bytes, Any] = OrderedDict()
        self._others: OrderedDict[str, Board] = OrderedDict()
        self._asked_runs = self._rest_until = 0.0
        self._over = False
        """Everything of a session that is over has been read."""

    def poll(self) -> bool:
        """Bring everything up to date; return whether anything changed. Never raises."""
        began = time.perf_counter()
        if began < self._rest_until or (self._over and self._caught_up()):
            return False
        try:
            over = self.source.stored
            changed = self._ask(began)
            self._over = over and self._caught_up()
            if self.stale_since_ns is not None or self.trouble:
                self.stale_since_ns, self.trouble, changed = None, "", True
        except SourceError as error:
            changed = self._failed(error)
        except Exception as error:
            self.errors.note("poll", error)
            changed = self._failed(SourceError(f"{type(error).__name__}: {error}"))
        took = time.perf_counter() - began
        before = self.poll_ms[-1] / 1e3 if self.poll_ms else 0.0
        slow = min(took, before) - _QUICK_S  # twice: the first time there is more to read
        self._rest_until = began + took + (_SHARE * slow if slow > 0 and self._caught_up() else 0)
        self.poll_ms.append(1e3 * took)
        self.version += changed
        if changed:
            self._prepare()
        return changed

    def view(self, page: str, **selection: Any) -> dict[str, Any]:
        """
        Return what a page shows, with the header that all have; see `views` for the selections. `run` is one
        of the session (id or name), `session` another stored one beside it (name).

        Raises KeyError for a page that there is not.
        """
        other = self._past(selection.pop("session", None))
        if other is not None:
            with other.lock:
                other.poll()  # until it has been read
            return other.view(page, **selection)
        with self.lock:
            named = selection.pop("run", None)
            run = self._selected(named)
            key = page, run.id if run else None, msgspec.json.encode(selection, order="deterministic")
            self._looked_at.add(key)
            return {**header(self, run, named), **self._made(key, run)}

    def ask(self, what: str, **args: Any) -> Any:
        """Return the answer to a question of one page; the last one while the source does not answer."""
        changes = ("first", "last") if what == "parts" else ()  # the steps that are shown
        question = msgspec.msgpack.encode([what, {k: v for k, v in args.items() if k not in changes}])
        if self.stale_since_ns is None and not self.trouble:
            try:
                self._answers[question] = self.source.ask(what, **args)[0]
                self._answers.move_to_end(question)
                while len(self._answers) > _MAX_VIEWS:
                    self._answers.popitem(last=False)
            except SourceError as error:
                self.errors.count(f"view: {what}")
                self.trouble = str(error)
        return self._answers.get(question)

    def _past(self, name: str | None) -> Board | None:
        """Return the board of a stored session of that name; None where there is none, or it is this one."""
        if name is None or name == self.status.get("session"):
            return None
        with self.lock:
            if name not in self._others and name in sessions.names(self.source.out):
                try:
                    source = StoredSource(Path(self.source.out) / name)
                except SourceError:
                    return None
                self._others[name] = Board(source, clock=self.clock, thresholds=self._limits)
                while len(self._others) > _MAX_OTHERS:
                    self._others.popitem(last=False)[1].source.close()
            return self._others.get(name)

    def _made(self, key: _Key, run: Run | None) -> dict[str, Any]:
        """Return a page as of now."""
        page, _, selection = key
        version, body = self._views.get(key, (-1, {}))
        if version != self.version:
            body = views.PAGES[page](self, run, **msgspec.json.decode(selection))
            self._views[key] = self.version, body
            self._views.move_to_end(key)
            while len(self._views) > _MAX_VIEWS:
                self._views.popitem(last=False)
        return body

    def _prepare(self) -> None:
        """Make the pages anew that were looked at since the last time, before somebody waits for them."""
        with self.lock:
            looked_at, self._looked_at = self._looked_at, set()
        for key in looked_at:
            with self.lock:
                try:
                    self._made(key, self._followed.get(key[1] or ""))
                except Exception as error:
                    self.errors.note(key[0], error)

    @property
    def newest(self) -> Run | None:
        """The run that is shown where none is chosen."""
        return self._followed.get(self.status.get("run") or "")

    def _ask(self, now: float) -> bool:
        """Ask for what is new; several questions go in one message."""
        with self.lock:
            for run in [*self._followed.values()]:
                if run is not self.newest and now - run.looked_at > _LOOKED_AT_S:
                    del self._followed[run.id]
            followed = [*self._followed.values()]
        slow = int(self.status.get("ranks") or 0) >= _SLOW_RANKS
        runs = not slow or self.newest is None or now - self._asked_runs > _SLOW_S
        asked = [{"what": "status"}, *([{"what": "runs"}] if runs else [])]
        parts = [(run, run.questions(now)) for run in followed]
        answers, _ = self.source.ask("several", asked=[*asked, *(q for _, part in parts for q in part)])
        status, at = answers[0]["result"], len(asked)
        changed = bool(status != self.status)
        with self.lock:
            self.status = status
            if runs:
                changed |= self.runs != answers[1]["result"]
                self.runs, self._asked_runs = answers[1]["result"], now
            for run, part in parts:
                changed |= run.take(part, answers[at : at + len(part)])
                at += len(part)
        newest = status["run"]
        if newest is not None and newest not in self._followed:
            changed |= self._follow(newest, now)
        for run in [*self._followed.values()]:
            changed |= self._catch_up(run, now)
        return changed

    def _follow(self, run_id: str, now: float) -> bool:
        """Begin with a run."""
        ranks = int(self.status.get("ranks") or 0)
        run = Run(run_id, self._limits, 0 if self.source.stored else -max(_HISTORY, _PER_RANK * ranks))
        for again in (0.0, _SLOW_S + 1):  # samples can be asked for once the nodes are known
            questions = run.questions(now + again)
            answers, _ = self.source.ask("several", asked=questions)
            with self.lock:
                run.take(questions, answers)
        run.looked_at = now
        with self.lock:
            self._followed[run_id] = run
            others = {
                other.looked_at: name for name, other in self._followed.items() if other is not self.newest
            }
            while len(self._followed) > _MAX_RUNS:
                del self._followed[others.pop(min(others))]
        return True

    def _catch_up(self, run: Run, began: float) -> bool:
        """Read on in a run that has more stored than one answer holds, for a while."""
        changed = False
        while not run.whole and time.perf_counter() - began < _SLICE_S:
            question = run.question()
            answers, _ = self.source.ask("several", asked=[question])
            with self.lock:
                changed |= run.take_rows(question, answers[0])
        return changed

    def _caught_up(self) -> bool:
        return all(run.whole for run in [*self._followed.values()])

    def _selected(self, named: str | None) -> Run | None:
        """Return the run of that id or name; one that is not followed yet is from here on."""
        if named is None:
            return self.newest
        run_id = next((run["id"] for run in reversed(self.runs) if named in (run["id"], run["name"])), None)
        if run_id is None:
            return self.newest
        now = time.perf_counter()
        if run_id not in self._followed:
            try:
                self._follow(run_id, now)
                self._catch_up(self._followed[run_id], now)
            except SourceError as error:
                self.trouble = str(error)
        run = self._followed.get(run_id)
        if run is not None:
            run.looked_at = now
        return run or self.newest

    def _failed(self, error: SourceError) -> bool:
        """Note that there was no answer: what is known stays."""
        before = self.stale_since_ns, self.trouble
        if self.status and self.stale_since_ns is None:
            self.stale_since_ns = self.clock()
        self.trouble = str(error)
        return before != (self.stale_since_ns, self.trouble)
