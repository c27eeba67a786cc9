"""
The traces to read, and what is known about the rank of each.

This includes the rows of the recorded steps, as intervals on the clock of their node, and the collectives in
them. The parts of a collective are matched across ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from traceml_ray.analysis.row_table import begins
from traceml_ray.identity import rank_in_name
from traceml_ray.stages import STAGES
from traceml_ray.store.profiles import MANIFEST, ProfileStep, RankProfile, StoredProfile, read_profile
from traceml_ray.traces.chrome import ChromeTrace, TraceError
from traceml_ray.traces.trace import DEVICE, Header, Trace, read_header

SUFFIXES = (".json", ".json.gz")
_MOST_FILES = 4096


@dataclass(frozen=True)
class Source:
    """The trace of one rank. None means not known."""

    path: Path
    rank: int | None = None
    node_id: str | None = None
    """Ray's id of the node."""
    node: str | None = None
    """Label of the node (`node-1`), or name of its host."""
    clock_offset_ns: int | None = None
    """Offset that converts its times to the clock of all traces, in ns."""
    clock_bound_ns: int | None = None
    """Largest error of that offset, in ns."""
    steps: tuple[ProfileStep, ...] = ()
    """The recorded steps, on its node's clock."""
    window: tuple[int, int] | None = None
    """Range of time in ns on its node's clock. Events outside of it are ignored. None: no limit."""

    @property
    def label(self) -> str:
        """`node-1 / rank 5`, or the file's name."""
        if self.rank is None:
            return self.path.name
        return f"{self.node} / rank {self.rank}" if self.node else f"rank {self.rank}"


def sources_of_profile(stored: StoredProfile) -> list[Source]:
    """Return the traces of a profile, in order of ranks."""
    ranks = sorted(stored.profile.captured, key=lambda rank: rank.rank)
    return [_source_of_rank(stored, rank) for rank in ranks]


def _source_of_rank(stored: StoredProfile, rank: RankProfile) -> Source:
    return Source(
        path=stored.trace(rank),
        rank=rank.rank,
        node_id=rank.node_id,
        node=rank.node or rank.hostname,
        clock_offset_ns=rank.clock_offset_ns,
        clock_bound_ns=rank.clock_bound_ns,
        steps=tuple(rank.steps),
        window=_window(rank),
    )


def _window(rank: RankProfile) -> tuple[int, int] | None:
    if not (rank.serves and rank.steps):
        return None
    return min(step.begin_ns for step in rank.steps), max(step.end_ns for step in rank.steps)


def sources_of_files(paths: Sequence[Path]) -> list[Source]:
    """
    Return traces from files and folders of a user, in order of ranks.

    The rank is read from the trace itself, otherwise from its name. In the folder of a profile it is in the
    manifest. Raises TraceError, also if two traces claim the same rank.
    """
    sources: list[Source] = []
    for path in _files(paths):
        sources += _sources_of_folder(path) if path.is_dir() else [_source_of_file(path)]
    if not sources:
        given = ", ".join(map(str, paths))
        raise TraceError(
            f"no trace in {given}: their names end in .json or .json.gz; folders inside are not read"
        )
    taken: dict[int, Path] = {}
    for source in sources:
        if source.rank is not None and (other := taken.setdefault(source.rank, source.path)) != source.path:
            raise TraceError(
                f"{other} and {source.path} are both of rank {source.rank}: merge one trace of each "
                "rank, from the same time"
            )
    return sorted(sources, key=lambda source: (source.rank is None, source.rank or 0))


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    seen = set[Path]()
    for given in paths:
        inside = given.is_dir() and not (given / MANIFEST).is_file()
        for path in sorted(p for p in given.iterdir() if p.name.endswith(SUFFIXES)) if inside else [given]:
            if (real := path.resolve()) not in seen:
                seen.add(real)
                yield path
            if len(seen) > _MOST_FILES:
                raise TraceError(f"{given}: there are more than {_MOST_FILES:,} files")


def _sources_of_folder(path: Path) -> list[Source]:
    try:
        return sources_of_profile(StoredProfile(path, read_profile(path)))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path / MANIFEST}: {error}") from None


