"""
Calls over torch.distributed.rpc: what one worker asks for, and the range of another in which that runs.

A call is a range with the name that torch's own RPC profiling gives it, `rpc_async#run_stage(worker1 ->
worker2)`; what it runs is a range `run_stage` on the other worker.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from traceml_ray.traces.collectives import Part
from traceml_ray.traces.sources import Source
from traceml_ray.traces.trace import Trace

_CALL = re.compile(
    r"rpc_(?:sync|async|async_jit|remote)#(?P<name>[^()]+)\((?P<caller>[^()]+) -> (?P<callee>[^()]+)\)"
)
_NUMBER = re.compile(r"(\d{1,6})$")
_RANGES = frozenset({"user_annotation"})
_MOST_RANGES = 500_000


class Call(NamedTuple):
    """A call, and what it has run."""

    name: str
    asked: Part
    done: Part


class Calls:
    """Collects the calls of some workers. The k-th call of a function is what runs it for the k-th time."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str], list[Part]] = defaultdict(list)
        """By the worker that is called and the function."""
        self._done: dict[tuple[int, str], list[Part]] = defaultdict(list)
        """By the place of a trace and the name of a range."""
        self._workers: dict[str, int] = {}
        self._ranks: dict[int, int] = {}
        self._bounds_ns: dict[int, int] = {}
        self._left = _MOST_RANGES

    def add(self, source_index: int, source: Source, trace: Trace, shift_ns: int) -> None:
        """Take the ranges of one trace, whose times are `shift_ns` before those of all traces."""
        self._bounds_ns[source_index] = source.clock_bound_ns or 0
        if source.rank is not None:
            self._ranks[source.rank] = source_index
        ranges = np.flatnonzero(trace.of_category(_RANGES) & ~trace.on_device)
        ends_ns: dict[tuple[int, int], int] = {}
        for event in ranges[np.argsort(trace.begin_ns[ranges], kind="stable")][: self._left].tolist():
            self._left -= 1
            key, end_ns = (int(trace.name[event]), int(trace.lane[event])), int(trace.end_ns[event])
            if end_ns <= ends_ns.get(key, -1):
                continue  # the same, named twice: by the script, too
            ends_ns[key] = end_ns
            name, lane = trace.names[key[0]], trace.lanes[key[1]]
            part = Part(source_index, lane, int(trace.begin_ns[event]) + shift_ns, end_ns + shift_ns)
            if call := _CALL.fullmatch(name):
                self._workers[call["caller"]] = source_index
                self._asked[call["callee"], call["name"]].append(part)
            else:
                self._done[source_index, name].append(part)

    def matched(self) -> list[Call]:
        """Return the calls of which it is known what they have run."""
        calls = []
        for (callee, name), asked in self._asked.items():
            callee_index = self._place_of(callee)
            waiting = iter(sorted(asked, key=lambda part: part.begin_ns))
            call = next(waiting, None)
            for done in self._done.get((callee_index, name), ()) if callee_index is not None else ():
                if call is None:
                    break
                slack_ns = self._bounds_ns[call.place] + self._bounds_ns[done.place]
                if call.begin_ns <= done.begin_ns + slack_ns:
                    calls.append(Call(name, call, done))
                    call = next(waiting, None)
        return calls

    def _place_of(self, worker: str) -> int | None:
        """Return where a worker's trace is; of one that calls nobody, by the rank at the end of its name."""
        number = _NUMBER.search(worker)
        return self._workers.get(worker, self._ranks.get(int(number[1])) if number else None)
