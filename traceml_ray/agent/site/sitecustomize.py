"""
Found first on the PYTHONPATH of processes that a launcher of ours starts.

It waits for the import of torch, then runs the machine's own sitecustomize. Every Python process pays for
this file, so it imports as little as possible.
"""

import os
import sys


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
        from traceml_ray.ray.channels import channel_to_relay

        start_on_import(pid, channel_to_relay)
    except Exception as error:
        sys.stderr.write(f"traceml-ray: not watching this process: {type(error).__name__}: {error}\n")


def _wait_for_torch() -> None:
    try:
        from traceml_ray.agent.imports import when_imported
    except Exception:  # a Python without traceml_ray; the error only matters if there is torch
        from importlib.machinery import SourceFileLoader
        from types import ModuleType

        path = f"{__file__.rpartition(f'{os.sep}site{os.sep}')[0]}{os.sep}imports.py"
        module = ModuleType("traceml_ray_imports")
        module.__file__ = path
        SourceFileLoader(module.__name__, path).exec_module(module)
        when_imported = module.when_imported
    when_imported("torch", _torch_is_there)


if os.environ.get("TRACEML_SOCKET") and "TRACEML_RANK_PID" not in os.environ:
    try:
        _wait_for_torch()
    except Exception:  # this Python is too old for any supported torch
        pass

_next_sitecustomize()
