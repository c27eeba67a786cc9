"""
What a rank sends of its work: what its steps were trained on, FLOPs, device, and when it is done.

The model FLOPs of one step are counted once by torch's `FlopCounterMode`, on the training thread. The mode
looks at every operation, so that this step takes longer, and so does what follows its backward: no
statistic is of these rows (`Rows.slowed`). It changes no number. Where it would miss something
(`torch.compile`, kernels that it does not know) there is no count, but a reason.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

from traceml_ray.agent.batch_size import Counted, packed
from traceml_ray.agent.patch.root_modules import RootModules
from traceml_ray.agent.recorder import Recorder
from traceml_ray.errors import Errors, error_text
from traceml_ray.settings import Settings
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.throughput.records import StepSizes, StepWork

SKIPPED = 2
"""Steps before the one that is counted, the same on all ranks: the first does more than all others."""
_AT_MOST = 8
"""Steps that are taken for slowed where the marks cannot be read at the end of the mode."""
SETTLE_S = 0.05
"""Longest wait of the training thread for its own marks, in each of these steps."""
_ABANDONED = "this process was no longer watched"
GIVEN = "torch.compile: give the model's FLOPs instead (--model-flops, traceml_ray.count)"
_WITHOUT_FLOPS = {
    *("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "inductor"),
    *("_dtensor", "symm_mem", "torchvision", "torchaudio", "_quantized", "record_function", "rpc"),
}
"""Namespaces of operations that have no FLOPs, or are known to the mode where they have some."""


class ModelFlops(NamedTuple):
    """What was counted."""

    flops: int
    step: int
    dtype: str
    """Of what most of them were computed with."""


class FlopCount:
    """
    Of one process. `on_step` runs on the training thread.

    Args:
        recorder: of that thread's marks.
        errors: counts what goes wrong.
    """

    def __init__(self, recorder: Recorder, errors: Errors) -> None:
        self.measured: ModelFlops | None = None
        self.why = ""
        """Why there is no count."""
        self._recorder, self._errors = recorder, errors
        self._mode: Any = None
        self._thread = 0
        self._seen: int | None = None
        """The step of the call before."""
        self._begin = self._began = 0
        self._over = False

    def arm(self) -> None:
        """Have a step counted: the third from here on. Any thread may."""
        self._recorder.add_step_hook(self.on_step)

    def on_step(self) -> None:
        """Turn the mode on where the step begins, and off where it is over; raises nothing."""
        try:
            if self._mode is None:
                if not self._over:
                    self._may_begin()
            elif get_ident() == self._thread:
                self._may_end()
        except Exception as error:
            self._errors.note("flops", error)
            self._give_up(error_text(error))

    def _may_begin(self) -> None:
        position = self._recorder.step_begins(SETTLE_S)
        if position is None:
            return
        step, before = position[0], self._seen
        self._seen = step
        if before is None:
            self._begin = SKIPPED if step < SKIPPED else step + SKIPPED
        elif step > before and step >= self._begin:  # else in the middle of a step
            if why := _cannot():
                self._give_up(why)
                return
            self._mode, self._thread, self._began = _counter(), get_ident(), step
            self._recorder.steps.rows.slowed.begin("flops", step)
            self._mode.__enter__()
            if self._over:  # abandoned meanwhile, by a thread that has seen no mode
                self._give_up(_ABANDONED)

    def _may_end(self) -> None:
        position = self._recorder.step_now(SETTLE_S)
        if not self._over and (position is None or position[0] <= self._began):
            return
        mode = self._mode
        if not self._exit() or self._over:
            self._give_up(self.why or "the script has a dispatch mode of its own across steps")
            return
        assert position is not None
        self._done()
        self.why = _cannot() or mode.why()
        steps, total = position[0] - self._began, mode.get_total_flops()
        if total and not self.why:
            self.measured = ModelFlops(total // steps, self._began, mode.dtypes.most_common(1)[0][0])
        self.why = self.why or ("" if total else "no operation with known FLOPs")

    def _exit(self) -> bool:
        """Turn the mode off; False: not now, since one of the script's own lies on it."""
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        mode = self._mode
        if _get_current_dispatch_mode() not in (mode, getattr(mode, "mode", None)):
            mode.muted = True
            return False
        mode.__exit__(None, None, None)
        self._mode = None
        now = self._recorder.step_now(SETTLE_S)
        self._recorder.steps.rows.slowed.end("flops", now[0] if now else self._began + _AT_MOST)
        return True

    def _give_up(self, why: str) -> None:
        """End it without a count; what is still on is turned off as soon as that can be."""
        self.why, self._over = why[:200], True
        if self._mode is None or self._exit():
            self._done()

    def _done(self) -> None:
        self._over = True
        self._recorder.remove_step_hook(self.on_step)

    def abandon(self) -> None:
        """End it: this process is no longer watched. Any thread may."""
        self._over = True  # first: the thread that trains looks at it once it has turned the mode on
        mode = self._mode
        if mode is None:
            self._done()
        elif get_ident() == self._thread:
            self._give_up(_ABANDONED)
        else:
            mode.muted = True  # it is turned off at the next step, also without us (`patch.optimizer`)


def _cannot() -> str:
    """Return why a count would miss something, "" where it would not."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None) or {}
    return GIVEN if counters.get("frames") or counters.get("stats") else ""


def _counter() -> Any:
    """Return a mode that counts all FLOPs, by type of data as well."""
    import torch
    from torch.utils import flop_counter

    class Counting(flop_counter.FlopCounterMode):
        def __init__(self) -> None:
            super().__init__(display=False, custom_mapping=_on_cpu(torch, flop_counter))
            self.mod_tracker: Any = _NoModules()  # whose hooks on all modules nobody needs
            self.dtypes: Counter[str] = Counter()
            self.unknown: set[str] = set()
            self.muted = False

        def why(self) -> str:
            return (
                f"it would be without those of {', '.join(sorted(self.unknown)[:5])}" if self.unknown else ""
            )

        def _count_flops(self, packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
            if self.muted:
                return out
            before = self.get_total_flops() if packet in self.flop_registry else None
            super()._count_flops(packet, out, args, kwargs)  # type: ignore[no-untyped-call]
            if before is not None:
                self.dtypes[_dtype(torch, packet, args)] += self.get_total_flops() - before
            elif str(packet).partition(".")[0] not in _WITHOUT_FLOPS:
                self.unknown.add(str(packet))
            return out

    return Counting()


class _NoModules:
    """In place of what finds out in which module an operation is."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _on_cpu(torch: Any, counter: Any) -> dict[Any, Any]:
    """Return how attention on the CPU is counted, which torch leaves out: as the same on a device."""

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(counter.sdpa_flop_count(query, key, value))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(counter.sdpa_backward_flop_count(gradient, query, key, value))

    name = "_scaled_dot_product_flash_attention_for_cpu"
    functions = {name: forward, f"{name}_backward": backward}
    return {
        getattr(torch.ops.aten, name): function
        for name, function in functions.items()
        if hasattr(torch.ops.aten, name)
    }


def _dtype(torch: Any, packet: Any, args: Any) -> str:
    """Return what an operation computes with: `tf32` where torch may do so for float32."""
    tensor = next((argument for argument in args if isinstance(argument, torch.Tensor)), None)
    if tensor is None:
        return "unknown"
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "float32" and tensor.is_cuda:
        convolves = "conv" in str(packet)
        allowed = torch.backends.cudnn.allow_tf32 if convolves else torch.backends.cuda.matmul.allow_tf32
        return "tf32" if allowed else name
    return name


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
        counted = self.flops.measured
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
