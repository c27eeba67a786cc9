"""
Found first on the PYTHONPATH of what a launcher of ours starts: waits for torch, then makes way for the
machine's own sitecustomize. Every Python process pays for this, so it imports as little as it can.
"""

import os
import sys

_NOT_WATCHED = "traceml-ray: not watching this process: "


def _next_sitecustomize() -> None:
    from importlib.machinery import PathFinder

    here = __file__.rpartition(os.sep)[0]
    path = [p for p in sys.path if p != here]
    spec = PathFinder.find_spec("sitecustomize", path)
    sys.path[:] = path
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _torch_is_there(pid: int = os.getpid()) -> None:
    try:
        from traceml_ray.agent.bootstrap import start_on_import

        start_on_import(pid)
    except Exception as error:
        sys.stderr.write(f"{_NOT_WATCHED}{type(error).__name__}: {error}\n")


if os.environ.get("TRACEML_SOCKET") and "TRACEML_RANK_PID" not in os.environ:
    try:
        from traceml_ray.agent.imports import when_imported

        when_imported("torch", _torch_is_there)
    except Exception as error:
        sys.stderr.write(f"{_NOT_WATCHED}{type(error).__name__}: {error}\n")

_next_sitecustomize()
