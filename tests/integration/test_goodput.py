"""
The ledger of real runs against what was planted in them: under the launcher, and under Ray Train that
restarts or goes on with fewer workers. See `planted_run`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from planted_run import KILLED_IN, WORLD, PlannedRun

import traceml_ray

pytestmark = pytest.mark.long
OF_ALL, OF_EACH = 0.001, 0.05
"""Largest difference of the whole time, and of each part, from what was planted."""


def differences(
    measured: dict[str, float | None], planted: dict[str, float], floor_s: float
) -> dict[str, tuple[float | None, float]]:
    """Return the parts that are not what was planted: name → (measured, planted), in s."""
    return {
        name: (measured.get(name), seconds)
        for name, seconds in planted.items()
        if abs((measured.get(name) or 0.0) - seconds) > max(OF_EACH * seconds, floor_s)
    }


def adds_up(goodput: Any) -> None:
    assert abs(sum(seconds or 0.0 for seconds in goodput.seconds.values()) - goodput.rank_s) < 1e-6
    assert sum(attempt.rank_s for attempt in goodput.attempts) == pytest.approx(goodput.rank_s, rel=1e-9)


def test_two_kills_three_checkpoints_an_evaluation_and_a_hang_are_accounted_for(tmp_path: Path) -> None:
    truth = PlannedRun(tmp_path / "run").wait()
    goodput = traceml_ray.open(tmp_path / "run" / "s").goodput()
    print(json.dumps({"planted": truth["run"], "measured": goodput.seconds}, indent=1))
    planted, measured = dict(truth["run"]), dict(goodput.seconds)
    whole = planted.pop("all")
    adds_up(goodput)
    assert abs(goodput.rank_s - whole) <= OF_ALL * whole
    assert goodput.twice_s <= OF_ALL * whole
    # when a killed process was gone, its relay knows to a quarter of a second: the rest of its attempt
    # ends there, and the recovery begins
    known_s = 0.25 * WORLD * len(KILLED_IN)
    assert abs((measured["recovery"] or 0.0) - planted["recovery"]) <= known_s
    for parts in (planted, measured):
        parts["around a kill"] = sum(parts.pop(name) or 0.0 for name in ("other", "idle", "recovery"))
    assert differences(measured, planted, OF_ALL * whole) == {}
    assert [attempt.ranks for attempt in goodput.attempts] == [WORLD] * 3
    assert [attempt.repeated_steps for attempt in goodput.attempts] == truth["repeated"]


# -- Ray Train ------------------------------------------------------------------------------------------


def train(config: dict[str, Any]) -> None:
    """
    60 steps of 50 ms after a second of preparation. Before step 20 a checkpoint is saved in 1.5 s; in step 40
    of the first attempt rank 1 is gone, or (`waits`) all wait there until a node is taken away.
    """
    import ray.train
    import ray.train.torch
    import torch
    from ray.train import Checkpoint

    import traceml_ray

    folder, context = Path(config["folder"]), ray.train.get_context()
    rank, began = context.get_world_rank(), time.time_ns()

    def note(what: str, since: int) -> None:
        with (folder / "notes.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, "rank": rank, "ns": time.time_ns() - since}) + "\n")

    class Slow:
        def __reduce__(self) -> Any:
            time.sleep(1.5)
            return str, ()

    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    time.sleep(1.0)
    start, kept = 0, ray.train.get_checkpoint()
    if kept is not None:
        with kept.as_directory() as path:
            since = time.time_ns()
            loaded = torch.load(Path(path, "all.pt"), weights_only=False)
            note("checkpoint_restore", since)
        start = loaded["step"]
        optimizer.load_state_dict(loaded["optimizer"])
        traceml_ray.count(steps_done=start)
    for step in range(start, 60):
        if step == 20 and start == 0:
            since, path = time.time_ns(), folder / f"checkpoint-{rank}"
            path.mkdir(exist_ok=True)
            state = {"optimizer": optimizer.state_dict(), "step": step, "slow": Slow()}
            torch.save(state, path / "all.pt")
            if rank:
                note("checkpoint_save", since)
            saved = None if rank else Checkpoint.from_directory(path)
            ray.train.report({"step": step}, checkpoint=saved)
            if not rank:
                note("checkpoint_save", since)
        if step == 40 and not (folder / "died").exists():
            if config.get("waits"):
                (folder / "ready").touch()
                time.sleep(60)
            elif rank == 1:
                note("died", began)
                (folder / "died").touch()
                os._exit(7)
        since = time.time_ns()
        time.sleep(0.05)
        loss = model(torch.ones(1, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note("step", since)
    note("trained", began)


def fitted(
    folder: Path, name: str, nodes: int, workers: Any, removes: bool
) -> tuple[Any, list[dict[str, Any]], float]:
    """
    Run Ray Train on `nodes` nodes of one CPU. Return the ledger, the notes of workers, and the time of
    `fit`.
    """
    import ray.cloudpickle
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray_cluster import fake_cluster, until

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch, fake_cluster(nodes, cpus=1 if nodes > 1 else 2) as cluster:
        for variable in ("TRACEML_SESSION", "TRACEML_OUT", "RAY_TRAIN_CALLBACKS"):
            patch.delenv(variable, raising=False)
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.3")
        session = traceml_ray.start(session=name, out=folder / "out", interval=0.5)

        def take_a_node_away() -> None:
            until((folder / "ready").exists, "step 40", 120)
            (folder / "died").touch()
            cluster.remove(cluster.others[0])

        if removes:
            threading.Thread(target=take_a_node_away, daemon=True).start()
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": str(folder), "waits": removes},
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                name=name, storage_path=str(folder / "store"), failure_config=FailureConfig(max_failures=1)
            ),
        )
        began = time.monotonic()
        assert trainer.fit().error is None
        took_s = time.monotonic() - began
        session.stop()
    notes = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    return traceml_ray.open(folder / "out" / name).goodput(), notes, took_s


def planted_s(notes: list[dict[str, Any]], what: str) -> float:
    return sum(note["ns"] for note in notes if note["what"] == what) / 1e9


def test_ray_train_that_restarts(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    goodput, notes, took_s = fitted(tmp_path, "restarts", 1, 2, removes=False)
    print(json.dumps({"measured": goodput.seconds, "fit_s": took_s}, indent=1))
    adds_up(goodput)
    assert [attempt.ranks for attempt in goodput.attempts] == [2, 2]
    assert 0.5 * took_s < goodput.rank_s / 2 <= took_s
    parts = {name: planted_s(notes, name) for name in ("checkpoint_save", "checkpoint_restore")}
    assert differences(goodput.seconds, parts, 0.1) == {}
    first = goodput.attempts[0]
    assert (first.repeated_from, first.repeated_steps) == (20, 20)
    assert first.recovery_s is not None and first.recovery_s > 0
    assert goodput.seconds["startup"] and goodput.seconds["preparation"] >= 2 * 2 * 1.0


def test_ray_train_that_goes_on_with_fewer_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    goodput, _, took_s = fitted(tmp_path, "shrinks", 2, (1, 2), removes=True)
    print(json.dumps({"measured": goodput.seconds, "fit_s": took_s}, indent=1))
    adds_up(goodput)
    one, two = goodput.attempts
    assert (one.ranks, two.ranks) == (2, 1)
    assert one.recovery_s is not None
    lengths = [(attempt.to_ns - attempt.from_ns) / 1e9 for attempt in goodput.attempts]
    assert goodput.rank_s == pytest.approx(2 * (lengths[0] + one.recovery_s) + lengths[1], rel=1e-6)
