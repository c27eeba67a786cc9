"""
Runs one check on all nodes: every node alone, then pairs of nodes, round by round.

Nodes that share a machine take turns, trial by trial, else they would measure each other. Every task has a
time limit. A node that does not answer is left out from then on, and the result names it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import msgspec

from traceml_ray import text
from traceml_ray.signals.check.nodes import CheckNode, NoAnswerError
from traceml_ray.signals.check.pairs import Pair, first_round, next_round
from traceml_ray.signals.check.records import Checked, Measure
from traceml_ray.signals.check.tasks import (
    Begin,
    Collect,
    Describe,
    Exchange,
    Listen,
    NodeUse,
    Plan,
    Round,
    Task,
    TaskReply,
)

TRIALS = 10
"""Number of trials of each probe of a node."""
START_S = 90.0
"""Time in s that a process may take to start, which includes the import of torch."""
_SLOWER = 8.0
"""How many times longer than planned a task may take."""
_ALONE = 0.6
"""Share of the seconds of a check in which the nodes measure alone, if there are pairs."""
_ROUNDS, _MOST_ROUNDS = 2, 4
"""Usual and largest number of rounds of pairs."""
_IN_USE = 0.5
"""Share of a node's cores above which other processes that keep them busy are taken for a job."""

_OF_GPUS = "gpu_matmul", "gpu_memory"
"""Probes that a job on the cores of the same node does not notice."""
_VISITS = 2
"""
Number of times that a pair exchanges data in a round. Others do in between, so that a disturbance of some
seconds is not the measure of one pair.
"""
Job = tuple[frozenset[str], Callable[[], None]]
"""What a job keeps busy, and the job."""


