"""
Reads `telemetry_timeline.json`, with what `stormlog diagnose` writes beside it.

The timeline has times and bytes alone. Whose they are stands in `manifest.json`, whether they are of a device
in `environment.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from traceml_ray.analysis.memory.recordings import (
    FileContents,
    Floats,
    NoSamplesError,
    Recording,
    RefusedFileError,
    column,
)
from traceml_ray.files import read_file
from traceml_ray.importers.stormlog import EARLIEST_WALL_NS, Rank, Size, job, measured, node
from traceml_ray.wire.codec import ready

_MOST_BESIDE = 1 << 20
_T = TypeVar("_T", bound=msgspec.Struct)
_Bytes = Annotated[float, msgspec.Meta(ge=0, lt=1e18)] | None
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=9e9)]


class _Identity(msgspec.Struct, frozen=True):
    """Who was sampled; a world of one is also written where no ranks are known."""

    session_id: str | None = None
    host: str | None = None
    pid: int | None = None
    job_id: str | None = None
    rank: Rank | None = None
    world_size: Size | None = None


_NOBODY = _Identity()


class _Timeline(msgspec.Struct):
    """Seconds and bytes, value by value."""

    timestamps: list[_Seconds]
    allocated: list[_Bytes]
    reserved: list[_Bytes] | None = None
    device_used: list[_Bytes] | None = None
    device_total: list[_Bytes] | None = None
    rank: Rank | None = None
    world_size: Size | None = None
    metadata: _Identity = _NOBODY
    distributed_identity: _Identity = _NOBODY

    def identity(self) -> tuple[int | None, int | None]:
        """Return rank and world size as the file has them."""
        sources_of_identity = self, self.metadata, self.distributed_identity
        rank = next((source.rank for source in sources_of_identity if source.rank is not None), None)
        return rank, next(
            (source.world_size for source in sources_of_identity if source.world_size is not None), None
        )


class _Manifest(msgspec.Struct):
    session: _Identity = msgspec.field(default_factory=_Identity)


class _System(msgspec.Struct):
    detected_backend: str | None = None


class _Environment(msgspec.Struct):
    system: _System = msgspec.field(default_factory=_System)


def read(data: bytes, path: Path) -> FileContents:
    """
    Return the timeline `data` of the file at `path` as a recording.

    Raises:
        NoSamplesError: it is empty.
        RefusedFileError: its lists do not fit together.
        msgspec.MsgspecError: it is no timeline.
    """
    timeline = msgspec.json.decode(data, type=ready(_Timeline))
    lists = {name: values for name, values in msgspec.structs.asdict(timeline).items() if _is_list(values)}
    lengths = {name: len(values) for name, values in lists.items()}
    if not timeline.timestamps:
        raise NoSamplesError("the timeline is empty")
    if len({*lengths.values()}) > 1:
        lengths_text = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise RefusedFileError(f"its lists are not of one length: {lengths_text}")
    seconds = np.array(lists.pop("timestamps"), np.float64)
    order = np.argsort(seconds, kind="stable")
    columns = {name: column(values)[order] for name, values in lists.items()}
    t_ns = np.round(seconds[order] * 1e9).astype(np.int64)
    return FileContents("Stormlog timeline", [_recording(t_ns, columns, timeline, path)])


def _is_list(values: Any) -> bool:
    return isinstance(values, list)


def _recording(t_ns: Any, columns: dict[str, Floats], timeline: _Timeline, path: Path) -> Recording:
    who = _beside(path, "manifest.json", _Manifest).session
    on_cpu = _beside(path, "environment.json", _Environment).system.detected_backend == "cpu"
    named = {f"{name}_bytes": values for name, values in columns.items()}
    if on_cpu:
        named = {"rss_bytes": columns["allocated"]}
    elif {*columns} == {"allocated", "reserved"} and _same(columns["allocated"], columns["reserved"]):
        del named["reserved_bytes"]
    rank, world = timeline.identity()
    if rank is None and (who.world_size or 1) > 1:
        rank, world = who.rank, who.world_size
    return Recording(
        process=f"{who.session_id}/{who.host}/{who.pid}" if who.session_id else str(path),
        node=node(who.host),
        device=None if on_cpu else 0,
        t_ns=t_ns,
        columns=measured(named),
        rank=rank,
        world_size=None if rank is None or world is None or world <= rank else world,
        run=job(who.job_id),
        wall=bool(t_ns[0] >= EARLIEST_WALL_NS),
    )


def _same(one: Floats, other: Floats) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def _beside(path: Path, name: str, kind: type[_T]) -> _T:
    """Return what is known from a file beside the timeline; what is not there or makes no sense is not."""
    try:
        return msgspec.json.decode(read_file(path.with_name(name), _MOST_BESIDE), type=ready(kind))
    except (OSError, msgspec.MsgspecError, RecursionError):
        return kind()
