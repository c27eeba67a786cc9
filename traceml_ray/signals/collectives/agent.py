"""
Reports the collectives of this process from torch's flight recorder, when the aggregator asks for them.

The agent's thread reads the recorder, only on command and when the process ends by an exception. The recorder
is a ring in memory (2,000 calls by default), with a lock of its own that no collective holds: reading it
neither waits for a collective nor talks to another process. Torch holds the GIL while it copies the ring: for
10 to 20 ms.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from traceback import walk_tb
from typing import Any, Literal

import msgspec

from traceml_ray.agent.patch.call_log import CallLog
from traceml_ray.agent.patch.collectives import named_groups
from traceml_ray.agent.stacks import user_line
from traceml_ray.errors import sendable
from traceml_ray.signals.collectives.records import (
    AT_END,
    MAX_CALLS,
    MAX_GROUPS,
    MAX_TENSORS,
    CallReport,
    CollectivesReport,
    GroupReport,
)
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

MAX_BYTES = 20 * 1024
"""Largest encoded size of a report, in bytes."""
FINISHED, PENDING, NEWEST = 8, 40, 16
"""Number of calls of each group that are reported: last finished, first unfinished, newest."""
_MAX_CHARS, _MAX_RANGES, _MAX_DIMENSIONS = 120, 64, 16
_MAX_RING = 20_000
"""Largest ring that is read, in calls: torch holds the GIL for 5 to 10 µs per call."""
_RING_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_OF_COLLECTIVE = re.compile(r"gloo|nccl|processgroup|distbackenderror", re.IGNORECASE)
_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""Functions of torch that return a recorder's content: of NCCL, and of other backends."""


class CollectivesReader(Collector):
    """Reports the collectives of one process."""

    commands = ("where", "dump")

    def __init__(self, rank: Rank) -> None:
        self._missing = rank.missing
        self._calls = rank.instrumentation.collectives
        self._reports: list[CollectivesReport] = []

    def handle_command(self, command: wire.Command) -> None:
        """Read the recorder. The report is collected at once."""
        self._read(str(command.args.get("id")))

    def collect(self, final: bool) -> list[CollectivesReport]:
        """Return the reports that were asked for. At the end of a process that failed, return one more."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if final and error is not None:
            self._read(AT_END)
            if self._reports and _is_of_collective(error):
                self._reports[-1] = _with_failed_call(self._reports[-1], _line_of_exchange(error))
        reports, self._reports = self._reports, []
        return reports

    def _read(self, asked: str) -> None:
        size = max((int(os.environ.get(name) or 0) for name in _RING_SIZES), default=0)
        if size > _MAX_RING:
            self._missing["collectives"] = (
                f"torch's flight recorder has a ring of {size} calls, limit {_MAX_RING}"
            )
            return
        report = read(asked, self._calls.log)
        if report is not None:
            self._reports.append(report)


def read(asked: str, log: CallLog | None = None) -> CollectivesReport | None:
    """
    Return the newest collectives of this process. None: none are known.

    Args:
        asked: id of the command.
        log: calls of the user's code, where torch records none.
    """
    if "torch.distributed" not in sys.modules:
        return None
    module = sys.modules.get("torch._C._distributed_c10d")
    dumps = [dump for name in _RECORDERS if (dump := getattr(module, name, None)) is not None]
    # With lines, torch looks into `torch._inductor`, and would import it: a second of work, from a disk that
    # may be what hangs. Optimizers and DDP have imported it.
    lines = "_inductor" in vars(sys.modules["torch"])
    traces = [pickle.loads(dump(True, lines, False)) for dump in dumps]
    report = report_of(traces, asked, time.time_ns(), _members())
    if report is None and log is not None:
        report = report_of([{"entries": log.entries()}], asked, time.time_ns(), _members(), "marks")
    return report


def _is_of_collective(error: BaseException) -> bool:
    """Return whether a collective raised an exception: the call before it was not completed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    inside = trace is not None and "/torch/distributed/" in trace.tb_frame.f_code.co_filename
    return inside or _OF_COLLECTIVE.search(str(error)[:2000]) is not None


def _line_of_exchange(error: BaseException) -> str | None:
    """
    Return the line of the user's code that called what raised an exception in torch.distributed. None: it
    went through no function there, such as a wait for a handle.
    """
    calls = [
        (frame.f_code.co_name, frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)
    ][::-1]
    users = next((i for i, one in enumerate(calls) if user_line([one]) is not None), 0)
    through = any("/torch/distributed/" in path for _, path, _ in calls[:users])
    return user_line(calls) if through else None


def _with_failed_call(report: CollectivesReport, line: str | None) -> CollectivesReport:
    """
    Return a report in which the newest call is not finished: gloo retires a call that failed, too.

    If the newest call is of another line than the exception, what failed was no recorded call: torch records
    no sends and receives of gloo, and checks of arguments raise before the call.
    """
    if not report.calls or (line and report.calls[-1].where not in (None, line)):
        return report
    newest = msgspec.structs.replace(report.calls[-1], finished=False)
    return msgspec.structs.replace(report, calls=[*report.calls[:-1], newest])


