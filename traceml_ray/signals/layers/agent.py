"""
When the layers of a model are measured, by a device's clock where there is one, and how that is added up to
the window that is sent.

One step in `every` is, a power of two that follows from what measuring has cost: all ranks measure steps of
the same numbers, so that no rank waits for another one that measures alone.
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
"""Events that are made at a time: each takes some µs."""


class LayerEvents:
    """
    The events of one process; the agent's thread calls it.

    Args:
        api: the device, by an instance that nobody else records with.
        calls: records events, up to `free_event`.
    """

    def __init__(self, api: DeviceApi, calls: LayerCalls) -> None:
        self._api, self._calls = api, calls
        self._made = 0

    def make_room(self, oldest: int) -> None:
        """Make events where they run out, or let those before number `oldest` be used again."""
        if self._made < EVENT_SLOTS and self._calls.next_event + _AT_ONCE > self._made:
            self._made = min(EVENT_SLOTS, self._made + _AT_ONCE)
            self._api.make(self._made)
        self._calls.free_event = oldest + EVENT_SLOTS if self._made == EVENT_SLOTS else self._made

    def times(self, sample: MeasuredCalls) -> list[int] | None:
        """
        Return the ns of each owner in a sample, as `MeasuredCalls.times`; empty where its events are out of
        order,
        since they are of several streams. None: the device is not done with it.
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
    """How many steps it turned out to be."""
    took_ns: int
    sample: MeasuredCalls
    gradients: list[int | None] | None
    every: int

    @property
    def cost_ns(self) -> int:
        """What measuring it has cost the training thread."""
        return self.sample.cost_ns + _UNSEEN_NS * self.sample.marks


class LayerSums:
    """What has been measured since the window began."""

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
        """Add one step, with the ns of each layer."""
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
        """Return the window as it is sent."""
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
    """Return one row that is all of `rest`."""
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
Largest cost of measuring by its own count, as a share of a step. 3 % are promised; the count
sees about half.
"""
_MOST_SHARE = 0.015
"""Once a window has cost more than this of its time, nothing is measured until it has not."""
_FIRST_EVERY = 8
MAX_EVERY = 1024
_FIRST_WINDOW_S, _MAX_WINDOW_S = 5.0, 600.0
"""A window is twice as long as the one before, so that a long run has few, and a short one has some."""
_SETTLE_S = 0.05
"""Longest wait of the training thread for its own marks."""
_UNBOUNDED = 1 << 62
_MAX_WAITING = 64
"""Samples that the agent has not come to yet; none is made beyond these."""


class LayerSampler(Collector):
    """
    One per process. `on_step` is called by the thread that trains, all else by the agent's.

    Args:
        instrumentation: knows the root modules, and counts what goes wrong.
        device: whether a device's clock is read.
        always: deep mode is on; else only on request.
        clock: the CPU's, in ns.
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
        Held where a sample begins or ends, and where the agent changes what is measured. The training thread
        does not wait for it: then a sample is longer than a step, and not used.
        """
        self._table: LayerTable | None = None
        self._roots: list[weakref.ref[Any]] = []
        """Whose layers the table has."""
        self._events: LayerEvents | None = None
        self._most = MAX_MODULES
        self.every = _FIRST_EVERY
        self._done: deque[MeasuredStep] = deque()
        self._step = self._skip = 0
        """The step that is measured; how many calls of `on_step` can be left out."""
        self._began_ns = 0
        self._left = 0
        """Samples that may still begin: set by the agent's thread, counted down by the one that trains."""
        self._paused = self._over_budget = False
        """Nothing is measured: the layers change; it has cost too much."""
        self._gradients_due = True
        self._idle_ns = 0
        """What the training thread has spent between two samples in deciding."""
        self._window: LayerSums | None = None
        self._windows = 0
        self._window_s = _FIRST_WINDOW_S
        self._costs: deque[float] = deque(maxlen=15)
        self._takes: deque[float] = deque(maxlen=15)

    # -- the training thread -------------------------------------------------------------------------

    def on_step(self) -> None:
        """Begin and end samples where steps do; raises nothing."""
        self._skip -= 1
        if self._skip > 0 and not self._calls.on:
            return
        began = self._clock()
        try:
            position = self._recorder.step_begins(_SETTLE_S)
            if position is not None and self._lock.acquire(blocking=False):
                try:
                    if self._installed:  # else the agent has stopped it since this call began
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
        waits = waits or step in self._recorder.steps.rows.slowed  # no step like others
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
        """Return that of a rank."""
        return cls(rank.instrumentation, rank.device, rank.settings.deep)

    def handle_command(self, command: wire.Command) -> None:
        """Measure as many steps as a command asks for; it is repeated, and each is done once."""
        wanted = msgspec.convert(command.args, ready(LayersCommand))
        if wanted.id not in self._asked:
            self._asked.add(wanted.id)
            self._wanted = wanted

    def collect(self, final: bool = False) -> list[LayerWindow]:
        """Go on; return the windows that are over."""
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
        """Return how many samples more are wanted than there are: of a request as many as it asks for."""
        wanted, window = self._wanted, self._window
        if wanted is None:
            return _UNBOUNDED if self._always else 0
        added = window.steps if window is not None and window.asked == wanted.id else 0
        return max(0, wanted.steps - added - len(self._done) - bool(self._began_ns))

    def abandon(self, forked: bool = False) -> None:
        """
        Put everything back: what was measured is sent. A child that was `forked` has only the thread that did
        it; it measures nothing.
        """
        self._always, self._wanted = False, None
        if forked:
            self._calls.on = False
            self._patcher.restore()
        elif self._installed:
            self._remove(at_any_rate=True)

    def _install(self) -> bool:
        """Begin, once the roots are known and a step is over; return whether that is done."""
        if self._recorder.steps.rows.first or not self._find():
            return False
        self._calls.install(self._patcher)
        self._installed = True
        self._recorder.add_step_hook(self.on_step)
        return True

    def _find(self) -> bool:
        """Look for the layers of the model as it is now; return whether these are what is measured."""
        roots = self._ours.roots.modules()
        if not roots:
            self._ours.missing.setdefault(
                "layers", "no root module is known: wrap a step in traceml_ray.trace_step(model)"
            )
            return False
        self._ours.missing.pop("layers", None)
        try:
            table = LayerTable(roots, self._most)
        except RuntimeError:  # a module gets another part at this moment: asked again
            return False
        if not self._lock.acquire(timeout=LOCK_S):
            return False
        try:
            return self._measure(table, roots)
        finally:
            self._lock.release()

    def _measure(self, table: LayerTable, roots: list[Any]) -> bool:
        """Measure these layers from the next sample on; return whether that is so already."""
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
        """Stop; where the training thread does not let go of the lock, the next turn does it."""
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
        """Add up what was measured; return the window that is over."""
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
        """Return the times of a sample; None: not known yet, empty: not known."""
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
        """Whether layers exchange something themselves: what they wait for is in their times."""
        strategy = self._ours.strategy
        return any(word in strategy for word in ("fsdp", "tp", "pp", "deepspeed"))

    def _weigh(self, step: MeasuredStep) -> None:
        """Choose how many steps are measured by what it costs."""
        cost = step.cost_ns
        self._costs.append(cost)
        self._takes.append(max(1, step.took_ns - cost))
        share = sum(self._costs) / sum(self._takes)
        every = 1
        while share / every > MAX_SHARE and every < MAX_EVERY:
            every *= 2
        self.every = every
