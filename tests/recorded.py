"""Traces of torch's profiler: real ones, recorded when needed, and hand-written ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WALL_NS = 1_790_857_026_000_000_000
"""Time from which times of hand-written traces are counted, in ns since the epoch."""


def profiled(path: Path, work: Callable[[], object], **options: bool) -> Any:
    """Write the trace of `work` as torch exports it, and return torch's profile of it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        work()
    profiler.export_chrome_trace(str(path))
    return profiler


def training(steps: int = 2) -> Callable[[], None]:
    """Return a small training loop that uses everything to which torch gives names."""
    import torch
    from torch.profiler import record_function

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.randn(8 * steps, 16), batch_size=8)

    def run() -> None:
        for number, batch in enumerate(loader):
            with record_function(f"ProfilerStep#{number}"):
                with record_function("forward"):
                    loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return run


def operation(name: str, begin: float, length: float, **more: Any) -> dict[str, Any]:
    """Return an event of a hand-written trace; times in µs."""
    args = {key.replace("_", " "): value for key, value in more.pop("args", {}).items()}
    event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": begin, "dur": length}
    return event | {"args": args} | more


def written(path: Path, events: Sequence[dict[str, Any]], **header: Any) -> Path:
    """Write a hand-written trace. It is gzipped if its name says so."""
    document = {"schemaVersion": 1, "baseTimeNanoseconds": WALL_NS, **header, "traceEvents": events}
    data = json.dumps(document, indent=1).encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path
