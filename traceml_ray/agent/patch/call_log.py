"""
The newest collectives that the user's code has called, for a torch that records none by itself.

Newer torch records all collectives (its flight recorder). There is no log then, and calls cost nothing more.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from types import CodeType
from typing import Any

MAX_CALLS = 256
"""Number of calls kept."""


class LoggedCall:
    """A call of a collective. `finished` is set once it has returned."""

    __slots__ = ("code", "dtype", "finished", "group", "line", "number", "op", "shape", "t_ns")

    def __init__(self, op: str, group: str, number: int, tensor: Any, code: CodeType, line: int) -> None:
        self.op, self.group, self.number = op, group, number
        self.shape, self.dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
        self.code, self.line = code, line
        self.t_ns = time.time_ns()
        self.finished = False


class CallLog:
    """Keeps the newest calls. The training thread adds them, the agent's thread reads them."""

    def __init__(self) -> None:
        self._calls: deque[LoggedCall] = deque(maxlen=MAX_CALLS)
        self._numbers: dict[str, int] = {}
        """Number of the last call in each group."""
        self._count = 0

    def begin(self, op: str, group: str, arguments: Sequence[Any]) -> LoggedCall:
        """
        Add a call. The caller of the calling function is taken as its place. No tensor is kept.

        Args:
            op: name of the function of torch.distributed.
            group: name of the process group.
            arguments: positional arguments of the call. The first is described if it is a tensor.
        """
        frame = sys._getframe(2)
        self._count += 1
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        tensor = arguments[0] if arguments else None
        call = LoggedCall(op, group, number, tensor, frame.f_code, frame.f_lineno)
        self._calls.append(call)
        return call

    def entries(self) -> list[dict[str, Any]]:
        """Return the calls as torch's flight recorder writes them, the oldest first."""
        calls = [*self._calls]
        first = self._count - len(calls)
        return [_entry(max(0, first) + i, call) for i, call in enumerate(calls)]


def _entry(record: int, call: LoggedCall) -> dict[str, Any]:
    sizes = [] if call.shape is None else [[*call.shape]]
    dtypes = [] if call.dtype is None else [str(call.dtype).removeprefix("torch.")]
    return {
        "record_id": record,
        "process_group": (call.group, "default_pg" if call.group == "world" else ""),
        "collective_seq_id": call.number,
        "profiling_name": call.op,
        "time_created_ns": call.t_ns,
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "retired": call.finished,
        "frames": [{"name": call.code.co_name, "filename": call.code.co_filename, "line": call.line}],
    }
