"""
A model in two stages on two workers, trained by a third over torch.distributed.rpc, in plain PyTorch.

    python examples/rpc_pipeline.py
    python -m traceml_ray.launch --nproc-per-node 3 examples/rpc_pipeline.py --steps 5000
    traceml-ray profile --steps 3                               # meanwhile: of all workers, at the same time

Without the monitor, each worker can record itself:

    python examples/rpc_pipeline.py --profile traces
    traceml-ray profile merge traces --table --trace pipeline.json.gz

With --profile each worker records its last steps with torch's profiler, and leaves a trace in that folder;
`traceml-ray profile merge` makes one table and one trace of them, with arrows from calls to what they run.
What others ask for runs on threads of the RPC agent, so the profiler has to record all threads
(`profile_all_threads`). And torch names no calls in such a trace: `call` below gives them the names that
torch's own RPC profiling used to have, `rpc_async#run_stage(trainer0 -> stage1)`.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.distributed.optim import DistributedOptimizer
from torch.profiler import ProfilerActivity, profile, record_function

WORKERS = ("trainer0", "stage1", "stage2")
WIDTH = 256
BATCH, MICRO_BATCHES = 64, 4
_wanted, _begun, _over = threading.Event(), threading.Event(), threading.Event()


class Stage(nn.Module):
    """Some layers, which live on one worker."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(layers)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers))
        )
        self._lock = threading.Lock()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layers make of inputs, (n, WIDTH)."""
        with self._lock:
            outputs: Tensor = self.layers(inputs)
            return outputs

    def parameter_rrefs(self) -> list[Any]:
        """Return the parameters, for an optimizer on another worker."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def run_stage(stage: Any, inputs: Tensor) -> Tensor:
    """Run a stage on the worker that has it."""
    with record_function("run_stage") if _wanted.is_set() else nullcontext():
        outputs: Tensor = stage.local_value()(inputs)
        return outputs


def parameters_of(stage: Any) -> list[Any]:
    """Return the parameters of a stage, from the worker that has it."""
    parameters: list[Any] = stage.local_value().parameter_rrefs()
    return parameters


def begin_to_record() -> None:
    """Have this worker record itself, and wait until it does."""
    _wanted.set()
    _begun.wait(30)


def record(folder: Path) -> None:
    """Record this worker from when it is wanted until the job is over; in a thread that does nothing else."""
    _wanted.wait()
    with profile(
        activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
    ) as recorder:
        _begun.set()
        _over.wait()
    recorder.export_chrome_trace(str(folder / f"rank-{rpc.get_worker_info().id}.json.gz"))


def call(to: str, function: Any, *args: Any) -> Any:
    """Call a function on another worker; return a future."""
    if not _wanted.is_set():
        return rpc.rpc_async(to, function, args=args)
    here = rpc.get_worker_info().name
    with record_function(f"rpc_async#{function.__name__}({here} -> {to})"):
        return rpc.rpc_async(to, function, args=args)


def train(steps: int, recorded: int) -> None:
    """Train both stages; each micro-batch goes through one while the next goes through the other."""
    stages = [rpc.remote(worker, Stage, args=(layers,)) for worker, layers in (("stage1", 3), ("stage2", 1))]
    parameters = [
        parameter for stage in stages for parameter in call(stage.owner_name(), parameters_of, stage).wait()
    ]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        if recorded and step == steps - recorded:
            for worker in WORKERS:
                rpc.rpc_sync(worker, begin_to_record)
        with dist_autograd.context() as context:
            first = [call("stage1", run_stage, stages[0], part) for part in inputs.chunk(MICRO_BATCHES)]
            second = [call("stage2", run_stage, stages[1], future.wait()) for future in first]
            loss = torch.cat([future.wait() for future in second]).square().mean()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


def end_recording() -> None:
    """Have this worker write its trace."""
    _over.set()


def work(rank: int, port: int, steps: int, recorded: int, folder: Path | None) -> None:
    """Run one worker until all are done."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    rpc.init_rpc(WORKERS[rank], rank=rank, world_size=len(WORKERS))
    recording = None
    if folder is not None:
        recording = threading.Thread(target=record, args=(folder,))
        recording.start()
    if rank == 0:
        train(steps, recorded if folder else 0)
        for worker in WORKERS:
            rpc.rpc_sync(worker, end_recording)
    if recording is not None:
        recording.join()
    rpc.shutdown()


def main() -> None:
    """Start the workers, and wait for them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--recorded", type=int, default=2, help="the last steps that --profile records")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="leave a trace of each worker there")
    args = parser.parse_args()
    if args.profile:
        args.profile.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:  # a launcher has started this worker
        work(int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]), args.steps, args.recorded, args.profile)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(
        work, (port, args.steps, args.recorded, args.profile), len(WORKERS), start_method="fork"
    )


if __name__ == "__main__":
    main()
