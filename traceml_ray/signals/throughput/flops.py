"""
The model FLOPs of one step of this rank, counted once by torch's `FlopCounterMode`, on the training thread.

The mode looks at every operation, so that this step takes longer, and so does what follows its backward: no
statistic is of these rows (`Rows.slowed`). It changes no number. Where it would miss something
(`torch.compile`, kernels that it does not know) there is no count, but a reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from threading import get_ident
from typing import Any, NamedTuple

from traceml_ray.agent.recorder import Recorder
from traceml_ray.errors import Errors, error_text

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
        self.found: ModelFlops | None = None
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
            self.found = ModelFlops(total // steps, self._began, mode.dtypes.most_common(1)[0][0])
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
