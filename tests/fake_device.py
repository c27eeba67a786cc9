"""
A CUDA device with a manually advanced clock. Streams are queues; an event is done when all work before it is
done.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable

from traceml_ray.agent.device import DeviceApi, DeviceClock
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.steps import STREAMED

EPSILON_NS = 5_000
"""Time that an idle stream takes to reach an event, in ns."""
OWN = "own"
CALLS = tuple(name for name in vars(DeviceApi) if not name.startswith("_"))
"""Names of all calls of the device API."""


class DeviceError(Exception):
    """The error that a broken device raises."""


class FakeDevice:
    """
    One device, with the script's calls (`launch`, `wait_for`, `wait`, `item`) and the monitor's calls
    (`DeviceApi`).

    An event is done once the host's clock reaches its time: device and host work at the same time.
    """

    def __init__(self, now: int = 1_000_000) -> None:
        self.now = now
        self.epsilon_ns = EPSILON_NS
        self.drift = 0.0
        self.stream: object = "default"
        self.ends: Counter[object] = Counter()
        """For each stream: the time at which all work given to it is done."""
        self.events: dict[int, int] = {}
        self.recorded: list[int] = []
        """Times of all events that marks have recorded, in order."""
        self.calls: Counter[str] = Counter()
        self.during: Callable[[str, int], None] = lambda _name, _count: None
        """Called during each call, with its name and the number of such calls so far."""
        self.fails: Callable[[str, int], bool] = lambda _name, _count: False
        """Whether a call raises, by its name and the number of such calls so far."""
        self.captures: Callable[[int], bool] = lambda _: False
        self.captured = False
        """Last result of `capturing`. An event recorded while it is True would spoil the script's graph."""
        self.late_ns: Callable[[int], int] = lambda _: 0
        """Delay of the n-th beat, in ns."""
        self.record_takes_ns: Callable[[int], int] = lambda _: 0
        self.rounds = False
        """Whether times are 32-bit floats of ms, like CUDA's."""
        self.broken = False
        self.last: object = None
        """The stream of the newest mark."""

    # -- the script's side -------------------------------------------------------------------------

    def __call__(self) -> int:
        """Return the CPU's time, in ns."""
        return self.now

    def wait(self, ns: int) -> None:
        """Let the host compute for `ns` ns."""
        self.now += ns

    def launch(self, ns: int) -> None:
        """Put a kernel on the current stream."""
        self.ends[self.stream] = max(self.ends[self.stream], self.now + self.epsilon_ns) + ns

    def wait_for(self, until: int) -> None:
        """Make the current stream wait for another one, which is done at `until`."""
        self.ends[self.stream] = max(self.ends[self.stream], until)

    def item(self) -> None:
        """Make the host wait for the current stream."""
        self.now = max(self.now, self.ends[self.stream])

    # -- the monitor's side ------------------------------------------------------------------------

    def capturing(self) -> bool:
        self._called("capturing")
        self.captured = self.captures(self.calls["capturing"])
        return self.captured

    def record(self, slot: int) -> None:
        self._called("record")
        assert not self.captured
        self.last = self.stream
        self._record(slot, self.stream)
        self.recorded.append(self.events[slot])
        self.now += self.record_takes_ns(self.calls["record"])

    def elsewhere(self) -> bool:
        self._called("elsewhere")
        return self.stream != self.last

    def make(self, slots: int) -> None:
        self._called("make")

    def beat(self, slot: int) -> None:
        self._called("beat")
        self._record(slot, OWN)
        self.events[slot] += self.late_ns(self.calls["beat"])

    def done(self, slot: int) -> bool:
        self._called("done")
        return self.events[slot] <= self.now

    def elapsed_ns(self, since: int, until: int) -> int | None:
        self._called("elapsed_ns")
        if max(self.events[since], self.events[until]) > self.now:
            return None
        elapsed_ms = (self.events[until] - self.events[since]) * (1 + self.drift)
        if self.rounds:
            elapsed_ms = struct.unpack("f", struct.pack("f", elapsed_ms / 1e6))[0] * 1e6
        return round(elapsed_ms)

    def _record(self, slot: int, stream: object) -> None:
        self.events[slot] = max(self.ends[stream], self.now + self.epsilon_ns)

    def _called(self, name: str) -> None:
        assert not self.broken, f"{name} after an error"
        self.calls[name] += 1
        self.during(name, self.calls[name])
        if self.fails(name, self.calls[name]):
            self.broken = True
            raise DeviceError(f"{name} failed")


def use(recorder: Recorder, device: FakeDevice) -> DeviceClock:
    """
    Let the recorder read the device's clock from here on, as in a rank that exchanges gradients on the
    device.
    """
    exchange = recorder.exchange
    exchange.couple(STREAMED)
    clock = DeviceClock(device, recorder.steps.rows.ring, recorder.clock, lambda: exchange.streamed)
    clock.resolve(recorder.first_event())
    recorder.use(clock)
    return clock
