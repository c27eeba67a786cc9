"""
A job whose script has runs open in W&B (offline), MLflow (a folder) and TensorBoard, with and without
traceml-ray: its own rows, steps and losses are the same, and rank 0's runs also have the figures.

These packages are large, so the tests are run by hand or at night:

    .venv/bin/python -m pip install wandb mlflow-skinny tensorboard
    .venv/bin/python -m pytest tests/integration/test_trackers.py -m long
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

wandb = pytest.importorskip("wandb")
mlflow = pytest.importorskip("mlflow")
pytest.importorskip("tensorboard")

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
import mlflow, wandb
from torch.utils.tensorboard import SummaryWriter

folder, how = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def start():
    global writer
    wandb.init(mode="offline", project="p", dir=f"{folder}/{rank}", settings=wandb.Settings(silent=True))
    if rank == 0:
        mlflow.set_tracking_uri(f"file://{folder}/mlruns")
        mlflow.start_run(run_name="mine")
        writer = SummaryWriter(f"{folder}/tb")

os.makedirs(f"{folder}/{rank}")
if how != "late":
    start()
losses, steps = [], []
for step in range(700):
    if how == "late" and step == 300:
        start()
    time.sleep(0.02 + 0.03 * (rank == 1))
    loss = model(torch.full((8, 16), step / 700)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if wandb.run is not None:
        if how == "explicit":
            wandb.log({"loss": losses[-1]}, step=3 * step)
        else:
            wandb.log({"loss": losses[-1]})
        steps.append(wandb.run.step)
        if rank == 0:
            mlflow.log_metric("loss", losses[-1], step=step)
            writer.add_scalar("loss", losses[-1], step)
    if how == "early" and step == 350:
        wandb.finish()
        mlflow.end_run()
if rank == 0 and how != "early":
    writer.close()
json.dump({"losses": losses, "steps": steps}, open(f"{folder}/{rank}.json", "w"))
dist.destroy_process_group()
"""


def run(folder: Path, how: str, *launcher: str) -> None:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(folder / "train.py"), str(folder), how],
        env={**environ, "WANDB_SILENT": "true", "PYTHONPATH": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def rows_of_wandb(folder: Path) -> list[dict[str, Any]]:
    """Return the history of the offline run in `folder`, as it would be sent."""
    return [row for row, _ in _records(folder)["history"]]


def logged(data: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's file: the log format of LevelDB, in blocks of 32 KiB, after 7 bytes."""
    begun, place = b"", 7
    while place + 7 <= len(data):
        left = -place % (1 << 15) or 1 << 15
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        begun += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield begun
            begun = b""


def _records(folder: Path) -> dict[str, list[Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    records = dict[str, list[Any]](history=[], alert=[])
    for data in logged(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            records["history"].append((row, record.history.step.num))
        elif kind == "alert":
            records["alert"].append(record.alert)
    return records


def own(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without what traceml-ray has added, and without times."""
    cleaned = [
        {
            name: value
            for name, value in row.items()
            if not name.startswith("traceml/") and name not in ("_timestamp", "_runtime", "_wandb")
        }
        for row in rows
    ]
    return [row for row in cleaned if row.keys() - {"_step"}]


@pytest.mark.parametrize("how", ["plain", "explicit", "late", "early"])
def test_the_scripts_own_rows_stay_and_the_figures_are_there(how: str, tmp_path: Path) -> None:
    bare, watched = tmp_path / "bare", tmp_path / "watched"
    two = ("--nproc-per-node", "2")
    run(bare, how, "torch.distributed.run", "--standalone", *two)
    sessions = ("--sessions", str(tmp_path / "sessions"), "--session", "s", "--log-to", "auto")
    run(watched, how, "traceml_ray.launch", *two, *sessions)

    for rank in (0, 1):
        before, after = (json.loads((folder / f"{rank}.json").read_text()) for folder in (bare, watched))
        assert before == after, "losses, and the run's step after each row"
        rows = [own(rows_of_wandb(folder / str(rank))) for folder in (bare, watched)]
        assert rows[0] == rows[1]

    written = [row for row in rows_of_wandb(watched / "0") if "traceml/step" in row]
    assert len(written) >= 1
    assert written[-1]["traceml/step_ms"] > 20
    assert written[-1]["traceml/exposed_ms/sync_wait"] >= 0
    assert not [row for row in rows_of_wandb(watched / "1") if "traceml/step" in row], "rank 0 alone"
    if how != "early":
        assert written[-1]["traceml/verdict"] == "straggler"
        assert [alert.title for alert in _records(watched / "0")["alert"]]

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(f"file://{watched}/mlruns")
    (one,) = client.search_runs(["0"])
    assert {"traceml/step_ms", "traceml/cost_pct", "loss"} <= one.data.metrics.keys()
    assert one.data.tags["traceml/verdict"] == "straggler"
    deadline = time.monotonic() + 60
    while not (files := [file.path for file in client.list_artifacts(one.info.run_id, "traceml")]):
        assert time.monotonic() < deadline, "the report has not been attached"
        time.sleep(0.2)
    assert files == ["traceml/report.html"]
    history = client.get_metric_history(one.info.run_id, "loss")
    bare_client = mlflow.MlflowClient(f"file://{bare}/mlruns")
    (bare_one,) = bare_client.search_runs(["0"])
    assert [(m.step, m.value) for m in history] == [
        (m.step, m.value) for m in bare_client.get_metric_history(bare_one.info.run_id, "loss")
    ]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(watched / "tb"))
    events.Reload()
    assert "traceml/step_ms" in events.Tags()["scalars"]
    assert len(list((watched / "tb").iterdir())) == 1
