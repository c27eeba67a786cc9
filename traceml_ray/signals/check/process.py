"""
The process that measures on a node, apart from training: `python -m traceml_ray.signals.check.process`.

It reads one task per line of stdin and writes one reply per line. It ends when stdin is closed, as it is when
its parent ends. A probe that never returns, for example because a disk hangs, is ended by
killing the process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import psutil

from traceml_ray import text
from traceml_ray.errors import error_text
from traceml_ray.signals.check import tasks
from traceml_ray.signals.check.cores import allowed, cpu_name
from traceml_ray.signals.check.exchange import exchange, listen
from traceml_ray.signals.check.probes import Prober, boot_id
from traceml_ray.signals.check.state import StateWatch

_LOOK_S = 0.3
"""How long the cores are watched to see how busy they are, in s."""
_DETAIL_CHARS = 300


class Worker:
    """Does the tasks of one process, one after the other."""

    def __init__(self) -> None:
        self._store: Any = None
        self._prober: Prober | None = None

    def do(self, task: tasks.Tasks) -> tasks.TaskReply:
        """Do a task. What it raises is the error of the reply."""
        try:
            return self._do(task)
        except Exception as error:
            return tasks.TaskReply(error=error_text(error)[:_DETAIL_CHARS])

    def _do(self, task: tasks.Tasks) -> tasks.TaskReply:
        if isinstance(task, tasks.Describe):
            return tasks.TaskReply(machine=machine())
        if isinstance(task, tasks.Begin):
            self._begin(task)
        elif isinstance(task, tasks.Round):
            self._probing.round(task.seconds)
        elif isinstance(task, tasks.Collect):
            prober = self._probing
            self._prober = None
            with contextlib.closing(_Entered(prober)):
                return tasks.TaskReply(checked=prober.checked())
        elif isinstance(task, tasks.Listen):
            self._store = listen(task.address)
            return tasks.TaskReply(port=self._store.port)
        elif isinstance(task, tasks.Exchange):
            store, self._store = self._store, None
            return tasks.TaskReply(measures=tuple(exchange(store, task)))
        return tasks.TaskReply()

    @property
    def _probing(self) -> Prober:
        if self._prober is None:
            raise RuntimeError("its process was restarted in the middle of the check")
        return self._prober

    def _begin(self, task: tasks.Begin) -> None:
        path = Path(task.path) if task.path else None
        prober = Prober(task.node, rank=task.rank, path=path, devices=task.devices, only=task.only)
        self._prober = prober.__enter__()


class _Entered:
    """Closes probes that were entered in an earlier task."""

    def __init__(self, prober: Prober) -> None:
        self._prober = prober

    def close(self) -> None:
        self._prober.__exit__(None, None, None)


def machine() -> tasks.NodeUse:
    """Return what is known about this machine without torch."""
    cores = allowed()
    gpus, free = _gpus()
    return tasks.NodeUse(
        socket.gethostname(),
        boot_id(),
        len(cores),
        _busy(cores),
        gpus,
        free,
        cpu_name()[:128],
        text.listed(sorted(set(StateWatch(Path("/"), cores).gpus().values())))[:128],
    )


def _busy(cores: list[int]) -> float | None:
    """Return how many of `cores` are busy."""
    try:
        shares = psutil.cpu_percent(_LOOK_S, percpu=True)
        return float(sum(shares[core] for core in cores)) / 100
    except (OSError, IndexError):
        return None


def _gpus() -> tuple[int, tuple[int, ...]]:
    """Return the number of GPUs, and which of them, in torch's order, no process uses."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        busy = [bool(nvml.nvmlDeviceGetComputeRunningProcesses(handle)) for handle in handles]
    except Exception:  # no GPU, no driver, no library, or a driver that does not tell
        return 0, ()
    try:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = range(len(busy)) if given is None else [int(index) for index in given.split(",") if index]
        free = [not busy[index] for index in visible]
    except (ValueError, IndexError):  # named by their UUIDs: which of them is which is not known
        free = [not any(busy)] * len(given.split(",") if given else ())
    return len(free), tuple(index for index, is_free in enumerate(free) if is_free)


def main() -> None:
    """Do the tasks of stdin until it is closed."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of NVML
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever torch prints is no reply
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), name="traceml-check-stdin", daemon=True).start()
    worker = Worker()
    while True:
        replies.write(msgspec.json.encode(worker.do(tasks.task_of(lines.get()))) + b"\n")
        replies.flush()


def _read(lines: queue.SimpleQueue[bytes]) -> None:
    """Pass on the lines of stdin. Its end is the end of this process, whatever it measures."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
