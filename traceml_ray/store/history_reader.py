"""
Builds the step history of a run from its session file, one slice of rows at a time. The history is kept, so
each row is read once; new rows of a growing file are added to it.

The reduction of compacted rows is stored in the file as bytes (arrays, and the objects that hold them). A
report continues from this stored reduction.
"""

from __future__ import annotations

import contextlib
import math
import threading
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.baseline import Baseline, Learner
from traceml_ray.analysis.episodes import AtEnd, Brief, Episodes
from traceml_ray.analysis.history import Replay, RunJudge
from traceml_ray.analysis.lasting import PastSteps
from traceml_ray.analysis.row_table import RankMeta, RowTable
from traceml_ray.analysis.step_history import Reduction, ResumePoint, StepHistory, processes_of
from traceml_ray.analysis.step_stats import Bins, Histograms, StepSums, SummedSteps
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import Clock, Episode, FindingTrack, Recurring
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.watching import Watch
from traceml_ray.analysis.window import RankRows, Window
from traceml_ray.store.rank_processes import RankProcess, pending_ranks, process_labels, training, world_size
from traceml_ray.store.schema import NONSENSE
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire.codec import ready

_DTYPES = ("<i8", "<f8", "<f4", "<u4", "|u1", "|b1")
_LISTS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "Counter": Counter}


class Packer:
    """
    Converts objects of `classes` to bytes and back, with everything they hold: arrays, numbers, text, lists,
    dicts and other objects of `classes`. `form` is the version of the format; bytes of another version are
    rejected. `most` bounds the bytes of all arrays together, and of the whole before compression, so that
    only readable data is written.
    """

    def __init__(self, form: int, most: int, *classes: type[Any]) -> None:
        self._form = form
        self._most = most
        self._classes = {cls.__name__: cls for cls in classes}

    def pack(self, value: Any) -> bytes:
        """
        Return `value` as bytes. Raises TypeError for a type that it does not know, ValueError if `value` is
        too large.
        """
        body = msgspec.msgpack.encode((self._form, self._plain(value, [self._most])))
        if len(body) > self._most:
            raise ValueError(f"too large to be kept: {len(body)} bytes")
        return zlib.compress(body, 1)

    def unpack(self, data: bytes) -> Any:
        """
        Return the value that was packed. Raises ValueError, TypeError, LookupError or a msgspec error for
        bytes that `pack` did not write.
        """
        inflate = zlib.decompressobj()
        try:
            body = inflate.decompress(data, self._most)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if inflate.unconsumed_tail:
            raise ValueError("too large")
        form, plain = msgspec.msgpack.decode(body)
        if form != self._form:
            raise ValueError(f"form {form}, not {self._form}")
        return self._whole(plain, [self._most])

    def _plain(self, value: Any, room: list[int]) -> Any:
        kind = type(value).__name__
        if isinstance(value, np.ndarray):
            room[0] -= value.nbytes
            if room[0] < 0:
                raise ValueError("too large to be kept")
            return _from_array(value)
        if isinstance(value, np.generic):
            return value.item()
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if kind in _LISTS:
            return kind, [self._plain(item, room) for item in value]
        if kind in _DICTS:
            return kind, [(self._plain(key, room), self._plain(item, room)) for key, item in value.items()]
        if isinstance(value, deque):
            return kind, value.maxlen, [self._plain(item, room) for item in value]
        if kind not in self._classes:
            raise TypeError(f"cannot keep {kind}")
        if isinstance(value, tuple):  # with names
            return kind, [self._plain(item, room) for item in value]
        if isinstance(value, msgspec.Struct):
            return kind, msgspec.to_builtins(value)
        return kind, {name: self._plain(item, room) for name, item in vars(value).items()}

    def _whole(self, plain: Any, room: list[int]) -> Any:
        if not isinstance(plain, list):
            return plain
        kind, *rest = plain
        if kind in _LISTS:
            return _LISTS[kind](self._whole(item, room) for item in rest[0])
        if kind in _DICTS:
            return _DICTS[kind]({self._whole(key, room): self._whole(item, room) for key, item in rest[0]})
        if kind == "deque":
            return deque((self._whole(item, room) for item in rest[1]), maxlen=rest[0])
        if kind == "array":
            return _to_array(room, *rest)
        which = self._classes[kind]
        if issubclass(which, msgspec.Struct):
            return msgspec.convert(rest[0], ready(which))
        if issubclass(which, tuple):
            return which(*(self._whole(item, room) for item in rest[0]))
        whole = object.__new__(which)
        vars(whole).update((name, self._whole(item, room)) for name, item in rest[0].items())
        return whole


