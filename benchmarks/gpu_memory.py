"""
The sections of `gpu.py` about memory that torch's allocator does not count, and about running out
of memory.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from gpu_env import figure, unseen
from gpu_machine import GIB, launched

from traceml_ray import analyze
from traceml_ray.reports.analyze import Analysis
from traceml_ray.store.bundles import bundles_of

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


def _ran(folder: Path, steps: int, at_step: int, then: str, code: int = 0, **variables: str) -> Path:
    """Train on one device, running `then` at each step from `at_step` on; return the session's folder."""
    script = folder / "loop.py"
    script.write_text(LOOP.format(steps=steps, at=at_step, then=then.strip()))
    command = "-m", "traceml_ray.launch", "--nproc-per-node", "1", "--session", "gpu", "--out", str(folder)
    launched(*command, str(script), code=code, **variables)
    return folder / "gpu"


def hidden(env: Any) -> None:
    """512 MiB that a library takes from the driver are detected as a step of hidden memory."""
    del env
    with tempfile.TemporaryDirectory() as folder:
        analysis = analyze(_ran(Path(folder), 400, 150, HIDE.format(bytes=HIDDEN_MIB * MIB)))
    row = next((row for row in analysis.ranks if row.device is not None), None)
    if row is None or row.gap_bytes is None:
        unseen("hidden memory", "the driver shows no process of this container by its pid")
        return
    steps = [finding for finding in analysis.findings if finding.kind == "step_change"]
    figure("memory that torch does not know of, at the end", f"{row.gap_bytes // MIB} MiB")
    figure(f"{HIDDEN_MIB} MiB from the driver", _said(analysis), "step_change", bool(steps))


def _said(analysis: Analysis) -> str:
    return " ".join(finding.why for finding in analysis.findings) or "nothing found"


def oom(env: Any) -> None:
    """A device runs out of memory: the verdict, and a bundle with torch's own snapshot."""
    del env
    then = f"kept.append(torch.empty({2 * GIB}, dtype=torch.uint8, device='cuda'))"
    with tempfile.TemporaryDirectory() as folder:
        session = _ran(Path(folder), 400, 40, then, code=1, TRACEML_MEMORY_HISTORY="1")
        summary = json.loads((session / "summary.json").read_text())
        bundles = bundles_of(session)
    label = summary["verdict"]["label"]
    figure("verdict", label, "oom", label == "oom")
    reasons = [bundle.manifest.reason for bundle in bundles]
    figure("bundles", ", ".join(reasons) or "none", "oom", "oom" in reasons)
    files = {name: size for bundle in bundles for name, size in bundle.manifest.files.items()}
    snapshots = [name for name in files if name.endswith(".pickle")]
    figure("torch's snapshot", ", ".join(snapshots) or f"none of {sorted(files)}", ".pickle", bool(snapshots))
