"""Decides whether, and from when on, the rows of this process are timed on a device's clock."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from traceml_ray import text
from traceml_ray.agent.cuda import CudaApi, cuda_api
from traceml_ray.agent.device import DeviceApi, DeviceClock
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.patch.fsdp import ShardedWaits
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing
from traceml_ray.agent.steps import STREAMED
from traceml_ray.errors import error_text
from traceml_ray.settings import SHORTEST_STEP_NS
from traceml_ray.wire.messages import CLOSED, DEVICE_CLOCK, OpenStage

_PACE_NS = 1_000_000_000
"""Shortest time over which steps are timed before `auto` decides, in ns."""
_GRAPHS = "a mark inside the capture of a CUDA graph is made once: a step that is only replayed has no row"
CLOSE_WAIT_S = 0.2
_POLL_S = 0.005


class StepPace:
    """
    Measures the time per step on the CPU's clock, without the first steps, which may include
    compilation.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._since: tuple[int, int] | None = None
        """(time, step) at which measuring began."""
        self._warm = False

    def step_ns(self, step: int) -> int | None:
        """
        Return the mean time of the newest steps, in ns. None if it is not known yet. `step` is the current
        step.
        """
        now = self._clock()
        if self._since is None:
            self._since = now, step
        began_ns, first = self._since
        if step == first or now - began_ns < _PACE_NS:
            return None
        self._since = now, step
        was_warm, self._warm = self._warm, True
        return (now - began_ns) // (step - first) if was_warm else None


