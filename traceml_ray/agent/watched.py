"""
Implements the object that `traceml_ray.watch` returns. It behaves like the given iterable in everything but
iteration.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from traceml_ray.agent import bootstrap
from traceml_ray.agent.importlib_bootstrap import uncounted
from traceml_ray.agent.patch.data_waits import is_timed, new_iterator, timed_next

_PLACE = "watch"
_BY_TYPE = (
    *("__len__", "__length_hint__", "__getitem__", "__setitem__", "__delitem__", "__contains__"),
    *("__reversed__", "__call__", "__exit__"),
)


class _Watched:
    """
    Iterates over its source and counts each wait as `data`. It forwards everything else to the source.

    It has the source's length, items and attributes, passes `isinstance` checks for the source's type, can be
    iterated as often, and is copied and pickled with the source. Its type creates objects like the source's
    type does: frameworks rebuild a loader with `type(loader)(…)`.
    """

    __slots__ = ("__weakref__", "_traceml_source")

    def __iter__(self) -> Iterator[Any]:
        return _timed(_source(self))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(_source(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(_source(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_source(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_source(self), name)

    def __bool__(self) -> bool:
        return bool(_source(self))

    def __repr__(self) -> str:
        return repr(_source(self))

    def __dir__(self) -> list[str]:
        return dir(_source(self))

    def __copy__(self) -> Any:
        return watched(copy.copy(_source(self)))

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return watched, (_source(self),)


class _WatchedIterator(_Watched):
    """Wraps an iterator, and is an iterator itself."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return self

    @uncounted
    def __next__(self) -> Any:
        return _next(_source(self), _source(self))


def watched(iterable: Any) -> Any:
    """
    Return `iterable` with its waits counted. Returns it unchanged if they are already; see
    `traceml_ray.watch`.
    """
    if _is_timed(iterable):
        return iterable
    proxy: Any = object.__new__(_kind(type(iterable)))  # type: ignore[arg-type]
    object.__setattr__(proxy, "_traceml_source", iterable)
    if hasattr(type(proxy), "__next__"):
        _begin()
    return proxy


def _is_timed(iterable: Any) -> bool:
    kind, torch_data = type(iterable), sys.modules.get("torch.utils.data")
    if issubclass(kind, _Watched) or is_timed(iterable):
        return True
    loader = getattr(torch_data, "DataLoader", None)
    return loader is not None and issubclass(kind, loader) and kind.__iter__ is loader.__iter__


@lru_cache(maxsize=256)
def _kind(source: type) -> type:
    """Return the wrapper class for sources of that type: Python looks up some methods only on the type."""

    def asks(name: str) -> Callable[..., Any]:
        return uncounted(lambda self, *given, **named: getattr(_source(self), name)(*given, **named))

    # a type's own attributes include more, such as `__call__`
    names = {name for cls in source.__mro__ for name in vars(cls)}
    methods: dict[str, Callable[..., Any]] = {name: asks(name) for name in _BY_TYPE if name in names}
    if "__enter__" in names:
        methods["__enter__"] = _enter
    methods["__new__"] = lambda _, *arguments, **keywords: watched(source(*arguments, **keywords))
    base = _WatchedIterator if hasattr(source, "__next__") else _Watched
    return type(base.__name__, (base,), {"__slots__": (), **methods})


@uncounted
def _enter(self: Any) -> Any:
    entered = _source(self).__enter__()
    return self if entered is _source(self) else entered


def _source(proxy: _Watched) -> Any:
    return object.__getattribute__(proxy, "_traceml_source")


def _begin() -> None:
    agent = bootstrap.current()
    if agent is not None:
        new_iterator(agent.recorder, agent.instrumentation.failed, _PLACE)


@uncounted
def _timed(source: Any) -> Iterator[Any]:
    items = iter(source)
    _begin()
    while True:
        try:
            item = _next(items, source)
        except StopIteration:
            return
        yield item


@uncounted
def _next(items: Iterator[Any], source: Any) -> Any:
    agent = bootstrap.current()
    if agent is None:
        return next(items)
    return timed_next(items, source, agent.recorder, agent.instrumentation.failed, _PLACE)
