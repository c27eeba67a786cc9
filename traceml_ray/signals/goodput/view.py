"""
Goodput of a run: the question, the answer from the lives of its ranks and the sums of their steps, and its
presentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from traceml_ray import text
from traceml_ray.analysis.hang import hangs
from traceml_ray.analysis.step_totals import step_totals
from traceml_ray.document.model import (
    Column,
    Facts,
    Gauge,
    Number,
    Section,
    Segment,
    Strip,
    Strips,
    Table,
)
from traceml_ray.document.timezone import clocks
from traceml_ray.signals.finding import Finding, OnSteps, key_of
from traceml_ray.signals.goodput.answer import CPU, AttemptGoodput, Goodput, amount, goodput, start_names
from traceml_ray.signals.goodput.attempts import Hang, Sources
from traceml_ray.signals.goodput.pieces import (
    CATEGORIES,
)
from traceml_ray.signals.goodput.records import LIFE, LIFECYCLE
from traceml_ray.signals.goodput.reported import Intervals, Lives, Totals
from traceml_ray.signals.goodput.totals import TOTALS
from traceml_ray.signals.throughput.judge import WorkHistory, time_left
from traceml_ray.signals.throughput.records import WORK
from traceml_ray.signals.view import SLOW_RANKS, Run, View
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile


class GetGoodput(OfRun[Goodput], frozen=True):
    """Where the time of all ranks of a run went, over all its attempts."""


class Read(NamedTuple):
    """What is read of a run besides records."""

    cursor: int = 0
    """Cursor of the newest verdict that was read."""
    hangs: Mapping[int, dict[str, Any]] = MappingProxyType({})
    """Verdicts on hangs, in their last version, by their begin."""
    events_cursor: int = 0
    """Cursor of the newest event that was read."""
    ended: Mapping[int, int] = MappingProxyType({})
    """When rank processes that were killed had ended (ns), by process."""
    price: float | None = None
    launched_ns: int | None = None
    """When torchrun was started (ns). None: another launcher."""
    first_interval: int | None = None
    """Number of the first interval in the file. None: there is none yet. Above 1: the oldest are gone."""


WORDS = {
    "productive": ("productive steps", "#3b82c4"),
    "data": ("data loading", "#c77c11"),
    "waiting": ("waiting for slower ranks", "#8b939c"),
    "checkpoint_save": ("saving checkpoints", "#9a63b8"),
    "checkpoint_restore": ("loading checkpoints", "#c2568f"),
    "evaluation": ("evaluation", "#1b9696"),
    "startup": ("program start", "#86891c"),
    "preparation": ("preparation, to the end of the first step", "#b9a44c"),
    "hang": ("hang", "#7d1f1f"),
    "wasted": ("steps that were repeated", "#d03b3b"),
    "recovery": ("recovery between attempts", "#d9731a"),
    "idle": ("idle", "#c9ced6"),
    "other": ("not known", "#5d6670"),
}
"""Name and colour of each category, for people."""
_NEXT = {
    "checkpoint_save": "Save checkpoints less often, or with `torch.distributed.checkpoint.async_save`.",
    "checkpoint_restore": "Load only what a rank needs (`torch.distributed.checkpoint`), from fast storage.",
    "startup": "Start ranks from local files; look at what they import.",
    "preparation": "Look at what comes before the first step: indexing data, building the model, compiling.",
    "hang": "Find the cause of the hang: its bundle has the stacks of all ranks.",
    "wasted": "Save checkpoints more often: what came after the last one was done again.",
    "recovery": "Find why attempts end, and why the next one starts late.",
}
"""What to do about a category. Data and waiting are the verdict's subject."""
_LEAST_S, _LEAST_SHARE, _LARGE_SHARE = 600.0, 0.1, 0.25
"""Length of a run and share of its time from which on a category is a finding, and from which on a notice."""
_MOST_ATTEMPTS = 20
_NOTHING = 5e-5
"""Share of the run up to which a category is not shown."""
_FEW_RANKS, _LARGE_S = 64, 60.0
"""Number of ranks below which each tick may ask; seconds between two questions in a job of `SLOW_RANKS`."""


