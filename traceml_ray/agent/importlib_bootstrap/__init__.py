"""
How a wrapper of ours stays out of `stacklevel`, which names the line that a warning or log message is about.

torch warns with `stacklevel=2` to name the line of the script. With a wrapper in between, that line would be
ours, and the filters of the script would not match. Python's `warnings` and `logging` (this since 3.11) skip
the frames of files with both `importlib` and `_bootstrap` in their path: a warning in a module names who
imports it. So the code of a wrapper has a path through this folder, as
`…/agent/importlib_bootstrap/../patch/patcher.py`. For tracebacks and debuggers that is the same file.

A C function that warns has no frame of its own: its warning names the frame that calls it, which is ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_HERE = Path(__file__).parent
_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncounted(function: _Function) -> _Function:
    """Have `stacklevel` skip the frame of a function, and return it. Other callables stay as they are."""
    code = getattr(function, "__code__", None)
    if code is not None:
        path = f"{_HERE}{os.sep}{os.path.relpath(code.co_filename, _HERE)}"
        function.__code__ = code.replace(co_filename=path)
    return function
