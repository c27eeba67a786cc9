"""
Converts messages of version 1, the format of TraceML on one node, to batches of the current version.

A message is a msgpack map `{"rank", "sampler", "tables": {name: [row, …]}}`, with `_v` 1 or absent. A list of
such maps is processed one by one. The format does not say when gradients are exchanged, so the flags of its
rows prevent that a rank is blamed by them. docs/v1.md says what each table becomes. Nothing here raises
anything but `WireError`.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from traceml_ray.identity import Rank, RankIdentity
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_DEVICE_CLOCK,
    FLAG_INSEPARABLE,
    FLAG_NO_BACKWARD,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_SPLIT,
    FORWARD,
    N_STAGES,
    POST_SYNC,
    PREPARE,
    SEGMENT_BITS,
)
from traceml_ray.text import one_line
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import WireError, ready

SOURCE = "v1"
HOSTNAME = "localhost"
MAX_SENDERS = 1024
"""Largest number of senders (rank of a process) at a time."""
MAX_NAMES = 32
"""
Largest number of names of a sender's tables and fields that are counted separately. The rest counts as `v1:
other`.
"""
MAX_NAME = 48
MAX_SAMPLES = 64
"""Largest number of process samples used from one message: the newest."""
MAX_STEP = (1 << (63 - SEGMENT_BITS)) - 1

_MAX_MS = 86_400_000.0
_EVENT = "_traceml_internal:"
_STAGES = {
    f"{_EVENT}dataloader_next": DATA,
    f"{_EVENT}h2d_time": PREPARE,
    f"{_EVENT}forward_time": FORWARD,
    f"{_EVENT}backward_time": BACKWARD,
    f"{_EVENT}optimizer_step": POST_SYNC,
}
_WHOLE = f"{_EVENT}step_time"
"""The whole step except the wait for data, which comes before it."""
_MISSING = (
    (DATA, FLAG_NO_DATA),
    (FORWARD, FLAG_NO_FORWARD),
    (BACKWARD, FLAG_NO_BACKWARD),
)
_KNOWN = frozenset({"rank", "sampler", "tables", "timestamp", "_v"})
_KNOWN_OF_STEP = frozenset({"seq", "timestamp", "step", "events"})


class _Time(msgspec.Struct):
    """Times of one event on one device in one step. Only newer messages have the CPU's own time."""

    duration_ms: float
    cpu_ms: float | None = None
    is_gpu: bool = False


class _Process(msgspec.Struct):
    ts: float
    cpu: float | None = None
    ram_used: float | None = None


_T = TypeVar("_T")
_Fields = dict[str, msgspec.Raw]
_Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]


def is_v1(data: bytes) -> bool:
    """
    Return whether this is a message of version 1 (a map, or a list of maps) and not of version 2 (a list that
    starts with a tag).
    """
    position = {0xDC: 3, 0xDD: 5}.get(data[0], 1 if 0x90 <= data[0] <= 0x9F else 0) if data else 0
    return _is_map(data[position : position + 1])


def _is_map(data: bytes) -> bool:
    return data[:1] != b"" and (0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF))


@dataclass
class _Sender:
    """One rank of one process, for as long as the process exists."""

    process_id: str = field(default_factory=lambda: secrets.token_hex(8))
    seq: int = -1
    stored: int = 0
    dropped: int = 0
    """Number of rows that could not be understood."""
    ignored: Counter[str] = field(default_factory=Counter)

    def ignore(self, what: str, names: Iterable[str]) -> None:
        """Count names that are not used."""
        for name in names:
            entry = f"v1 {what}: {one_line(name[:MAX_NAME])[:MAX_NAME]}"
            known = entry in self.ignored or len(self.ignored) < MAX_NAMES
            self.ignored[entry if known else "v1: other"] += 1


class Senders:
    """
    The senders of version 1 messages to a relay. The relay numbers their rows.

    Args:
        run: id of the run of their ranks.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._known: dict[tuple[int, int], _Sender] = {}

    def read(self, data: bytes, pid: int, now_ns: int) -> Iterator[wire.RankBatch | WireError]:
        """
        Yield the batches of a message that process `pid` (0: not known) sent at wall-clock time `now_ns`.

        For a part that is refused, a `WireError` is yielded: `too_large`, `wrong_version`, `malformed`,
        `too_many`.
        """
        try:
            if len(data) > wire.MAX_BATCH_BYTES:
                raise WireError("too_large", f"{len(data)} bytes, limit {wire.MAX_BATCH_BYTES}")
            parts = [data] if _is_map(data) else _as(data, list[msgspec.Raw])
            if len(parts) > codec.MAX_ITEMS:
                yield WireError("too_many", f"{len(parts)} messages in one, limit {codec.MAX_ITEMS}")
        except WireError as error:
            yield error
            return
        for part in parts[: codec.MAX_ITEMS]:
            try:
                yield from self._read(_as(part, _Fields), pid, now_ns)
            except WireError as error:
                yield error

    def forget(self, pid: int) -> None:
        """Forget a process that has ended."""
        for key in [key for key in self._known if key[0] == pid]:
            del self._known[key]

    def _read(self, message: _Fields, pid: int, now_ns: int) -> Iterator[wire.RankBatch]:
        version = _as(message["_v"], Any) if "_v" in message else 1
        if type(version) is not int or version != 1:
            raise WireError("wrong_version", f"message has {str(version)[:40]}, a map is of 1")
        if not {"rank", "sampler", "tables"} <= message.keys():
            raise WireError("malformed", "rank, sampler or tables is missing")
        rank, _ = _as(message["rank"], Rank), _as(message["sampler"], str)
        tables = {
            name: _as(table, list[msgspec.Raw]) for name, table in _as(message["tables"], _Fields).items()
        }
        sender = self._sender(pid, rank)
        sender.ignore("field", message.keys() - _KNOWN)
        sender.ignore("table", tables.keys() - {"StepTimeTable", "ProcessTable"})
        steps = _steps(tables.get("StepTimeTable", []), sender)
        samples = _samples(tables.get("ProcessTable", []), sender)
        identity = self._identity(rank, pid)
        chunks = [steps[begin : begin + wire.MAX_ROWS] for begin in range(0, len(steps), wire.MAX_ROWS)]
        for chunk, sample in list(zip_longest(chunks, samples)) or [(None, None)]:
            yield _batch(sender, identity, chunk or [], sample, now_ns)

    def _sender(self, pid: int, rank: int) -> _Sender:
        sender = self._known.get((pid, rank))
        if sender is None:
            if len(self._known) >= MAX_SENDERS:
                raise WireError("too_many", f"more than {MAX_SENDERS} ranks speak version 1")
            sender = self._known[pid, rank] = _Sender()
        return sender

    def _identity(self, rank: int, pid: int) -> RankIdentity:
        """
        Return the identity of a rank. The size of the job is not stated, so each rank knows of the ranks
        below it.
        """
        size = min(rank + 1, 1 << 20)
        return RankIdentity(rank, rank, 0, size, size, 1, HOSTNAME, None, self._run, 0, pid, SOURCE)


def _as(data: bytes | msgspec.Raw, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=ready(kind))
    except codec.UNREADABLE as error:
        raise WireError("malformed", str(error)) from None


_Row = tuple[int, int, list[int]]
"""(key, flags, ns of the six stages)."""


def _steps(table: list[msgspec.Raw], sender: _Sender) -> list[_Row]:
    """Return the rows of a table of steps. Invalid rows are counted as dropped."""
    rows = []
    for raw in table[: wire.MAX_ROWS]:
        try:
            rows.append(_step(_as(raw, _Fields), sender))
        except WireError as error:
            sender.ignore("row", [error.reason])
    sender.dropped += len(table) - len(rows)
    sender.ignore("row", ["too_many"] * (len(table) > wire.MAX_ROWS))
    return rows


def _step(fields: _Fields, sender: _Sender) -> _Row:
    sender.ignore("field of a step", fields.keys() - _KNOWN_OF_STEP)
    if not {"step", "events"} <= fields.keys():
        raise WireError("malformed", "step or events is missing")
    step: int = _as(fields["step"], _Step)
    events = _as(fields["events"], _Fields)
    sender.ignore("event", events.keys() - {*_STAGES, _WHOLE})
    times = {name: _time(events[name]) for name in (*_STAGES, _WHOLE) if name in events}
    if not times:
        raise WireError("malformed", "a step without times")
    ns = [0] * N_STAGES
    for name, stage in _STAGES.items():
        ns[stage] = times.get(name, (0, False))[0]
    if _WHOLE in times:
        rest = times[_WHOLE][0] - ns[PREPARE] - ns[FORWARD] - ns[BACKWARD]
        ns[POST_SYNC] = max(rest, ns[POST_SYNC])
    seen = {_STAGES[name] for name in times if name in _STAGES}
    flags = FLAG_NO_SPLIT | FLAG_INSEPARABLE
    flags |= sum(flag for stage, flag in _MISSING if stage not in seen)
    flags |= FLAG_DEVICE_CLOCK * any(device for _, device in times.values())
    return step << SEGMENT_BITS, flags, ns


def _time(raw: msgspec.Raw) -> tuple[int, bool]:
    """Return (ns of an event, all devices together; whether some of it is by a device's clock)."""
    times = _as(raw, dict[str, _Time]).values()
    ms = sum(time.duration_ms if time.cpu_ms is None else time.cpu_ms for time in times)
    least = min((time.duration_ms if time.cpu_ms is None else time.cpu_ms for time in times), default=0.0)
    if not (least >= 0 and ms <= _MAX_MS):  # also refuses NaN
        raise WireError("malformed", "an impossible duration")
    return round(ms * 1e6), any(time.is_gpu and time.cpu_ms is None for time in times)


def _samples(table: list[msgspec.Raw], sender: _Sender) -> list[wire.ProcessSample]:
    """Return the newest process samples. TraceML writes 0 for a value that it could not have."""
    samples = []
    for raw in table[-MAX_SAMPLES:]:
        try:
            fields = _as(raw, _Process)
            t_ns = _within(fields.ts, 1, 1 << 32)
            if t_ns is None:
                raise WireError("malformed", "a time that cannot be")
            ram = _within(fields.ram_used, 1, 1 << 60)
            sample = wire.ProcessSample(
                round(t_ns * 1e9),
                _within(fields.cpu, 0, 1e6),
                None if ram is None else int(ram),
                None,
                None,
                None,
            )
            samples.append(sample)
        except WireError as error:
            sender.ignore("sample", [error.reason])
    sender.ignore("sample", ["too_many"] * (len(table) > MAX_SAMPLES))
    return samples


def _within(value: float | None, least: float, most: float) -> float | None:
    return value if value is not None and least <= value <= most else None


def _batch(
    sender: _Sender,
    identity: RankIdentity,
    rows: list[_Row],
    sample: wire.ProcessSample | None,
    now_ns: int,
) -> wire.RankBatch:
    first, sender.stored, sender.seq = sender.stored, sender.stored + len(rows), sender.seq + 1
    return wire.RankBatch(
        v=codec.VERSION,
        process_id=sender.process_id,
        seq=sender.seq,
        sent_ns=now_ns,
        produced=sender.stored + sender.dropped,
        dropped=sender.dropped,
        first_row=first,
        keys=np.array([key for key, _, _ in rows], dtype="<i8").tobytes(),
        flags=bytes(flags for _, flags, _ in rows),
        rows=np.array([ns for _, _, ns in rows], dtype="<i8").tobytes(),
        identity=identity,
        process=sample,
        errors=dict(sender.ignored),
    )
