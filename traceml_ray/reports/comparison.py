"""
Compares two sessions, live or stored. Both get the same questions, and `analysis.comparison` judges the
answers.

Also renders the comparison as plain text: `traceml-ray compare`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.comparison import (
    ComparisonVerdict,
    MemorySeries,
    NumberChange,
    RankChange,
    Word,
    compare_memory,
    compare_steps,
    fact,
)
from traceml_ray.analysis.roles import mode
from traceml_ray.analysis.shapes import StepSample, StepTimes
from traceml_ray.analysis.thresholds import COMPARE, CompareLimits
from traceml_ray.analysis.verdict_shapes import VerdictInfo
from traceml_ray.document.json import indented
from traceml_ray.document.model import Column, Facts, Table
from traceml_ray.document.text import page
from traceml_ray.reports.answers import Answers
from traceml_ray.reports.headlines import named
from traceml_ray.settings import Settings
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.stages import STAGES
from traceml_ray.store import query, session
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.results import Status
from traceml_ray.store.schema import legible

SCHEMA = "traceml_ray/comparison/1"
DEFAULT_PCT = 100 * COMPARE.least
"""Times that differ by less, in % of a step of the first session, are not called different."""
_SAMPLES, _ALL_SAMPLES, _LEAST_SAMPLES = 600, 60_000, 50
"""
Largest number of memory samples of each rank, and of all ranks together; least number of each rank if there
are many.
"""
_MEMORY = {
    "host memory": "rss_bytes",
    "device memory, allocated": "allocated_bytes",
    "device memory, reserved": "reserved_bytes",
}
_FACTS: tuple[tuple[str, str, Callable[[StepTimes, VerdictInfo | None], float | None]], ...] = (
    ("throughput", "steps/s", lambda times, _: times.steps_per_s if times.steps else None),
    ("productive time", "%", lambda times, _: times.productive_pct),
    ("cost of the verdict", "%", lambda _, verdict: verdict.cost_pct if verdict else None),
    ("time lost to causes", "s", lambda _, verdict: verdict.lost_s if verdict else None),
)
_T = TypeVar("_T")


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of two sessions that are compared. Unknown values are None."""

    session: str | None
    """Name of the session."""
    run: str | None
    """Id of the run that is compared."""
    status: str | None
    """Status of the session: running, finished, failed or stopped."""
    exit_code: int | None = None
    """Exit code of the session."""
    command: str | None = None
    """Command that the session was started with."""
    launcher: str | None = None
    """Launcher that started the session."""
    strategy: str | None = None
    """Parallelism mode of the job, as in `SummarySession.strategy`."""
    world_size: int | None = None
    """Number of ranks of the job."""
    first_step: int | None = None
    """First step that is compared; the warm-up is left out."""
    last_step: int | None = None
    """Last step that is compared."""
    verdict: str | None = None
    """Verdict on the run, in one line; None: not known."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Difference between session `b` and session `a`; ms, %, bytes. Unknown values are None."""

    schema: str = SCHEMA
    """Name and version of this format."""
    word: Word | None
    """better, worse or no difference; None: the steps cannot be compared, `cannot` says why."""
    headline: str
    """The judgement in a sentence, with the size of the difference."""
    where: str
    """How the rest of the step changed; "" if nothing differs."""
    a: Side
    """The session that is compared with."""
    b: Side
    """The session that is judged."""
    change_pct: float | None
    """How much worse `b` is, in % of a step of `a`: in its `stage`, or without one in the whole step."""
    low_pct: float | None
    """Lower end of the interval of `change_pct`, in %, from the steps of both sessions."""
    high_pct: float | None
    """Upper end of the interval of `change_pct`, in %."""
    stage: str | None
    """Stage that took longer, or less, than all other work did; None: none."""
    ranks: list[RankChange]
    """Ranks that moved in that stage, the largest change first."""
    changes: list[NumberChange]
    """All compared numbers, each with its change."""
    cannot: list[str]
    """What cannot be compared, and why, each a sentence."""
    notes: list[str]
    """Notes for the reader, each a sentence."""


