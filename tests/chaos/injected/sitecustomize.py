"""
Harm from inside, on PYTHONPATH of everything that the launcher starts. In folder CHAOS_FOLDER:

- `clock.rank`, `clock.monitor`: by how many seconds the wall clocks of such processes have moved;
- `hang.relay`, `hang.aggregator`: while it is there, taking a message does not end.
"""

import os
import time
from pathlib import Path

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

    _hang("relay", RankIntake, "take")


def _aggregator():
    from traceml_ray.monitor.aggregator import AggregatorCore

    _hang("aggregator", AggregatorCore, "ingest")


if "CHAOS_FOLDER" in os.environ:
    from traceml_ray.agent.imports import when_imported

    time.time = lambda: _time() + _moved()
    time.time_ns = lambda: _time_ns() + int(_moved() * 1e9)
    when_imported("traceml_ray.monitor.rank_intake", _relay)
    when_imported("traceml_ray.monitor.aggregator", _aggregator)
