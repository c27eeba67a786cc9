"""
Checks that only a CUDA device can confirm. They take less than eight minutes.

    python benchmarks/gpu.py [memory] --markdown [--only SECTION] [--played]

Each section runs in a separate process and fails independently; the docstring of its function says what it
checks. Sections that measure time run alone, the others three at a time. What cannot be seen on this machine
(Ray is not installed, NVML shows no pids in this container) is NOT SEEN, which is neither a failure nor a
confirmation. The last line says whether this device is confirmed. `--markdown` prints the text for
RESULTS.md; the figures of each section appear on stderr as soon as it ends. `--played` runs what it can on
the simulated device of the tests. That shows that the script works, and nothing about a real device.

The exit code is 0 if no section failed, 1 if one failed, and 2 if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from figures import Figure, machine, table

ALL_S = 460.0
"""Time limit of all sections together, in s. No section begins later or is allowed to exceed it."""


class Section(NamedTuple):
    """A section: its time limit in seconds, whether it measures time, and whether it can be played."""

    limit_s: int
    alone: bool = False
    played: bool = False


SECTIONS = {
    "cost": Section(40, alone=True, played=True),
    "stages": Section(60, alone=True, played=True),
    "peer": Section(40, alone=True, played=True),
    "offset": Section(30, alone=True, played=True),
    "overhead": Section(75, alone=True, played=True),
    "kineto": Section(60, alone=True),
    "fsdp2": Section(60, alone=True, played=True),
    "memory": Section(30, alone=True),
    "judge": Section(90, alone=True, played=True),
    "load": Section(45, alone=True, played=True),
    "demo": Section(120, played=True),
    "graphs": Section(120),
    "ray_train": Section(120, played=True),
    "capture": Section(60),
    "amp": Section(60, played=True),
    "nvml": Section(30, played=True),
    "driver": Section(40, played=True),
    "visible": Section(90, played=True),
    "mig": Section(30, played=True),
    "hidden": Section(90),
    "oom": Section(90),
}
ABOUT = {"memory": ["driver", "memory", "hidden", "oom"]}
AT_ONCE = 3
MAY_BE_UNSEEN = {"ray_train", "nvml", "driver", "visible", "mig", "load", "hidden", "oom"}
"""Sections that may be NOT SEEN: they do not check the device's clock."""
NO_DEVICE = 2
FAILED, NOT_SEEN = "FAILED", "NOT SEEN"


def without_device() -> str:
    """Return why there is no CUDA device to measure; "" if there is one."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not built for CUDA"
    return "" if torch.cuda.is_available() else "torch.cuda.is_available() is False: no device, or no driver"


def device() -> str:
    """Return device, driver and versions as one line for the head of the table."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.check_output(query, text=True, timeout=20).split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        driver = "?"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return (
        f"{properties.name}, {properties.total_memory >> 30} GiB, {torch.cuda.device_count()} of them, "
        f"driver {driver}, CUDA {torch.version.cuda}, NCCL {nccl}"
    )


def run(section: str, limit_s: float, played: bool) -> list[Figure]:
    """
    Return the figures of a section. If it fails, return a figure that says so. Its child processes end with
    it.
    """
    command = [sys.executable, __file__, "--section", section, *["--played"] * played]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    late = ""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        late = f"not over after {limit_s:.0f} s"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if late:
        out, err = process.communicate()
    figures = [Figure(section, *json.loads(line)) for line in out.splitlines() if line.startswith('["')]
    if process.returncode or late:
        shown = late or " / ".join(err.strip().splitlines()[-2:]) or "no output"
        figures.append(Figure(section, "the section", f"{FAILED} ({process.returncode}): {shown[-200:]}"))
    elif not figures:
        figures.append(Figure(section, "the section", f"{FAILED}: it printed no figure"))
    return [Figure(*(cell.replace("|", "/") for cell in figure)) for figure in figures]


def run_all(chosen: list[str], played: bool) -> list[Figure]:
    """Run the sections that measure time one after the other, then the others in parallel."""
    end, figures, text = time.monotonic() + ALL_S, dict[str, list[Figure]](), threading.Lock()

    def one(section: str) -> None:
        left, began = end - time.monotonic(), time.monotonic()
        figures[section] = (
            run(section, min(SECTIONS[section].limit_s, left), played)
            if left >= 5
            else [Figure(section, "the section", f"{FAILED}: no time left")]
        )
        with text:
            print(f"{table(figures[section], False)}\n{time.monotonic() - began:.0f} s\n", file=sys.stderr)

    for section in chosen:
        if SECTIONS[section].alone:
            one(section)
    with ThreadPoolExecutor(AT_ONCE) as together:
        list(together.map(one, [section for section in chosen if not SECTIONS[section].alone]))
    return [figure for section in chosen for figure in figures[section]]


def verdict(figures: list[Figure], chosen: list[str], played: bool) -> tuple[str, int]:
    """Return the last line, and the exit code."""
    failed = [figure for figure in figures if FAILED in figure.value]
    unseen = sorted({figure.part for figure in figures if NOT_SEEN in figure.value})
    if failed:
        parts = ", ".join(dict.fromkeys(figure.part for figure in failed))
        return (
            f"NOT green: {len(failed)} {FAILED} ({parts}). TRACEML_DEVICE_CLOCK=0 turns the clock off.",
            1,
        )
    if played:
        return "every played section is green; a played device confirms nothing.", 0
    if lacking := sorted(set(SECTIONS) - set(chosen)) + [
        part for part in unseen if part not in MAY_BE_UNSEEN
    ]:
        return f"green, but {', '.join(lacking)} did not run, so this device is not confirmed.", 0
    seen = f" (not seen here: {', '.join(unseen)})" if unseen else ""
    return (
        f"GREEN{seen}: this device is confirmed; RESULTS.md and docs/gpu.md should say so.",
        0,
    )


def main() -> int:
    """Run all sections, or one inside its own process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("about", nargs="?", choices=ABOUT, help="only these sections")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, help="only this section; may be repeated"
    )
    parser.add_argument("--markdown", action="store_true", help="print the section for RESULTS.md")
    parser.add_argument("--played", action="store_true", help="use the simulated device of the tests")
    parser.add_argument("--commit", default="unknown", help="commit of a copy without .git")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.played and (why := without_device()):
        print(f"gpu.py needs a CUDA device: {why}. Nothing was measured.", file=sys.stderr)
        return NO_DEVICE
    if options.section:
        import gpu_sections

        return gpu_sections.run(options.section, options.played)
    head = "a played device: nothing here is about a real one" if options.played else device()
    every = [name for name, section in SECTIONS.items() if section.played or not options.played]
    chosen = options.only or ABOUT.get(options.about, every)
    figures = run_all(chosen, options.played)
    where = machine().replace("commit unknown", f"commit {options.commit}")
    title = f"### {head}\n\n{where}; `python benchmarks/gpu.py --markdown`\n"
    print(title if options.markdown else f"{where}\n{head}\n")
    print(table(figures, options.markdown))
    line, code = verdict(figures, chosen, options.played)
    print(f"\n{line}")
    return code


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    sys.exit(main())
