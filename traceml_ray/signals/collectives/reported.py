"""What ranks have reported about their collectives, as it is matched."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from traceml_ray.signals.collectives.calls import CollectiveCall, ProcessGroup, RankCollectives, Sizes
from traceml_ray.signals.collectives.records import CallReport, CollectivesReport, GroupReport


def collectives_of(
    report: CollectivesReport | None,
    rank: int,
    *,
    where: str | None = None,
    call: str | None = None,
    peer: int | None = None,
    ended: bool = False,
    ending: str = "",
) -> RankCollectives:
    """
    Return the collectives of one rank.

    Args:
        report: its newest report. None: it has sent none.
        rank: its global rank.
        where: where in the user's code it is now.
        call: function of torch.distributed that it waits in now.
        peer: rank that this function names.
        ended: whether its process has ended.
        ending: how it ended, for a person.
    """
    return RankCollectives(
        rank=rank,
        calls=[_call(one, report) for one in report.calls] if report else (),
        groups=[_group(one) for one in report.groups] if report else (),
        whole=report is not None and report.whole,
        where=where,
        call=call,
        peer=peer,
        ended=ended,
        ending=ending,
        taken_ns=report.t_ns if report else None,
    )


_LINE = re.compile(r"(.*) \((.*):(\d+)\)", re.DOTALL)


def as_dump(report: CollectivesReport) -> bytes:
    """Return a report as a dump of torch's flight recorder, in JSON. Files have no folder."""
    return msgspec.json.encode(
        {
            "version": "2.10",
            "taken_ns": report.t_ns,
            "pg_config": {
                group.name: {"name": group.name, "desc": group.description, **_members(_group(group))}
                for group in report.groups
            },
            "entries": [
                _entry(number + (not report.whole), call, report) for number, call in enumerate(report.calls)
            ],
        }
    )


def _members(group: ProcessGroup) -> dict[str, str]:
    return {} if group.ranks is None else {"ranks": str([*group.ranks])}


def _entry(number: int, call: CallReport, report: CollectivesReport) -> dict[str, Any]:
    group, line = report.groups[call.group], _LINE.fullmatch(call.where or "")
    frames = [{"name": line[1], "filename": line[2], "line": int(line[3])}] if line else []
    return {
        "record_id": number,
        "process_group": [group.name, group.description],
        "collective_seq_id": 0 if call.point_to_point else call.number,
        "p2p_seq_id": call.number if call.point_to_point else 0,
        "is_p2p": call.point_to_point,
        "profiling_name": f"{report.source}:{call.op}",
        "time_created_ns": report.t_ns - call.age_ns,
        "input_sizes": call.input_sizes,
        "input_dtypes": call.input_dtypes,
        "output_sizes": call.output_sizes,
        "output_dtypes": call.output_dtypes,
        "state": "completed" if call.finished else "scheduled",
        "retired": call.finished,
        "frames": frames,
    }


def _group(group: GroupReport) -> ProcessGroup:
    ranks = None if group.ranks is None else tuple(map(tuple, group.ranks))
    return _made(group.name, group.description, ranks)


@lru_cache(maxsize=8192)
def _made(name: str, description: str, ranges: tuple[tuple[int, ...], ...] | None) -> ProcessGroup:
    """Return a group. The ranks of a large job share one object."""
    if ranges is None:
        return ProcessGroup(name, description)
    members = (first + i * distance for first, count, distance in ranges for i in range(count))
    return ProcessGroup(name, description, tuple(sorted(members)))


def _call(call: CallReport, report: CollectivesReport) -> CollectiveCall:
    return CollectiveCall(
        group=report.groups[call.group].name,
        seq=call.number,
        op=call.op,
        in_sizes=_sizes(call.input_sizes),
        in_dtypes=tuple(call.input_dtypes),
        out_sizes=_sizes(call.output_sizes),
        out_dtypes=tuple(call.output_dtypes),
        p2p=call.point_to_point,
        done=call.finished,
        created_ns=report.t_ns - call.age_ns,
        where=call.where,
    )


def _sizes(sizes: list[list[int]]) -> Sizes:
    return tuple(map(tuple, sizes))
