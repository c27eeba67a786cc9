"""A real job of three ranks, with relay and aggregator in the process of the test, and without Ray."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sessions import NoSamples, Straight

from traceml_ray.agent.bootstrap import rank_environment
from traceml_ray.launchers.control import profile
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.relay import RelayCore
from traceml_ray.settings import RelayPaths, Settings
from traceml_ray.store.profiles import StoredProfile
from traceml_ray.store.session import Live, SessionFolder, prepare, write_live
from traceml_ray.wire import messages as wire

WORLD = 3


class Job:
    """
    Three ranks of a script and their monitor, without Ray.

    Args:
        folder: folder for all files.
        script: source that the ranks run.
        args: arguments of the script.
        environ: environment variables of the ranks.
        settings: of the session.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        args: Sequence[object] = (),
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.session: SessionFolder = prepare(folder, "s")
        settings = Settings(interval=0.25, **settings)
        self.aggregator = AggregatorCore(self.session.path, settings, {"world_size": WORLD})
        self.socket = folder / "run" / "relay.sock"
        node = wire.NodeIdentity("node-0", "host-0", "127.0.0.1")
        self.relay = RelayCore(self.socket, node, Straight(self.aggregator), NoSamples(), settings)
        write_live(self.session.path, Live(os.getpid(), str(self.socket), ""))
        (folder / "train.py").write_text(script)
        own_settings = Settings(session="s", interval=0.25)
        variables = rank_environment(own_settings, RelayPaths(str(self.socket)), dict(os.environ)) | dict(
            environ or {}
        )
        variables |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "train.py", *map(str, args)],
                cwd=folder,
                env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=(folder / f"{rank}.err").open("wb"),
            )
            for rank in range(WORLD)
        ]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.relay.start()
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.2):
            self.aggregator.commit()
            self.aggregator.judge()

    def wait_for_steps(self, steps: int, ranks: int = WORLD) -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            with self.aggregator.stored() as file:
                steps_of_ranks = [process.last_step or 0 for process in file.ranks().values()]
            if (
                len(steps_of_ranks) == WORLD
                and sum(last_step >= steps for last_step in steps_of_ranks) >= ranks
            ):
                return
            time.sleep(0.1)
        raise AssertionError(f"steps {steps_of_ranks}: {self.errors()}")

    def wait_for_event(self, message: str) -> None:
        deadline, messages = time.monotonic() + 240, []
        while time.monotonic() < deadline and message not in messages:
            time.sleep(0.1)
            with self.aggregator.stored() as file:
                messages = [event.message for event in file.events()[0]]
        assert message in messages

    def errors(self) -> list[str]:
        return [(self.folder / f"{rank}.err").read_text()[-2000:] for rank in range(WORLD)]

    def profile(self, **wanted: object) -> StoredProfile:
        request = wire.ProfileRequest.of(wanted)
        return profile(self.session.path, request, limit_s=60)

    def end(self) -> list[int]:
        (self.folder / "stop").touch()
        codes = [rank.wait(240) for rank in self.ranks]
        self._over.set()
        self._thread.join()
        return codes

    def close(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
            rank.wait()
        self._over.set()
        self._thread.join()
        self.relay.close()
        self.aggregator.close()
        self.session.release()