def _from_array(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    dtype = array.dtype.str
    if dtype not in _DTYPES:
        raise TypeError(f"cannot keep an array of {dtype}")
    return "array", dtype, array.shape, array.tobytes()


def _to_array(room: list[int], dtype: str, shape: list[int], values: bytes) -> np.ndarray[Any, Any]:
    if dtype not in _DTYPES or min(shape, default=0) < 0:
        raise ValueError("no array of ours")
    room[0] -= math.prod(shape) * np.dtype(dtype).itemsize
    if room[0] < 0:
        raise ValueError("too large")
    return np.frombuffer(values, dtype).reshape(shape).copy()


FORM = 12
"""
Version of the packed form. Raise it whenever a class below, or an attribute of such a class, is renamed or
changes its meaning (`tests/unit/test_packing.py`).
"""
MAX_RANKS = 1024
"""
Largest number of ranks of a run whose reduction is kept. Of larger runs only the sums are kept: the rest
would take too much memory.
"""
MAX_BYTES = MAX_RANKS << 19
"""
Largest size of the reduction of one run, in bytes. A rank has 62 kB of histograms, 40 kB of steps and bins,
up to 49 kB of samples per row of a step, and 52 kB that wait for another rank. With a device clock the last
two are twice as large.
"""


def pack(run: Reduction) -> bytes:
    """
    Return the reduction of compacted rows as bytes, without the rows themselves. Raises TypeError or
    ValueError if it cannot be packed.
    """
    run.history.forget_rows()
    return _PACKER.pack(run)


def unpack(data: bytes | None, rows: Sequence[RankRows]) -> Reduction | None:
    """
    Return the packed reduction; None if it covers none of the processes of `rows`. Raises ValueError if the
    data is damaged, or of another version.
    """
    try:
        run: Reduction | None = _PACKER.unpack(data) if data else None
        return run if run is not None and run.processes == processes_of(rows) else None
    except NONSENSE as error:
        raise ValueError(f"statistics of folded rows cannot be read: {error}") from error


_PACKER = Packer(
    FORM,
    MAX_BYTES,
    *(Reduction, StepHistory, RowTable, RankMeta, ResumePoint, StepSums, Bins, SummedSteps, Histograms),
    *(
        Replay,
        RunJudge,
        PastSteps,
        Window,
        Learner,
        Baseline,
        Episodes,
        Brief,
        AtEnd,
        Watch,
        FindingTrack,
        Recurring,
        Clock,
        Episode,
        Verdict,
        Thresholds,
    ),
)


SLICE_ROWS = 1 << 18
"""Number of rows read at a time, which takes about a quarter of a second."""
_FEW_CHUNKS, _MANY_CHUNKS = 1 << 7, 1 << 18


class HistoryReader:
    """
    Builds `history`, the step history of the run that `session` reads. It starts again if a rank gets another
    process.

    Args:
        session: the session file to read.
        limits: thresholds of the session.
        since: first chunk to read, as a negative number of chunks before the newest one.
        run: reduction that receives the rows. None: a new one without verdicts, which starts from the stored
            reduction of compacted rows.
    """

    def __init__(
        self,
        session: SessionFile,
        limits: Thresholds,
        since: int = 0,
        run: Reduction | None = None,
    ) -> None:
        self.session = session
        self.ranks: dict[int, RankProcess] = {}
        """The current process of each rank: rank → process."""
        self.whole = False
        """Whether all stored rows have been read."""
        self._limits = limits
        self._patience_ns = int(limits.report_timeout_s * 1e9)
        self._run = run or Reduction(StepHistory(limits))
        self.history = self._run.history
        self._reporting = run is not None
        self._processes: dict[int, int] | None = None if run is None else {}
        self._since = self._cursor = since
        self._chunks = _FEW_CHUNKS

    @property
    def world(self) -> int:
        """Number of ranks in the job, as far as the ranks have reported it."""
        return world_size(self.ranks, None)

    @property
    def _training(self) -> int:
        return training(self.ranks, self.world)

    def read(self, most: int = SLICE_ROWS) -> None:
        """Read about `most` more rows. Raises `SessionFileError`."""
        self.ranks = self.session.ranks()
        processes = {rank: process.id for rank, process in self.ranks.items()}
        before = self._processes
        if before is None or any(processes.get(rank) != process for rank, process in before.items()):
            self._begin()
        self._processes = processes
        self._know_ranks()
        read = 0
        while read < most:
            chunk, cursor = self.session.rows(since=self._cursor, most=self._chunks)
            count = sum(len(rank_rows.keys) for rank_rows in chunk)
            self.whole = self._cursor >= 0 and cursor < self._cursor + self._chunks
            self._cursor, read = cursor, read + count
            self._add(chunk)
            if self.whole:
                return
            self._chunks = int(np.clip(self._chunks * most // max(1, count), _FEW_CHUNKS, _MANY_CHUNKS))

    def read_all(self, most: int) -> None:
        """Read all stored rows, about `most` at a time. Raises `SessionFileError`."""
        while not self.whole:
            self.read(most)
            stored = sum(process.stored for process in self.ranks.values())
            text.advance("reading the steps", min(1.0, self._run.rows / max(1, stored)))
        self._run.finish(self._training)

    def _know_ranks(self) -> None:
        """
        Add a line for each rank, as a live run does. A report does not do this: it covers only ranks with
        rows.
        """
        if self._reporting or self.ranks.keys() <= self.history.who.keys():
            return
        labels = process_labels(self.session.cluster(), self.session.processes())
        self.history.register_ranks(
            {
                rank: RankMeta(labels[process.id], process.group, process.strategy, process.role)
                for rank, process in self.ranks.items()
                if rank not in self.history.who
            }
        )

    def _begin(self) -> None:
        self._run = (self._kept() if self._since == 0 else None) or Reduction(StepHistory(self._limits))
        self.history = self._run.history
        self._cursor, self._chunks = self._since, _FEW_CHUNKS
        self.whole = False

    def _kept(self) -> Reduction | None:
        """Return the stored reduction of compacted rows; None: not known."""
        run, body = None, self.session.kept()
        if body is None:
            return None
        with contextlib.suppress(ValueError):  # of another version: then there are the rows that are left
            run = unpack(body, self.session.rows(last=1)[0])
        if run is not None:
            run.replay = None
        return run

    def _add(self, chunk: Sequence[RankRows]) -> None:
        known = self.history.reported() | {rank_rows.rank for rank_rows in chunk}
        holding, waited = pending_ranks(self.ranks, self._training, self._patience_ns, known)
        if not self.whole:  # of a rank that has been read to its end nothing is waited for
            ends, none = self.history.ends(), (-1, -1)
            last = {rank: process.last_key or 0 for rank, process in self.ranks.items()}
            holding = {rank for rank, key in last.items() if ends.get(rank, none)[1] < key}
        self._run.add(chunk, holding, waited, self._training)


_MAX_READERS = 3
"""Largest number of runs whose histories are open at the same time."""


class RunSteps(Protocol):
    """The step history of a run, and the rank processes it covers."""

    history: StepHistory
    ranks: dict[int, RankProcess]
    whole: bool
    """Whether all stored rows have been read."""

    @property
    def world(self) -> int:
        """Number of ranks in the job."""


class StoredHistories:
    """
    The histories of the runs of a session file. Several threads may use it.

    Args:
        open_file: opens the session file again, for one run.
        limits: thresholds of the session.
    """

    def __init__(self, open_file: Callable[[str | None], SessionFile], limits: Thresholds) -> None:
        self._open = open_file
        self._limits = limits
        self._lock = threading.Lock()
        self._readers: OrderedDict[str | None, HistoryReader] = OrderedDict()

    @contextmanager
    def of(self, run: str | None, read_on: bool) -> Iterator[RunSteps]:
        """
        Yield the history of a run. With `read_on`, read one more slice of the file first. Raises
        `SessionFileError`.
        """
        with self._lock:
            reader = self._readers.get(run)
            if reader is None:
                reader, read_on = HistoryReader(self._open(run), self._limits), True
                self._readers[run] = reader
                while len(self._readers) > _MAX_READERS:
                    self._readers.popitem(last=False)[1].session.close()
            self._readers.move_to_end(run)
            if read_on:
                reader.read()
            yield reader

    def close(self) -> None:
        """Close all open files."""
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].session.close()
