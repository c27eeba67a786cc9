"""The monitor beside a launch, where its Ray is not needed."""

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

from traceml_ray.launchers.monitor import Monitor, monitor_of
from traceml_ray.launchers.nodes import Nodes
from traceml_ray.session import SessionError, prepare
from traceml_ray.settings import Settings


def test_session_begins_with_its_launcher_even_if_ray_never_came_up(tmp_path: Path) -> None:
    """A short run on a busy machine is over before Ray is up: it still lasted as long as it did."""
    monitor = Monitor(Settings(out=str(tmp_path), session="s"), {"launcher": "torchrun"}, {}, Nodes())
    made = datetime.now(timezone.utc)
    monitor.finish(0, [])
    session = json.loads((tmp_path / "s" / "summary.json").read_bytes())["session"]
    assert datetime.fromisoformat(session["started_at"]) <= made


def test_running_session_of_the_same_job_name_does_not_prevent_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same job again, while another node is still at the end of the one before."""
    held = prepare(tmp_path, "job-1")
    settings, nodes = Settings(out=str(tmp_path)), Nodes(count=2, job="job-1")
    assert monitor_of(settings, {}, {}, nodes) is None
    assert "no monitor for this run: session 'job-1' is already running" in capsys.readouterr().err
    with pytest.raises(SessionError, match="already running"):
        monitor_of(Settings(out=str(tmp_path), session="job-1"), {}, {}, nodes)
    held.release()
    made = monitor_of(settings, {}, {}, nodes)
    assert made is not None
    made.discard()
