"""Waits for data that are marked one call at a time: those of Ray Data and of `traceml_ray.watch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from traceml_ray.agent.importlib_bootstrap import uncounted
from traceml_ray.agent.patch.patcher import Failed
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
                if got:
                    recorder.batch(item)
        except Exception as error:
            failed(place, error)