def _source_of_file(path: Path) -> Source:
    header = first_header(path)
    rank = rank_in_name(path.name) if header.rank is None else header.rank
    return Source(path, rank, node=path.name if rank is None else header.hostname)


def first_header(path: Path) -> Header:
    """Return the header of a trace without reading all of its events. Raises TraceError."""
    stream = ChromeTrace(path)
    events = iter(stream)
    with closing(events):
        next(events, None)
    return read_header(stream.header)


class Interval(NamedTuple):
    """A stage of a step, or the whole row. Times are ns since the epoch."""

    step: int
    stage: str
    """Name of the stage. "" for the whole row."""
    begin_ns: int
    end_ns: int


def intervals(steps: Iterable[ProfileStep]) -> list[Interval]:
    """
    Return the known rows, each followed by its stages, in order of time. A row ends with the step's last
    backward, so the first row begins before the recording.
    """
    result: list[Interval] = []
    before_ns = -(1 << 62)
    for step in sorted(steps, key=lambda row: row.begin_ns):
        if step.sync_exit_ns is None or step.stages_ns is None:
            continue
        lengths = np.array([step.stages_ns], np.int64)
        begin_ns = step.sync_exit_ns - int(lengths.sum())
        edges = [begin_ns + int(begin) for begin in begins(lengths)[0]] + [step.sync_exit_ns]
        edges = [max(edge, before_ns) for edge in edges]  # rows are rounded; their intervals must not overlap
        result.append(Interval(step.step, "", edges[0], edges[-1]))
        result += [
            Interval(step.step, stage, edges[index], edges[index + 1])
            for index, stage in enumerate(STAGES)
            if edges[index + 1] > edges[index]
        ]
        before_ns = max(before_ns, step.sync_exit_ns)
    return result


def step_at(steps: Iterable[ProfileStep], t_ns: int) -> int | None:
    """Return the number of the step at a time. None outside of all recorded steps."""
    return next((step.step for step in steps if step.begin_ns <= t_ns < step.end_ns), None)


_ON_HOST = re.compile(r"(?:gloo|mpi|ucc|xccl|nccl|hccl):|c10d::|_?c10d_functional::|record_param_comms$")
_ON_DEVICE = re.compile(r"(?:nccl|rccl|oneccl|hccl)", re.IGNORECASE)
_BY_HOST = re.compile(r"(?:gloo|mpi|ucc):(?P<name>\w+)")
_BY_DEVICE = re.compile(r"[nr]ccl(?:Dev)?Kernel_(?P<name>[A-Za-z]+)")
"""Name of a rank's part in a collective. Some backends exchange data in a thread, others on a device."""
_ALL_WAIT = {"allreduce", "allgather", "barrier", "alltoall", "reducescatter"}
"""Collectives in which no rank can end before all ranks have begun."""
_TO_ONE = {"send", "recv"}


def is_collective(name: str, category: str) -> bool:
    """Return whether an operation involves other ranks, so that its time may be waiting."""
    return bool(_ON_DEVICE.match(name) if category in DEVICE else _ON_HOST.match(name))


def exchanges(name: str) -> bool:
    """Return whether a range is a collective that is exchanged with other ranks in a thread of its own."""
    return _BY_HOST.match(name) is not None


class CollectivePart(NamedTuple):
    """The part of one rank in a collective. Times are ns on the clock of all traces."""

    place: int
    """Index of the rank's trace among all traces."""
    lane: tuple[str, str]
    """Process and thread ids in its trace."""
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class TracedCollective:
    """One collective, with the parts of its ranks."""

    name: str
    parts: tuple[CollectivePart, ...]

    @property
    def last(self) -> CollectivePart:
        """The part of the rank that came last."""
        return max(self.parts, key=lambda part: part.begin_ns)

    @property
    def all_wait(self) -> bool:
        """Whether no part can end before all parts have begun."""
        name = _plain(self.name)
        return any(name.startswith(prefix) for prefix in _ALL_WAIT)


class Key(NamedTuple):
    """The fields that all parts of one collective share."""

    name: str
    group: str
    seq: int
    """Sequence number in the process group. -1: not known; the parts are counted in each step instead."""
    step: int | None
    shape: str
    peers: tuple[int, int]


@dataclass
class Matched:
    """The collectives of some ranks, matched across their traces."""

    collectives: list[TracedCollective]
    unmatched: int
    """Number of parts that could not be matched with other ranks."""