class GoodputView(View[Goodput]):
    """See `View`."""

    name = "goodput"
    question = GetGoodput
    states = ((LIFE, Lives), (LIFECYCLE, Intervals), (TOTALS, Totals), (WORK, WorkHistory))
    of_steps = polled = True
    rounded = False
    finds = MappingProxyType({})

    def read(self, file: SessionFile, before: Any) -> Read:
        """Read the hangs of a run (new verdicts), when its processes ended (new events), and the price."""
        known = before or _facts(file.meta())
        verdicts, cursor = file.verdicts(known.cursor)
        new = {one["began_ns"]: one for one in verdicts if one.get("began_ns") and one["label"] == "hang"}
        events, events_cursor = file.events(known.events_cursor, brief=True)
        ended = {
            one.process: one.t_ns for one in events if one.kind == "process_ended" and one.process is not None
        }
        first = known.first_interval
        if first is None:
            first = next((number for number, _, _ in file.records(LIFECYCLE)), None)
        return known._replace(
            first_interval=first,
            cursor=cursor,
            hangs={**known.hangs, **new},
            events_cursor=events_cursor,
            ended={**known.ended, **ended} if ended else known.ended,
        )

    def answer(self, run: Run, asked: GetGoodput) -> Goodput:
        """Return where the time went."""
        history, work = run.history, run.records.of(WORK, WorkHistory)
        of_rank = {rank: process.id for rank, process in run.ranks.items()}
        total_steps, left_s = time_left(history, work, of_rank, run.over)
        sources = Sources(
            run.processes,
            run.records.of(LIFE, Lives),
            run.records.of(LIFECYCLE, Intervals),
            run.records.of(TOTALS, Totals),
            step_totals(history) if history is not None and history.ranks else None,
            of_rank,
            _hangs(run.read),
            run.over,
            {} if run.read is None else run.read.ended,
            None if run.read is None else run.read.launched_ns,
            run.read is not None and (run.read.first_interval or 1) > 1,
        )
        devices = {work.facts.get(process, {}).get("device") for process in of_rank.values()} - {None}
        return goodput(
            sources,
            device=devices.pop() if len(devices) == 1 else None,
            price=run.read.price if run.read is not None else None,
            total_steps=total_steps,
            left_s=left_s,
        )

    def findings(
        self, answer: Goodput, steps: Sequence[Finding], verdict: OnSteps | None
    ) -> Sequence[Finding]:
        """Return the category that costs most of the run, if it costs much, and something can be done."""
        if answer.from_ns is None or answer.to_ns is None or answer.to_ns - answer.from_ns < _LEAST_S * 1e9:
            return ()
        costs = {name: (answer.seconds.get(name) or 0.0) / answer.rank_s for name in _NEXT}
        worst = max(costs, key=lambda name: costs[name])
        return [_finding(answer, worst, costs[worst])] if costs[worst] >= _LEAST_SHARE else ()

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 10 s, or a minute in large jobs."""
        return 10.0 if world < SLOW_RANKS else _LARGE_S

    def polls_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 0 s; in large jobs as `every_s`."""
        return 0.0 if world < _FEW_RANKS else self.every_s(ranks, world)

    def sections(self, answer: Goodput) -> Sequence[Section]:
        """Return the share of productive steps, where the rest went, and the timeline."""
        return sections(answer) if answer.rank_s else ()

    def details(self, answer: Goodput) -> Sequence[Section]:
        """Return the sections, or why nothing is known."""
        return self.sections(answer) or [Section(blocks=[Facts(("Goodput", _unknown(answer)))])]

    def brief(self, answer: Goodput) -> Facts:
        """Return the share of productive steps, and what costs most besides."""
        return Facts(("Goodput", _sentence(answer))) if answer.rank_s else Facts()


def _facts(meta: Mapping[str, Any]) -> Read:
    """Return what the facts of a session say."""
    launched_ns = meta.get("started_at") if meta.get("launcher") == "torchrun" else None
    return Read(price=_price(meta), launched_ns=launched_ns if isinstance(launched_ns, int) else None)


def _price(meta: Mapping[str, Any]) -> float | None:
    """Return the price of an hour of a device. The settings of a session are kept as text."""
    try:
        price = float((meta.get("settings") or {})["gpu_hour_price"])
    except (LookupError, TypeError, ValueError):
        return None
    return price if math.isfinite(price) and price > 0 else None


