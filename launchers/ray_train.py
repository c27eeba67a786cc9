"""
Ray Train: the path of our callback, and whether it can be used here.

This module is deliberately cheap to import: `traceml_ray.start()` uses it in every driver, and most drivers
never train.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

_NAME = "TraceMLTrainCallback"
_CALLBACKS = "RAY_TRAIN_CALLBACKS"
_NEEDED = ("fsspec", "pandas", "pyarrow", "pydantic", "requests")
"""Packages that `import ray.train` needs."""


def train_callback_path() -> str | None:
    """
    Return the value of RAY_TRAIN_CALLBACKS with which Ray Train is watched. None: that is not possible.

    Imports nothing; only checks that Ray Train v2 and the packages it needs exist. When `fit()` imports the
    callback, it always gets one, if necessary one that does nothing.
    """
    if os.environ.get("RAY_TRAIN_V2_ENABLED", "1").lower() not in ("1", "true"):
        return None
    ray = importlib.util.find_spec("ray")
    if ray is None or not ray.submodule_search_locations:
        return None
    reads_variable = Path(ray.submodule_search_locations[0], "train/v2/_internal/callbacks/env_callback.py")
    if not reads_variable.is_file() or any(importlib.util.find_spec(name) is None for name in _NEEDED):
        return None
    return f"{__name__}.{_NAME}"


def watch_trainers() -> None:
    """Make Ray Train load our callback in this process, if it can."""
    path = train_callback_path()
    named = _named()
    if path is not None and path not in named:
        os.environ[_CALLBACKS] = ",".join([*named, path])


def unwatch_trainers() -> None:
    """Undo `watch_trainers`."""
    named = [name for name in _named() if not name.startswith(f"{__name__}.")]
    if named:
        os.environ[_CALLBACKS] = ",".join(named)
    else:
        os.environ.pop(_CALLBACKS, None)


def _named() -> list[str]:
    return [name for name in os.environ.get(_CALLBACKS, "").split(",") if name]


def __getattr__(name: str) -> object:
    if name != _NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .train_callback import TraceMLTrainCallback
    except Exception as error:
        # `fit()` of a watched driver asks for this attribute, and must not fail because of it.
        return _inert(error)
    return TraceMLTrainCallback


def _inert(error: Exception) -> type:
    """
    Return a callback that does nothing, for a Ray Train that ours does not fit. Raises ImportError if
    impossible.
    """
    from ray.train.v2.api.callback import RayTrainCallback

    class TraceMLTrainCallback(RayTrainCallback):
        def __init__(self, *_settings: object, **_fields: object) -> None:
            import logging

            logging.getLogger("traceml_ray").warning("Ray Train is not watched: %s", reason)

    reason = f"{type(error).__name__}: {error}"
    TraceMLTrainCallback.__module__ = "__main__"  # cloudpickle then sends the whole class
    return TraceMLTrainCallback