class Parts:
    """
    Collects the ranks' parts of collectives.

    Two parts belong to one collective if torch has given both the same number in the same process group.
    Without such numbers, as with gloo, the k-th parts with the same name and shape in a step belong together,
    if all ranks have the same number of them.
    """

    def __init__(self) -> None:
        self._found: dict[Key, dict[int, list[CollectivePart]]] = defaultdict(lambda: defaultdict(list))
        self._groups: dict[str, tuple[int, ...]] = {}
        self._ranks: dict[int, int] = {}

    def add(self, source_index: int, source: Source, trace: Trace, shift_ns: int) -> None:
        """Add the parts of one trace. Its times plus `shift_ns` are on the clock of all traces."""
        self._groups.update(trace.header.groups)
        if source.rank is not None:
            self._ranks[source.rank] = source_index
        for event, name in sorted(_parts(trace).items(), key=lambda part: int(trace.begin_ns[part[0]])):
            begin_ns = int(trace.begin_ns[event])
            step = step_at(source.steps, begin_ns)
            if source.steps and step is None:
                continue  # it began before or after what the other ranks have recorded
            part = CollectivePart(
                source_index,
                trace.lanes[int(trace.lane[event])],
                begin_ns + shift_ns,
                int(trace.end_ns[event]) + shift_ns,
            )
            self._found[_key(trace, event, name, step)][source_index].append(part)

    def matched(self) -> Matched:
        """Return the collectives that were recorded on at least two ranks."""
        result = Matched([], 0)
        for key, by_place in self._found.items():
            rows = list(by_place.values())
            expected = self._members(key)
            if len(rows) > 1 and len({*map(len, rows)}) == 1 and expected in (None, by_place.keys()):
                result.collectives += [TracedCollective(key.name, parts) for parts in zip(*rows, strict=True)]
            else:
                result.unmatched += sum(map(len, rows))
        return result

    def _members(self, key: Key) -> set[int] | None:
        """Return the indices of the traces that must have a part. None: not known."""
        if key.peers != (-1, -1):
            ranks: Sequence[int] = key.peers
        elif key.group in self._groups:
            ranks = self._groups[key.group]
        else:
            return None
        return {self._ranks[rank] for rank in ranks if rank in self._ranks}


def _parts(trace: Trace) -> dict[int, str]:
    """Return the operations of a trace that are parts of collectives, with the names of the collectives."""
    names_by_event, on_device = dict[int, str](), trace.on_device
    for number, name in enumerate(trace.names):
        for match, mask in ((_BY_HOST.match(name), ~on_device), (_BY_DEVICE.match(name), on_device)):
            if match:
                names_by_event |= dict.fromkeys(
                    np.flatnonzero((trace.name == number) & mask).tolist(), match["name"]
                )
    return names_by_event | {
        event: communication.name for event, communication in trace.communications.items() if on_device[event]
    }


def _key(trace: Trace, event: int, name: str, step: int | None) -> Key:
    communication = trace.communications.get(event)
    shape = trace.shapes[int(trace.shape[event])] if trace.shape[event] >= 0 else ""
    if communication is None:
        return Key(name, "", -1, step, shape, (-1, -1))
    peers = (communication.source, communication.destination) if _plain(name) in _TO_ONE else (-1, -1)
    name = "send and recv" if peers != (-1, -1) else name
    if communication.seq >= 0:
        return Key(name, communication.group, communication.seq, None, "", peers)
    return Key(name, communication.group, -1, step, "" if peers != (-1, -1) else shape, peers)


def _plain(name: str) -> str:
    return name.strip("_").replace("_", "").lower()


def apart(collectives: Sequence[TracedCollective], bounds_ns: Mapping[int, int | None]) -> int:
    """
    Return the number of collectives in which a part ends before another begins, although no part can end
    before all have begun. Only differences above the error of the clocks count; `bounds_ns` is that error by
    index of the trace.
    """
    number = 0
    for collective in collectives:
        last = collective.last
        number += collective.all_wait and any(
            part.end_ns + (bounds_ns.get(part.place) or 0) + (bounds_ns.get(last.place) or 0) < last.begin_ns
            for part in collective.parts
        )
    return number
