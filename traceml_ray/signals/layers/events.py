"""Times of layers by a device's clock: events in a ring of their own, read once the device is done."""

from __future__ import annotations

from traceml_ray.agent.device import EVENT_SLOTS, DeviceApi
from traceml_ray.agent.patch.layer_calls import LayerCalls, MeasuredCalls

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
