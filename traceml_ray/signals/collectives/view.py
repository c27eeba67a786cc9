"""Bytes, times and bandwidth of the collectives of a run: question, answer and presentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from traceml_ray import text
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.document.model import Column, Facts, Gauge, Number, Section, Table
from traceml_ray.signals.collectives.judge import (
    FEW_CALLS,
    NOT_BETWEEN_ALL,
    ONLY_STARTED,
    CollectiveKind,
    CollectiveTimes,
    GroupTimes,
    OfRank,
    collective_times,
)
from traceml_ray.signals.collectives.match import Mismatch, match
from traceml_ray.signals.collectives.records import AT_END, CALLS, LAST_CALLS
from traceml_ray.signals.collectives.reported import as_dump, collectives_of
from traceml_ray.signals.finding import Finding, OnSteps, key_of, known
from traceml_ray.signals.view import SLOW_RANKS, Run, View
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile

_EVERY_S = 10.0
MAX_FILES = 512
"""Largest number of ranks whose last calls are files of a bundle. Its session has those of all ranks."""
_ROWS, _LEAST_RATE = 16, 0.01
"""Largest number of kinds that a table shows; bandwidth below which only a bound is shown, in GB/s."""
_LEAST_BYTES = 1 << 20
"""The time of smaller calls is that of a message, whatever its size."""
_NOTE = "time: from when the last rank joined; wait: of a rank for the last one; GB/s: as in nccl-tests"
_NO_TIME = {ONLY_STARTED: "only started", NOT_BETWEEN_ALL: "not between all", FEW_CALLS: "too few calls"}
_CLOCKS = {"host": "CPU", "inspector": "Inspector"}
_NEXT = (
    "Compare the links and the load of its nodes with those of the other groups: `nvidia-smi nvlink -s`, the "
    "counters of the network cards, and other jobs on these nodes."
)


class GetCollectives(OfRun[CollectiveTimes], frozen=True):
    """Bytes, times and bandwidth of the collectives of a run."""


class CollectivesView(View[CollectiveTimes]):
    """See `View`."""

    name = "collectives"
    question = GetCollectives
    polled = True
    finds = MappingProxyType({})

    def answer(self, run: Run, asked: GetCollectives) -> CollectiveTimes:
        """Return the kinds of collectives that the ranks have called."""
        rank_of = {process.id: rank for rank, process in run.ranks.items()}
        records = run.file.records_of(CALLS, [*rank_of])
        times = collective_times(
            OfRank(rank_of[process], _node(run.ranks[rank_of[process]]), record)
            for process, several in records.items()
            for record in several
        )
        return msgspec.structs.replace(times, mismatch=_mismatch(run))

    def cause(self, death: Verdict, answer: CollectiveTimes) -> str:
        """Return which call differs between the ranks, or which rank ended while others waited for it."""
        return answer.mismatch.why if answer.mismatch is not None else ""

    def files(
        self, file: SessionFile, ranks: Mapping[int, RankProcess], since_ns: int
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the last calls of each rank, as a dump of torch's flight recorder."""
        reports = file.records_of(LAST_CALLS, [process.id for process in ranks.values()])
        known = [(rank, reports[s.id][-1]) for rank, s in sorted(ranks.items()) if s.id in reports]
        for rank, report in [(rank, report) for rank, report in known if report.t_ns >= since_ns][:MAX_FILES]:
            yield f"collectives_rank_{rank}.json", as_dump(report)

    def findings(
        self, answer: CollectiveTimes, steps: Sequence[Finding], verdict: OnSteps | None
    ) -> list[Finding]:
        """Return the groups that are slower than the others which do the same."""
        return [_finding(kind, name) for kind in answer.kinds for name in kind.slow]

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 10 s."""
        return _EVERY_S if world < SLOW_RANKS else None

    def polls_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 10 s, once the number of ranks is known."""
        return self.every_s(ranks, world) if ranks else None

    def sections(self, answer: CollectiveTimes) -> Sequence[Section]:
        """
        Return the call that does not match, a table of the kinds, and the bandwidth of the kind that moves
        the most bytes.
        """
        mismatch = [_of_mismatch(answer.mismatch)] if answer.mismatch is not None else []
        if not answer.kinds:
            return mismatch
        rows = answer.kinds[:_ROWS]
        left = len(answer.kinds) - len(rows)
        note = _NOTE + f"; {text.count(left, 'more kind')} with fewer bytes" * (left > 0)
        title = "Collectives (median call)"
        table = Table(
            title, _COLUMNS, rows, note, spare=("nodes", "GB/s", "a step", "measured", "since start")
        )
        times = Section("tables", [table], numbers=[*_numbers(answer)], gauges=_gauges(answer))
        return [*mismatch, times]


def _mismatch(run: Run) -> Mismatch | None:
    """
    Return the first call that cannot match, in what the ranks reported last: when they failed, or in answer
    to the newest command. None: there is none.

    A rank is known to make no further call if it ended normally, before the answers or before others failed.
    """
    records = run.file.records_of(LAST_CALLS, [process.id for process in run.ranks.values()])
    newest = {process: several[-1] for process, several in records.items()}
    last = max(newest.values(), key=lambda one: (one.asked == AT_END, one.t_ns), default=None)
    if last is None:
        return None
    asked = last.asked.partition("?")[0]
    reports = {process: one for process, one in newest.items() if one.asked.partition("?")[0] == asked}
    until_ns = None if asked == AT_END else last.t_ns
    ended = {
        rank
        for rank, process in run.ranks.items()
        if process.final and (until_ns is None or process.last_seen_ns <= until_ns)
    }
    known = (
        collectives_of(reports.get(process.id), rank, ended=rank in ended)
        for rank, process in sorted(run.ranks.items())
        if process.id in reports or rank in ended
    )
    mismatch = match(known)
    if mismatch is None or not mismatch.proven:
        return None
    failed = all(run.ranks[rank].id in reports for rank in mismatch.ranks)
    return None if mismatch.kind == "missing" and failed else mismatch  # its own exception says more


