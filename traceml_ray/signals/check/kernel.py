"""What the kernel counts of the time of threads and of cores."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

BUSY = 0, 1, 2, 5, 6
"""Columns of user, nice, system, irq and softirq time in `core_ticks`."""
STEAL = 7
"""Column of the time that the hypervisor gave to other machines."""
_COLUMNS = 8
"""Number of columns that add up to all time. Those of guests are contained in others."""


def thread_ns(task: Path) -> tuple[int, int]:
    """
    Return for how long a thread has run, and for how long it has waited for a core while it was ready to run,
    in ns. Raises OSError if it has ended, OSError or ValueError if this kernel does not count.

    Args:
        task: its folder, `/proc/PID/task/TID`.
    """
    ran, waited = (task / "schedstat").read_bytes().split()[:2]
    return int(ran), int(waited)


def core_ticks(cores: Iterable[int], root: Path = Path("/")) -> list[int] | None:
    """
    Return the time of some cores together since the machine was started, in clock ticks, by state (the first
    columns of /proc/stat). None: not known.

    Args:
        cores: their numbers.
        root: the folder that contains `proc`.
    """
    names = {f"cpu{core}" for core in cores}
    try:
        lines = [line.split() for line in (root / "proc/stat").read_text().splitlines()]
        rows = [
            [int(ticks) for ticks in line[1 : 1 + _COLUMNS]] for line in lines if line and line[0] in names
        ]
    except (OSError, ValueError):
        return None
    if not rows or any(len(row) < _COLUMNS for row in rows):
        return None
    return [sum(column) for column in zip(*rows, strict=True)]
