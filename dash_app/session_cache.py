"""
What is known of a session in this process: its state, and the newest answers to what pages ask.

Nothing is computed about training here or in the views but by `traceml_ray.analysis`; times are ms, and
what is not known is None (NaN in arrays).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from traceml_ray.analysis.step_sums import MAX_BINS
from traceml_ray.errors import Errors
from traceml_ray.results import RunInfo, Status
from traceml_ray.step_shapes import DeathInfo
from traceml_ray.store import query
from traceml_ray.store.query import A, Request

from .breakdowns import Breakdowns
from .run_state import RunState
from .source import Source

_MAX_KEPT = 64
_ABOUT = ("by", "ranks", "nodes")
"""Of columns: only in an answer that is whole."""
_K = TypeVar("_K")
_V = TypeVar("_V")


def keep(kept: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Keep a value, and of all no more than the newest."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > _MAX_KEPT:
        kept.popitem(last=False)


_Wanted = dict[Request[Any], None]
"""Questions, in order."""


class SessionCache:
    """
    What pages are made of. None holds `lock` while the source is asked, so one that is slow holds up only who
    needs its answer.

    Args:
        source: the session.
        clock: wall clock in ns.
    """

    def __init__(self, source: Source, clock: Callable[[], int]) -> None:
        self.source = source
        self.version = self.answered = 0
        """Changes so far, and answers to questions of pages."""
        self.errors = Errors()
        """What went wrong in here, by place."""
        self.status: Status = {}
        self.runs: list[RunInfo] = []
        self.poll_ms: deque[float] = deque(maxlen=300)
        self.stale_since_ns: int | None = None
        self.trouble = ""
        """Why the source does not answer."""
        self.clock = clock
        self.lock = threading.RLock()
        """Held while what is here is read or changed."""
        self._answers: OrderedDict[Request[Any], tuple[int, Any]] = OrderedDict()
        """To questions of pages, and as of which version."""
        self._wanted: _Wanted = {}
        """What the pages that were just made would like to have asked."""
        self._used: _Wanted = {}
        """What the pages that are looked at have asked."""
        renew = weakref.WeakMethod(self.renew)  # a session that is no longer shown goes at once
        self.breakdowns = Breakdowns(source, self.errors, lambda: (of_this := renew()) and of_this())

    def renew(self) -> None:
        """Have all pages made anew: something that the source has not said is new."""
        with self.lock:
            self.version += 1

    def ask(self, request: Request[A], settled: Callable[[A], bool] | None = None) -> A | None:
        """
        Return the newest answer to a question of one page, None before any. Called with `lock` by what makes
        a page; what is not as of now is asked afterwards, and the page made again: not where the answer is
        `settled`.
        """
        self._used[request] = None
        known: tuple[int, A | None] = self._answers.get(request, (-1, None))
        version, found = known
        if version < self.version and not (settled and found is not None and settled(found)):
            self._wanted[request] = None
        return found

    def deaths(self, run: RunState) -> Sequence[DeathInfo]:
        """Return the ranks of a run that died, the first cause first; see `ask`."""
        return self.ask(query.Deaths(run.id)) or () if run.died else ()

    def _question(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Ask the source, without `lock`; a page that stays open is no use of the session, and says so."""
        return query.ask(self.source.reply, requests, watching=True)

    def _fetch(self, wanted: _Wanted) -> bool:
        """Ask what pages want to know, unless the source does not answer; return whether it did."""
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
        """Return questions as they are asked: of columns, only for those that are not here."""
        return [
            msgspec.structs.replace(request, since=self._answers[request][1]["next"])
            if isinstance(request, query.Columns) and request in self._answers
            else request
            for request in wanted
        ]

    def _keep_answers(self, wanted: _Wanted, answers: Sequence[Any], version: int) -> bool:
        """Keep answers that are as of `version`; return whether one is new. Called with `lock`."""
        new = False
        self.answered += 1
        for request, answer in zip(wanted, answers, strict=True):
            _, before = self._answers.get(request, (-1, None))
            found = joined(before, answer) if isinstance(request, query.Columns) else answer
            new |= before is None or (found is not before and query.encode([found]) != query.encode([before]))
            keep(self._answers, request, (version, found))
        return new


def joined(before: Mapping[str, Any] | None, answer: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return what was held `before` with what is new in `answer`, see `analysis.step_numbers.columns`. `next` is
    `since` of the next question.
    """
    found = {name: value for name, value in answer.items() if name not in ("token", "since")}
    if answer["since"] is not None:
        if before is None or before["next"][0] != answer["token"]:
            return dict(before or {})  # it is of another one: the next answer is whole
        keep = slice(0, int(np.searchsorted(before["last"], answer["since"])))
        for name, value in found.items():
            axis = 1 if name == "z" else 0
            old = before[name][:, keep] if axis else before[name][keep]
            whole = np.concatenate([old, value], axis)
            found[name] = whole[:, -MAX_BINS:] if axis else whole[-MAX_BINS:]
        found |= {name: before[name] for name in _ABOUT}
    last = int(found["last"][-1]) if len(found["last"]) else -1
    return {**found, "next": [answer["token"], last]}
