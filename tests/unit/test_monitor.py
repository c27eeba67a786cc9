"""The monitor beside a launch, where its Ray is not needed."""

import json
from datetime import datetime, timezone
from pathlib import Path

from traceml_ray.launchers.monitor import Monitor
from traceml_ray.launchers.nodes import Nodes
from traceml_ray.settings import Settings


def test_session_begins_with_its_launcher_even_if_ray_never_came_up(tmp_path: Path) -> None:
    """A short run on a busy machine is over before Ray is up: it still lasted as long as it did."""
    monitor = Monitor(Settings(out=str(tmp_path), session="s"), {"launcher": "torchrun"}, {}, Nodes())
    made = datetime.now(timezone.utc)
    monitor.finish(0, [])
    session = json.loads((tmp_path / "s" / "summary.json").read_bytes())["session"]
    assert datetime.fromisoformat(session["started_at"]) <= made
