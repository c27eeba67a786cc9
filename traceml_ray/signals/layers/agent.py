"""
Decides when the layers of a model are measured, on a device's clock if there is one, and sums up the windows
that are sent.

One step in `every` is measured. `every` is a power of two that follows from the cost of measuring. All ranks
measure the same step numbers, so that no rank waits for one that measures alone.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from traceml_ray.agent.device import EVENT_SLOTS, DeviceApi
from traceml_ray.agent.device_use import DeviceUse
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.mark_log import LOCK_S
from traceml_ray.agent.patch.layer_calls import LayerCalls, MeasuredCalls
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.layers.records import MAX_LAYERS, OTHERS, LayerSum, LayerWindow
from traceml_ray.signals.layers.table import MAX_MODULES, LayerTable
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready
from traceml_ray.wire.messages import LayersCommand

_AT_ONCE = 2048
"""Number of events that are made at a time. Making one takes some µs."""


class LayerEvents:
    """
    The events of one process. The agent's thread calls it.

    Args:
        api: the device, through an instance that nothing else records with.
        calls: records events, up to `free_event`.
    """

    def __init__(self, api: DeviceApi, calls: LayerCalls) -> None:
        self._api, self._calls = api, calls
        self._made = 0

    def make_room(self, oldest: int) -> None:
        """Make more events if they run out, or allow those before number `oldest` to be reused."""
        if self._made < EVENT_SLOTS and self._calls.next_event + _AT_ONCE > self._made:
            self._made = min(EVENT_SLOTS, self._made + _AT_ONCE)
            self._api.make(self._made)
        self._calls.free_event = oldest + EVENT_SLOTS if self._made == EVENT_SLOTS else self._made

    def times(self, sample: MeasuredCalls) -> list[int] | None:
        """
        Return the ns of each owner in a sample, as `MeasuredCalls.times`.

        Empty if the events are out of order, because they belong to several streams. None if the device is
        not done with the sample.
        """
        first, times = sample.first_event, [0] * (len(sample.calls) + 1)
        if not self._api.done((first + len(sample.owners) - 1) % EVENT_SLOTS):
            return None
        for number, owner in enumerate(sample.owners[:-1], first):
            elapsed = self._api.elapsed_ns(number % EVENT_SLOTS, (number + 1) % EVENT_SLOTS)
            if elapsed is None or elapsed < 0:
                return []
            times[owner] += elapsed
        return times


_UNSEEN_NS = 1000
"""Approximate time that torch takes to call one of our hooks, in ns."""
_IDLE_NS = 250
"""
Approximate time that a call of a module takes to pass our wrapper in a step that is not
measured, in ns.
"""
_MAX_BYTES = 24 * 1024
"""Largest size of a window as it is sent, in bytes. With long names, fewer layers are listed."""


class MeasuredStep(NamedTuple):
    """A step that was measured."""

    number: int
    steps: int
    """Number of steps that the sample actually covers."""
    took_ns: int
    sample: MeasuredCalls
    gradients: list[int | None] | None
    every: int

    @property
    def cost_ns(self) -> int:
        """Time that measuring this step cost the training thread, in ns."""
        return self.sample.cost_ns + _UNSEEN_NS * self.sample.marks


class LayerSums:
    """Sums of the measurements since the window began."""

    def __init__(self, table: LayerTable, began_ns: int, asked: str, on_device: bool) -> None:
        self._on_device = on_device
        self.began_ns, self.asked = began_ns, asked
        self.steps = self.cost_ns = 0
        self._table = table
        n = len(table.layers)
        self._times, self._calls, self._outputs = [0] * (2 * n + 1), [0] * (2 * n), [0] * n
        self._squares = [0.0] * n
        self._gradients: list[int | None] = [None] * n
        self._first = self._last = 0

    def add(self, step: MeasuredStep, times: list[int]) -> None:
        """Add one measured step, with the ns of each layer."""
        sample, n = step.sample, len(self._squares)
        self._times = [a + b for a, b in zip(self._times, times, strict=True)]
        self._calls = [a + b for a, b in zip(self._calls, sample.calls, strict=True)]
        self._outputs = [a + b for a, b in zip(self._outputs, sample.outputs, strict=True)]
        self._squares = [a + (times[i] + times[n + i]) ** 2 for i, a in enumerate(self._squares)]
        self.cost_ns += step.cost_ns + (step.every - 1) * _IDLE_NS * sum(sample.calls)
        self._gradients = step.gradients or self._gradients
        self._first = self._first if self.steps else step.number
        self._last = step.number
        self.steps += 1

    def made(self, number: int, every: int, now: int, waits: bool) -> LayerWindow:
        """Return the window in the form in which it is sent."""
        n, steps = len(self._squares), max(1, self.steps)
        layers = [
            self._layer(index, steps)
            for index in range(n)
            if self._calls[index] or self._table.parameter_bytes[index]
        ]
        longest = sorted(layers, key=lambda one: one.forward_ns + one.backward_ns, reverse=True)
        window = LayerWindow(
            number=number,
            t_ns=time.time_ns(),
            first_step=self._first,
            last_step=self._last,
            steps=self.steps,
            every=every,
            clock="device" if self._on_device else "host",
            accelerated=self._table.accelerated,
            waits=waits,
            cost_ns=self.cost_ns,
            spent_ns=now - self.began_ns,
            layers=[],
            asked=self.asked,
        )
        most = MAX_LAYERS
        while True:
            kept = {one.name for one in longest[:most]}
            listed = [one for one in layers if one.name in kept]
            rest = [one for one in layers if one.name not in kept]
            made = msgspec.structs.replace(window, layers=[*listed, *_together(rest)], others=len(rest))
            if codec.size_of(made) <= _MAX_BYTES or most < 2:
                return made
            most = most * 4 // 5

    def _layer(self, index: int, steps: int) -> LayerSum:
        n, layer = len(self._squares), self._table.layers[index]
        return LayerSum(
            layer.name,
            layer.kind,
            layer.region,
            self._calls[index],
            self._calls[n + index],
            self._times[index],
            self._times[n + index],
            float(self._squares[index]),
            self._outputs[index] // steps,
            self._table.parameter_bytes[index],
            self._gradients[index],
        )


def _together(rest: list[LayerSum]) -> list[LayerSum]:
    """Return one row that sums up all rows in `rest`."""
    if not rest:
        return []

    def total(name: str) -> int | None:
        known = [value for one in rest if (value := getattr(one, name)) is not None]
        return sum(known) if known else None

    sums = {name: total(name) for name in LayerSum.__struct_fields__[3:]}
    known = {
        name: value for name, value in sums.items() if value is not None or name.startswith(("par", "grad"))
    }
    return [msgspec.structs.replace(rest[0], name="", kind=OTHERS, region="", **known)]


MAX_SHARE = 0.012
"""
Largest cost of measuring, as measured by itself, as a share of a step. 3 % are promised; the measured cost is
about half of the actual cost.
"""
_MOST_SHARE = 0.015
"""If a window has cost more than this share of its time, measuring pauses until the share is below it."""
_FIRST_EVERY = 8
MAX_EVERY = 1024
_FIRST_WINDOW_S, _MAX_WINDOW_S = 5.0, 600.0
"""
Length of the first window, and largest length of a window, in s. Each window is twice as long as the one
before, so a long run has few windows and a short run has some.
"""
_SETTLE_S = 0.05
"""Longest time that the training thread waits for its own marks, in s."""
_UNBOUNDED = 1 << 62
_MAX_WAITING = 64
"""Largest number of samples that the agent has not processed. No further sample is made above it."""


class LayerSampler(Collector):
    """
    Measures the layers of one process. The training thread calls `on_step`; the agent's thread calls
    everything else.

    Args:
        instrumentation: knows the root modules, and counts errors.
        device: whether a device's clock is read.
        always: deep mode is on. Otherwise layers are measured only on request.
        clock: the CPU's clock, in ns.
    """

    def __init__(
        self,
        instrumentation: Instrumentation,
        device: DeviceUse,
        always: bool,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._ours, self._device, self._clock = instrumentation, device, clock
        self._recorder = instrumentation.recorder
        self._calls = LayerCalls(instrumentation.failed, clock)
        self._patcher = Patcher(debug=instrumentation.errors.debug)
        self._patcher.errors, self._patcher.missing = instrumentation.errors, instrumentation.missing
        self._always = always
        self._wanted: LayersCommand | None = None
        self._asked: set[str] = set()
        self._installed = False
        self._lock = Lock()
        """
        Held when a sample begins or ends, and when the agent changes what is measured.

        The training thread does not wait for it. If the lock is taken, the sample is longer than a step and
        is not used.
        """
        self._table: LayerTable | None = None
        self._roots: list[weakref.ref[Any]] = []
        """The root modules whose layers are in the table."""
        self._events: LayerEvents | None = None
        self._most = MAX_MODULES
        self.every = _FIRST_EVERY
        self._done: deque[MeasuredStep] = deque()
        self._step = self._skip = 0
        """Number of the step that is measured; number of calls of `on_step` that can be skipped."""
        self._began_ns = 0
        self._left = 0
        """
        Number of samples that may still begin. The agent's thread sets it; the training thread counts it
        down.
        """
        self._paused = self._over_budget = False
        """Reasons why nothing is measured: the layers are being changed; measuring has cost too much."""
        self._gradients_due = True
        self._idle_ns = 0
        """Time that the training thread has spent on decisions between two samples, in ns."""
        self._window: LayerSums | None = None
        self._windows = 0
        self._window_s = _FIRST_WINDOW_S
        self._costs: deque[float] = deque(maxlen=15)
        self._takes: deque[float] = deque(maxlen=15)

    # -- the training thread -------------------------------------------------------------------------

    def on_step(self) -> None:
        """Begin and end samples where steps begin and end. Raises nothing."""
        self._skip -= 1
        if self._skip > 0 and not self._calls.on:
            return
        began = self._clock()
        try:
            position = self._recorder.step_begins(_SETTLE_S)
            if position is not None and self._lock.acquire(blocking=False):
                try:
                    if self._installed:  # otherwise the agent has stopped it since this call began
                        self._decide(position[0], began)
                finally:
                    self._lock.release()
        except Exception as error:
            self._calls.on = False
            self._ours.failed("layers", error)

    def _decide(self, step: int, began: int) -> None:
        calls = self._calls
        if self._began_ns and step > self._step:
            sample, steps = calls.end(), step - self._step
            if sample is not None:
                due, self._gradients_due = self._gradients_due, False
                gradients = sample.table.gradient_bytes() if due else None
                took = began - self._began_ns
                self._done.append(MeasuredStep(self._step, steps, took, sample, gradients, self.every))
            elif calls.full and calls.next_event - calls.first_event > EVENT_SLOTS // 2:
                self._most = max(1, self._most // 2)
            elif calls.captured:
                self._ours.errors.count("layers: no event inside a graph capture")
            self._began_ns = 0
        if self._began_ns:
            return
        every = self.every
        self._skip = every - step % every
        waits = self._paused or self._over_budget or len(self._done) >= _MAX_WAITING
        waits = waits or step in self._recorder.steps.rows.slowed  # a slowed step is not representative
        if step % every == 0 and self._left > 0 and not waits:
            self._left -= 1
            self._step = step
            calls.begin()
            self._began_ns = self._clock()
            self._skip = 0
        self._idle_ns += self._clock() - began

    # -- the agent's thread --------------------------------------------------------------------------

    commands = ("layers",)

    @classmethod
    def of_rank(cls, rank: Rank) -> LayerSampler:
        """Make the sampler of a rank."""
        return cls(rank.instrumentation, rank.device, rank.settings.deep)

    def handle_command(self, command: wire.Command) -> None:
        """
        Measure as many steps as a command requests. The command is repeated; each request is
        executed once.
        """
        wanted = msgspec.convert(command.args, ready(LayersCommand))
        if wanted.id not in self._asked:
            self._asked.add(wanted.id)
            self._wanted = wanted

    def collect(self, final: bool = False) -> list[LayerWindow]:
        """Process what was measured, and return the windows that are complete."""
        if not (self._always or self._wanted is not None):
            if self._installed:
                self._remove()
            return self._add_up(final) if self._window is not None else []
        if not self._installed and not self._install():
            return []
        began = time.thread_time_ns()
        over = self._add_up(final)
        if (window := self._window) is not None:
            window.cost_ns += time.thread_time_ns() - began
            spent = self._clock() - window.began_ns
            self._over_budget = window.steps > 1 and window.cost_ns + self._idle_ns > _MOST_SHARE * spent
        self._left = self._lacking()
        return over

    def _lacking(self) -> int:
        """Return how many more samples are needed. A request needs as many as it asks for."""
        wanted, window = self._wanted, self._window
        if wanted is None:
            return _UNBOUNDED if self._always else 0
        added = window.steps if window is not None and window.asked == wanted.id else 0
        return max(0, wanted.steps - added - len(self._done) - bool(self._began_ns))

    def abandon(self, forked: bool = False) -> None:
        """
        Remove all hooks; finished measurements are still sent. A `forked` child has only the forking thread
        and measures nothing.
        """
        self._always, self._wanted = False, None
        if forked:
            self._calls.on = False
            self._patcher.restore()
        elif self._installed:
            self._remove(at_any_rate=True)

    def _install(self) -> bool:
        """Start, once the roots are known and a step is over. Returns whether measuring has started."""
        if self._recorder.steps.rows.first or not self._find():
            return False
        self._calls.install(self._patcher)
        self._installed = True
        self._recorder.add_step_hook(self.on_step)
        return True

    def _find(self) -> bool:
        """Find the current layers of the model. Returns whether these are the layers being measured."""
        roots = self._ours.roots.modules()
        if not roots:
            self._ours.missing.setdefault(
                "layers", "no root module is known: wrap a step in traceml_ray.trace_step(model)"
            )
            return False
        self._ours.missing.pop("layers", None)
        try:
            table = LayerTable(roots, self._most)
        except RuntimeError:  # a module is being changed at this moment: ask again
            return False
        if not self._lock.acquire(timeout=LOCK_S):
            return False
        try:
            return self._measure(table, roots)
        finally:
            self._lock.release()

    def _measure(self, table: LayerTable, roots: list[Any]) -> bool:
        """Measure these layers from the next sample on. Returns whether they are measured already."""
        on_device = self._device.another is not None and not self._calls.broken
        same = self._table is not None and self._table.same(table)
        if not same or on_device != (self._events is not None):
            self._paused = True  # layers and clock change only between two samples
            if self._calls.on:
                return False
            self._done.clear()
            self._table, self._window_s = table, _FIRST_WINDOW_S
            self._calls.use(table)
            self._use_device(on_device)
        self._paused, self._roots = False, [weakref.ref(root) for root in roots]
        return True

    def _use_device(self, on: bool) -> None:
        self._calls.api = self._events = None
        if on and self._device.another is not None:
            api = self._device.another()
            self._events = LayerEvents(api, self._calls)
            self._events.make_room(self._calls.next_event)
            self._calls.api = api

    def _remove(self, at_any_rate: bool = False) -> None:
        """Stop measuring. If the training thread does not release the lock, the next round tries again."""
        held = self._lock.acquire(timeout=LOCK_S)
        if not (held or at_any_rate):
            return
        try:
            self._installed = False
            self._recorder.remove_step_hook(self.on_step)
            self._calls.on = False
            self._patcher.restore()
            self._began_ns = 0
        finally:
            if held:
                self._lock.release()

    def _add_up(self, final: bool) -> list[LayerWindow]:
        """Add up what was measured. Returns the window that is complete."""
        if self._window is None and not self._open():
            return []
        window = self._window
        assert window is not None
        wanted = self._wanted
        most = wanted.steps if wanted is not None and wanted.id == window.asked else _UNBOUNDED
        while self._done and window.steps < most:
            step = self._done[0]
            times = self._times_of(step.sample)
            if times is None and len(self._done) < _MAX_WAITING:
                break  # the device is not done with it
            self._done.popleft()
            if times and step.sample.table is self._table and step.steps == 1:
                window.add(step, times)
                self._weigh(step)
        if self._events is not None and not self._calls.broken:
            oldest = self._done[0].sample.first_event if self._done else self._calls.first_event
            self._events.make_room(oldest)
        if not (final or self._is_over(window)):
            return []
        return [self._close(window)] if window.steps else []

    def _times_of(self, sample: MeasuredCalls) -> list[int] | None:
        """Return the times of a sample. None: not known yet. Empty: will not be known."""
        if sample.times or self._events is None:
            return sample.times
        if self._calls.broken:
            return []
        try:
            return self._events.times(sample)
        except Exception as error:
            self._calls.broken, self._calls.api = True, None
            self._ours.failed("layers", error)
            return []

    def _is_over(self, window: LayerSums) -> bool:
        wanted = self._wanted
        lost = self._calls.broken and self._events is not None
        other = [ref() for ref in self._roots] != self._ours.roots.modules()
        if lost or other or not self._installed or window.asked != ("" if wanted is None else wanted.id):
            if not window.steps:
                self._window = None
            return True
        if wanted is not None:
            return window.steps >= wanted.steps
        return window.steps > 0 and self._clock() - window.began_ns >= self._window_s * 1e9

    def _open(self) -> bool:
        if not self._find():
            return False
        assert self._table is not None
        self._gradients_due = True
        asked = "" if self._wanted is None else self._wanted.id
        self._window = LayerSums(self._table, self._clock(), asked, self._events is not None)
        return True

    def _close(self, window: LayerSums) -> LayerWindow:
        exchange = self._recorder.exchange
        window.cost_ns += self._idle_ns
        self._idle_ns = 0
        waits = exchange.inseparable or self._shares_layers()
        made = window.made(self._windows, self.every, self._clock(), waits)
        self._windows += 1
        self._window = None
        if self._wanted is not None and self._wanted.id == window.asked:
            self._wanted = None
        self._window_s = min(2 * self._window_s, _MAX_WINDOW_S)
        return made

    def _shares_layers(self) -> bool:
        """
        Return whether layers communicate with other ranks themselves, so that waits are part
        of their times.
        """
        strategy = self._ours.strategy
        return any(word in strategy for word in ("fsdp", "tp", "pp", "deepspeed"))

    def _weigh(self, step: MeasuredStep) -> None:
        """Choose how many steps are measured from the cost of measuring."""
        cost = step.cost_ns
        self._costs.append(cost)
        self._takes.append(max(1, step.took_ns - cost))
        share = sum(self._costs) / sum(self._takes)
        every = 1
        while share / every > MAX_SHARE and every < MAX_EVERY:
            every *= 2
        self.every = every
