"""
Collects the stacks of all threads of this process, when the job hangs.

The agent's thread does this, so a training thread that is stuck in a collective is no obstacle. A training
thread that holds the GIL is: then there is no answer, and that is informative too. No source files are read,
because the disk may be what hangs.
"""

from __future__ import annotations

import gc
import json
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

MAX_BYTES = 12_000
"""Largest size of one event's text, in bytes. Two such texts and half a batch of rows fit into one batch."""
MAX_FRAMES = 40
MAX_THREADS = 64
_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    sorted({path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platlib", "purelib")})
)
_INSTALLED = ("/site-packages/", "/dist-packages/")
_COLLECTIVES = "/torch/distributed/"
_WRAPPERS = {"wrapper", "wrapped"}


def event(owner: int | None, opened: wire.OpenStage, dump: str) -> wire.Event:
    """
    Return the event `stacks`: the stacks of all threads as text, the thread `owner` first.

    `data` has `dump` (the id of the request), `where` the training thread is in the user's code (`evaluate
    (train.py:88)`), and, if it waits in torch.distributed, the `call` in which it waits.
    """
    frames = _current_frames()
    frames.pop(threading.get_ident(), None)
    # `threading.enumerate` is not used: it takes a lock that may never be released.
    known = {ident: thread.name for ident, thread in dict(vars(threading).get("_active", {})).items()}
    owner = owner if owner in frames else threading.main_thread().ident
    order = sorted(frames, key=lambda ident: (ident != owner, ident))[:MAX_THREADS]
    parts = []
    for ident in order:
        trained = ", training" if ident == owner else ""
        parts.append(f"thread {known.get(ident, ident)}{trained}:\n{_text(frames[ident])}")
    data: dict[str, codec.Value] = {"dump": dump}
    if owner in frames:
        where, call = place(frames[owner])
        data.update(where=where, call=call)
    text = "\n".join(parts)
    return wire.Event("stacks", time.time_ns(), opened.step, opened.stage, _bounded(text), data)


def _current_frames() -> dict[int, FrameType]:
    """
    Return the frame of each thread, without a garbage collection in between.

    Before Python 3.11.9 a garbage collection there deadlocks the process
    (https://github.com/python/cpython/issues/106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def flight_recorder(opened: wire.OpenStage, dump_id: str) -> wire.Event | None:
    """
    Return the event `flight_recorder`: the collectives that torch has in progress. None if torch records
    none.

    `data` describes the oldest of them: `pending` (its name), `pending_seq` (its number in its group) and
    `pending_ns` (its age in ns). These keys are missing if no collective is in progress.
    """
    if "torch.distributed" not in sys.modules:
        return None
    module = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Callable[..., bytes] | None = getattr(module, name, None)
        if dump is None:
            continue
        record = json.loads(dump(True, True))  # with collectives; only active ones
        # Of gloo's finished collectives it is only known that they are retired.
        entries = [entry for entry in record.get("entries", ()) if not entry.get("retired")]
        if "entries" in record:
            data = {"dump": dump_id, "by": name, **_pending(entries, time.time_ns())}
            text = json.dumps({**record, "entries": entries})
            now = time.time_ns()
            return wire.Event("flight_recorder", now, opened.step, opened.stage, _bounded(text), data)
    return None


def _pending(entries: list[dict[str, Any]], now_ns: int) -> dict[str, codec.Value]:
    """
    Return the oldest collective in progress: its name and group, its number in the group, its
    age in ns.
    """
    if not entries:
        return {}
    oldest = min(entries, key=lambda entry: int(entry["time_created_ns"]))
    group = (list(oldest.get("process_group", ())) or [""])[-1]
    name = str(oldest["profiling_name"]).rpartition(":")[2]
    return {
        "pending": name if group in ("", "default_pg", "undefined") else f"{name} of {group}",
        "pending_seq": int(oldest["collective_seq_id"] or oldest["p2p_seq_id"]),
        "pending_ns": max(0, now_ns - int(oldest["time_created_ns"])),
    }


def place(frame: FrameType) -> tuple[str | None, str | None]:
    """
    Return (place in the user's code, function of torch.distributed) at which a stack ends. None for a part
    that does not apply.
    """
    call = None
    for one in _inner_first(frame):
        code = one.f_code
        if not _is_library(code.co_filename):
            return _bounded(f"{code.co_name} ({Path(code.co_filename).name}:{one.f_lineno})"), call
        if _COLLECTIVES in code.co_filename and code.co_name not in _WRAPPERS:
            call = code.co_name
    return None, call


def _is_library(path: str) -> bool:
    return path.startswith(("<", _OURS, *_LIBRARIES)) or any(folder in path for folder in _INSTALLED)


def _inner_first(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _text(frame: FrameType) -> str:
    """Return a stack as lines, the innermost call last, as in a traceback."""
    lines: list[str] = []
    for one in _inner_first(frame):
        if len(lines) == MAX_FRAMES:
            lines.append("  …")
            break
        lines.append(f"  {one.f_code.co_filename}:{one.f_lineno} in {one.f_code.co_name}")
    return "\n".join(reversed(lines))


def _bounded(text: str) -> str:
    return text.encode("utf-8", "backslashreplace")[:MAX_BYTES].decode("utf-8", "ignore")
