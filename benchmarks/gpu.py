"""
What only a CUDA device can confirm about the device's clock; less than eight minutes.

    python benchmarks/gpu.py [--markdown] [--only SECTION] [--played]

Each section is a process of its own and fails by itself; what it looks at stands at the top of its function.
Ends with 0 when every section is green: then `CONFIRMED` in `traceml_ray/agent/device_use.py` may be set, and
the table belongs into RESULTS.md. `--played` tries what it can on the device of the tests, whose time is
played: that shows that the script works, and nothing about a device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from figures import Figure, machine, table

ALL_S = 460.0
"""No section begins later than this, or takes the whole beyond it."""
SECTIONS = {
    "cost": 40,
    "stages": 60,
    "peer": 40,
    "offset": 30,
    "overhead": 60,
    "capture": 40,
    "kineto": 60,
    "amp": 40,
    "fsdp2": 60,
    "judge": 90,
    "nvml": 20,
    "memory": 20,
    "graphs": 120,
}
"""Section: how many seconds it may take."""
PLAYED = ("cost", "stages", "peer", "offset", "overhead")
NO_DEVICE = 2


def without_device() -> str:
    """Return why there is no CUDA device to measure, "" where there is one."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not built for CUDA"
    return "" if torch.cuda.is_available() else "torch.cuda.is_available() is False: no device, or no driver"


def device() -> str:
    """Return device, driver and versions, as one line to stand over the table."""
    import torch

    found = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.check_output(query, text=True, timeout=20).split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        driver = "?"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"{found.name}, {found.total_memory >> 30} GiB, {torch.cuda.device_count()} of them, "
        f"driver {driver}, CUDA {torch.version.cuda}, NCCL {nccl}"
    )


def run(section: str, limit_s: float, played: bool) -> list[Figure]:
    """Return the figures of a section; where it fails, one that says so."""
    command = [sys.executable, __file__, "--section", section, *["--played"] * played]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return [Figure(section, "the section", f"FAILED: not over after {limit_s:.0f} s")]
    found = [line for line in ran.stdout.splitlines() if line.startswith("[")]
    figures = [Figure(section, *json.loads(line)) for line in found]
    if ran.returncode:
        said = (ran.stderr.strip().splitlines() or ["nothing said"])[-1]
        figures.append(Figure(section, "the section", f"FAILED ({ran.returncode}): {said[:160]}"))
    return figures


def main() -> int:
    """Run all sections, or one inside its own process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=SECTIONS)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--played", action="store_true")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.played and (why := without_device()):
        print(f"gpu.py needs a CUDA device: {why}. Nothing was measured.", file=sys.stderr)
        return NO_DEVICE
    if options.section:
        import gpu_sections

        return gpu_sections.run(options.section, options.played)
    print(machine())
    print("a played device: nothing here is about a real one" if options.played else device())
    end, figures = time.monotonic() + ALL_S, []
    for section in options.only or (PLAYED if options.played else SECTIONS):
        left = end - time.monotonic()
        if left < 5:
            figures.append(Figure(section, "the section", "FAILED: no time left"))
        else:
            figures += run(section, min(SECTIONS[section], left), options.played)
    print(f"\n{table(figures, options.markdown)}")
    failed = [figure for figure in figures if "FAILED" in figure.value]
    print(f"\n{'every section is green' if not failed else f'{len(failed)} FAILED'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    sys.exit(main())
