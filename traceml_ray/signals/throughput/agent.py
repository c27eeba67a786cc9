"""
Sends the work of a rank: what its steps were trained on, FLOPs, its device, and the total number of steps.

The model FLOPs of one step are counted once by torch's `FlopCounterMode`, on the training thread. The mode
handles every operation, so this step takes longer, and so does what follows its backward. These rows are
excluded from statistics (`Rows.slowed`). The mode changes no result. If it would miss operations
(`torch.compile`, unknown kernels), there is no count, but a reason.
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
"""Number of steps before the counted one, the same on all ranks: the first step does more than all others."""
_AT_MOST = 8
"""Number of steps that count as slowed if the marks cannot be read at the end of the mode."""
SETTLE_S = 0.05
"""Longest time that the training thread waits for its own marks in each of these steps, in s."""
_ABANDONED = "this process was no longer watched"
GIVEN = "torch.compile: give the model's FLOPs instead (--model-flops, traceml_ray.count)"
_WITHOUT_FLOPS = {
    *("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "inductor"),
    *("_dtensor", "symm_mem", "torchvision", "torchaudio", "_quantized", "record_function", "rpc"),
}
"""Namespaces of operations that have no FLOPs, or whose FLOPs the mode knows."""


class ModelFlops(NamedTuple):
    """The counted FLOPs."""

    flops: int
    step: int
    dtype: str
    """Data type of most of these FLOPs."""


class FlopCount:
    """
    Counts the FLOPs of one process. `on_step` runs on the training thread.

    Args:
        recorder: recorder of the training thread's marks.
        errors: counts errors.
    """

    def __init__(self, recorder: Recorder, errors: Errors) -> None:
        self.measured: ModelFlops | None = None
        self.why = ""
        """Why there is no count."""
        self._recorder, self._errors = recorder, errors
        self._mode: Any = None
        self._thread = 0
        self._seen: int | None = None
        """The step at the last call."""
        self._begin = self._began = 0
        self._over = False

    def arm(self) -> None:
        """Arm the count of a step: the third from now on. Any thread may call this."""
        self._recorder.add_step_hook(self.on_step)

    def on_step(self) -> None:
        """Turn the mode on where the step begins, and off where it is over. Raises nothing."""
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
        elif step > before and step >= self._begin:  # otherwise the call is in the middle of a step
            if why := _cannot():
                self._give_up(why)
                return
            self._mode, self._thread, self._began = _counter(), get_ident(), step
            self._recorder.steps.rows.slowed.begin("flops", step)
            self._mode.__enter__()
            if self._over:  # another thread has abandoned the count meanwhile, before it could see the mode
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
        """
        Turn the mode off. Returns False if that is impossible now, because a mode of the
        script is above it.
        """
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
        """End without a count. A mode that is still on is turned off as soon as possible."""
        self.why, self._over = why[:200], True
        if self._mode is None or self._exit():
            self._done()

    def _done(self) -> None:
        self._over = True
        self._recorder.remove_step_hook(self.on_step)

    def abandon(self) -> None:
        """End because this process is no longer watched. Any thread may call this."""
        self._over = True  # first: the training thread checks it after turning the mode on
        mode = self._mode
        if mode is None:
            self._done()
        elif get_ident() == self._thread:
            self._give_up(_ABANDONED)
        else:
            mode.muted = True  # it is turned off at the next step, also without us (`patch.optimizer`)


def _cannot() -> str:
    """Return why a count would miss operations. "" if it would not."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None) or {}
    return GIVEN if counters.get("frames") or counters.get("stats") else ""


def _counter() -> Any:
    """Return a mode that counts all FLOPs, also by data type."""
    import torch
    from torch.utils import flop_counter

    class Counting(flop_counter.FlopCounterMode):
        def __init__(self) -> None:
            super().__init__(display=False, custom_mapping=_on_cpu(torch, flop_counter))
            self.mod_tracker: Any = _NoModules()  # avoids its hooks on all modules, which are not needed
            self.dtypes: Counter[str] = Counter()
            self.unknown: set[str] = set()
            self.muted = False

        def why(self) -> str:
            return f"the FLOPs of {', '.join(sorted(self.unknown)[:5])} are not known" if self.unknown else ""

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
    """Replaces the tracker that determines in which module an operation is."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _on_cpu(torch: Any, counter: Any) -> dict[Any, Any]:
    """Return how attention on the CPU is counted, which torch omits: like attention on a device."""

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
    """Return the data type that an operation computes with: `tf32` where torch may use it for float32."""
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
"""Time between two records, in s: a share of the time since the first, within these bounds."""
_SOON, _LATER = 0.25, 0.005
SIZES_STEPS = 128
"""The sizes of this many steps are sent at once, even if they are not due yet."""


class WorkReport(Collector):
    """
    Reports the work of one process. Any thread may call `declare`; only the agent calls the rest.

    Args:
        recorder: recorder of the training thread's marks.
        roots: the model, which shows the device.
        settings: the values that the user has set.
        errors: counts errors.
        missing: receives the reasons why something is not known.
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
        """Make the report of a rank."""
        return cls(rank.recorder, rank.instrumentation.roots, rank.settings, rank.errors, rank.missing)

    def abandon(self, forked: bool) -> None:
        """Stop counting FLOPs."""
        self.flops.abandon()

    def declare(self, **known: float | None) -> None:
        """Record what the script declares: `job_flops`, `total_steps`."""
        self._declared.update({name: value for name, value in known.items() if value is not None})

    def collect(self, final: bool) -> list[StepWork | StepSizes]:
        """Return what is due."""
        return [*self._work(final), *self._sizes(final)]

    def _work(self, final: bool) -> list[StepWork]:
        """Return the sums that are due: at the end, and not much more often than drawing needs."""
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
        """Return the sizes of batches that are due: of at most 10 s, or of `SIZES_STEPS` steps."""
        now, log = self._clock(), self._recorder.steps.work.sizes
        if not len(log) or not (final or now >= self._sizes_due or len(log) >= SIZES_STEPS):
            return []
        began = now if self._began is None else self._began
        self._sizes_due = now + max(_FIRST_S, min(_SOON_S, _SOON * (now - began)))
        return packed(self._recorder.drain_sizes())

    def _facts(self) -> dict[str, Any]:
        """Return the other facts that are known."""
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
    """Return name and id of the device that holds the model. Empty before the model is on a device."""
    import torch

    device = next((parameter.device for root in roots.modules() for parameter in root.parameters()), None)
    if device is None or device.type == "meta":
        return {}
    if device.type != "cuda":
        return {"device": device.type}
    about = torch.cuda.get_device_properties(device)
    return {"device": str(about.name), "device_id": str(getattr(about, "uuid", ""))}