def _of_mismatch(mismatch: Mismatch) -> Section:
    return Section("failure", [Facts.listed("calls", [mismatch.why, mismatch.next])])


def _node(process: RankProcess) -> str | None:
    return process.identity.node_id if process.identity is not None else None


def _ranks(kind: CollectiveKind) -> str:
    """Return how many ranks call a collective together: "8", or "4 × 2" for four groups of two."""
    size = "?" if kind.group_size is None else f"{kind.group_size:,}"
    return f"{kind.groups:,} × {size}" if kind.groups > 1 else size


def _measured(kind: CollectiveKind) -> str:
    return _NO_TIME[kind.why] if kind.why else _CLOCKS[kind.source]


def _change(kind: CollectiveKind) -> str:
    return "" if kind.change_pct is None else text.percent(kind.change_pct, sign=True)


def _rate(title: str, name: str) -> Column:
    """Return the column of a bandwidth, from the field of that name."""

    def written(kind: CollectiveKind) -> str:
        value = getattr(kind, name)
        if value is None:
            return ""
        return f"<{_LEAST_RATE}" if value < _LEAST_RATE else text.number(value, aligned=True)

    return Column(title, lambda kind: getattr(kind, name), "figures", written)


_COLUMNS = [
    Column("collective", lambda kind: kind.op, "name"),
    Column("ranks", _ranks, "figures"),
    Column("nodes", lambda kind: kind.nodes, "known figures"),
    Column("size", lambda kind: kind.bytes_per_call, "known size"),
    Column("a step", lambda kind: kind.calls_per_step, "known value"),
    Column("time", lambda kind: kind.ms, "known ms"),
    Column("wait", lambda kind: kind.wait_ms, "known ms"),
    _rate("GB/s", "algorithm_gb_per_s"),
    _rate("bus GB/s", "bus_gb_per_s"),
    Column("since start", lambda kind: kind.change_pct, "figures", _change),
    Column("measured", _measured),
]


def _numbers(answer: CollectiveTimes) -> Iterator[Number]:
    """Yield the bus bandwidth of the kind that moves the most bytes, among kinds with large calls."""
    for kind in answer.kinds:
        if kind.bus_gb_per_s is not None and (kind.bytes_per_call or 0) >= _LEAST_BYTES:
            about = f"{kind.op} of {text.size(kind.bytes_per_call)}, {_ranks(kind)} ranks"
            short = "BUS", f"{text.number(kind.bus_gb_per_s, figures=3)} GB/s"
            yield Number("bus", "Bus bandwidth", kind.bus_gb_per_s, "GB/s", about, title=_NOTE, short=short)
            return


def _gauges(answer: CollectiveTimes) -> list[Gauge]:
    labels = "op", "ranks", "nodes", "size", "source"

    def series(name: str, unit: float) -> list[tuple[Sequence[object], float | None]]:
        return [
            (_labels(kind), None if getattr(kind, name) is None else getattr(kind, name) * unit)
            for kind in answer.kinds
        ]

    return [
        Gauge(
            "collective_bus_bandwidth",
            "Bandwidth of each rank's link in a collective, as nccl-tests defines it.",
            series("bus_gb_per_s", 1e9),
            labels,
            "bytes_per_second",
        ),
        Gauge(
            "collective_time",
            "Median time of a call of a collective, from when its last rank joined.",
            series("ms", 1e-3),
            labels,
            "seconds",
        ),
        Gauge(
            "collective_wait",
            "Mean time that a rank waits for the last rank in a call of a collective.",
            series("wait_ms", 1e-3),
            labels,
            "seconds",
        ),
    ]


def _labels(kind: CollectiveKind) -> tuple[object, ...]:
    """Return labels that no two kinds share. All sizes of a kind are below the same power of two."""
    size = 1 << int(kind.bytes_per_call).bit_length() if kind.bytes_per_call else 0
    return kind.op, kind.group_size, kind.nodes, size, kind.source


def _finding(kind: CollectiveKind, name: str) -> Finding:
    group = next((group for group in kind.slowest if group.group == name), None)
    times: GroupTimes | None = group
    ranks = tuple(times.ranks) if times is not None else ()
    took = times.ms if times is not None else None
    return Finding(
        key=key_of("slow_collective", ranks, kind.op, name),
        signal="collectives",
        label="slow_collective",
        severity="notice",
        ranks=ranks,
        what=kind.op,
        why=(
            f"`{kind.op}` of {text.size(kind.bytes_per_call)} takes {text.ms(took)} in the group of "
            f"{text.ranks(ranks)}, from when its last rank has joined. The median of the {kind.groups:,} "
            f"groups with as many ranks is {text.ms(kind.ms)}."
        ),
        next=_NEXT,
        evidence=known({"ms": took, "median_ms": kind.ms, "groups": kind.groups}),
    )
