"""The sections of `gpu.py` about memory that torch's allocator does not know of, and memory that runs out."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from gpu_env import figure, unseen
from gpu_machine import launched

from traceml_ray import analyze
from traceml_ray.reports.analyze import Analysis

MIB = 1 << 20
HIDDEN_MIB = 512
LOOP = """
import ctypes, time, torch
net = torch.nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
kept = []
for step in range({steps}):
    net(torch.randn(256, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    time.sleep(0.05)
    if step >= {at}:
        {then}
"""
HIDE = """
        if not kept:
            kept.append(ctypes.c_uint64())
            allocate = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2
            assert allocate(ctypes.byref(kept[0]), ctypes.c_size_t({bytes})) == 0
"""


def _ran(folder: Path, steps: int, at: int, then: str, **variables: str) -> Path:
    """Train on one device, doing `then` from step `at` on; return the session's folder."""
    script = folder / "loop.py"
    script.write_text(LOOP.format(steps=steps, at=at, then=then.strip()))
    command = "-m", "traceml_ray.launch", "--nproc-per-node", "1", "--session", "gpu", "--out", str(folder)
    launched(*command, str(script), **variables)
    return folder / "gpu"


def hidden(env: Any) -> None:
    """512 MiB that a library takes from the driver are found as a step of the memory that is hidden."""
    del env
    with tempfile.TemporaryDirectory() as folder:
        found = analyze(_ran(Path(folder), 400, 150, HIDE.format(bytes=HIDDEN_MIB * MIB)))
    row = next((row for row in found.ranks if row.device is not None), None)
    if row is None or row.gap_bytes is None:
        unseen("hidden memory", "the driver shows no process of this container by its pid")
        return
    steps = [each for each in found.findings if each.kind == "step_change"]
    figure("memory that torch does not know of, at the end", f"{row.gap_bytes // MIB} MiB")
    figure(f"{HIDDEN_MIB} MiB from the driver", _said(found), "step_change", bool(steps))


def _said(found: Analysis) -> str:
    return " ".join(each.why for each in found.findings) or "nothing found"
