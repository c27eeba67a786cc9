"""The wait for a batch of a `DataLoader` counts as `data`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

from traceml_ray.agent.importlib_bootstrap import uncounted
from traceml_ray.agent.marks import COLLATED, DATA_BEGIN, DATA_END
from traceml_ray.agent.patch.iterators import LOADER
from traceml_ray.agent.patch.patcher import Failed, Make, Patcher
from traceml_ray.agent.recorder import Recorder


def patch(patcher: Patcher, recorder: Recorder) -> None:
    """Patch the iterators of all DataLoaders; raises what does not fit this torch."""
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
    """Note on each iterator of `kind` which loader it reads; making it (starting workers) is a wait, too."""

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
    """In a DataLoader without workers, mark when the samples are there; the loader stays as it is."""
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
