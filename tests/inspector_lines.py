"""Lines as NCCL Inspector writes them (`inspector_json.cc`, format v4.0): JSON, one for each call."""

from __future__ import annotations

import json
from typing import Any


def line(
    number: int,
    us: int,
    *,
    coll: str = "AllReduce",
    size: int = 64 << 20,
    rank: int = 0,
    ranks: int = 2,
    comm: str = "0x7f8c496ae9f661",
    name: str | None = "unknown",
    source: str | None = "kernel_gpu",
    traced: int = 0,
) -> bytes:
    """Return the line of a collective. Older versions write no `name` and no `source`. `traced`: channels."""
    header: dict[str, Any] = {"id": comm, "comm_name": name, "rank": rank, "n_ranks": ranks, "nnodes": 1}
    call: dict[str, Any] = {
        "coll": coll,
        "coll_sn": number,
        "coll_msg_size_bytes": size,
        "coll_exec_time_us": us,
        "coll_timing_source": source,
        "coll_algobw_gbs": 277.210914,
        "coll_busbw_gbs": 485.119099,
    }
    if traced:
        channels = [{"channel_id": n, "kernel_start_sn": 3, "kernel_stop_sn": 48} for n in range(traced)]
        call["event_trace_sn"] = {"coll_start_sn": 1, "coll_stop_sn": 2, "kernel_events": channels}
    parts = {"header": header, "metadata": metadata(), "coll_perf": call}
    known = {key: {k: v for k, v in part.items() if v is not None} for key, part in parts.items()}
    return json.dumps(known, separators=(",", ":")).encode() + b"\n"


def pair(number: int, us: int, *, p2p: str = "Send", size: int = 1 << 20, ranks: int = 2) -> bytes:
    """Return the line of a send or receive."""
    header = {"id": "0x1", "comm_name": "unknown", "rank": 0, "n_ranks": ranks, "nnodes": 1}
    call = {
        "p2p": p2p,
        "p2p_sn": number,
        "p2p_peer": 1,
        "p2p_msg_size_bytes": size,
        "p2p_exec_time_us": us,
        "p2p_timing_source": "kernel_gpu",
        "p2p_algobw_gbs": 464.9,
        "p2p_busbw_gbs": 464.9,
    }
    parts = {"header": header, "metadata": metadata(), "p2p_perf": call}
    return json.dumps(parts, separators=(",", ":")).encode() + b"\n"


def metadata() -> dict[str, Any]:
    """Return the part that is the same in all lines of a process."""
    return {
        "inspector_output_format_version": "v4.0",
        "git_rev": "",
        "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": 1748030377748202,
        "hostname": "example-hostname",
        "pid": 1639453,
    }
