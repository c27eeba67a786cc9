"""
The packages of Comet (an offline experiment) and Aim (a local repository): a script's own steps, epochs,
contexts and values are the same with and without figures, and the figures are there.

These packages are large, so the tests are run by hand or at night:

    .venv/bin/python -m pip install comet_ml aim
    .venv/bin/python -m pytest tests/integration/test_comet_and_aim.py -m long
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]

FIGURES = """
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.trackers.run_writer import TRACKERS
from traceml_ray.wire.messages import Figures

def figures(step):
    values = {"step_ms": 21.5, "late_rank": -1.0}
    return Figures(step, step, values, "straggler", "key", "warning", "Head", "Why.")
"""

COMET = """
import json, sys
import comet_ml

folder, watched = sys.argv[1], sys.argv[2] == "watched"
tracker = TRACKERS["comet"]()
assert tracker.open_run() is None
experiment = comet_ml.OfflineExperiment(offline_directory=folder, auto_metric_logging=False)
assert tracker.open_run() is experiment
place = tracker.place(experiment)
assert place == ("", f"{folder} (offline)", ""), place
states = []
with experiment.train():
    for i in range(20):
        experiment.log_metric("loss", 1 / (i + 1), step=3 * i, epoch=i // 5)
        if watched and i % 5 == 2:
            tracker.write(experiment, figures(40 + i), changed=i == 2)
        states.append((experiment.curr_step, experiment.curr_epoch, experiment.context))
experiment.log_other("mine", 1)
experiment.end()
assert tracker.open_run() is None
json.dump(states, open(f"{folder}/states.json", "w"))
"""

AIM = """
import json, sys, threading
import aim
from aim.storage.context import Context

folder, watched = sys.argv[1], sys.argv[2] == "watched"
tracker, patcher = TRACKERS["aim"](), Patcher(debug=True)
((_, _, patch),) = tracker.patches()
patch(patcher)
run = aim.Run(repo=folder, system_tracking_interval=None, log_system_params=False)
patcher.restore()
assert tracker.open_run() is run
run["lr"] = 0.1

def write():
    for step in range(200):
        tracker.write(run, figures(step), changed=step % 50 == 0)

beside = threading.Thread(target=write if watched else int)
beside.start()
for i in range(500):
    run.track(1 / (i + 1), name="loss", step=3 * i, context={"subset": "train"})
    run.track(float(i), name="acc")
beside.join()

def series(name, **context):
    values = run.get_metric(name, Context(context))
    return [] if values is None else [list(values.data.items_list()[0]), list(values.data.items_list()[1][0])]

own = {"loss": series("loss", subset="train"), "acc": series("acc"), "lr": run["lr"]}
texts = run.get_text_sequence("traceml/verdict", Context({"traceml": True}))
ours = {
    "step_ms": series("traceml/step_ms", traceml=True),
    "parameters": run.get("traceml"),
    "text": texts.data.items_list()[1][0][0].data if texts else None,
}
run.close()
assert tracker.open_run() is None
json.dump({"own": own, "ours": ours}, open(f"{folder}/series.json", "w"))
"""


def run(folder: Path, script: str, how: str) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text(FIGURES + script)
    done = subprocess.run(
        [sys.executable, str(folder / "train.py"), str(folder), how],
        env={**os.environ, "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def messages(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """
    Return kind and content of what a script has logged, from the archive of its offline experiment: without
    times, numbers of messages, arguments of the script, and what Comet measures.
    """
    (archive,) = folder.glob("*.zip")
    logged = []
    for line in zipfile.ZipFile(archive).read("messages.json").decode().splitlines():
        kind, what = (json.loads(line)[name] for name in ("type", "payload"))
        measured = what.get("metric", {}).get("metricName", "").startswith(("sys.", "process "))
        argument = what.get("param", {}).get("source") == "cli"
        if kind in ("metric_msg", "parameter_msg", "log_other") and not (measured or argument):
            logged.append(
                (kind, {k: v for k, v in what.items() if k not in ("local_timestamp", "message_id")})
            )
    return logged


def test_a_script_of_comet_keeps_its_steps_epochs_and_values(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    bare, watched = (run(tmp_path / how, COMET, how) for how in ("bare", "watched"))
    states = [json.loads((folder / "states.json").read_text()) for folder in (bare, watched)]
    assert states[0] == states[1]
    before, after = (messages(folder) for folder in (bare, watched))
    ours = [message for message in after if "traceml/" in json.dumps(message)]
    assert [message for message in after if message not in ours] == before
    assert len([kind for kind, _ in before if kind == "metric_msg"]) == 20
    metrics = [what["metric"] for kind, what in ours if kind == "metric_msg"]
    assert [(m["metricName"], m["metricValue"], m["step"]) for m in metrics[:3]] == [
        ("traceml/step", 42, 6),
        ("traceml/step_ms", 21.5, 6),
        ("traceml/late_rank", -1.0, 6),
    ]
    assert len(metrics) == 3 * 4
    others = {what["key"]: what["value"] for kind, what in ours if kind == "log_other"}
    assert others == {"traceml/verdict": "straggler", "traceml/why": "Why."}


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server that accepts what Comet's API sends, and the paths that were asked."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            paths.append(self.path)
            data = json.dumps({"experimentKey": "k" * 32, "version": "9.9.9"}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}", paths
    serving.shutdown()
    serving.server_close()


ATTACH = """
import sys
from pathlib import Path
from traceml_ray.sinks.report_in_tracker import attach
from traceml_ray.wire.messages import TrackerState

report = Path(sys.argv[1]) / "report.html"
report.write_text("<p>report")
attach(TrackerState("comet", "k" * 32, "page", "https://comet.example"), report, figures(40))
"""


def test_the_report_goes_to_the_key_of_a_comet_experiment(
    server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("comet_ml")
    address, paths = server
    monkeypatch.setenv("COMET_URL_OVERRIDE", f"{address}/clientlib/")
    monkeypatch.setenv("COMET_API_KEY", "x" * 25)
    run(tmp_path / "attach", ATTACH, "watched")
    asked = [path.partition("?")[0].rpartition("/")[2] for path in paths if "/write/" in path]
    assert asked == ["upload-asset", "log-other", "log-other", "metric", "metric", "metric"]


def test_a_script_of_aim_keeps_its_series(tmp_path: Path) -> None:
    pytest.importorskip("aim")
    bare, watched = (run(tmp_path / how, AIM, how) for how in ("bare", "watched"))
    before, after = (json.loads((folder / "series.json").read_text()) for folder in (bare, watched))
    assert before["own"] == after["own"]
    assert len(before["own"]["loss"][0]) == 500
    assert before["ours"] == {"step_ms": [], "parameters": None, "text": None}
    assert after["ours"]["step_ms"] == [list(range(200)), [21.5] * 200]
    assert after["ours"]["parameters"] == {"verdict": "straggler", "why": "Why."}
    assert after["ours"]["text"] == "Head: Why."
