"""
How something is patched, and put back.

A patch is one attribute replaced by a thin wrapper. Each wrapper asks first whether torch is compiling
(then it is transparent, so `fullgraph=True` keeps its one graph), makes its mark inside a `try` of its
own, and calls the original exactly once with the caller's own arguments.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from traceml_ray.agent.importlib_bootstrap import uncounted
from traceml_ray.agent.imports import forget, when_imported
from traceml_ray.errors import Errors

Make = Callable[[Any], Any]
"""Takes the original and returns what replaces it."""
Failed = Callable[[str, BaseException], None]
"""Takes the place where an exception was swallowed, and the exception."""


class Patcher:
    """
    Applies patches, lists those that cannot be applied, and undoes all of them.

    A wrapper has the original's name, docstring, signature and attributes, and is pickled as the original is:
    where it is loaded without us, the original is found.

    Args:
        debug: raise what would be counted.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self.errors = Errors(debug=debug)
        """Exceptions kept away from the training script, by place."""
        self.missing: dict[str, str] = {}
        """Patches that could not be applied, with the reason."""
        self._undo: list[Callable[[], object]] = []
        self._awaited: list[str] = []

    def failed(self, place: str, error: BaseException) -> None:
        """Count an exception that is kept away from the training script (or raise it: debug)."""
        self.errors.swallow(place, error)

    def apply(self, name: str, patch: Callable[[], object]) -> None:
        """Call `patch`; what it raises is noted in `missing` under `name`."""
        try:
            patch()
        except Exception as error:
            self.missing[name] = f"{type(error).__name__}: {error}"[:200]
            if self.errors.debug:
                raise

    def when_imported(self, module: str, name: str, patch: Callable[[], object]) -> None:
        """Apply `patch` once the script has imported `module`; there is one patch a module."""
        self._awaited.append(module)
        when_imported(module, functools.partial(self.apply, name, patch))

    def replace(self, owner: Any, name: str, make: Make, *, counted: bool = False) -> None:
        """
        Replace attribute `name` of `owner` (a class or a module) by `make(original)` until `restore`.

        `stacklevel` of warnings skips the frame of the wrapper. One that takes the place of a frame of the
        original is `counted`.
        """
        original = getattr(owner, name)
        stored = owner.__dict__.get(name, original)  # how it is bound: not all that is callable is a function
        made = make(original)
        wrapper: Any = functools.wraps(original)(made if counted else uncounted(made))
        with contextlib.suppress(TypeError, ValueError):  # not all look through wrappers: `getfullargspec`
            wrapper.__signature__ = inspect.signature(original)
        if isinstance(owner, types.ModuleType):  # where pickle finds the wrapper, and without us the original
            wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
        setattr(owner, name, wrapper)

        def put_back() -> None:
            # Another library may have wrapped our wrapper since: then theirs stays, and ours in it is inert.
            if owner.__dict__.get(name) is wrapper:
                setattr(owner, name, stored)

        self._undo.append(put_back)

    def when_restored(self, undo: Callable[[], object]) -> None:
        """Have `undo` called by `restore`."""
        self._undo.append(undo)

    def after(self, place: str, action: Callable[[Any, dict[str, Any]], None]) -> Make:
        """Return what makes a wrapper that calls the original, then `action(self or module, keywords)`."""

        def make(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                try:
                    action(args[0] if args else kwargs.get("module"), kwargs)
                except Exception as error:
                    self.failed(place, error)
                return result

            return call

        return make

    def restore(self) -> None:
        """Put everything back as it was, the last patch first; raises nothing, safe to call twice."""
        for module in self._awaited:
            forget(module)
        undo, self._undo, self._awaited = self._undo, [], []
        for one in reversed(undo):
            self.apply("detach", one)


def expect(function: Any, arguments: tuple[str, ...]) -> None:
    """Raise TypeError if `function` does not take `arguments` (spelled out: `*args` costs a µs a call)."""
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError:
        raise TypeError(f"takes {signature}, expected {', '.join(arguments)}") from None
