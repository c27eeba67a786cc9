"""
A launch with a straggler, and a real Alertmanager: the alert appears, is sent again while the rank is late,
is resolved when it is not, and a run that fails leaves its reason. Needs `prometheus-alertmanager` (Debian).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_cluster import until
from switched_straggler import SCRIPT, running

from traceml_ray.launchers.cluster import free_port

ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
ALERTS = """
[[rule]]
severity = "critical"
[[rule]]
labels = ["straggler"]
for = 2
resolve_after = 4
[to.pager]
kind = "alertmanager"
url = "${MY_ALERTMANAGER}"
every = 1
[to.script]
kind = "command"
argv = ["/bin/sh", "-c", "cat >> $0; echo >> $0", "%s"]
group = 0
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(ALERTMANAGER is None, reason="there is no alertmanager here"),
]


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Port of an Alertmanager that sends nothing on."""
    port = free_port()
    config = {"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]}
    (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(config))
    command = [
        *(str(ALERTMANAGER), f"--config.file={tmp_path / 'alertmanager.yml'}", "--cluster.listen-address="),
        *(f"--storage.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
    ]
    with running(command, tmp_path / "alertmanager.log"):
        until(lambda: alerts_at(port) is not None, "Alertmanager", 60)
        yield port


def alerts_at(port: int) -> dict[str, dict[str, Any]] | None:
    """Return the alerts that fire, by name; None: it does not answer."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/api/v2/alerts?active=true", timeout=10
        ) as answer:
            return {alert["labels"]["alertname"]: alert for alert in json.load(answer)}
    except OSError:
        return None


def train(folder: Path) -> list[str]:
    """Return the command of the launch."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "alerts.toml").write_text(ALERTS % (folder / "sent"))
    return [
        *(sys.executable, "-m", "traceml_ray.launch", "--nproc-per-node", "2", "--session", "watched"),
        *("--sessions", str(folder / "sessions"), "--alerts", str(folder / "alerts.toml")),
        *(str(folder / "train.py"), str(folder)),
    ]


def sent(folder: Path) -> list[tuple[str, str]]:
    """Return status and label of what the command was given."""
    path = folder / "sent"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(one["status"], one["label"]) for line in lines for one in json.loads(line)["alerts"]]


def test_an_alert_appears_is_sent_again_and_is_resolved(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_ALERTMANAGER", f"http://127.0.0.1:{port}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with running(train(tmp_path), tmp_path / "train.log") as job:
        (tmp_path / "late").touch()
        alert = until(lambda: (alerts_at(port) or {}).get("TracemlStraggler"), "an alert", 180)
        assert alert["annotations"]["summary"].startswith("straggler: rank 1")
        assert (alert["labels"]["session"], alert["labels"]["severity"]) == ("watched", "warning")

        def again() -> dict[str, Any] | None:
            now = (alerts_at(port) or {}).get("TracemlStraggler")
            return now if now and now["endsAt"] > alert["endsAt"] else None

        newer = until(again, "the alert once more", 60)
        assert (newer["startsAt"], newer["fingerprint"]) == (alert["startsAt"], alert["fingerprint"])
        (tmp_path / "late").unlink()
        until(lambda: alerts_at(port) == {}, "no alert any more", 180)
        (tmp_path / "end").touch()
        assert job.wait(120) == 0, (tmp_path / "train.log").read_text()[-2000:]
    assert sent(tmp_path) == [("firing", "straggler"), ("resolved", "straggler")]
    folder = tmp_path / "sessions" / "watched"
    assert b"cat >>" not in (folder / "session.sqlite").read_bytes(), (
        "the text of alerts is in no session file"
    )


def test_a_run_that_fails_leaves_its_reason(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_ALERTMANAGER", f"http://127.0.0.1:{port}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = train(tmp_path)
    script = (tmp_path / "train.py").read_text()
    dying = 'if rank == 1 and os.path.exists(folder + "/late"):\n        os.kill(os.getpid(), 9)'
    (tmp_path / "train.py").write_text(
        script.replace('if rank == 1 and os.path.exists(folder + "/late"):', dying, 1)
    )
    with running(command, tmp_path / "train.log") as job:
        until(lambda: (tmp_path / "sessions" / "watched" / "session.sqlite").exists(), "a session", 120)
        status = [sys.executable, "-m", "traceml_ray.cli", "status", "watched", "--json"]
        status += ["--sessions", str(tmp_path / "sessions")]
        until(
            lambda: b'"label"' in subprocess.run(status, capture_output=True, timeout=60).stdout, "steps", 120
        )
        (tmp_path / "late").touch()
        assert job.wait(180) != 0
    alert = until(lambda: (alerts_at(port) or {}).get("TracemlRankLost"), "the reason", 60)
    assert alert["labels"]["severity"] == "critical"
    assert "SIGKILL" in alert["annotations"]["description"]
    ended = [("firing", "rank_lost"), ("ended", "rank_lost")]
    until(lambda: sent(tmp_path) == ended, "the message", 60)