class Known(NamedTuple):
    """The answers about one of two sessions."""

    side: Side
    times: StepTimes
    verdict: VerdictInfo | None
    sample: StepSample
    memory: Mapping[str, Sequence[MemorySeries]]
    """Memory samples by measured quantity."""


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str] | None = None,
    *,
    run_a: str | None = None,
    run_b: str | None = None,
    out: str | os.PathLike[str] | None = None,
    least_pct: float | None = None,
) -> Comparison:
    """
    Return whether the stored session `b` is better or worse than `a`, by how much, and what changed.

    Intervals come from the steps of both sessions: a block bootstrap, because steps are correlated, and the
    drift within each run. They do not cover effects that last longer than a run. See docs/method.md.

    Args:
        a: name, folder or session.sqlite of the session to compare with.
        b: name, folder or session.sqlite of the other session; None: the running one, else the newest.
        run_a: id or name of one run of `a` (default: the newest).
        run_b: id or name of one run of `b` (default: the newest).
        out: folder of sessions (default: as in the settings).
        least_pct: smallest difference of times, in % of a step of `a`, that counts as a difference (default:
            5).

    Raises:
        SessionError: there is no such session.
        SessionFileError: a session file cannot be read.
        QueryError: there is no such run.
    """
    settings = Settings.load(out=None if out is None else os.fspath(out))
    one, other = (ask_stored(ask_side, name, run, settings) for name, run in ((a, run_a), (b, run_b)))
    return compared(one, other, limits_of(least_pct))


def ask_stored(
    ask: Callable[[Callable[[bytes], bytes], str | None], _T],
    name: str | os.PathLike[str] | None,
    run: str | None,
    settings: Settings,
) -> _T:
    """Return what `ask` asks about a run, from the files of its session. Raises like `compare`."""
    folder = session.find(None if name is None else os.fspath(name), settings.out)
    answers = Answers(folder, settings.thresholds)
    try:
        with legible(folder):
            return ask(answers.reply, run)
    finally:
        answers.close()


def limits_of(least_pct: float | None) -> CompareLimits:
    """Return the limits with `least_pct` as the smallest difference of times, in %."""
    return COMPARE if least_pct is None else msgspec.structs.replace(COMPARE, least=least_pct / 100)


def ask_side(send: Callable[[bytes], bytes], run: str | None = None) -> Known:
    """Return the answers that `send` gives about one session. Raises like `query.ask`."""
    asked = query.GetStatus(), query.GetRanks(run), query.GetVerdict(run)
    status, ranks, verdict = query.ask(send, asked)
    times = read_whole(partial(query.ask_one, send), run, live=status.status == "running")
    memory = query.ask_one(send, memory_question(ranks))
    return known(
        status,
        run or status.run,
        times,
        verdict,
        ranks,
        query.ask_one(send, query.GetStepSample(run)),
        memory,
    )


def read_whole(
    ask: Callable[[query.Request[StepTimes]], StepTimes], run: str | None, live: bool
) -> StepTimes:
    """
    Return the numbers of a run after all of it has been read. A long run is read one slice per question. For
    a `live` session, read the steps so far. Raises whatever `ask` raises.
    """
    before = None
    while True:
        times = ask(query.GetTimes(run, True))
        if times.whole or (live and times.version == before):
            return times
        before = times.version


