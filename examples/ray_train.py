"""
The GPT of train_gpt.py under Ray Train, watched without a line in the training loop.

    python examples/ray_train.py
    python examples/ray_train.py --workers 4 --slow data:2:40

The driver says `traceml_ray.start()` after `ray.init()`; that is all. The second line plants a fault for
it to find (see train_gpt.py): the worker of rank 2 gets every batch 40 ms late. Without a cluster at hand
(RAY_ADDRESS), Ray starts one here. Where it has fewer CPUs than there are workers, they share them.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from typing import Any

import ray
import ray.train
import train_gpt
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device

import traceml_ray


def train_loop(config: dict[str, Any]) -> float:
    """Train on one worker; return the last validation loss. Nothing here knows that it is watched."""
    context = ray.train.get_context()
    me = train_gpt.Process(context.get_world_rank(), context.get_world_size(), get_device())
    losses = io.StringIO()
    train_gpt.train(argparse.Namespace(**config), me, losses)
    return float.fromhex(losses.getvalue().split()[-1])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=train_gpt.count, default=2, help="Ray Train workers")
    add("--steps", type=train_gpt.count, default=120)
    add("--gpus", action="store_true", help="train on GPUs; workers share one where there are fewer")
    add("--slow", type=train_gpt.parse_slow, action="append", default=[], metavar="STAGE:RANK:MS[@STEP]")
    args = parser.parse_args()
    for slow in args.slow:
        if slow.rank >= args.workers:
            parser.error(f"a fault on rank {slow.rank}: this run has ranks 0 to {args.workers - 1}")
    return args


def share_of(resource: str, workers: int) -> float:
    """Return the share of a CPU, or GPU, that each worker gets."""
    there = int(ray.cluster_resources().get(resource, 0))
    if not there:
        raise SystemExit(f"Ray sees no {resource} in this cluster")
    return 1 / -(-workers // there)


def main() -> None:
    """Train, then say which rank was late, where, and what that cost."""
    args = parse_arguments()
    config = vars(train_gpt.argument_parser().parse_args([]))
    config |= {"steps": args.steps, "slow": args.slow, "log_every": 20, "eval_every": args.steps}

    ray.init()
    device = "GPU" if args.gpus else "CPU"
    share = share_of(device, args.workers)
    session = traceml_ray.start()

    with tempfile.TemporaryDirectory() as results:  # where Ray Train keeps its own files of the run
        result = TorchTrainer(
            train_loop,
            train_loop_config=config,
            # NCCL refuses two ranks on one device; gloo exchanges CUDA tensors through the host.
            torch_config=TorchConfig(backend="nccl" if args.gpus and share == 1 else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=args.workers,
                use_gpu=args.gpus,
                resources_per_worker={device: share},
            ),
            run_config=RunConfig(name="gpt", storage_path=results),
        ).fit()
    verdict = session.summary().verdict
    print(f"validation loss {result.return_value:.4f}")
    print(f"{verdict.label}: {verdict.why}")
    print(f"{verdict.next}\nReport: {session.folder / 'report.txt'}")
    session.stop()


if __name__ == "__main__":
    main()
