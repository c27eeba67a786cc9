"""A clock for one module, for the thread of a test: `time` itself is shared with every other thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


class ModuleTime:
    """
    Stands for `time` in one module. Functions that a test replaces are replaced in the test's thread alone:
    threads that others have left, and libraries, keep the real ones.

    Args:
        all_threads: whether they are replaced in all threads that run the module's code.
        replaced: the functions, by name.
    """

    def __init__(self, all_threads: bool = False, **replaced: Callable[..., Any]) -> None:
        self._replaced = replaced
        self._thread = None if all_threads else threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in self._replaced and self._thread in (None, threading.get_ident()):
            return self._replaced[name]
        return getattr(time, name)


def replace_time(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    all_threads: bool = False,
    **replaced: Callable[..., Any],
) -> None:
    """Replace functions of `time`, by their names, as `module` calls them: see `ModuleTime`."""
    assert module.time is time, f"{module.__name__} has no `time`, or it is replaced already"
    monkeypatch.setattr(module, "time", ModuleTime(all_threads, **replaced))
