"""The interface of a signal's view: how its records are answered and shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.document.model import Facts, Section
from traceml_ray.signals.finding import Finding, OnSteps
from traceml_ray.signals.kind import Kind
from traceml_ray.store.query import OfRun, answer_type
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire.codec import ready

SLOW_RANKS = 256
"""From this number of ranks on, views whose cost grows with the ranks are asked less often, or not at all."""
A = TypeVar("A")


class State(Protocol):
    """State built from the records of all processes of a session, in bounded memory."""

    def add(self, process: int, record: Any) -> None:
        """Add the next record of a rank process (its number). Records are in order of arrival."""


_S = TypeVar("_S", bound=State)
States = Sequence[tuple[Kind[Any], Callable[[], State]]]
"""Kinds of records, each with the factory of its state."""


class Records:
    """Records read so far from a growing session file, each once. Several threads may use it."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._cursors: dict[str, int] = {}
        self._read: dict[tuple[str, str | None], Any] = {}
        self._reading = Lock()
        self.lock = Lock()
        """Held while a state is changed or used; never while the file is read."""

    def read(self, file: SessionFile, states: States) -> Records:
        """Read the new records of the file. Raises `SessionFileError`."""
        with self._reading:
            for kind, made in states:
                records = [*file.records(kind, self._cursors.get(kind.name, 0))]
                with self.lock:
                    state = self._states.setdefault(kind.name, made())
                    for cursor, process, record in records:
                        state.add(process, record)
                        self._cursors[kind.name] = cursor
        return self

    def besides(self, view: View[Any], file: SessionFile) -> Any:
        """Return what a view reads of the run of `file` besides records. Raises `SessionFileError`."""
        with self._reading:
            known = self._read.get((view.name, file.run))
            read = view.read(file, known)
            if read is not None:
                self._read[view.name, file.run] = read
            return read

    def of(self, kind: Kind[Any], state: type[_S]) -> _S:
        """Return the state of a kind at the last reading."""
        known = self._states[kind.name]
        assert isinstance(known, state)
        return known


@dataclass(frozen=True)
class Run:
    """A run as signals see it, live or stored."""

    file: SessionFile
    """Reads this run. A view with `of_steps` must not read it, because the history is locked meanwhile."""
    records: Records
    history: StepHistory | None
    """The steps of the run. None if there are none, or the view needs none."""
    ranks: Mapping[int, RankProcess]
    world: int
    """Number of ranks of the job."""
    over: bool
    """Whether the run is over."""
    whole: bool
    """Whether questions without a range cover all steps instead of the newest."""
    failed: Mapping[int, RankProcess] = field(default_factory=dict)
    """Ranks that a failure names first, with the process that failed. Only a report knows them."""
    processes: Sequence[RankProcess] = ()
    """All rank processes of the run, of all attempts."""
    read: Any = None
    """What the view has read besides records, see `View.read`."""
    live: Any = None
    """Current result of the signal's live judge. None: the result comes from the records."""

    def missing(self, names: Iterable[str]) -> dict[str, str]:
        """Return why processes know less than they could: the first reason for each name."""
        reasons: dict[str, str] = {}
        for process in self.ranks.values():
            reasons = {name: why for name, why in process.missing.items() if name in names} | reasons
        return reasons


class View(Generic[A]):
    """Answers and shows one signal. Python callers and faces get an answer `A`."""

    name: str
    """Name of its block in `summary.json`."""
    question: type[OfRun[A]]
    """Question for a run. All other fields have defaults, which a report uses."""
    states: States = ()
    """Records that are read into memory before the view answers."""
    of_steps = False
    """Whether it needs the step history."""
    finds: Mapping[str, Any] | None = None
    """Fields of its question if only findings are requested. None: it has no findings."""
    rounded = True
    """Whether `summary.json` rounds its numbers to at most four decimals. Their unit must be known."""
    polled = False
    """Whether web app and terminal request it once per tick, for its numbers and gauges."""
    overview = False
    """Whether the overview of `top` requests it, in jobs for which findings are requested."""
    page = "signals"
    """
    Name of the page of the web app, and of the pane of `top`, that shows it: the page of all signals, or its
    own.
    """

    def read(self, file: SessionFile, before: Any) -> Any:
        """
        Return what it needs of the file besides records, read before the step history is locked. Raises
        `SessionFileError`.

        Args:
            file: reads the run.
            before: what it returned the last time for this run; None: this is the first time.
        """
        return None

    def answer(self, run: Run, asked: Any) -> A:
        """Return the answer to a question. Raises `SessionFileError`."""
        raise NotImplementedError

    def findings(self, answer: A, steps: Sequence[Finding], verdict: OnSteps | None) -> Sequence[Finding]:
        """
        Return its findings, and which of the findings on `steps` each may explain. Pure.

        Args:
            answer: answer to the question, or made of a block.
            steps: findings that the verdict names, the first one first.
            verdict: verdict on the steps. None before there is one.
        """
        return ()

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """
        Return the shortest time in s between two requests of a face for the findings of a running job. None:
        do not request them, because there are none, or the job is so large that answers take long.
        """
        return None

    def polls_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """
        Return the shortest time in s between two requests of a view that is `polled`. None: the job is so
        large that it is not requested while it runs.
        """
        return 0.0

    def cause(self, death: Verdict, answer: A) -> str:
        """
        Return a sentence with what the signal knows about why a rank died. "" if it knows
        nothing. Pure.
        """
        return ""

    def confirmed(self, verdict: Verdict, answer: A) -> Verdict:
        """
        Return a verdict on steps, extended by whether what the signal measured confirms it. Unchanged if it
        measured nothing. Pure.
        """
        return verdict

    def files(
        self, file: SessionFile, ranks: Mapping[int, RankProcess], since_ns: int
    ) -> Iterable[tuple[str, bytes]]:
        """
        Yield files for the bundle of an incident, as (name, contents). Raises `SessionFileError`.

        Args:
            file: reads the run.
            ranks: its ranks.
            since_ns: time from which on something belongs to the incident, in ns since the epoch.
        """
        return ()

    def block(self, answer: A) -> Any:
        """
        Return the part of an answer that is in `summary.json`: a struct, or a list of structs. By default the
        whole answer. Pure.
        """
        return answer

    def of_block(self, block: Any) -> A:
        """
        Return the answer that a block was made of, without what is drawn. By default the block is the
        answer; without one (None) it is empty. Pure.

        The block of a signal that is no field of `summary_shape.Summary` consists of plain values.
        """
        shape = answer_type(self.question)
        is_empty = block is None and isinstance(shape, type) and issubclass(shape, msgspec.Struct)
        return msgspec.convert({} if is_empty else block, ready(shape))

    def sections(self, answer: A) -> Sequence[Section]:
        """Return what is shown of an answer, including an answer made of a block."""
        return ()

    def details(self, answer: A) -> Sequence[Section]:
        """
        Return what a face with enough room shows of a whole answer, without findings. If nothing is known, a
        sentence says so. A report has the `sections`.
        """
        return self.sections(answer)

    def brief(self, answer: A) -> Facts:
        """Return what a face with a line or two shows for the signal."""
        facts = (block for one in self.sections(answer) for block in one.blocks if isinstance(block, Facts))
        return Facts(*(pair for block in facts for pair in block.pairs))
