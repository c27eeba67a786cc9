"""Ray Data: the wait for a batch of `iter_batches` and `iter_torch_batches` counts as `data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from traceml_ray.agent.recorder import Recorder

MODULE = "ray.data.iterator"
_METHODS = ("iter_batches", "iter_torch_batches")

Failed = Callable[[str, BaseException], None]


def patch(
    replace: Callable[[Any, str, Callable[[Any], Any]], Any], recorder: Recorder, failed: Failed
) -> None:
    """Patch `DataIterator`, whose module has been imported; raises what does not fit."""
    from ray.data.iterator import DataIterator

    def make(original: Any) -> Any:
        def batches(source: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(source, *args, **kwargs)
            try:
                kind = _TimedIterator if hasattr(type(found), "__next__") else _TimedBatches
                return kind(found, id(source), recorder, failed)
            except Exception as error:
                failed("ray_data", error)
                return found

        return batches

    for name in _METHODS:
        replace(DataIterator, name, make)


class _Timed:
    """In place of what Ray Data returned; whatever else is asked of it, that is asked."""

    def __init__(self, inner: Any, source: int, recorder: Recorder, failed: Failed) -> None:
        self._traceml_inner = inner
        self._traceml_loader = source
        """What the recorder knows it by: iterators come and go with the epochs."""
        self._traceml_recorder = recorder
        self._traceml_failed = failed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_traceml"):  # half-made, as while it is being copied
            raise AttributeError(name)
        return getattr(self._traceml_inner, name)


class _TimedBatches(_Timed):
    def __iter__(self) -> Iterator[Any]:
        inner = iter(self._traceml_inner)
        return _TimedIterator(inner, self._traceml_loader, self._traceml_recorder, self._traceml_failed)


class _TimedIterator(_Timed):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        new_iterator(self._traceml_recorder, self._traceml_failed, "ray_data")

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        inner, recorder = self._traceml_inner, self._traceml_recorder
        return timed_next(inner, self, recorder, self._traceml_failed, "ray_data")


def new_iterator(recorder: Recorder, failed: Failed, place: str) -> None:
    """Tell the recorder that an iterator was made."""
    try:
        recorder.new_iterator()
    except Exception as error:
        failed(place, error)


def timed_next(items: Iterator[Any], loader: Any, recorder: Recorder, failed: Failed, place: str) -> Any:
    """Return the next of `items`, with the wait for it counted as `data` of `loader`."""
    began = got = False
    try:
        began = recorder.data_begin(loader)
    except Exception as error:
        failed(place, error)
    try:
        item = next(items)
        got = True
        return item
    finally:
        try:
            if began:
                recorder.data_end(got)
        except Exception as error:
            failed(place, error)
