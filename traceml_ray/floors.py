"""The oldest torch and Ray that this works with, and one line for whoever has older ones."""

from __future__ import annotations

import re
from importlib import metadata

FLOORS = {"torch": (2, 4), "ray": (2, 51)}


def too_old(package: str) -> str:
    """Return what is wrong with the installed `package`, found without importing it; "" where it will do."""
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return ""  # where it is needed, its import says so
    release = tuple(int(part) for part in re.findall(r"\d+", found.version)[:2])
    if release >= FLOORS[package]:
        return ""
    floor = ".".join(map(str, FLOORS[package]))
    return (
        f"traceml-ray needs {package} {floor} or newer and found {found.version} in {found.locate_file('')}; "
        f"pip install -U '{package}>={floor}'"
    )
