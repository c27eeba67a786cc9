"""
Calls a callback right after a module has been imported, without importing the module.

A launcher of ours loads this into every Python process, so it imports only `sys`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Callback = Callable[[], None]


_UNCOUNTED = "/importlib_bootstrap/../".join(__file__.rsplit("/", 1))
"""Path of this file that `stacklevel` of warnings skips: see `importlib_bootstrap`."""


class _Finder:
    """Import finder at the front of `sys.meta_path`. It answers only for modules that have a callback."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callback] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        # old finders have no `find_spec`
        specs = (find(name, path, target) for find in finders if find is not None)
        spec: ModuleSpec | None = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return None
        # The module keeps its own loader, because others read `__loader__`. Only this one call of it is
        # replaced.
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                del loader.exec_module
            except AttributeError:
                pass
            execute(module)
            callback = self.waiting.pop(name, None)
            if callback is not None:  # code that only checked whether the module exists has not run it
                callback()

        exec_module.__code__ = exec_module.__code__.replace(co_filename=_UNCOUNTED)
        try:
            loader.exec_module = exec_module
        except AttributeError:
            return None
        return spec


_finder = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """
    Call `callback` once `name` has been imported, or now if it is imported already. The callback must not
    raise.
    """
    if name in sys.modules:
        callback()
        return
    _finder.waiting[name] = callback
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(name: str) -> None:
    """Remove the callback for `name` if it has not run yet."""
    _finder.waiting.pop(name, None)
    if not _finder.waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
