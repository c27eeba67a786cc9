"""Found first on a rank's PYTHONPATH: waits for torch, then makes way for the machine's own sitecustomize."""

import os
import sys


def _next_sitecustomize() -> None:
    import importlib.util
    from importlib.machinery import PathFinder

    here = __file__.rpartition(os.sep)[0]
    path = [p for p in sys.path if p != here]
    spec = PathFinder.find_spec("sitecustomize", path)
    sys.path[:] = path
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("TRACEML_SOCKET") and "TRACEML_RANK_PID" not in os.environ:
    try:
        from traceml_ray.agent.bootstrap import start_on_import

        start_on_import()
    except Exception as error:
        sys.stderr.write(f"traceml-ray: not watching this process: {type(error).__name__}: {error}\n")

_next_sitecustomize()