class DeviceUse:
    """
    Turns the device's clock on after the first step, and reads it. The agent's thread calls it.

    Args:
        setting: `Settings.device_clock`.
        instrumentation: its root modules show which device is used; its `missing` states why there is no
            device clock.
        ring: receives the rows.
    """

    def __init__(self, setting: str, instrumentation: Instrumentation, ring: StepRing) -> None:
        self.clock: DeviceClock | None = None
        self._setting = setting
        self._ours = instrumentation
        self._recorder: Recorder = instrumentation.recorder
        self._ring = ring
        self._decided = False
        self._index: int | None = None
        """
        Index of the device whose clock is used once steps are known to be long enough. None if there is none.
        """
        self._pace = StepPace(instrumentation.recorder.clock)
        self._noted: dict[str, int] = {}
        self._waits: ShardedWaits | None = None
        self._make_another: Callable[[], DeviceApi] | None = None

    def tick(self) -> None:
        """Read what the device has finished. Call it after the log was replayed."""
        if self.clock is None and not self._decided:
            self._consider()
        if self._index is not None:
            self._begin_if_long(self._index)
        if self.clock is not None:
            self.clock.resolve(self._recorder.first_event())
            if self._waits is not None:
                self._waits.tick()
            self._after()

    def finish(self) -> None:
        """
        Read what is left, for a short while. Rows that the device has not finished are passed on without its
        times.
        """
        end = time.monotonic() + CLOSE_WAIT_S
        while self.clock is not None:
            self.tick()
            if self.clock is None or not self.clock.waiting or time.monotonic() > end:
                break
            time.sleep(_POLL_S)
        if self.clock is not None and not self._stop():
            self.clock.flush()

    def begin(self, api: DeviceApi, another: Callable[[], DeviceApi] | None = None) -> None:
        """Use `api` from now on. `another` makes a second interface to the same device."""
        self._make_another = another
        exchange = self._recorder.exchange
        clock = DeviceClock(api, self._ring, self._recorder.clock, lambda: exchange.streamed)
        self._decided = True
        clock.resolve(self._recorder.first_event())
        strategy = self._ours.data_parallel.strategy
        if not clock.stopped and strategy.startswith("fsdp"):
            self._waits = ShardedWaits(strategy, self._recorder, clock, self._ours.patcher)
            clock.sharded = True
        if clock.stopped:
            self._ours.missing[DEVICE_CLOCK] = clock.stopped
        else:
            self.clock = clock
            self._recorder.use(clock)

    @property
    def waited(self) -> tuple[int, int, int] | None:
        """
        Return (ns that FSDP waited for gathers, ns for everything else, number of steps). None
        if not known.
        """
        clock = self.clock
        if clock is None or not clock.sharded or not clock.waited_steps:
            return None
        return clock.waited[0], clock.waited[1], clock.waited_steps

    @property
    def another(self) -> Callable[[], DeviceApi] | None:
        """
        Return the function that makes another interface, with events of its own, to the device in use. None
        if no device is in use.
        """
        return None if self.clock is None else self._make_another

    def device_position(self, step: int) -> OpenStage | None:
        """Return the device's position if it is behind its host, which is in `step`."""
        if self.clock is None:
            return None
        standing = self.clock.device_position(step, self._recorder.steps.open_cuts())
        return None if standing is None else OpenStage(*standing)

    # -- on and off --------------------------------------------------------------------------------

    def _consider(self) -> None:
        torch: Any = sys.modules.get("torch")
        if torch is None or self._recorder.steps.rows.first:
            return
        try:
            roots = self._ours.roots.modules()
            devices = {parameter.device for root in roots for parameter in root.parameters()}
        except RuntimeError:  # a module is being changed at this moment: ask again
            return
        if not devices:
            return
        devices = {device for device in devices if device.type not in ("cpu", "meta")}
        self._decided = True
        if not devices:
            return
        if len(devices) > 1:
            self._recorder.exchange.couple("several devices")
        why = self._refusal(torch, devices)
        if why:
            self._ours.missing[DEVICE_CLOCK] = why[:200]
            return
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            self._ours.missing[f"{DEVICE_CLOCK}: lead"] = (
                "CUDA_LAUNCH_BLOCKING=1: no host is ahead of its device"
            )
        index = devices.pop().index
        if self._setting == "auto":
            self._index = index
        else:
            self._begin_on(index)

    def _begin_on(self, index: int) -> None:
        try:
            self.begin(cuda_api(index), functools.partial(CudaApi, index))
        except Exception as error:
            self._ours.errors.note("device clock", error)
            self._ours.missing[DEVICE_CLOCK] = error_text(error)[:200]

    def _begin_if_long(self, index: int) -> None:
        """Use the device's clock from now on if steps are long enough to make its cost negligible."""
        step_ns = self._pace.step_ns(self._recorder.steps.rows.step)
        if step_ns is None:
            return
        self._index = None
        if step_ns < SHORTEST_STEP_NS:
            self._ours.missing[DEVICE_CLOCK] = _too_short(step_ns)
        else:
            self._begin_on(index)

    def _refusal(self, torch: Any, devices: set[Any]) -> str:
        kinds = sorted({device.type for device in devices})
        if kinds != ["cuda"]:
            return f"only of CUDA devices, not of {', '.join(kinds)}"
        if torch.version.hip is not None:
            return "only of CUDA devices, not with ROCm"
        if len(devices) > 1:
            return "the model is on several devices"
        if self._setting == "0":
            return "turned off by TRACEML_DEVICE_CLOCK=0"
        if not torch.cuda.is_initialized():
            return "CUDA is not initialized in this process"
        return ""

    def _after(self) -> None:
        """Count the errors of the clock. End its use if it has stopped itself or is not needed."""
        assert self.clock is not None
        self._count(self.clock)
        if self._recorder.exchange.inseparable:
            why = ", ".join(sorted(self._recorder.exchange.reasons - {STREAMED}))
            self._ours.missing[f"{DEVICE_CLOCK}: rows"] = f"ranks are not compared by them: {why}"[:200]
        if self.clock.counts["no event inside a graph capture"]:
            self._ours.missing["graphs"] = _GRAPHS
        usual_ns = self.clock.usual_ns
        # Half of the limit. Where steps are about as long as the shortest allowed, some ranks would otherwise
        # have a device clock and others none.
        if self._setting == "auto" and usual_ns is not None and usual_ns < SHORTEST_STEP_NS // 2:
            self.clock.fail(_too_short(usual_ns))
        if self._recorder.exchange.inferred:
            self.clock.fail("gradients are not exchanged by DDP or FSDP")
        if self.clock.stopped:
            self._ours.missing[DEVICE_CLOCK] = (
                f"{CLOSED} {self._recorder.steps.rows.step}: {self.clock.stopped}"[:200]
            )
            self._stop()

    def _count(self, clock: DeviceClock) -> None:
        for name, count in dict(clock.counts).items():
            self._ours.errors.count(name, count - self._noted.get(name, 0))
            self._noted[name] = count

    def _stop(self) -> bool:
        clock = self.clock
        if self._waits is not None:
            self._waits.stop()
        if left := self._recorder.stop_device_clock():
            self._ring.end_hosts()
            self.clock = None
        if clock is not None:
            self._count(clock)
        return left


def _too_short(step_ns: int) -> str:
    return f"not read in steps as short as {text.ns(step_ns)}: TRACEML_DEVICE_CLOCK=1 turns it on"
