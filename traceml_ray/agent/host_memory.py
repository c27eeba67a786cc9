"""Memory of this process and of what limits it, as the kernel counts it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CACHE = b"inactive_file", b"active_file"
"""In `memory.stat`: file cache that the kernel gives up before it kills a process."""


@dataclass(frozen=True)
class HostLimit:
    """A limit of host memory, and where its use is counted; `group` is None for the whole machine."""

    total: int
    group: Path | None = None
    legacy: bool = False
    """The group is of cgroup v1."""


class HostMemory:
    """
    Args:
        root: where `proc` and `sys` are.

    All methods raise OSError or ValueError where the kernel does not say it.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._statm = str(root / "proc/self/statm")
        self._meminfo = str(root / "proc/meminfo")

    def rss(self) -> int:
        """Return the resident bytes of this process."""
        return int(_read(self._statm).split()[1]) * _PAGE

    def uss(self) -> int:
        """Return the bytes that no other process shares; takes 1 ms at 3 GB."""
        fields = _values(_read(str(self._root / "proc/self/smaps_rollup")), b":")
        return 1024 * sum(fields[name] for name in (b"Private_Clean", b"Private_Dirty"))

    def limit(self) -> HostLimit:
        """Return the tightest limit above this process: that of a cgroup, or all that the machine has."""
        machine = HostLimit(1024 * self._machine()[b"MemTotal"])
        return min([machine, *self._groups()], key=lambda limit: limit.total)

    def used(self, limit: HostLimit) -> int:
        """Return what is used of `limit`, without file cache that can be had back."""
        if limit.group is None:
            fields = self._machine()
            return 1024 * (fields[b"MemTotal"] - fields[b"MemAvailable"])
        name, prefix = ("memory.usage_in_bytes", b"total_") if limit.legacy else ("memory.current", b"")
        current = int(_read(f"{limit.group}/{name}"))
        stat = _values(_read(f"{limit.group}/memory.stat"), b" ")
        return max(0, current - sum(stat.get(prefix + name, 0) for name in _CACHE))

    def _machine(self) -> dict[bytes, int]:
        return _values(_read(self._meminfo)[:512], b":")

    def _groups(self) -> Iterator[HostLimit]:
        """Yield the limits of this process's cgroup and of those above it, as far as they can be seen."""
        for line in _read(str(self._root / "proc/self/cgroup")).decode(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            legacy = "memory" in controllers.split(",")
            if controllers and not legacy:
                continue
            own_group = Path(path.lstrip("/"))
            # Which of these exists depends on whether the process sees its cgroup from within.
            for part in dict.fromkeys([own_group, *own_group.parents]):
                group = self._root / "sys/fs/cgroup" / ("memory" if legacy else "") / part
                text = _read_if(f"{group}/memory.{'limit_in_bytes' if legacy else 'max'}").strip()
                if text.isdigit():
                    yield HostLimit(int(text), group, legacy)


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 1 << 16)
    finally:
        os.close(file)


def _read_if(path: str) -> bytes:
    try:
        return _read(path)
    except OSError:
        return b""


def _values(text: bytes, separator: bytes) -> dict[bytes, int]:
    """Return the numbers by name of lines `name<separator> number …`; other lines are left out."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(separator)
        number = rest.split(None, 1)
        if number and number[0].isdigit():
            values[name] = int(number[0])
    return values
