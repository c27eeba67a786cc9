"""
Plain Ray actors that train together with DDP, without Ray Train: one line in the actor has it watched.

    python examples/ray_actors.py
    python examples/ray_actors.py --actors 3 --slow-actor 2

The second line makes actor 2 late with every batch, for the monitor to find. Without a cluster at hand
(RAY_ADDRESS), Ray starts one here. Where it has fewer CPUs than there are actors, they share them.
"""

from __future__ import annotations

import argparse
import math
import socket
import time
from collections.abc import Iterator
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn

import traceml_ray

WIDTH, BATCH = 256, 32
PATIENCE_S = 10.0


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    """Random batches, each `pause_s` seconds late."""

    def __init__(self, count: int, pause_s: float) -> None:
        self.count, self.pause_s = count, pause_s

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield them."""
        for _ in range(self.count):
            time.sleep(self.pause_s)
            yield torch.randn(BATCH, WIDTH)


@ray.remote
class Trainer:
    """One rank."""

    def rendezvous(self) -> str:
        """Return where the ranks can meet: an address of this actor's node."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def train(self, rank: int, world_size: int, meet_at: str, steps: int, pause_s: float) -> float:
        """Train for `steps` steps and return the last loss."""
        traceml_ray.attach(rank=rank, world_size=world_size, job_id="ray_actors")

        dist.init_process_group("gloo", init_method=meet_at, rank=rank, world_size=world_size)
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for batch in torch.utils.data.DataLoader(Batches(steps, pause_s), batch_size=None):
            loss = (model(batch) - batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.barrier()
        dist.destroy_process_group()
        traceml_ray.detach()
        return loss.item()


def start_actors(count: int) -> tuple[list[Any], str]:
    """Start so many actors; return them, and where they can meet."""
    cpus = ray.cluster_resources().get("CPU", 0)
    share = 1 / math.ceil(count / max(1, cpus))
    trainers = [Trainer.options(name=f"trainer-{rank}", num_cpus=share).remote() for rank in range(count)]
    places = [trainer.rendezvous.remote() for trainer in trainers]
    _, waiting = ray.wait(places, num_returns=count, timeout=PATIENCE_S)
    if waiting:
        print(
            f"Waiting for {len(waiting)} of {count} actors to start: each takes {share:g} of the "
            f"{cpus:g} CPUs in this cluster.",
            flush=True,
        )
    return trainers, ray.get(places)[0]


def main() -> None:
    """Train, then say which actor was late, where, and what that cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--slow-actor", type=int, help="the one that gets its batches 30 ms late")
    args = parser.parse_args()
    if args.actors < 1 or args.steps < 1:
        parser.error("at least one actor and one step")
    if args.slow_actor is not None and not 0 <= args.slow_actor < args.actors:
        parser.error(f"--slow-actor {args.slow_actor}: this run has actors 0 to {args.actors - 1}")

    ray.init()
    with traceml_ray.start() as session:
        trainers, meet_at = start_actors(args.actors)
        print(f"{args.actors} actors train for {args.steps} steps.", flush=True)
        losses = ray.get(
            [
                trainer.train.remote(
                    rank, args.actors, meet_at, args.steps, 0.03 if rank == args.slow_actor else 0.0
                )
                for rank, trainer in enumerate(trainers)
            ]
        )
        verdict = session.summary().verdict
        print(f"loss {losses[0]:.4f}")
        print(f"{verdict.label}: {verdict.why}\n{verdict.next}")
        print(f"Report: {session.folder / 'report.txt'}")


if __name__ == "__main__":
    main()
