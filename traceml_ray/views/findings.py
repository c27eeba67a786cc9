"""What was found in a run that is looked at, in order, and which of it is read first."""

from __future__ import annotations

from traceml_ray.reports.conclusion import Conclusion, conclude
from traceml_ray.signals.experts.answer import GetExperts
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.findings import findings_of
from traceml_ray.signals.layers.answer import GetLayers
from traceml_ray.signals.layers.judge import Layers
from traceml_ray.signals.memory.answer import GetMemory
from traceml_ray.signals.sharding.answer import MOST_RANKS, GetSharding
from traceml_ray.store import query

from .run_state import SLOW_RANKS, RunState
from .session_poll import SessionPoll
from .state import RUNNING

MEMORY_S = 5.0
"""Least time between two questions about memory, in s, while a run goes on and no view of memory is open."""
LAYERS_S, LAYERS_S_A_RANK, LAYERS_RANKS = 30.0, 2.0, 32
"""
The same for layers: `LAYERS_S`, or `LAYERS_S_A_RANK` per rank; up to `LAYERS_RANKS` ranks are asked for: each
takes the aggregator up to 18 ms. Sharding and experts are asked for every `LAYERS_S`.
"""
_SHARDED = ("fsdp2", "hsdp")
"""Strategies that divide a model."""


def found_in(cache: SessionPoll, run: RunState, state: str) -> list[Finding]:
    """
    Return what was found in a run: of one that is over, what its summary has. Those of the verdict are of the
    verdict that is shown. Of a large job that goes on, they are all: see `SLOW_RANKS` and `LAYERS_RANKS`.
    """
    if run.verdict is None:
        return []
    if state not in RUNNING:
        stored = cache.ask(query.Findings(run.id))
        return findings_of(run.verdict) if stored is None else stored
    large = run.world >= SLOW_RANKS
    memory = sharding = None
    if not large and any(process.memory_from for process in run.ranks.values()):
        memory = cache.ask(GetMemory(run.id, peaks=False), every_s=MEMORY_S)
    if not large and any(
        set(_SHARDED) & {*(process.strategy or "").split("+")} for process in run.ranks.values()
    ):
        sharding = cache.ask(GetSharding(run.id, MOST_RANKS), every_s=LAYERS_S)
    return findings_of(
        run.verdict,
        memory=memory,
        layers=layers_of(cache, run, state),
        sharding=sharding,
        loads=(None if large else cache.ask(GetExperts(run.id), every_s=LAYERS_S)) or (),
    )


def first_of(run: RunState, findings: list[Finding]) -> Conclusion | None:
    """Return what to read first of a run, None before any verdict."""
    return None if run.verdict is None else conclude(run.verdict, findings)


def layers_of(cache: SessionPoll, run: RunState | None, state: str) -> Layers | None:
    """Return the layers of a run, as they were a while ago, where they have been measured."""
    if run is None or (state in RUNNING and run.world > LAYERS_RANKS):
        return None
    layers = cache.ask(GetLayers(run.id), every_s=max(LAYERS_S, LAYERS_S_A_RANK * run.world))
    return layers if layers is not None and layers.ranks else None
