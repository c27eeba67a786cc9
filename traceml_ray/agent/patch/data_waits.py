"""
Counts the wait for a batch as `data`.

This covers `DataLoader`, and Ray Data's `iter_batches` and `iter_torch_batches`. Waits of Ray Data and of
`traceml_ray.watch` are marked call by call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from threading import get_ident
from types import GeneratorType, SimpleNamespace
from typing import Any

from traceml_ray.agent.importlib_bootstrap import uncounted
from traceml_ray.agent.marks import COLLATED, DATA_BEGIN, DATA_END
from traceml_ray.agent.patch.patcher import Failed, Make, Patcher
from traceml_ray.agent.recorder import Recorder

LOADER = "_traceml_loader"
"""Attribute of an iterator: the id of the loader or dataset that it reads."""


def new_iterator(recorder: Recorder, failed: Failed, place: str) -> None:
    """Tell the recorder that an iterator was made."""
    try:
        recorder.new_iterator()
    except Exception as error:
        failed(place, error)


@uncounted
def timed_next(items: Iterator[Any], loader: Any, recorder: Recorder, failed: Failed, place: str) -> Any:
    """Return the next item of `items`. The wait for it counts as `data` of `loader`."""
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
                if got:
                    recorder.batch(item)
        except Exception as error:
            failed(place, error)


def patch_dataloader(patcher: Patcher, recorder: Recorder) -> None:
    """Patch the iterators of all DataLoaders. Raises if this torch does not fit."""
    from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter, _SingleProcessDataLoaderIter

    patcher.replace(_BaseDataLoaderIter, "__next__", _next(recorder, patcher.failed))
    patcher.replace(DataLoader, "__iter__", _iter(_BaseDataLoaderIter, recorder, patcher.failed))
    collate = patcher.after("collate", lambda iterator, _: _mark_collate(iterator, recorder))
    patcher.replace(_SingleProcessDataLoaderIter, "__init__", collate)


def _next(recorder: Recorder, failed: Failed) -> Make:
    append, clock = recorder.log.append, recorder.clock
    data_begin, data_end = recorder.data_begin, recorder.data_end
    size_of, note_batch = recorder.batches.mark, recorder.batch

    def stamp_with(stamp: Callable[[], int]) -> None:
        nonlocal clock
        clock = stamp

    recorder.follow(stamp_with)

    def make(original: Any) -> Any:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            began = got = False
            try:
                written = id(iterator) == recorder.iterator and get_ident() == recorder.ready
                if written:
                    append(DATA_BEGIN)
                    append(clock())
                else:
                    began = data_begin(iterator)
            except Exception as error:
                failed("data", error)
                written = False
            try:
                item = original(iterator)
                got = True
                return item
            finally:
                try:
                    if written and got:
                        append(DATA_END)
                        append(clock())
                        append(size_of(item))
                    elif written or began:
                        data_end(got)
                        if got:
                            note_batch(item)
                except Exception as error:
                    failed("data", error)

        return __next__

    return make


def _iter(kind: type, recorder: Recorder, failed: Failed) -> Make:
    """
    Record on each iterator of `kind` which loader it reads. Making the iterator (starting workers) is a wait,
    too.
    """

    def make(original: Any) -> Any:
        def __iter__(loader: Any) -> Any:  # noqa: N807
            began = False
            try:
                recorder.new_iterator()
                began = recorder.data_begin(loader)
            except Exception as error:
                failed("data", error)
            try:
                iterator = original(loader)
                if isinstance(iterator, kind):
                    iterator.__dict__[LOADER] = id(loader)
                return iterator
            finally:
                try:
                    if began:
                        recorder.data_end(True)
                except Exception as error:
                    failed("data", error)

        return __iter__

    return make


def _mark_collate(iterator: Any, recorder: Recorder) -> None:
    """In a DataLoader without workers, mark when the samples are ready. The loader itself is not changed."""
    fetcher = iterator._dataset_fetcher
    collate = fetcher.collate_fn
    append, clock = recorder.log.append, recorder.clock

    @uncounted
    @functools.wraps(collate)
    def marked(samples: Any) -> Any:
        if get_ident() == recorder.ready:
            append(COLLATED)
            append(clock())
        return collate(samples)

    fetcher.collate_fn = marked


RAY_DATA_MODULE = "ray.data.iterator"
_METHODS = ("iter_batches", "iter_torch_batches")


def patch_ray_data(patcher: Patcher, recorder: Recorder) -> None:
    """
    Patch Ray's iterable, whose module must be imported. Raises if this Ray does not fit.

    The methods still return Ray's own object, because Ray and others check its type. The dataset that it
    reads is stored on the object. Its class's `__iter__` times the iterators of objects with that attribute.
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
    """Return whether `iterable` is one of Ray's iterables whose iterators are timed."""
    return LOADER in getattr(iterable, "__dict__", ()) and type(iterable).__module__ == RAY_DATA_MODULE


@uncounted
def _timed(
    items: Generator[Any, Any, Any], loader: int, recorder: Recorder, failed: Failed
) -> Generator[Any, None, None]:
    """Yield from `items`, which only this generator reads. Each wait counts as `data` of `loader`."""
    iterator = SimpleNamespace(**{LOADER: loader})  # each epoch makes new iterators
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
