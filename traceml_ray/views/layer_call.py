"""Requests a measurement of layers and waits for it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from traceml_ray import text
from traceml_ray.signals.layers.judge import Layers
from traceml_ray.signals.layers.view import GetLayers
from traceml_ray.store import query
from traceml_ray.wire import messages as wire

_POLL_S = 0.2


def ask_layers(
    ask: Callable[[query.Request[Any]], Any], steps: int | None, run: str | None, timeout: float
) -> Layers:
    """Return the layers, as `Session.layers` does. `ask` sends a question and returns its answer."""
    if steps is None:
        layers: Layers = ask(GetLayers(run))
        return layers
    asked = secrets.token_hex(8)
    ask(query.StartLayers(asked, wire.LayersRequest.checked(steps, run)))
    return measured(ask, asked, run, timeout)


def measured(
    ask: Callable[[query.Request[Any]], Any],
    asked: str,
    run: str | None,
    timeout: float,
    goes_on: Callable[[], bool] = lambda: True,
) -> Layers:
    """
    Return what was measured for the request `asked`, once all live ranks have measured. Returns the
    measurements so far after `timeout` s, when no rank is alive any more, or when the session no longer
    `goes_on`.
    """
    deadline = time.monotonic() + timeout
    while True:
        last = not goes_on() or time.monotonic() > deadline
        layers: Layers = ask(GetLayers(run, asked))
        ranks = ask(query.GetRanks(run)).values()
        living = sum(not process.ended for process in ranks)
        last = last or bool(ranks and not living)
        if last or (layers.ranks and len(layers.ranks) >= living):
            return layers
        share = len(layers.ranks) / living if living else None
        text.advance(f"layers: measured by {len(layers.ranks):,} of {text.count(living, 'rank')}", share)
        time.sleep(_POLL_S)
