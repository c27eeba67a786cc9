"""What a rank sends of its work: what its steps were trained on, FLOPs, device, and when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from traceml_ray.agent.batch_size import Counted, packed
from traceml_ray.agent.patch.root_modules import RootModules
from traceml_ray.agent.recorder import Recorder
from traceml_ray.errors import Errors
from traceml_ray.settings import Settings
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.throughput.flops import FlopCount
from traceml_ray.signals.throughput.records import StepSizes, StepWork

_FIRST_S, _SOON_S, _LONGEST_S = 1.0, 10.0, 300.0
"""Between two records: a share of the time since the first, within these bounds."""
_SOON, _LATER = 0.25, 0.005
SIZES_STEPS = 128
"""The sizes of so many steps are sent at once, sooner than they are due by time."""


class WorkReport(Collector):
    """
    Of one process. `declare` may be called by any thread; everything else is called by the agent's.

    Args:
        recorder: of the training thread's marks.
        roots: the model, which shows the device.
        settings: what of it was given.
        errors: counts what goes wrong.
        missing: is told why something is not known.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        recorder: Recorder,
        roots: RootModules,
        settings: Settings,
        errors: Errors,
        missing: dict[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.flops = FlopCount(recorder, errors)
        self._recorder, self._roots, self._clock, self._missing = recorder, roots, clock, missing
        self._wanted = settings.flops and settings.model_flops is None
        self._declared: dict[str, Any] = {
            "job_flops": settings.model_flops,
            "total_steps": settings.total_steps,
            "peak_tflops": settings.peak_tflops,
        }
        self._device: dict[str, str] = {}
        self._sent: dict[str, Any] = {}
        self._began: float | None = None
        self._due = self._sizes_due = 0.0
        if self._wanted:
            self.flops.arm()

    @classmethod
    def of_rank(cls, rank: Rank) -> WorkReport:
        """Return that of a rank."""
        return cls(rank.recorder, rank.instrumentation.roots, rank.settings, rank.errors, rank.missing)

    def abandon(self, forked: bool) -> None:
        """Stop counting FLOPs."""
        self.flops.abandon()

    def declare(self, **known: float | None) -> None:
        """Note what the script says: `job_flops`, `total_steps`."""
        self._declared.update({name: value for name, value in known.items() if value is not None})

    def collect(self, final: bool) -> list[StepWork | StepSizes]:
        """Return what is due."""
        return [*self._work(final), *self._sizes(final)]

    def _work(self, final: bool) -> list[StepWork]:
        """Return the sums that are due: little more often than it is needed to draw them, and at the end."""
        now, facts = self._clock(), self._facts()
        new = facts != self._sent
        if not (new or final or now >= self._due):
            return []
        counted = self._recorder.drain_work()
        if counted is None and not (new and any(facts.values())):
            return []
        self._explain(counted)
        self._began = began = now if self._began is None else self._began
        gap = max(_FIRST_S, min(_SOON_S, _SOON * (now - began)), _LATER * (now - began))
        self._due, self._sent = now + min(_LONGEST_S, gap), facts
        step = self._recorder.steps.rows.step
        return [StepWork(*(counted or Counted(step, step, 0, 0, None, None)), **facts)]

    def _sizes(self, final: bool) -> list[StepSizes]:
        """Return the sizes of batches that are due: those of 10 s at most, or of `SIZES_STEPS` steps."""
        now, log = self._clock(), self._recorder.steps.work.sizes
        if not len(log) or not (final or now >= self._sizes_due or len(log) >= SIZES_STEPS):
            return []
        began = now if self._began is None else self._began
        self._sizes_due = now + max(_FIRST_S, min(_SOON_S, _SOON * (now - began)))
        return packed(self._recorder.drain_sizes())

    def _facts(self) -> dict[str, Any]:
        """Return what is known besides."""
        counted = self.flops.found
        if self._wanted and self.flops.why:
            self._missing["flops"] = self.flops.why
        counted_facts = {} if counted is None else {
            "flops": counted.flops, "flops_step": counted.step, "dtype": counted.dtype
        }  # fmt: skip
        self._device = self._device or _device_of(self._roots)
        return {**self._declared, **counted_facts, **self._device}

    def _explain(self, counted: Counted | None) -> None:
        self._missing.pop("samples", None)
        if counted is not None and counted.batches and counted.samples is None:
            self._missing["samples"] = self._recorder.batches.why or "not known of every batch"


def _device_of(roots: RootModules) -> dict[str, str]:
    """Return name and id of the device that the model is on; nothing before it is anywhere."""
    import torch

    device = next((parameter.device for root in roots.modules() for parameter in root.parameters()), None)
    if device is None or device.type == "meta":
        return {}
    if device.type != "cuda":
        return {"device": device.type}
    about = torch.cuda.get_device_properties(device)
    return {"device": str(about.name), "device_id": str(getattr(about, "uuid", ""))}
