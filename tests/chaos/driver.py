"""The training of `train.py` by Ray Train, on a Ray of its own; takes the launcher's arguments."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
import train as training
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from stopwatch import measured

OBJECT_STORE_BYTES = 78 * 1024 * 1024


def loop(config: dict[str, Any]) -> None:
    """Train in a worker; the hooks that Ray Train's callback has put in are put in again, timed."""
    from traceml_ray.agent import bootstrap

    agent = bootstrap.current()
    if agent is not None:
        training.stopwatch = measured()
        agent.instrumentation.remove()
        agent.instrumentation.install()
    training.train(training.parsed(config["arguments"]))
    ray.train.report({})


def speak(folder: Path, session: str) -> None:
    """Call the relays with what the test has written down, once that is there."""
    from traceml_ray.ray.actors import find_relays

    while not (folder / "messages").exists():
        time.sleep(0.05)
    for data in msgspec.msgpack.decode((folder / "messages").read_bytes(), type=list[bytes]):
        for relay in find_relays(session).values():
            with contextlib.suppress(Exception):  # that is its answer
                ray.get(relay.ingest.remote(data), timeout=10)
    (folder / "messages.sent").touch()


def main() -> None:
    """Be a driver."""
    parser = argparse.ArgumentParser()
    for name in ("nproc-per-node", "channel", "out", "session"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--no-monitor", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    folder = Path.cwd()
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder / "ray"),
    )  # fmt: skip
    trainer = TorchTrainer(
        loop,
        train_loop_config={"arguments": args.arguments},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=int(args.nproc_per_node)),
        run_config=RunConfig(name="chaos", storage_path=str(folder / "storage")),
    )
    session: Any = contextlib.nullcontext()
    if not args.no_monitor:
        import traceml_ray

        session = traceml_ray.start(
            session=args.session, out=args.out, interval=float(os.environ["TRACEML_INTERVAL"])
        )
        threading.Thread(target=speak, args=(folder, args.session), daemon=True).start()
    with session:
        trainer.fit()


if __name__ == "__main__":
    main()
