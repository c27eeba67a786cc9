"""Answers what faces ask of step histories: of live runs and stored ones, by the same functions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import msgspec
import numpy as np

from traceml_ray.analysis import step_numbers
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.store.history_reader import HistoryReader
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.streams import Stream

QUESTIONS = ("times", "columns", "busy", "rank_steps", "cell")
_MAX_READERS = 3
"""Runs that are read from the file at the same time."""
_ARRAY = 1
_KINDS = ("<f8", "<f4", "<i8", "|u1")


class RunSteps(Protocol):
    """The history of a run, and the processes that it is of."""

    history: StepHistory
    ranks: dict[int, Stream]
    whole: bool

    @property
    def world(self) -> int:
        """How many ranks the job has."""


class StepAnswers:
    """
    May be asked by several threads.

    Args:
        open_file: opens the session file once more, for one run.
        limits: of the session.
        summary: gives what is reported of a run that is over, None where that is not known.
        live: gives a run whose history is kept as rows arrive, and the lock to be held while it is read.
    """

    def __init__(
        self,
        open_file: Callable[[str | None], SessionFile],
        limits: Thresholds,
        summary: Callable[[str | None], Mapping[str, Any] | None],
        live: Callable[[str], tuple[RunSteps | None, AbstractContextManager[Any]]] = lambda _: (
            None,
            nullcontext(),
        ),
    ) -> None:
        self._open = open_file
        self._limits = limits
        self._summary = summary
        self._live = live
        self._lock = threading.Lock()
        self._readers: OrderedDict[str | None, HistoryReader] = OrderedDict()

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].session.close()

    def answer(self, asked: dict[str, Any], over: bool) -> dict[str, Any]:
        """
        Answer one of `QUESTIONS`, with arrays; `over` says that nothing more comes.

        `whole` asks for all of the run; without it, that is so where it is over. Raises `SessionFileError`.
        """
        run, whole = asked.get("run"), asked.get("whole")
        asked = {**asked, "whole": over if whole is None else bool(whole)}
        summary = self._summary(run) if over and asked["whole"] and asked["what"] == "times" else None
        found, lock = self._live(run) if run is not None else (None, nullcontext())
        if found is not None:
            with lock:
                return {"result": _answer(found, asked, summary)}
        with self._lock:
            return {"result": _answer(self._read(run, asked["what"] == "times"), asked, summary)}

    def _read(self, run: str | None, on: bool) -> HistoryReader:
        """Return the reader of a run; `on`: it reads on."""
        reader = self._readers.get(run)
        if reader is None:
            reader, on = HistoryReader(self._open(run), self._limits), True
            self._readers[run] = reader
            while len(self._readers) > _MAX_READERS:
                self._readers.popitem(last=False)[1].session.close()
        self._readers.move_to_end(run)
        if on:
            reader.read()
        return reader


def _answer(of: RunSteps, asked: dict[str, Any], summary: Mapping[str, Any] | None) -> dict[str, Any]:
    what, history, whole = asked["what"], of.history, asked["whole"]
    if what == "times":
        began = min((stream.first_seen_ns for stream in of.ranks.values()), default=0)
        ended = max((stream.last_rows_ns or 0 for stream in of.ranks.values()), default=0)
        stored = sum(stream.stored for stream in of.ranks.values())
        wall_ms = (ended - began) / 1e6 if ended > began else None
        found = step_numbers.times(history, whole, of.world, wall_ms, stored)
        found = step_numbers.as_reported(history, found, summary) if summary else found
        return {**found, "whole": of.whole}
    if what == "columns":
        stage, since = str(asked.get("stage")), asked.get("since")
        return step_numbers.columns(history, stage, whole, of.world, since)
    if what == "busy":
        return step_numbers.busy(history, [int(rank) for rank in asked["ranks"]], int(asked["most"]))
    rank = int(asked["rank"])
    if what == "rank_steps":
        return step_numbers.of_rank(history, rank, int(asked["most"]))
    return step_numbers.cell(history, rank, int(asked["first"]), int(asked["last"]), of.world)


def encode(answer: Any) -> bytes:
    """Return an answer as msgpack, arrays and all."""
    return msgspec.msgpack.encode(answer, enc_hook=_encode)


def decode(data: bytes) -> Any:
    """Return an answer with its arrays. Raises ValueError, `msgspec.MsgspecError` for what is none."""
    return msgspec.msgpack.decode(data, ext_hook=_decode)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        head = msgspec.msgpack.encode([value.dtype.str, list(value.shape)])
        return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(2, "little") + head + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(type(value).__name__)


def _decode(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    end = 2 + int.from_bytes(data[:2], "little")
    kind, shape = msgspec.msgpack.decode(data[2:end], type=tuple[str, list[int]])
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of array {kind[:20]!r}")
    return np.frombuffer(data[end:], kind).reshape(shape)
