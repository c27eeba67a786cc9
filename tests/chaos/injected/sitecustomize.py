"""
Harm from inside, on PYTHONPATH of everything that the launcher starts. In folder CHAOS_FOLDER:

- `clock.rank`, `clock.monitor`: by how many seconds the wall clocks of such processes have moved;
- `hang.relay`, `hang.aggregator`: while it is there, taking a message does not end;
- `hang.disk`, a FIFO: while it is there, no call that has to do with a file of the sessions' folder returns.
"""

import builtins
import io
import os
import time
from pathlib import Path

_open = os.open

_folder = Path(os.environ.get("CHAOS_FOLDER", ""))
_file = _folder / ("clock.rank" if "LOCAL_RANK" in os.environ else "clock.monitor")
_time, _time_ns = time.time, time.time_ns


def _moved():
    try:
        return float(_file.read_text() or 0)
    except OSError:
        return 0.0


def _hang(name, cls, method):
    original = getattr(cls, method)

    def hung(*args, **kwargs):
        while (_folder / f"hang.{name}").exists():
            time.sleep(0.01)
        return original(*args, **kwargs)

    setattr(cls, method, hung)


def _relay():
    from traceml_ray.monitor.rank_intake import RankIntake

    _hang("relay", RankIntake, "accept")


def _aggregator():
    from traceml_ray.monitor.aggregator import AggregatorCore

    _hang("aggregator", AggregatorCore, "ingest")


_OF_FILES = ("open", "stat", "lstat", "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "scandir")
_OF_FILES += ("listdir", "access", "chmod")


def _wait_for_disk(path):
    """Return when the disk answers: a process that waits for it does nothing else."""
    if isinstance(path, int) or not os.fsdecode(path).startswith(f"{_folder}/out"):
        return
    while True:
        try:
            os.close(_open(_folder / "hang.disk", os.O_RDONLY))
        except FileNotFoundError:
            return


def _hang_with_disk(module, name):
    original = getattr(module, name)

    def hung(path=".", *args, **kwargs):
        _wait_for_disk(path)
        return original(path, *args, **kwargs)

    setattr(module, name, hung)


def _sqlite():
    import sqlite3

    class Connection(sqlite3.Connection):
        def __init__(self, path, *args, **kwargs):
            self.path = str(path).removeprefix("file://")
            super().__init__(path, *args, **kwargs)

        def execute(self, *args):
            _wait_for_disk(self.path)
            return super().execute(*args)

    connect = sqlite3.connect
    sqlite3.connect = lambda path, *args, **kwargs: connect(path, *args, factory=Connection, **kwargs)


def _disk():
    for name in _OF_FILES:
        _hang_with_disk(os, name)
    for module in (builtins, io):
        _hang_with_disk(module, "open")


if "CHAOS_FOLDER" in os.environ:
    from traceml_ray.agent.imports import when_imported

    time.time = lambda: _time() + _moved()
    time.time_ns = lambda: _time_ns() + int(_moved() * 1e9)
    when_imported("traceml_ray.monitor.rank_intake", _relay)
    when_imported("traceml_ray.monitor.aggregator", _aggregator)
    when_imported("sqlite3", _sqlite)
    _disk()