def _hangs(read: Any) -> list[Hang]:
    known = hangs(read.hangs.values()) if read is not None else []
    return [
        Hang(
            one.began_ns,
            None if one.lasted_s is None else one.began_ns + round(one.lasted_s * 1e9),
            frozenset(one.ranks),
            one.stage,
        )
        for one in known
        if one.began_ns is not None
    ]


def _unknown(answer: Goodput) -> str:
    return f"not known: {answer.why.get('steps', 'no rank has reported when it was started')}"


def _finding(answer: Goodput, what: str, share: float) -> Finding:
    seconds = answer.seconds.get(what) or 0.0
    words = WORDS[what][0]
    return Finding(
        key=key_of("badput", (), what),
        signal="goodput",
        label="badput",
        severity="notice" if share >= _LARGE_SHARE else "info",
        what=words,
        from_ns=answer.from_ns,
        to_ns=answer.to_ns,
        cost=share,
        about="run",
        cost_s=seconds / max(1, answer.ranks),
        why=f"{text.share(share)} of the run's time went into {words}: {amount(seconds, answer)}.",
        next=_NEXT[what],
        evidence={"rank_s": answer.rank_s, "goodput_pct": answer.goodput_pct},
    )


def _sentence(answer: Goodput) -> str:
    """Return "87 % of 12 GPU-hours in productive steps; saving checkpoints 6 %, evaluation 4 %"."""
    if answer.goodput_pct is None:
        return f"not known: {answer.why.get('productive', '')}"
    costs = sorted(_known(answer), key=lambda pair: -pair[1])
    most = [
        f"{WORDS[name][0].partition(',')[0]} {text.share(ns / answer.rank_s)}"
        for name, ns in costs
        if name != "productive" and ns >= 0.01 * answer.rank_s
    ][:3]
    about = f"{text.percent(answer.goodput_pct)} of {amount(answer.rank_s, answer)} in productive steps"
    return "; ".join(filter(None, (about, ", ".join(most))))


def _known(answer: Goodput) -> list[tuple[str, float]]:
    """Return what is more than nothing when it is rounded: category, seconds of all ranks together."""
    known = [(name, answer.seconds.get(name) or 0.0) for name in CATEGORIES]
    return [(name, seconds) for name, seconds in known if seconds > _NOTHING * answer.rank_s]


def sections(answer: Goodput) -> list[Section]:
    """Return what is shown of a known answer: sentences and numbers, then bars and tables."""
    facts = Facts(
        ("Goodput", _sentence(answer)),
        ("Cost", _money(answer)),
        ("", _beside(answer)),
        *(("", f"{WORDS[name][0]}: {why}") for name, why in answer.why.items()),
        ("", _twice(answer)),
        *(("", sentence) for sentence in answer.clocks),
    )
    strips = Strips("Where the time went", [_bar(answer), *_timeline(answer)])
    tables = [_table(answer), _attempts(answer.attempts if len(answer.attempts) > 1 else [])]
    return [
        Section("steps", [facts], numbers=[*_numbers(answer)], gauges=_gauges(answer)),
        Section("tables", [strips, *tables], "Goodput"),
    ]


def _money(answer: Goodput) -> str:
    if answer.price is not None and answer.device == CPU:
        return "none: the price is of an hour of a GPU, and the ranks have none"
    if answer.cost is None or answer.badput_s is None:
        return ""
    badput = (answer.price or 0.0) * answer.badput_s / 3600
    return (
        f"{text.number(answer.cost)} at {text.number(answer.price)} an hour of a GPU, "
        f"{text.number(badput)} of it not in productive steps"
    )


def _beside(answer: Goodput) -> str:
    if not answer.async_save_s:
        return ""
    return (
        f"besides, checkpoints were saved beside training for {amount(answer.async_save_s, answer)}; "
        "only what blocks a step counts"
    )


def _twice(answer: Goodput) -> str:
    if answer.twice_s < 1e-3 * answer.rank_s:
        return ""
    return f"steps and intervals claim {amount(answer.twice_s, answer)} twice: clocks or records are wrong"