def memory_question(ranks: Mapping[int, RankProcess]) -> query.GetMemorySamples:
    """Return the question for the memory of all ranks over the whole run."""
    last = max(_LEAST_SAMPLES, min(_SAMPLES, _ALL_SAMPLES // max(1, len(ranks))))
    return query.GetMemorySamples(tuple(process.id for process in ranks.values()), last, first_ns=1)


def known(
    status: Status,
    run: str | None,
    times: StepTimes,
    verdict: VerdictInfo | None,
    ranks: Mapping[int, RankProcess],
    sample: StepSample,
    memory: Sequence[tuple[int, MemorySample]],
) -> Known:
    """Return the data to compare, from the answers about one session."""
    side = Side(
        session=status.session,
        run=run,
        status=status.status,
        exit_code=status.exit_code,
        command=status.command,
        launcher=status.launcher,
        strategy=mode(process.strategy for process in ranks.values()),
        world_size=sample.world or None,
        first_step=sample.first,
        last_step=sample.last,
        verdict=named(verdict) if verdict else None,
    )
    rank_of_process = {process.id: rank for rank, process in ranks.items()}
    series = {what: _series(memory, field, rank_of_process, sample.first) for what, field in _MEMORY.items()}
    return Known(side, times, verdict, sample, series)


def _series(
    samples: Sequence[tuple[int, MemorySample]],
    field: str,
    rank_of: Mapping[int, int],
    first: int | None,
) -> list[MemorySeries]:
    """Return the samples of each rank and device from step `first` on. Unknown values are left out."""
    values_by_device: dict[tuple[int, int | None], list[int]] = {}
    for process, sample in samples:
        value, step = getattr(sample, field), sample.step
        if value is not None and process in rank_of and (step is None or step >= (first or 0)):
            values_by_device.setdefault((rank_of[process], sample.device), []).append(value)
    return [
        MemorySeries(rank=rank, samples=np.array(values, float))
        for (rank, _), values in values_by_device.items()
    ]


def compared(a: Known, b: Known, limits: CompareLimits = COMPARE) -> Comparison:
    """Return the difference between session `b` and session `a`."""
    verdict, steps = compare_steps(a.sample, b.sample, limits)
    memory = [
        compare_memory(what, a.memory[what], b.memory[what], limits)
        for what in _MEMORY
        if a.memory[what] or b.memory[what]
    ]
    facts = [
        fact(what, unit, value_of(a.times, a.verdict), value_of(b.times, b.verdict))
        for what, unit, value_of in _FACTS
    ]
    by = verdict.by or NumberChange(what="step", unit="ms")
    return Comparison(
        word=verdict.word,
        headline=_headline(verdict, steps[0], limits),
        where=_where(verdict, steps[0]),
        a=a.side,
        b=b.side,
        change_pct=by.change_pct,
        low_pct=by.low_pct,
        high_pct=by.high_pct,
        stage=verdict.stage,
        ranks=[*verdict.ranks],
        changes=[*steps, *memory, *facts],
        cannot=_cannot(a, b, [*steps, *memory]),
        notes=[*_notes(a, b, limits)],
    )


def regressed(comparison: Comparison, percent: float) -> bool:
    """Return whether `b` is worse by `percent` of a step or more."""
    return comparison.word == "worse" and (comparison.change_pct or 0.0) >= percent


def to_json(comparison: Comparison) -> str:
    """Return the comparison as indented JSON with a line break at the end."""
    return indented(comparison)


def interval(low: float | None, high: float | None, unit: str = "%") -> str:
    """Return "+13.9 … +16.4 %"; "" if there is no interval."""
    return "" if low is None or high is None else f"{signed(low)} … {signed(high)} {unit}"


def signed(value: float | None) -> str:
    """Return a change with its sign: "+15.2", "−0.3", "+132"."""
    digits = 0 if value is not None and abs(value) >= 100 else 1
    return text.number(value, digits, sign=True)


def _headline(verdict: ComparisonVerdict, step: NumberChange, limits: CompareLimits) -> str:
    """Return "worse by 15.2 % of a step (95 %: …): `data` took 3.6 ms more on rank 2 (node-0)"."""
    by = verdict.by
    if by is None:
        return f"cannot be compared: {step.why}"
    if by.what in STAGES:
        more = f"{text.number(abs(by.change or 0.0))} ms {'more' if verdict.word == 'worse' else 'less'}"
        share = f"{text.number(abs(by.change_pct or 0.0), 1)} % of a step (95 %: {_pct(by)})"
        return f"{verdict.word} by {share}: `{by.what}` took {more}{_on_ranks(verdict)}"
    most = max(abs(by.low_pct or 0.0), abs(by.high_pct or 0.0))
    unsure = ""
    if by.word == "no difference" and most > 100 * limits.least:
        unsure = f"; {text.number(most, 0)} % either way cannot be ruled out"
    return f"{by.word}: {_step(by)}{unsure}"


def _step(by: NumberChange) -> str:
    """Return "a step took 24.1 ms → 27.8 ms, +15.2 % (95 %: +13.9 … +16.4 %)"."""
    what = "the median step" if by.what == "median step" else "a step"
    return f"{what} took {text.ms(by.a)} → {text.ms(by.b)}, {signed(by.change_pct)} % (95 %: {_pct(by)})"


def _pct(by: NumberChange) -> str:
    return interval(by.low_pct, by.high_pct)


def _on_ranks(verdict: ComparisonVerdict) -> str:
    ranks = verdict.ranks
    if not ranks or verdict.of_ranks < 2:
        return ""
    if len(ranks) == verdict.of_ranks:
        return f" on all {len(ranks):,} ranks"
    return f" on {text.ranks(rank.rank for rank in ranks)}" + (
        f" ({ranks[0].node})" if len(ranks) == 1 else ""
    )


def _where(verdict: ComparisonVerdict, step: NumberChange) -> str:
    """Return how the rest of the step changed, in a sentence; "" if nothing differs."""
    if verdict.word in (None, "no difference"):
        return ""
    rest = f"took {text.times(verdict.rest)} as long"
    if verdict.by is not None and verdict.by.what in STAGES:
        return f"{_step(step).capitalize()}; the ranks' other work {rest}."
    if verdict.stage is not None:
        return f"`{verdict.stage}` explains it: the exchange itself takes longer, not the work of a rank."
    alike = "" if verdict.rest is None else f": all work of the ranks {rest}, as on a busier machine"
    return f"No single stage explains it{alike}."


def _cannot(a: Known, b: Known, changes: Sequence[NumberChange]) -> list[str]:
    """
    Return what cannot be compared and why, each a sentence. Numbers with the same reason
    share a sentence.
    """
    by_reason: dict[str, list[str]] = {}
    for change in changes:
        if change.why:
            by_reason.setdefault(change.why, []).append(change.what)
    reasons = [f"{text.listed(names)}: {why}" for why, names in by_reason.items()]
    if not any(side.memory[what] for side in (a, b) for what in _MEMORY):
        reasons.append("memory: neither session has samples")
    elif not any(a.memory[what] or b.memory[what] for what in [*_MEMORY][1:]):
        reasons.append("memory of devices: neither session used a device")
    if a.sample.ranks != b.sample.ranks:
        reasons.append(f"rank by rank: A has {_ranks(a)}, B {_ranks(b)}")
    return reasons


def _ranks(side: Known) -> str:
    return text.ranks(side.sample.ranks) or "no rank"


def _notes(a: Known, b: Known, limits: CompareLimits) -> list[str]:
    notes = []
    sizes = a.sample.world, b.sample.world
    if sizes[0] != sizes[1] and all(sizes):
        notes.append(
            f"A has {text.count(sizes[0], 'rank')}, B {sizes[1]:,}: with the same batch on each rank a step "
            f"of B does {text.times(sizes[1] / sizes[0])} the work. More ranks have a larger skew by chance."
        )
    if a.side.strategy != b.side.strategy:
        notes.append(f"A is {a.side.strategy or text.NA}, B is {b.side.strategy or text.NA}.")
    for name, known_side in (("A", a), ("B", b)):
        notes += _notes_of(name, known_side)
    notes.append(
        "Intervals come from the steps of these two runs. They assume that two runs differ by as much as the "
        "fifths of one run do, and do not cover effects that last longer than a run. Differences below "
        f"{100 * limits.least:g} % of a step count as no difference."
    )
    return notes


def _notes_of(name: str, known_side: Known) -> list[str]:
    notes = []
    if known_side.side.status == "running":
        notes.append(f"{name} still runs: its steps so far are compared.")
    elif known_side.side.status not in ("finished", "stopped", None):
        notes.append(f"{name} is {known_side.side.status}.")
    if known_side.sample.per > 1:
        notes.append(
            f"{name} has too many steps to compare each: {known_side.sample.columns:,} means over "
            f"{known_side.sample.per:,} steps each are compared. Its median and p95 are those of the means."
        )
    return notes


_MOST_RANKS = 16


def render_comparison(comparison: Comparison) -> str:
    """Return a comparison as text: verdict, numbers, the ranks that moved, what was not compared."""
    lines = [(name, _side(side)) for name, side in (("A", comparison.a), ("B", comparison.b))]
    return page(
        [
            Facts(*lines, ("Verdict", comparison.headline), ("Where", comparison.where)),
            numbers_table(comparison),
            Table(f"Ranks in {comparison.stage}", _RANKS, comparison.ranks[:_MOST_RANKS]),
            Facts.listed("Not known", comparison.cannot),
            Facts.listed("Notes", comparison.notes),
        ]
    )


def render_value(value: float | None, unit: str) -> str:
    """Return a number of a comparison: "41.3 ms", "3.2 GB"."""
    return text.size(value) if unit == "B" else text.unit(value, unit)


def label(change: NumberChange) -> str:
    """Return the name of a compared number. For a stage it is its exposed time."""
    return f"exposed {change.what}" if change.what in STAGES else text.words(change.what)


def change(change: NumberChange) -> str:
    """Return the change of a number: "+15 %". For a number that is a percentage, the change is in points."""
    if change.unit == "%":
        return "" if change.change is None else f"{signed(change.change)} points"
    return "" if change.change_pct is None else f"{signed(change.change_pct)} %"


def range_of(change: NumberChange) -> str:
    """Return the interval of the change of a number."""
    return (
        interval(change.low, change.high, "points")
        if change.unit == "%"
        else interval(change.low_pct, change.high_pct)
    )


def _side(side: Side) -> str:
    steps = "no step beyond the warm-up"
    if side.first_step is not None:
        steps = f"steps {side.first_step:,} to {side.last_step:,}"
    ranks = text.count(side.world_size, "rank") if side.world_size else "no rank"
    about = [f"{side.session}", side.status, ranks, side.strategy, steps, side.verdict]
    return " · ".join(filter(None, about))


def _is_shown(change: NumberChange) -> bool:
    return not (change.a is None and change.b is None)


TONES: dict[str, str] = {"worse": "critical", "better": "good"}
"""Tone of a judgement, for one number and for the whole comparison."""
NUMBERS = [
    Column("", lambda row: label(row) + (f", rank {row.rank_b}" if row.rank_b is not None else "")),
    Column("A", lambda row: render_value(row.a, row.unit), "figures"),
    Column("B", lambda row: render_value(row.b, row.unit), "figures"),
    Column("change", change, "figures", tone=lambda row: TONES.get(row.word or "", "")),
    Column("95 %", range_of),
    Column("judged", lambda row: row.word),
]


def numbers_table(comparison: Comparison) -> Table:
    """Return the table of the numbers that are known for at least one of the sessions."""
    return Table("Numbers", NUMBERS, [change for change in comparison.changes if _is_shown(change)])


_RANKS = [
    Column("rank", lambda row: str(row.rank), "figures"),
    Column("node", lambda row: row.node),
    Column("A", lambda row: row.a, "ms"),
    Column("B", lambda row: row.b, "ms"),
    Column("change", lambda row: f"{signed(row.change)} ms", "figures"),
    Column("95 %", lambda row: interval(row.low, row.high, "ms")),
]
