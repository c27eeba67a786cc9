"""All signals that are judged while their session runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from traceml_ray.signals.check.live import LiveCheck
from traceml_ray.signals.goodput.live import LiveGoodput
from traceml_ray.signals.live import LiveSignal
from traceml_ray.signals.memory.live import LiveMemory

LIVE: tuple[Callable[[threading.Lock, Callable[[], float]], LiveSignal], ...] = (
    LiveMemory,
    LiveCheck,
    LiveGoodput,
)
"""Factories of the live signals. Arguments: the writer's lock, and a clock in monotonic seconds."""