def _bar(answer: Goodput) -> Strip:
    """Return one bar in which all categories add up to the time of all ranks."""
    segments, begin = [], 0.0
    for name, seconds in _known(answer):
        words, colour = WORDS[name]
        title = f"{words}: {amount(seconds, answer)}, {text.share(seconds / answer.rank_s)}"
        segments.append(Segment(words, begin, seconds, colour, title))
        begin += seconds
    ends = "0", amount(answer.rank_s, answer)
    return Strip("all ranks together", segments, answer.rank_s, ends)


def _timeline(answer: Goodput) -> list[Strip]:
    """Return what most ranks did, over the time of the run."""
    if not answer.timeline or answer.from_ns is None or answer.to_ns is None:
        return []
    begin, several = answer.from_ns, len(answer.attempts) > 1
    segments, names = [], start_names([one.attempt for one in answer.attempts])
    for one in answer.timeline:
        words, colour = WORDS[one.what]
        length = (one.to_ns - one.from_ns) / 1e9
        of_attempt = f", attempt {names[one.attempt]}" if several else ""
        segments.append(
            Segment(
                words,
                (one.from_ns - begin) / 1e9,
                length,
                colour,
                f"{words}: {text.duration(length)}{of_attempt}",
            )
        )
    first, last = clocks([answer.from_ns, answer.to_ns])
    return [Strip("over time, most ranks", segments, (answer.to_ns - begin) / 1e9, (first, last))]


def _table(answer: Goodput) -> Table:
    columns = [
        Column("what", lambda pair: WORDS[pair[0]][0]),
        Column("share", lambda pair: pair[1] / answer.rank_s, "share"),
        Column("all ranks", lambda pair: amount(pair[1], answer), "figures"),
        Column("a rank", lambda pair: pair[1] / max(1, answer.ranks), "duration"),
    ]
    if answer.cost:
        price, digits = answer.price or 0.0, max(0, 2 - math.floor(math.log10(answer.cost)))
        columns.append(Column("cost", lambda pair: text.number(price * pair[1] / 3600, digits), "figures"))
    note = "all ranks: their time added up. a rank: the mean, over all attempts."
    return Table("Where the time went", columns, _known(answer), note)


def _attempts(attempts: Sequence[AttemptGoodput]) -> Table:
    columns = [
        Column("attempt", lambda pair: pair[0], "plain"),
        Column("ranks", lambda pair: pair[1].ranks, "count"),
        Column("lasted", lambda pair: (pair[1].to_ns - pair[1].from_ns) / 1e9, "duration"),
        Column("productive", lambda pair: _share(pair[1], "productive"), "known percent"),
        Column("steps", lambda pair: pair[1].steps, "count"),
        Column("repeated steps", lambda pair: _repeated(pair[1]), "figures"),
        Column("recovery", lambda pair: pair[1].recovery_s, "known duration"),
    ]
    items = [*zip(start_names([one.attempt for one in attempts]), attempts, strict=True)]
    title = (
        f"Attempts (the newest {_MOST_ATTEMPTS} of {len(items)})"
        if len(items) > _MOST_ATTEMPTS
        else "Attempts"
    )
    return Table(title, columns, items[-_MOST_ATTEMPTS:])


def _share(one: AttemptGoodput, name: str) -> float | None:
    seconds = one.seconds.get(name)
    return None if seconds is None or not one.rank_s else 100 * seconds / one.rank_s


def _repeated(one: AttemptGoodput) -> str:
    return "not known" if "wasted" in one.why and not one.repeated_steps else f"{one.repeated_steps:,}"


def _numbers(answer: Goodput) -> Iterator[Number]:
    if answer.goodput_pct is None:
        return
    about = f"of {amount(answer.rank_s, answer)}"
    short = "GOODPUT", text.percent(answer.goodput_pct)
    yield Number("goodput", "Goodput", answer.goodput_pct, "%", about, title=_sentence(answer), short=short)


def _gauges(answer: Goodput) -> list[Gauge]:
    share = None if answer.goodput_pct is None else answer.goodput_pct / 100
    seconds = [((name,), answer.seconds.get(name)) for name in CATEGORIES]
    return [
        Gauge("goodput", "Share of the time of all ranks in productive steps.", [((), share)], unit="ratio"),
        Gauge(
            "rank_time",
            "Time of all ranks together, over all attempts, by where it went.",
            seconds,
            ("what",),
            unit="seconds",
        ),
        Gauge("run_cost", "Price of the time of all devices of the run.", [((), answer.cost)]),
    ]
