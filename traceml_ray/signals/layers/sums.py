"""What was measured of layers, added up step by step to the window that is sent."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from traceml_ray.agent.patch.layer_calls import MeasuredCalls
from traceml_ray.signals.layers.records import MAX_LAYERS, OTHERS, LayerSum, LayerWindow
from traceml_ray.signals.layers.table import LayerTable
from traceml_ray.wire import messages as wire

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
            if wire.size_of(made) <= _MAX_BYTES or most < 2:
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
