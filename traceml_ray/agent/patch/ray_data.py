"""Ray Data: the wait for a batch of `iter_batches` and `iter_torch_batches` counts as `data`."""

from __future__ import annotations

from collections.abc import Generator
from types import GeneratorType, SimpleNamespace
from typing import Any

from traceml_ray.agent.importlib_bootstrap import uncounted
from traceml_ray.agent.patch.iterators import LOADER, new_iterator, timed_next
from traceml_ray.agent.patch.patcher import Failed, Patcher
from traceml_ray.agent.recorder import Recorder

MODULE = "ray.data.iterator"
_METHODS = ("iter_batches", "iter_torch_batches")


def patch(patcher: Patcher, recorder: Recorder) -> None:
    """
    Patch Ray's iterable, whose module has been imported; raises what does not fit.

    What the methods return stays Ray's own object, which Ray and others ask for its type; on it is noted
    which dataset it reads, and its class's `__iter__` times the iterators of those that are noted.
    """
    from ray.data.iterator import DataIterator, _IterableFromIterator

    def make_batches(original: Any) -> Any:
        def batches(source: Any, *args: Any, **kwargs: Any) -> Any:
            iterator = original(source, *args, **kwargs)
            try:
                iterator.__dict__[LOADER] = id(source)
            except Exception as error:
                patcher.failed("ray_data", error)
            return iterator

        return batches

    def make_iter(original: Any) -> Any:
        def __iter__(iterable: Any) -> Any:  # noqa: N807
            items, loader = original(iterable), iterable.__dict__.get(LOADER)
            if loader is None or type(items) is not GeneratorType:
                return items
            return _timed(items, loader, recorder, patcher.failed)

        return __iter__

    patcher.replace(_IterableFromIterator, "__iter__", make_iter)
    for name in _METHODS:
        patcher.replace(DataIterator, name, make_batches)


def is_timed(iterable: Any) -> bool:
    """Return whether `iterable` is one of Ray's whose iterators are timed."""
    return LOADER in getattr(iterable, "__dict__", ()) and type(iterable).__module__ == MODULE


@uncounted
def _timed(
    items: Generator[Any, Any, Any], loader: int, recorder: Recorder, failed: Failed
) -> Generator[Any, None, None]:
    """Yield from `items`, which nothing else reads, with each wait counted as `data` of `loader`."""
    iterator = SimpleNamespace(**{LOADER: loader})  # iterators come and go with the epochs
    new_iterator(recorder, failed, "ray_data")
    try:
        while True:
            try:
                item = timed_next(items, iterator, recorder, failed, "ray_data")
            except StopIteration:
                return
            yield item
    finally:
        items.close()
