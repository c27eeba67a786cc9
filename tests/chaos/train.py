"""
A tiny DDP training that writes down what it computed and how long any hook of ours held it up.

    train.py FOLDER --steps 120 [--ms 12] [--end exit|raise|gone|term|int|kill] [--children fork|spawn]
        [--device] [--tracker]

With `--tracker` it has a run of W&B open that fails once and never returns after that. With `--device` it
computes on a played device, whose clock the agent reads. At every 30th step rank 0 says so (`stop.K`) and all
wait until the test has done its harm (`go.K`, or `go.all`), so that a fault hits every run at the same step.
Everything is in `result.RANK` before the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "training"))
sys.path.insert(0, str(Path(__file__).parent))
from stopwatch import measured, stalls_s

# Before torch is imported, which is when our hooks are put in.
stopwatch: Any = measured() if "TRACEML_SOCKET" in os.environ else None

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

STOP = 30
KERNEL_NS = 2_000_000
ENDS = {
    "exit": lambda: sys.exit(3),
    "gone": lambda: os._exit(7),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class HungTracker(types.ModuleType):
    """W&B with an open run whose first call fails, and none of whose later calls returns."""

    disabled, offline, dir = False, True, "/nowhere"

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run, self._calls = self, 0

    def define_metric(self, *_: object, **__: object) -> None:
        """Fail, then hang."""
        self._calls += 1
        if self._calls == 1:
            raise ConnectionError("the tracker does not answer")
        threading.Event().wait()

    log = alert = define_metric


def dataset(steps: int) -> torch.utils.data.Dataset[Any]:
    """Every step's data, the same in every run."""
    made = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(steps * 4, 32, generator=made))


def train(args: argparse.Namespace) -> None:
    """Train, with `args` as on the command line; in a group that is there."""
    rank, folder = dist.get_rank(), Path(args.folder)
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    device: Any = None
    if args.tracker:
        sys.modules["wandb"] = HungTracker()
    if args.device:
        import played_device

        device = played_device.PlayedDevice()
        if stopwatch:
            played_device.measure(device)  # before there is a model, whose device the agent looks for
    model = torch.nn.parallel.DistributedDataParallel(net)
    if device:
        played_device.exchange_on(device, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, codes = [], []
    for step, (batch,) in enumerate(torch.utils.data.DataLoader(dataset(args.steps), batch_size=4)):
        loss = (model(batch * (rank + 1)) - 1).pow(2).mean()
        if device:
            device.launch(KERNEL_NS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device:
            device.launch(KERNEL_NS)
            device.item()
        losses.append(loss.item().hex())
        time.sleep(args.ms / 1e3)
        if step % STOP == STOP - 1:
            if args.children:
                codes.append(child(args.children))
            if rank == 0:
                wait(folder, step // STOP)
            dist.barrier()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    result = {
        "losses": losses,
        "weights": hashlib.sha256(weights).hexdigest(),
        "children": codes,
        "hook_ms": stopwatch.longest_ns / 1e6 if stopwatch else 0.0,
        "where": f"{stopwatch.where} ({stopwatch.parts})" if stopwatch else "",
        "hooks": stopwatch.count if stopwatch else 0,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "stalls_s": stalls_s(),
        "ended": time.monotonic(),
    }
    (folder / f"result.{rank}").write_text(json.dumps(result))


def wait(folder: Path, number: int) -> None:
    """Tell the test that this stop is reached, and wait for its word."""
    (folder / f"stop.{number}").touch()
    while not ((folder / f"go.{number}").exists() or (folder / "go.all").exists()):
        time.sleep(0.01)


def child(method: str) -> int:
    """Have a child compute something and end with 7; return its exit code."""
    if method == "fork":
        pid = os.fork()
        if pid == 0:  # which no process group of torch survives in any other way
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    process = multiprocessing.get_context(method).Process(target=work)
    process.start()
    process.join()
    return process.exitcode or 0


def work() -> None:
    """What a child that is spawned does."""
    torch.ones(8, 8).sum()
    sys.exit(7)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--ms", type=float, default=12)
    parser.add_argument("--end", default="")
    parser.add_argument("--children", default="")
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--tracker", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    """Train as a rank of torchrun."""
    args = parsed()
    dist.init_process_group("gloo")
    train(args)
    dist.barrier()
    if args.end == "raise" and dist.get_rank() == 1:
        raise ValueError("as it was")
    if args.end and dist.get_rank() == 1:
        ENDS[args.end]()
    if args.end:
        time.sleep(60)  # torchrun ends it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
