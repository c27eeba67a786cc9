"""Events and files in Stormlog's export format, with made-up values."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
BEGAN_NS = 1_790_000_000_000_000_000
SECOND = 1_000_000_000
CAPABILITIES = {
    "backend": "cuda",
    "telemetry_collector": "stormlog.cuda_tracker",
    "sampling_source": "torch",
    "supports_device_used": True,
}


def events(
    allocated: Sequence[int | None],
    *,
    rank: int = 0,
    world: int = 1,
    host: str = "node-a",
    pid: int | None = None,
    device: int = 0,
    version: int = 4,
    began_ns: int = BEGAN_NS,
    outside: int | None = None,
    job: str | None = None,
) -> list[dict[str, Any]]:
    """
    Return one event a second. `outside`: bytes that the driver counts in addition to the reserved bytes.
    None: the used memory is written as the CUDA tracker writes it, from the allocator's numbers.
    """
    pid = 100 + rank if pid is None else pid
    records = []
    for index, now in enumerate(allocated):
        reserved = None if now is None else now + 2 * MIB
        used = reserved if outside is None or reserved is None else reserved + outside
        event = {
            "schema_version": version,
            "session_id": f"session-{host}-{pid}",
            "timestamp_ns": began_ns + index * SECOND,
            "event_type": "sample",
            "collector": "stormlog.cuda_tracker",
            "sampling_interval_ms": 1000,
            "pid": pid,
            "host": host,
            "job_id": job,
            "rank": rank,
            "local_rank": rank,
            "world_size": world,
            "device_id": device,
            "allocator_allocated_bytes": now,
            "allocator_reserved_bytes": reserved,
            "allocator_active_bytes": now,
            "allocator_inactive_bytes": None if now is None else MIB,
            "allocator_change_bytes": 0,
            "device_used_bytes": used,
            "device_free_bytes": None,
            "device_total_bytes": 80_000 * MIB,
            "context": "sampled, as the tracker says",
            "metadata": {"memory_capabilities": CAPABILITIES},
        }
        if version == 2:
            del event["session_id"]
        records.append(event)
    return records


def of_cpu(resident: Sequence[int], **fields: Any) -> list[dict[str, Any]]:
    """Return the same events from the CPU tracker: every number is the resident memory."""
    records = events(resident, device=-1, **fields)
    for event in records:
        rss = event["allocator_allocated_bytes"]
        event |= {"collector": "stormlog.cpu_tracker", "device_total_bytes": None}
        event |= {"allocator_active_bytes": None, "allocator_inactive_bytes": None}
        event |= {"allocator_reserved_bytes": rss, "device_used_bytes": rss}
    return records


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Write records in the format given by the suffix of `path`, as Stormlog does. Return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, records[0].keys())
            rows.writeheader()
            rows.writerows(records)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        path.write_text(json.dumps(records, indent=2))
    return path


def level(rank: int, samples: int = 120, *, grows_at: int | None = None) -> list[int]:
    """Return a level of about 1,000 MiB for each second. From `grows_at` on it grows by 20 MiB per second."""
    grown = [0 if grows_at is None else max(0, sample - grows_at) * 20 * MIB for sample in range(samples)]
    return [1000 * MIB + (sample * 7 + rank * 3) % 5 * 4096 + grown[sample] for sample in range(samples)]


def leak(folder: Path, world: int = 4, culprit: int = 2, *, suffix: str = ".json", **fields: Any) -> Path:
    """
    Write a file for each rank into `folder`, and return `folder`. From 40 s on, the culprit's
    memory grows.
    """
    for rank in range(world):
        values = level(rank, grows_at=40 if rank == culprit else None)
        write(folder / f"rank{rank}{suffix}", events(values, rank=rank, world=world, **fields))
    return folder
