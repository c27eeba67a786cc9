"""What a person reads first of a run that is looked at: see `reports.conclusion`."""

from __future__ import annotations

from traceml_ray.analysis.layer_times import Layers
from traceml_ray.reports.conclusion import Conclusion, conclude
from traceml_ray.store import query

from .run_state import SLOW_RANKS, RunState
from .session_poll import SessionPoll
from .state import RUNNING

MEMORY_S = 5.0
"""How often memory is asked for, at most, while a run goes on and nobody looks at it,"""
LAYERS_S, LAYERS_S_A_RANK, LAYERS_RANKS = 30.0, 2.0, 32
"""and layers, of how many ranks: a rank takes the aggregator up to 18 ms of an answer."""


def concluded(cache: SessionPoll, run: RunState, state: str) -> Conclusion | None:
    """
    Return what to read first of a run, None before any verdict. Of a large job that goes on, that is of its
    verdict alone: see `SLOW_RANKS` and `LAYERS_RANKS`.
    """
    if run.verdict is None:
        return None
    memory = None
    if any(process.memory_from for process in run.ranks.values()) and not (
        state in RUNNING and run.world >= SLOW_RANKS
    ):
        memory = cache.ask(query.Memory(run.id), every_s=MEMORY_S)
    return conclude(run.verdict, memory, layers_of(cache, run, state))


def layers_of(cache: SessionPoll, run: RunState | None, state: str) -> Layers | None:
    """Return the layers of a run, as they were a while ago, where they have been measured."""
    if run is None or (state in RUNNING and run.world > LAYERS_RANKS):
        return None
    layers = cache.ask(query.Layers(run.id), every_s=max(LAYERS_S, LAYERS_S_A_RANK * run.world))
    return layers if layers is not None and layers.ranks else None
