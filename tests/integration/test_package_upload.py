"""Nodes that lack the package: it is sent to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray_cluster import fake_cluster

import traceml_ray

WITHOUT_US = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "traceml" not in getattr(f, "__module__", "")]
sys.path[:] = [p for p in sys.path if not p.endswith(%r)]
"""
NODES_SEEN_LATE = """
import threading, time
run = threading.Thread.run
def late(self):
    if self.name == "traceml-membership":
        time.sleep(3)
    run(self)
threading.Thread.run = late
"""


def test_cluster_without_the_package_receives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(traceml_ray.__file__).parents[1])
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_US % root + NODES_SEEN_LATE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # the driver's folder is on its workers' path
    with fake_cluster(nodes=1, cpus=2):

        @ray.remote(num_cpus=0)
        def is_there() -> bool:
            import importlib.util

            return importlib.util.find_spec("traceml_ray") is not None

        assert not ray.get(is_there.remote())
        with pytest.raises(traceml_ray.StartError, match="No module named 'traceml_ray'"):
            traceml_ray.start(session="without", out=tmp_path)
        with traceml_ray.start(session="with", out=tmp_path, ship=True) as session:
            session.wait_ready()
            [node] = session.nodes()
            assert node.alive
        assert (session.folder / "summary.json").exists()
        assert not ray.get(is_there.remote())