def report_of(
    traces: Sequence[Mapping[str, Any]],
    asked: str,
    now_ns: int,
    members: Mapping[str, Iterable[int]],
    source: Literal["recorder", "marks"] = "recorder",
) -> CollectivesReport | None:
    """
    Return a report of what torch's recorders contain. None if they contain no call.

    Args:
        traces: content of each recorder, as torch returns it.
        asked: id of the command.
        now_ns: present time, in ns since the epoch.
        members: global ranks of each process group of this process, by torch's name of the group.
        source: who recorded the calls.
    """
    entries = [entry for trace in traces for entry in trace.get("entries", ())]
    if not entries:
        return None
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        by_group.setdefault(str(entry["process_group"][0]), []).append(entry)
    groups: list[GroupReport] = []
    kept: list[tuple[int, Mapping[str, Any]]] = []
    for name, entries_of in sorted(by_group.items(), key=lambda item: -_created(item[1][-1]))[:MAX_GROUPS]:
        kept += [(len(groups), call) for call in _selected(entries_of)]
        groups.append(_group(name, entries_of, members))
    # Across groups, what is pending is worth more than what is finished, and the newest is worth more.
    kept.sort(key=lambda item: (not _finished(item[1]), _created(item[1])), reverse=True)
    calls: list[CallReport] = []
    size = sum(codec.size_of(group) for group in groups)
    for index, entry in kept[:MAX_CALLS]:
        call = _call(index, entry, now_ns)
        size += codec.size_of(call)
        if size > MAX_BYTES:
            break
        calls.append(call)
    calls.sort(key=lambda call: -call.age_ns)
    groups_of_calls = {call.group for call in calls}
    recorded = all(int(trace["entries"][0]["record_id"]) == 0 for trace in traces if trace.get("entries"))
    whole = recorded and len(groups_of_calls) == len(by_group)
    return CollectivesReport(now_ns, sendable(asked), source, groups, calls, whole)


def _selected(calls: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the calls of a group that are worth reporting."""
    pending = [call for call in calls if not _finished(call)]
    finished = [call for call in calls if _finished(call)]
    first, rest = pending[:PENDING], pending[PENDING:]
    return [*finished[-FINISHED:], *first, *rest[-NEWEST:]] if pending else finished[-NEWEST:]


def _finished(entry: Mapping[str, Any]) -> bool:
    # Of gloo's finished collectives it is only known that they are retired.
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _created(entry: Mapping[str, Any]) -> int:
    return int(entry["time_created_ns"])


def _group(
    name: str,
    calls: Sequence[Mapping[str, Any]],
    members: Mapping[str, Iterable[int]],
) -> GroupReport:
    numbers = [int(call["collective_seq_id"]) for call in calls if not call.get("is_p2p")]
    finished = [
        int(call["collective_seq_id"]) for call in calls if not call.get("is_p2p") and _finished(call)
    ]
    ranks = ranges(members[name]) if name in members else None
    description = str([*calls[-1]["process_group"], ""][1])
    return GroupReport(
        sendable(name)[:_MAX_CHARS],
        sendable(description)[:_MAX_CHARS],
        ranks if ranks is None or len(ranks) <= _MAX_RANGES else None,
        max(numbers, default=None),
        max(finished, default=None),
    )


def _call(group: int, entry: Mapping[str, Any], now_ns: int) -> CallReport:
    point_to_point = bool(entry.get("is_p2p"))
    return CallReport(
        group=group,
        number=int(entry["p2p_seq_id" if point_to_point else "collective_seq_id"]),
        point_to_point=point_to_point,
        op=sendable(str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]))[:64],
        input_sizes=_sizes(entry.get("input_sizes", ())),
        input_dtypes=_dtypes(entry.get("input_dtypes", ())),
        output_sizes=_sizes(entry.get("output_sizes", ())),
        output_dtypes=_dtypes(entry.get("output_dtypes", ())),
        finished=_finished(entry),
        age_ns=max(0, now_ns - _created(entry)),
        where=_where(entry.get("frames", ())),
    )


def _sizes(sizes: Iterable[Iterable[int]]) -> list[list[int]]:
    return [[int(size) for size in shape][:_MAX_DIMENSIONS] for shape in sizes][:MAX_TENSORS]


def _dtypes(dtypes: Iterable[str]) -> list[str]:
    return [sendable(str(dtype))[:32] for dtype in dtypes][:MAX_TENSORS]


def _where(frames: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the innermost line of the user's code among frames, which are ordered from inside to outside."""
    lines = ((str(one["name"]), str(one["filename"]), int(one["line"])) for one in frames)
    return user_line(lines)


def _members() -> dict[str, list[int]]:
    """Return the global ranks of each process group of this process, by the group's name."""
    groups = named_groups()
    if not groups:
        return {}
    ranks = dict(sys.modules["torch.distributed"].distributed_c10d._world.pg_group_ranks)
    return {name: sorted(ranks[group]) for name, group in groups.items() if group in ranks}


def ranges(ranks: Iterable[int]) -> list[tuple[int, int, int]]:
    """Return ranks as (first, number of ranks, distance between them)."""
    rest, parts = sorted(ranks), []
    while rest:
        distance = rest[1] - rest[0] if len(rest) > 1 else 1
        count = 1
        while count < len(rest) and rest[count] == rest[0] + count * distance:
            count += 1
        parts.append((rest[0], count, distance))
        rest = rest[count:]
    return parts
