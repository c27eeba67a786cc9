"""
Applies and reverts patches.

A patch replaces one attribute by a thin wrapper. Each wrapper first checks whether torch is compiling; then
it is transparent, so `fullgraph=True` keeps its one graph. Otherwise the wrapper makes its mark inside its
own `try`, and calls the original exactly once with the caller's arguments.
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
"""Called with the place where an exception was suppressed, and the exception."""


class Patcher:
    """
    Applies patches, lists those that cannot be applied, and reverts all of them.

    A wrapper has the original's name, docstring, signature and attributes. It is pickled as the original is:
    where it is loaded without traceml_ray, the original is used.

    Args:
        debug: raise exceptions that would otherwise be counted.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self.errors = Errors(debug=debug)
        """Exceptions kept away from the training script, by place."""
        self.missing: dict[str, str] = {}
        """Patches that could not be applied, with the reason."""
        self._undo: list[Callable[[], object]] = []
        self._awaited: list[str] = []

    def failed(self, place: str, error: BaseException) -> None:
        """Count an exception that is kept away from the training script. In debug mode, raise it."""
        self.errors.swallow(place, error)

    def apply(self, name: str, patch: Callable[[], object]) -> None:
        """Call `patch`. If it raises, record the reason in `missing` under `name`."""
        try:
            patch()
        except Exception as error:
            self.missing[name] = f"{type(error).__name__}: {error}"[:200]
            if self.errors.debug:
                raise

    def when_imported(self, module: str, name: str, patch: Callable[[], object]) -> None:
        """Apply `patch` once the script has imported `module`. A module can have only one patch."""
        self._awaited.append(module)
        when_imported(module, functools.partial(self.apply, name, patch))

    def replace(self, owner: Any, name: str, make: Make, *, counted: bool = False) -> None:
        """
        Replace attribute `name` of `owner` (a class or a module) by `make(original)` until `restore`.

        `stacklevel` of warnings skips the frame of the wrapper, unless it replaces a frame of the original:
        then pass `counted`.
        """
        original = getattr(owner, name)
        # the stored object shows how it is bound: not every callable is a function
        stored = owner.__dict__.get(name, original)
        made = make(original)
        wrapper: Any = functools.wraps(original)(made if counted else uncounted(made))
        # some callers do not look through wrappers: `getfullargspec`
        with contextlib.suppress(TypeError, ValueError):
            wrapper.__signature__ = inspect.signature(original)
        # where pickle looks the wrapper up, and finds the original without us
        if isinstance(owner, types.ModuleType):
            wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
        setattr(owner, name, wrapper)

        def put_back() -> None:
            # Another library may have wrapped our wrapper since. Then its wrapper stays, and ours inside it
            # does nothing.
            if owner.__dict__.get(name) is wrapper:
                setattr(owner, name, stored)

        self._undo.append(put_back)

    def when_restored(self, undo: Callable[[], object]) -> None:
        """Register `undo`, which `restore` calls."""
        self._undo.append(undo)

    def after(self, place: str, action: Callable[[Any, dict[str, Any]], None]) -> Make:
        """
        Return the function that makes a wrapper, which calls the original, then `action(self or module,
        keywords)`.
        """

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
        """Restore everything, the last patch first. Raises nothing; may be called twice."""
        for module in self._awaited:
            forget(module)
        undo, self._undo, self._awaited = self._undo, [], []
        for one in reversed(undo):
            self.apply("detach", one)


def expect(function: Any, arguments: tuple[str, ...]) -> None:
    """
    Raise TypeError if `function` does not accept `arguments`. Wrappers name arguments, because `*args` costs
    1 µs a call.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError:
        raise TypeError(f"takes {signature}, expected {', '.join(arguments)}") from None
