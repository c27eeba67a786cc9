"""The driver of the scripts for Ray Train, and the data that Ray Data gives its workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
from common import BATCH, LENGTH, VOCABULARY, Arguments, Planted, arguments
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import traceml_ray


def tokens(batch: dict[str, Any]) -> dict[str, Any]:
    """Return sequences for the ids of a batch, the same in every run."""
    import numpy as np

    ids = np.asarray(batch["id"])[:, None] * np.arange(1, LENGTH + 1)[None, :] % VOCABULARY
    return {"input_ids": ids, "labels": ids}


def batches(split: str, args: Arguments) -> Any:
    """Return this worker's share of a data set, as torch batches."""
    planted = Planted(args)

    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        import torch

        if split == "train":
            planted.sleep("data")
        return {name: torch.as_tensor(values.copy()) for name, values in batch.items()}

    shard = ray.train.get_dataset_shard(split)
    return shard.iter_torch_batches(batch_size=BATCH, collate_fn=collate, prefetch_batches=0)


def main(train_loop: Callable[[Arguments], None]) -> None:
    """Train on two workers; watched unless `--no-monitor`."""
    args = arguments()
    ray.init(num_cpus=4, include_dashboard=False, logging_level="warning")
    session = traceml_ray.start(session="session", out=str(args.out)) if args.monitor else None
    ray.data.DataContext.get_current().execution_options.preserve_order = True  # so that runs are equal
    length = args.steps * args.micro * BATCH * 2
    datasets = {
        "train": ray.data.range(length, override_num_blocks=4).map_batches(tokens),
        "validation": ray.data.range(4 * BATCH).map_batches(tokens),
    }
    TorchTrainer(
        lambda: train_loop(args),
        datasets=datasets,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(Path(args.out) / "results")),
    ).fit()
    if session is not None:
        session.stop()
    ray.shutdown()