@dataclass
class Outcome:
    """Results of all nodes, before they are judged."""

    checks: list[Checked] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Labels of the nodes that exchanged data. Pairs refer to them by index."""
    rounds: list[dict[Pair, Sequence[Measure]]] = field(default_factory=list)
    """Measures of each pair, by round. A pair that failed has none."""
    silent: dict[str, str] = field(default_factory=dict)
    """Nodes that did not answer, by label, with the reason."""
    in_use: dict[str, str] = field(default_factory=dict)
    """Nodes of which only the unused part was measured, by label, with what is in use."""
    errors: list[str] = field(default_factory=list)
    """Sentences: what could not be measured, and why."""


@dataclass(eq=False)
class Coordinator:
    """
    One check.

    Args:
        nodes: the nodes. Their labels are unique.
        plan: what to do.
        advance: called with what is being done, and the share (0..1) of the check that is done.
    """

    nodes: Sequence[CheckNode]
    plan: Plan
    advance: Callable[[str, float], object] = lambda _what, _share: None

    def __post_init__(self) -> None:
        self._by_name = {node.name: node for node in self.nodes}
        self._machines: dict[str, NodeUse] = {}
        self._lock = threading.Lock()
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Run the check. A node that fails is part of the result."""
        with ThreadPoolExecutor(max(2, 2 * len(self.nodes)), "traceml-check") as self._pool:
            self.advance("looking at the nodes", 0.0)
            self._all(self._describe, self._by_name)
            pairs = self.plan.pairs and len(self._machines) > 1
            self._alone(_ALONE if pairs else 1.0)
            if pairs:
                self._in_pairs()
        return self._outcome

    def _all(self, do: Callable[[str], None], names: Iterable[str]) -> None:
        """Do something on several nodes at the same time."""
        self._in_waves([(frozenset([name]), lambda name=name: do(name)) for name in names])  # type: ignore[misc]

    def _ask(self, name: str, task: Task, limit_s: float) -> TaskReply | None:
        """Have a node do a task. Return None if it does not answer (now or before), or could not do it."""
        if name in self._outcome.silent:
            return None
        try:
            reply = self._by_name[name].ask(task, limit_s)
        except NoAnswerError as error:
            self._is_silent(name, str(error))
            return None
        if reply.ended and not isinstance(task, (Listen, Exchange)):  # a broken link can end both processes
            self._is_silent(name, reply.error)
            return None
        if reply.error:
            self._note(f"{name}: {reply.error}")
            return None
        return reply

    def _is_silent(self, name: str, why: str) -> None:
        with self._lock:
            self._outcome.silent.setdefault(name, why)

    def _note(self, sentence: str) -> None:
        with self._lock:
            if sentence not in self._outcome.errors:
                self._outcome.errors.append(sentence)

    # -- each node alone -------------------------------------------------------------------------

    def _describe(self, name: str) -> None:
        reply = self._ask(name, Describe(), START_S)
        if reply is not None and reply.machine is not None:
            with self._lock:
                self._machines[name] = reply.machine

    def _alone(self, share: float) -> None:
        names = [name for name in self._by_name if name in self._machines]
        self._all(self._begin, names)
        seconds = self.plan.seconds * share / TRIALS
        for trial in range(TRIALS):
            self.advance(f"each node alone, trial {trial + 1} of {TRIALS}", share * trial / TRIALS)
            shift = trial % max(1, len(names))
            order = names[shift:] + names[:shift]
            self._in_waves(
                [(self._hosts(name), lambda name=name: self._trial(name, seconds)) for name in order]  # type: ignore[misc]
            )
        self._all(self._collect, names)

    def _begin(self, name: str) -> None:
        devices, only = self._free(name)
        self._ask(name, Begin(name, path=self.plan.path, devices=devices, only=only), START_S)

    def _free(self, name: str) -> tuple[tuple[int, ...] | None, tuple[str, ...] | None]:
        """Return the devices and the probes for a node. None: all. Note what a running job uses."""
        machine, used = self._machines[name], self._used(name)
        if not used or self.plan.disturb:
            return None, None
        self._outcome.in_use[name] = used
        return machine.free_gpus, _OF_GPUS if machine.free_gpus else ()

    def _used(self, name: str) -> str:
        """Return in words what a running job uses on a node; "": nothing."""
        machine, reserved = self._machines[name], self._by_name[name].reserved
        parts = [reserved] if reserved else []
        if not reserved and (machine.busy_cores or 0) > _IN_USE * machine.cores:
            parts.append(f"{text.number(machine.busy_cores, 1)} of {machine.cores} cores are busy")
        if not reserved and len(machine.free_gpus) < machine.gpus:
            parts.append(f"{machine.gpus - len(machine.free_gpus)} of {machine.gpus} GPUs are in use")
        return ", ".join(parts)

    def _trial(self, name: str, seconds: float) -> None:
        self._ask(name, Round(seconds), START_S + _SLOWER * seconds)

    def _collect(self, name: str) -> None:
        reply = self._ask(name, Collect(), START_S)
        if reply is not None and reply.checked is not None:
            checked = msgspec.structs.replace(reply.checked, node=name, host=self._machines[name].boot_id)
            with self._lock:
                self._outcome.checks.append(checked)

    # -- pairs of nodes --------------------------------------------------------------------------

    def _in_pairs(self) -> None:
        """Have pairs exchange data, until the rounds decide or a limit of rounds."""
        outcome = self._outcome
        free = [name for name in self._machines if name not in outcome.silent | outcome.in_use]
        outcome.names = names = [name for name in self._by_name if name in free]
        pairs, seconds = first_round(len(names)), self.plan.seconds * (1 - _ALONE) / _ROUNDS
        while pairs and len(outcome.rounds) < _MOST_ROUNDS:
            done = len(outcome.rounds)
            self.advance(f"pairs of nodes, round {done + 1}", min(0.95, _ALONE + 0.2 * done))
            measured: dict[Pair, Sequence[Measure]] = {}

            def exchange(pair: Pair, measured: dict[Pair, Sequence[Measure]] = measured) -> None:
                measures = self._exchange(names[pair[0]], names[pair[1]], seconds / _VISITS)
                with self._lock:
                    measured[pair] = joined(measured[pair], measures) if pair in measured else measures

            self._in_waves(
                [
                    (self._hosts(*(names[node] for node in pair)), lambda pair=pair: exchange(pair))  # type: ignore[misc]
                    for _ in range(_VISITS)
                    for pair in pairs
                ]
            )
            outcome.rounds.append(measured)
            pairs = next_round(len(names), outcome.rounds)

    def _exchange(self, one: str, other: str, seconds: float) -> Sequence[Measure]:
        """Have two nodes exchange data. Return no measures if they cannot."""
        address = self._by_name[one].address
        listening = self._ask(one, Listen(address), START_S)
        if listening is None or listening.port is None:
            return ()
        both = [self._machines[name] for name in (one, other)]
        gpu = all(machine.gpus > 0 for machine in both)
        limit_s = START_S + _SLOWER * seconds
        asked = [
            self._pool.submit(
                self._ask, name, Exchange(address, listening.port, place, seconds, gpu), limit_s
            )
            for place, name in enumerate((one, other))
        ]
        wait(asked)
        reply = asked[0].result()
        if reply is None or asked[1].result() is None:
            return ()
        # How fast a pair is depends on its machines: only pairs of the same two models are peers.
        models = " – ".join(sorted((machine.gpu if gpu else machine.cpu)[:96] for machine in both))
        return tuple(msgspec.structs.replace(one, like=f"{one.like}: {models}") for one in reply.measures)

    # -- several at once -------------------------------------------------------------------------

    def _hosts(self, *names: str) -> frozenset[str]:
        """Return what distinguishes the machines of nodes."""
        return frozenset(self._machines[name].boot_id or name for name in names)

    def _in_waves(self, jobs: Iterable[Job]) -> None:
        for wave in waves(jobs):
            running = [self._pool.submit(job) for job in wave]
            for future in running:
                future.result()


def joined(one: Sequence[Measure], other: Sequence[Measure]) -> Sequence[Measure]:
    """Return the trials of two exchanges of a pair as those of one. A pair that failed once has failed."""
    both = list[Measure]()
    for before, after in zip(one, other, strict=False):
        known = before.others is not None and after.others is not None
        others = [*(before.others or ()), *(after.others or ())] if known else None
        values = [*before.values, *after.values]
        both.append(msgspec.structs.replace(before, values=values, others=others))
    return tuple(both)


def waves(jobs: Iterable[Job]) -> Iterable[list[Callable[[], None]]]:
    """Return the jobs in lists. The jobs of a list keep different things busy, and are in the given order."""
    left = list(jobs)
    while left:
        busy: set[str] = set()
        wave, later = list[Callable[[], None]](), list[Job]()
        for uses, job in left:
            if busy & uses:
                later.append((uses, job))
            else:
                wave.append(job)
            busy |= uses
        yield wave
        left = later
