"""Nodes that are slow by themselves, made on this machine: by cgroups and by shaped links. Takes root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

_CPU, _DISK = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/blkio")
_PERIOD_US = 100_000
FINE_US = 10_000
"""Period of a quota in which no measurement of a check fits."""
_FIRST = "262144"
"""The most that the kernel allows; a process outside of all cgroups has 1024."""


def why_no_cgroups() -> str:
    """Return why no node can be slowed here by a cgroup; "": it can."""
    if os.getuid() != 0:
        return "nodes are slowed by cgroups, which takes root"
    for file in (_CPU / "cpu.cfs_quota_us", _DISK / "blkio.throttle.read_bps_device"):
        if not file.parent.is_dir() or not (file.exists() or file.parent == _CPU):
            return f"nodes are slowed by cgroups of version 1, and there is no {file}"
    return "" if os.access(_CPU, os.W_OK) and os.access(_DISK, os.W_OK) else "the cgroups are read-only"


def why_no_links() -> str:
    """Return why no slow link can be made here; "": it can."""
    if os.getuid() != 0:
        return "links are made of network namespaces, which takes root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    return f"links are made with {missing[0]}, which is not here" if missing else ""


@contextlib.contextmanager
def _cgroup(parent: Path, settings: dict[str, str]) -> Iterator[Path]:
    folder = parent / f"tr-{uuid.uuid4().hex[:12]}"
    folder.mkdir()
    try:
        for name, value in settings.items():
            (folder / name).write_text(value)
        yield folder
    finally:
        for _ in range(50):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (parent / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def slow_cpu(share: float, period_us: int = _PERIOD_US) -> contextlib.AbstractContextManager[Path]:
    """
    Return a cgroup whose processes get `share` (0..1) of all cores together. What takes less than `period_us`
    may fit into what a period allows.
    """
    limits = {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": _quota(share, period_us)}
    return _cgroup(_CPU, {"cpu.shares": _FIRST, **limits})


def hold_back(cgroup: Path, share: float) -> None:
    """Have the processes of a cgroup of `slow_cpu` get another share of all cores."""
    period_us = int((cgroup / "cpu.cfs_period_us").read_text())
    (cgroup / "cpu.cfs_quota_us").write_text(_quota(share, period_us))


def _quota(share: float, period_us: int) -> str:
    return str(int(share * (os.cpu_count() or 1) * period_us))


def first_cpu() -> contextlib.AbstractContextManager[Path]:
    """Return a cgroup whose processes come before others: what else runs here is no planted fault."""
    return _cgroup(_CPU, {"cpu.shares": _FIRST})


def slow_disk(path: Path, bytes_per_s: int) -> contextlib.AbstractContextManager[Path]:
    """Return a cgroup whose processes read from the disk of `path` with at most `bytes_per_s`."""
    device = path.stat().st_dev
    throttle = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
    return _cgroup(_DISK, {"blkio.throttle.read_bps_device": throttle})


def put(cgroup: Path, pids: Iterable[int]) -> None:
    """Put processes, and all that descend from them, into a cgroup."""
    for pid in pids:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(OSError):
                (cgroup / "cgroup.procs").write_text(str(process.pid))


def ip(*arguments: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def network(hosts: int) -> Iterator[list[str]]:
    """
    Make namespaces that reach each other over a bridge; yield their names. Number n has `address(n)` on
    `eth0`.
    """
    mark = f"tr{os.getpid() % 100_000}"
    names, bridge = [f"{mark}-{number}" for number in range(hosts)], f"{mark}b"
    try:
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", bridge, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip(
                *("link", "add", "eth0", "netns", name, "type", "veth"),
                *("peer", "name", f"p{number}", "netns", bridge),
            )
            ip("-n", bridge, "link", "set", f"p{number}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def address(number: int) -> str:
    """Return the address of a host of `network`."""
    return f"10.78.0.{number + 1}"


def slow_link(name: str, mbit: int) -> None:
    """Limit what a host of `network` sends, in 10⁶ bits per second."""
    shape = ("tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")
    subprocess.run(
        ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *shape],
        check=True,
        capture_output=True,
    )
