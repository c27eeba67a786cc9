"""What is made of the records of a signal, and what is shown of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.document.model import Facts, Section
from traceml_ray.signals.finding import Finding, OnSteps
from traceml_ray.signals.kind import Kind
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile

SLOW_RANKS = 256
"""In a job of so many ranks, or more, what takes time for each of them is asked for less often, or not."""
A = TypeVar("A")


class State(Protocol):
    """Records of all processes of a session, in bounded memory."""

    def add(self, process: int, record: Any) -> None:
        """Add the next record of a rank process (its number), in order of arrival."""


_S = TypeVar("_S", bound=State)
States = Sequence[tuple[Kind[Any], Callable[[], State]]]
"""Kinds of records, with what makes the state of each."""


class Records:
    """What has been read of a session file that grows, each record once. May be used by several threads."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._cursors: dict[str, int] = {}
        self._reading = Lock()
        self.lock = Lock()
        """Held while a state changes, or is used; never while the file is read."""

    def read(self, file: SessionFile, states: States) -> Records:
        """Read on in the file. Raises `SessionFileError`."""
        with self._reading:
            for kind, made in states:
                records = [*file.records(kind, self._cursors.get(kind.name, 0))]
                with self.lock:
                    state = self._states.setdefault(kind.name, made())
                    for cursor, process, record in records:
                        state.add(process, record)
                        self._cursors[kind.name] = cursor
        return self

    def of(self, kind: Kind[Any], state: type[_S]) -> _S:
        """Return the state of a kind, as it was read last."""
        known = self._states[kind.name]
        assert isinstance(known, state)
        return known


@dataclass(frozen=True)
class Run:
    """A run as signals see it, live and stored."""

    file: SessionFile
    """Reads this run. A view that is `of_steps` does not read it: the history is held meanwhile."""
    records: Records
    history: StepHistory | None
    """Its steps; None without any, or for a view that needs none."""
    ranks: Mapping[int, RankProcess]
    world: int
    """How many ranks the job has."""
    over: bool
    """Nothing is to come."""
    whole: bool
    """What is asked without saying so is of all steps, not of the newest."""
    failed: Mapping[int, RankProcess] = field(default_factory=dict)
    """Ranks that a failure names first, with the process that failed; a report alone knows them."""
    live: Any = None
    """What the live judge of the signal has found as of now; None: what is found is that of the records."""

    def missing(self, names: Iterable[str]) -> dict[str, str]:
        """Return why processes know less than they could, by name, the first reason of each."""
        reasons: dict[str, str] = {}
        for process in self.ranks.values():
            reasons = {name: why for name, why in process.missing.items() if name in names} | reasons
        return reasons


class View(Generic[A]):
    """One signal where it is answered and shown. An answer `A` is what Python callers and faces get."""

    name: str
    """Of its block in `summary.json`."""
    question: type[OfRun[A]]
    """Asks for the answer on a run; all other fields have defaults, which are those of a report."""
    states: States = ()
    """Records that are read into memory before the view answers."""
    of_steps = False
    """Whether it needs the step history."""
    finds: Mapping[str, Any] | None = None
    """Fields of its question where only what was found is wanted; None: it finds nothing."""
    rounded = True
    """Whether `summary.json` has four decimals of its numbers, at most; their unit is known then."""
    polled = False
    """Whether web app and terminal ask once a tick, for its numbers and gauges."""
    overview = False
    """Whether the overview of `top` asks for it, in jobs in which what was found is asked for."""
    page = "signals"
    """Name of the page of the web app, and of the pane of `top`, that has it: that of all signals, or its."""

    def answer(self, run: Run, asked: Any) -> A:
        """Return the answer to a question. Raises `SessionFileError`."""
        raise NotImplementedError

    def findings(self, answer: A, steps: Sequence[Finding], verdict: OnSteps | None) -> Sequence[Finding]:
        """
        Return what was found, and which of the findings on `steps` it may explain. Pure.

        Args:
            answer: to the question, or made of a block.
            steps: what the verdict names, the first finding first.
            verdict: on the steps; None before any.
        """
        return ()

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """
        Return how many seconds a face waits, at least, before it asks again what was found in a run that goes
        on; None: it does not ask, since there is nothing, or the job is so large that answers take long.
        """
        return None

    def cause(self, death: Verdict, answer: A) -> str:
        """Return in a sentence what the signal knows of why a rank died; "" where that is nothing. Pure."""
        return ""

    def block(self, answer: A) -> Any:
        """Return what `summary.json` has of an answer: a struct, or a list of structs. Pure."""
        raise NotImplementedError

    def of_block(self, block: Any) -> A:
        """
        Return the answer that a block is of, without what is drawn. The block of a signal that is no field of
        `summary_shape.Summary` is of plain values. Pure.
        """
        raise NotImplementedError

    def sections(self, answer: A) -> Sequence[Section]:
        """Return what is shown of an answer, also of one that is made of a block."""
        return ()

    def details(self, answer: A) -> Sequence[Section]:
        """
        Return what a face shows that has room for all of a whole answer, without what was found; where
        nothing is known, a sentence says so. A report has the `sections`.
        """
        return self.sections(answer)

    def brief(self, answer: A) -> Facts:
        """Return what a face shows that has a line or two for the signal."""
        facts = (block for one in self.sections(answer) for block in one.blocks if isinstance(block, Facts))
        return Facts(*(pair for block in facts for pair in block.pairs))
