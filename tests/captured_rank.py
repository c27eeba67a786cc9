"""A rank that trains and is profiled. The test itself acts as the agent's thread."""

from __future__ import annotations

import gzip
import json
import os
from typing import Any

import torch

from traceml_ray.agent.capture import CaptureAgent
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.monitor.bulk import open_trace
from traceml_ray.wire import messages as wire


class Rank:
    """A watched training loop. The test itself acts as the agent's thread."""

    def __init__(self) -> None:
        self.now = 0.0
        self.recorder = Recorder(StepRing(4096))
        self.patches = Instrumentation(self.recorder)
        self.patches.install()
        self.captures = CaptureAgent(
            self.recorder, self.patches.spans, self.patches.errors, None, lambda: "p", lambda: self.now
        )
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def ask(self, first_step: int, steps: int = 2, number: int = 1, **more: float) -> None:
        args: dict[str, Any] = {"id": "p", "number": number, "first_step": first_step, "steps": steps}
        self.captures.handle_command(
            wire.Command("profile", {**args, "limit_s": 60.0, "run": "r", "ranks": "0", **more})
        )

    @property
    def status(self) -> wire.Capture:
        self.captures.tick()
        now = self.captures._now
        if now is not None and now._packing is not None:
            now._packing.join(240)
            now.finish_export()
        status = self.captures.status
        assert status is not None
        return status

    def trace(self) -> dict[str, Any]:
        """Return what the relay may read."""
        status = self.status
        file = open_trace(status.folder, status.total_bytes or 0)
        with os.fdopen(file, "rb") as packed:
            trace: dict[str, Any] = json.loads(gzip.decompress(packed.read()))
        return trace
