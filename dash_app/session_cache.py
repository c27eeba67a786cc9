"""
What is known of a session in this process: its state, and the newest answers to what pages ask.

Nothing is computed about training here or in the views but by `traceml_ray.analysis`; times are ms, and
what is not known is None (NaN in arrays).
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from traceml_ray.errors import Errors
from traceml_ray.store.step_answers import encode

from .drawn import joined
from .source import Source, SourceError

_MAX_KEPT = 64

_K = TypeVar("_K")
_V = TypeVar("_V")


def keep(kept: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Keep a value, and of all no more than the newest."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > _MAX_KEPT:
        kept.popitem(last=False)


def _about(what: str, args: Mapping[str, Any]) -> bytes:
    """Return what names a question whatever steps it is of: an older answer is better than none."""
    return msgspec.msgpack.encode([what, {k: v for k, v in args.items() if k not in ("first", "last")}, None])


_Wanted = dict[bytes, tuple[str, dict[str, Any]]]
"""Questions by what they are known by here."""


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
        self.lock = threading.RLock()
        """Held while what is here is read or changed."""
        self._answers: OrderedDict[bytes, Any] = OrderedDict()
        self._asked: OrderedDict[bytes, int] = OrderedDict()
        """Questions of pages, and at which version they were asked last."""
        self._wanted: _Wanted = {}
        """What the pages that were just made would like to have asked."""
        self._used: _Wanted = {}
        """What the pages that are looked at have asked,"""
        self._current: _Wanted = {}
        """and what of that was answered in this tick."""

    def ask(self, what: str, **args: Any) -> Any:
        """
        Return the newest answer to a question of one page, None before any. Called with `lock` by what makes
        a page; what is not as of now is asked afterwards, and the page made again.
        """
        question = msgspec.msgpack.encode([what, args])
        self._used[question] = what, args
        if self._asked.get(question) != self.version:
            self._wanted[question] = what, args
        return self._answers.get(question, self._answers.get(_about(what, args)))

    def _question(self, what: str, **args: Any) -> tuple[Any, int]:
        """Ask the source, without `lock`; a page that stays open is no use of the session, and says so."""
        return self.source.ask(what, watching=True, **args)

    def _fetch(self, wanted: _Wanted) -> bool:
        """Ask what pages want to know, unless the source does not answer; return whether anything is new."""
        if not wanted or self.stale_since_ns is not None or self.trouble:
            return False
        version, asked = self.version, self._as_asked(wanted)
        try:
            if len(asked) == 1:
                answers = [{"result": self._question(**asked[0])[0]}]
            else:
                answers, _ = self._question("several", asked=asked)
        except SourceError as error:
            self.errors.note("view", error, str(asked[0]["what"]))
            self.trouble = str(error)
            return False
        with self.lock:
            return self._keep_answers(wanted, answers, version)

    def _as_asked(self, wanted: _Wanted) -> list[dict[str, Any]]:
        """Return questions as they are asked: of columns, only for those that are not here."""
        asked = []
        for question, (what, args) in wanted.items():
            held = self._answers.get(question) if what == "columns" else None
            since = {"since": held["next"]} if held else {}
            asked.append({"what": what, **args, **since})
        return asked

    def _keep_answers(self, wanted: _Wanted, answers: list[dict[str, Any]], version: int) -> bool:
        """Keep answers that are as of `version`; return whether one is new. Called with `lock`."""
        new = False
        for (question, (what, args)), answer in zip(wanted.items(), answers, strict=True):
            before, found = self._answers.get(question), answer["result"]
            if what == "columns":
                found = joined(before, found)
            new |= before is None or (found is not before and encode(found) != encode(before))
            keep(self._answers, question, found)
            keep(self._answers, _about(what, args), found)
            keep(self._asked, question, version)
        return new

    @property
    def nbytes(self) -> int:
        """Memory that is held for what is drawn."""
        held = [answer for answer in self._answers.values() if isinstance(answer, dict)]
        arrays = {id(value): value for answer in held for value in answer.values()}
        return sum(value.nbytes for value in arrays.values() if isinstance(value, np.ndarray))
