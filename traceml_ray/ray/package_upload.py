"""Sends this package to nodes that lack it."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from pathlib import Path


def upload() -> str:
    """
    Put this package, as it is imported here, into the cluster's store; return its URI for `py_modules`.

    What Ray Train's workers and anything else of the user's run with is not touched.
    """
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed

    with tempfile.TemporaryDirectory(prefix="traceml-") as folder:
        package = Path(folder) / "traceml_ray"
        for name in ("traceml_ray", "traceml_ray.launchers", "traceml_ray.dash_app"):
            # In a checkout the latter two lie beside the package, not in it.
            source = Path(importlib.import_module(name).__path__[0])
            target = package.joinpath(*name.split(".")[1:])
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        env = upload_py_modules_if_needed({"py_modules": [str(package)]}, False, scratch_dir=folder)
    uri: str = env["py_modules"][0]
    return uri
