"""What the kernel, and py-spy where it is installed, know of another process of this node."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from pathlib import Path

SPY_S = 5.0
SPY_BYTES = 12_000
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for the disk or the network's file system",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "ended",
}


def state(pid: int) -> str | None:
    """Return what the process does, in words: `running`, `stopped (SIGSTOP)`, …"""
    fields = _stat(pid)
    return _STATES.get(fields[0]) if fields else None


def exit_code(pid: int) -> int | None:
    """Return how a process ended that its parent has not waited for yet; a signal is negative."""
    fields = _stat(pid)
    if not fields or fields[0] != "Z":
        return None
    status = int(fields[-1])
    return -(status & 0x7F) if status & 0x7F else status >> 8


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on (the name before it may hold anything)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def memory_events(pid: int, root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the file in which the kernel counts the out-of-memory kills of the process's cgroup."""
    file_here = None
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                files = [root / path.lstrip("/") / "memory.events", root / "memory.events"]
            elif "memory" in controllers.split(","):
                files = [root / "memory" / path.lstrip("/") / "memory.oom_control"]
                files.append(root / "memory" / "memory.oom_control")
            else:
                continue
            file_here = file_here or next((file for file in files if file.is_file()), None)
    return file_here


def oom_kills(file: Path | None) -> int | None:
    """Return how many processes the kernel has killed there because memory ran out."""
    if file is not None:
        with contextlib.suppress(OSError, ValueError):
            lines = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
            return int(lines["oom_kill"]) if "oom_kill" in lines else None
    return None


def spy(pid: int) -> str:
    """Return the process's stacks as py-spy sees them, "" without it; takes up to `SPY_S` seconds."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=SPY_S, check=True)
        text = done.stdout[:SPY_BYTES].decode("utf-8", "replace")
        return re.sub(r"^Process .*\n", "", text)  # its arguments: what a script is given may be secret
    return ""
