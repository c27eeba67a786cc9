"""
Keeps our wrappers out of `stacklevel`, which selects the line that a warning or log message names.

torch warns with `stacklevel=2` to name a line of the script. A wrapper in between would make it a line of
ours, and the filters of the script would not match. Python's `warnings` and `logging` (the latter since 3.11)
skip the frames of files with both `importlib` and `_bootstrap` in their path, so that a warning in a module
names the importer. So the code of a wrapper has a path through this folder, for example
`…/agent/importlib_bootstrap/../patch/patcher.py`. Tracebacks and debuggers resolve it to the same file.

A C function that warns has no frame of its own. Its warning names the calling frame, which is ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_HERE = Path(__file__).parent
_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncounted(function: _Function) -> _Function:
    """
    Make `stacklevel` skip the frame of a function, and return the function. Other callables
    are not changed.
    """
    code = getattr(function, "__code__", None)
    if code is not None:
        path = f"{_HERE}{os.sep}{os.path.relpath(code.co_filename, _HERE)}"
        function.__code__ = code.replace(co_filename=path)
    return function
