"""What a rank process runs with, as its reader wants to know after it has died."""

from __future__ import annotations

import os
import platform
import sys

from traceml_ray import __version__
from traceml_ray.errors import sendable

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_CHARS = 300


def environment() -> dict[str, str]:
    """
    Return versions, and the configuration of torch's allocator, of what this process
    has imported already.
    """
    values = {"traceml_ray": __version__, "python": platform.python_version()}
    if (torch := sys.modules.get("torch")) is not None:
        values["torch"] = str(torch.__version__)
        for name in ("cuda", "hip"):
            if version := getattr(torch.version, name, None):
                values[name] = str(version)
    if (ray := sys.modules.get("ray")) is not None:
        values["ray"] = str(getattr(ray, "__version__", ""))
    values |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {name: sendable(value)[:_CHARS] for name, value in values.items() if value}
