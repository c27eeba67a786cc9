"""
The stacks of every thread of this process, asked for when the job hangs.

Made by the agent's own thread, so a training thread that is stuck in a collective is no obstacle; one
that holds the interpreter's lock is, and then no answer is the answer. No source files are read: the disk
may be what hangs.
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
"""Largest size of one event's text, in bytes: two of them and half a batch of rows fit into one batch."""
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
    Return event `stacks`: all threads' stacks as text, the thread `owner` first.

    `data` has `dump` (`of`, what asked for it), `where` the training thread is in the user's own code
    (`evaluate (train.py:88)`), and the `call` of torch.distributed that it waits in, where it does.
    """
    frames = _current_frames()
    frames.pop(threading.get_ident(), None)
    # Not `threading.enumerate`, which takes a lock that may never be released.
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
    Return each thread's frame, without a garbage collection meanwhile.

    Before Python 3.11.9 one deadlocks the process there (https://github.com/python/cpython/issues/106883).
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
    Return event `flight_recorder`: the collectives that torch has under way, None where it keeps none.

    `data` has the oldest of them: `pending` (its name), `pending_seq` (its number in its group) and
    `pending_ns` (for how long), or none of these when nothing is under way.
    """
    if "torch.distributed" not in sys.modules:
        return None
    module = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Callable[..., bytes] | None = getattr(module, name, None)
        if dump is None:
            continue
        record = json.loads(dump(True, True))  # collectives, only those that are active
        # Of gloo's, those that are over are only known to be retired.
        entries = [entry for entry in record.get("entries", ()) if not entry.get("retired")]
        if "entries" in record:
            data = {"dump": dump_id, "by": name, **_pending(entries, time.time_ns())}
            text = json.dumps({**record, "entries": entries})
            now = time.time_ns()
            return wire.Event("flight_recorder", now, opened.step, opened.stage, _bounded(text), data)
    return None


def _pending(entries: list[dict[str, Any]], now_ns: int) -> dict[str, codec.Value]:
    """Return the oldest collective under way: its name and group, its number in the group, its age."""
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
    Return (where in the user's code, in which function of torch.distributed) a stack ends; None where
    it is in neither.
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
