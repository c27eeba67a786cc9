"""
What NVML says of the memory of this process's devices.

NVML makes no context and waits for no kernel, but a driver may hang: it is asked in a thread of its own, and
an answer that does not come in time is left out.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceml_ray.errors import error_text

WAIT_S = 0.1
_HOST_PIDS = 0xEFFFFFFC
"""Inode of the kernel's first pid namespace, whose pids NVML speaks of."""
_NO_PIDS = "NVML does not name this process on the device (a container has pids of its own)"
_NO_BYTES = "NVML does not say how much of the device each process has"
_LATE = f"NVML has not answered within {WAIT_S:g} s"


@dataclass
class Reading:
    """One device; None is not known, `why` has the reasons by name."""

    used: int | None = None
    total: int | None = None
    processes: list[tuple[int, int | None]] | None = None
    """(pid, bytes) of all that compute on it."""
    why: dict[str, str] = field(default_factory=dict)


class DriverMemory:
    """
    Asks NVML of devices by their uuid.

    Args:
        nvml: the binding; None imports `pynvml`, when it is asked for the first time.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._ready = False
        self._handles: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._asked: list[str] | None = None
        self._found: dict[str, Reading] = {}
        self._thread: threading.Thread | None = None

    def ask(self, uuids: list[str]) -> Mapping[str, Reading]:
        """Return what is known of each of `uuids`; waits `WAIT_S` at most."""
        with self._changed:
            if self._idle():
                self._asked, self._found = uuids, {}
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="traceml-nvml", daemon=True)
                    self._thread.start()
                self._changed.wait_for(self._idle, WAIT_S)
            if self._idle():
                return self._found
            # A late answer is of another moment.
            return {uuid: Reading(why={"nvml": _LATE}) for uuid in uuids}

    def _idle(self) -> bool:
        return self._asked is None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._idle())
                asked = self._asked or []
            readings = {uuid: self._read(uuid) for uuid in asked}
            with self._changed:
                self._asked, self._found = None, readings
                self._changed.notify_all()

    def _read(self, uuid: str) -> Reading:
        reading = Reading()
        try:
            handle = self._handle(uuid)
        except Exception as error:
            reading.why["nvml"] = _reason(error)
            return reading
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            reading.used, reading.total = int(memory.used), int(memory.total)
        except Exception as error:
            reading.why["device_used_bytes"] = _reason(error)
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            reading.processes = [(process.pid, process.usedGpuMemory) for process in processes]
        except Exception as error:
            reading.why["process_bytes"] = _reason(error)
        return reading

    def _handle(self, uuid: str) -> Any:
        if not self._ready:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._ready = True
        if uuid not in self._handles:
            try:
                self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except Exception as error:
                if type(error).__name__ != "NVMLError_NotFound":
                    raise
                self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        return self._handles[uuid]


def host_pids(root: Path = Path("/")) -> bool:
    """Return whether this process's pid is the one that the host, and so NVML, knows it by."""
    try:
        return (root / "proc/self/ns/pid").stat().st_ino == _HOST_PIDS
    except OSError:
        return False


def own_bytes(
    processes: list[tuple[int, int | None]], least: int, known: bool, pid: int | None = None
) -> tuple[int | None, str]:
    """
    Return what this process has on a device, or None and why that is not known.

    Args:
        processes: (pid, bytes) of those that compute on the device, on which this process has a context.
        least: torch has reserved so much there: who has less is another one.
        known: pids are those that this process knows, see `host_pids`; elsewhere it is told by being alone.
        pid: of this process.
    """
    pid = pid or os.getpid()
    mine = [process for process in processes if process[0] == pid] if known else processes
    if len(mine) != 1:
        return None, _NO_PIDS
    ((_, used_bytes),) = mine
    if used_bytes is None:
        return None, _NO_BYTES
    return (used_bytes, "") if used_bytes >= least else (None, _NO_PIDS)


def _reason(error: Exception) -> str:
    return f"NVML: {error_text(error)}"
