"""
What a reduction of rows is kept as in the session file: arrays, and the objects that hold them, as bytes. So
a report goes on from what the folded rows of a run came to.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

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
from traceml_ray.store.schema import NONSENSE
from traceml_ray.wire.codec import ready

_DTYPES = ("<i8", "<f8", "<f4", "<u4", "|u1", "|b1")
_LISTS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "Counter": Counter}


class Packer:
    """
    Turns objects of `classes` into bytes and back, with all that they hold: arrays, numbers, text, lists,
    dicts and other objects of `classes`. `form` tells what was written by another version. `most` bounds the
    bytes of the arrays together, and of all before compression: nothing is written that cannot be read.
    """

    def __init__(self, form: int, most: int, *classes: type[Any]) -> None:
        self._form = form
        self._most = most
        self._classes = {cls.__name__: cls for cls in classes}

    def pack(self, value: Any) -> bytes:
        """Return `value` as bytes. Raises TypeError for what it does not know, ValueError for too much."""
        body = msgspec.msgpack.encode((self._form, self._plain(value, [self._most])))
        if len(body) > self._most:
            raise ValueError(f"too large to be kept: {len(body)} bytes")
        return zlib.compress(body, 1)

    def unpack(self, data: bytes) -> Any:
        """Return what was packed. Raises ValueError, TypeError, LookupError or msgspec's for what is not."""
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


FORM = 11
"""
Version of the packed form. It is raised when a class below, or an attribute of one, gets another name or
meaning (`tests/unit/test_packing.py`).
"""
MAX_RANKS = 1024
"""Number of ranks beyond which only the sums of a run are kept: the rest would take too much memory."""
MAX_BYTES = MAX_RANKS << 19
"""
Largest size of one run, in bytes. A rank has 62 kB of histograms, 40 kB of steps and bins, up to 49 kB of
samples per row of a step, and 52 kB that wait for another rank; twice as much of the last two with a device
clock.
"""


def pack(run: Reduction) -> bytes:
    """
    Return the reduction of folded rows as bytes, without the rows that were reduced. Raises TypeError or
    ValueError where it cannot be kept.
    """
    run.history.forget_rows()
    return _PACKER.pack(run)


def unpack(data: bytes | None, rows: Sequence[RankRows]) -> Reduction | None:
    """
    Return what was packed, None where there is nothing of the processes of `rows`. Raises ValueError for what
    cannot be read: it is damaged, or of another version.
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
