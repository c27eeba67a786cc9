"""Oldest supported torch and Ray, and the message for older ones."""

from __future__ import annotations

from importlib import metadata

from packaging.version import InvalidVersion, Version

FLOORS = {"torch": (2, 4), "ray": (2, 51)}


def too_old(package: str) -> str:
    """Return what is wrong with the installed `package`, without importing it; "" if nothing is."""
    try:
        installed = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return ""  # a missing package is reported by its import, where it is needed
    if not (release := release_of(installed.version)) or release >= FLOORS[package]:
        return ""
    floor = ".".join(map(str, FLOORS[package]))
    where = installed.locate_file("")
    return (
        f"traceml-ray needs {package} {floor} or newer and found {installed.version} in {where}; "
        f"pip install -U '{package}>={floor}'"
    )


def release_of(version: str) -> tuple[int, ...]:
    """
    Return (2, 4) for "2.4.0a0+git", which has the features of the release. Return () if it is no
    version.
    """
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()
