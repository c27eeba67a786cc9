"""
Collects the stacks of all threads of this process, when the job hangs.

The agent's thread does this, so a training thread that is stuck in a collective is no obstacle. A training
thread that holds the GIL is: then there is no answer, and that is informative too. No source files are read,
because the disk may be what hangs.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
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
_INSTALLED = ("/site-packages/", "/dist-packages/", "/torchinductor_")
_TORCH, _COLLECTIVES, _CHECKPOINT = "/torch/", "/torch/distributed/", "/torch/distributed/checkpoint/"
_TRANSPARENT = ("/torch/_ops.py", "/torch/futures/__init__.py")
"""Files of torch through which others call what waits."""
_EXCHANGES = ("/distributed_c10d.py", "/_functional_collectives.py")
"""Files of torch.distributed with the functions that people know."""
_WRAPPERS = {"wrapper", "wrapped"}


def event(owner: int | None, opened: wire.OpenStage, dump: str) -> wire.Event:
    """
    Return the event `stacks`: the stacks of all threads as text, the thread `owner` first.

    `data` has `dump` (the id of the request), `where` the training thread is in the user's code (`evaluate
    (train.py:88)`), and, if it waits in torch.distributed, the `call` in which it waits, and the `peer`: the
    rank that it sends to or receives from, or the root of the collective.
    """
    frames = current_frames()
    frames.pop(threading.get_ident(), None)
    known = {ident: thread.name for ident, thread in python_threads().items()}
    owner = owner if owner in frames else threading.main_thread().ident
    order = sorted(frames, key=lambda ident: (ident != owner, ident))[:MAX_THREADS]
    parts = []
    for ident in order:
        trained = ", training" if ident == owner else ""
        parts.append(f"thread {known.get(ident, ident)}{trained}:\n{_text(frames[ident])}")
    data: dict[str, codec.Value] = {"dump": dump}
    if owner in frames:
        where, call = place(frames[owner])
        data.update(where=where, call=call, peer=peer(frames[owner]))
    text = "\n".join(parts)
    return wire.Event("stacks", time.time_ns(), opened.step, opened.stage, _bounded(text), data)


def python_threads() -> dict[int, threading.Thread]:
    """
    Return the threads that Python knows, by identifier.

    `threading.enumerate` takes a lock that may never be released.
    """
    return dict(vars(threading).get("_active", {}))


def current_frames() -> dict[int, FrameType]:
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


def place(frame: FrameType) -> tuple[str | None, str | None]:
    """
    Return (place in the user's code, function of torch.distributed) at which a stack ends. None for a part
    that does not apply: a stack that only passes through torch.distributed (a forward of FSDP, a checkpoint
    that is written) ends in no function of it.
    """
    call, inside, exchanges = None, None, False
    for one in _inner_first(frame):
        path, name = one.f_code.co_filename, one.f_code.co_name
        if not _is_library(path):
            return _line(name, path, one.f_lineno), call
        if _TORCH in path and inside is None and not path.endswith(_TRANSPARENT):
            inside = _COLLECTIVES in path and _CHECKPOINT not in path
        if inside and _COLLECTIVES in path and name not in _WRAPPERS:
            exchange = path.endswith(_EXCHANGES)
            if exchange or not exchanges:
                call, exchanges = name, exchange
    return None, call


def peer(frame: FrameType) -> int | None:
    """
    Return the global rank that a stack's call of torch.distributed names: the one that it sends to or
    receives from, or the root of the collective. None: it names none.
    """
    named = None
    for one in _inner_first(frame):
        if not _is_library(one.f_code.co_filename):
            break
        if _COLLECTIVES in one.f_code.co_filename and _NAMES_PEER.intersection(one.f_code.co_varnames):
            named = _named_peer(one.f_locals)
    return named


_NAMES_PEER = {"src", "dst"}


def _named_peer(arguments: Mapping[str, Any]) -> int | None:
    for name in ("src", "dst"):
        rank, rank_in_group = arguments.get(name), arguments.get(f"group_{name}")
        if isinstance(rank, int):
            return rank
        if isinstance(rank_in_group, int):
            return _global_rank(arguments.get("group"), rank_in_group)
    return None


def _global_rank(group: Any, rank: int) -> int | None:
    """Return the global rank of a rank of a group. None: it is not known."""
    if group is None:
        return rank
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    try:
        members = dict(world.pg_group_ranks[group])
        return next(int(one) for one, number in members.items() if number == rank)
    except Exception:  # the group is gone, or its torch keeps no ranks
        return None


def user_line(frames: Iterable[tuple[str, str, int]]) -> str | None:
    """
    Return the place in the user's code of a stack that is given as (function, file, line), the innermost call
    first. None: there is no user code in it.
    """
    return next((_line(*one) for one in frames if not _is_library(one[1])), None)


def _line(function: str, path: str, line: int) -> str:
    return _bounded(f"{function} ({Path(path).name}:{line})")


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
