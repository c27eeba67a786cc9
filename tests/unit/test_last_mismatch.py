"""Which call did not match, in what the ranks of a stored run reported last."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from traceml_ray.signals.collectives.records import AT_END, CallReport, CollectivesReport, GroupReport
from traceml_ray.signals.collectives.view import _mismatch

SECOND = 10**9


def report(asked: str, t_s: float, number: int, finished: bool = False) -> CollectivesReport:
    """Return a report whose newest call has this number."""
    group = GroupReport("0", "default_pg", [(0, 3, 1)])
    calls = [
        CallReport(0, n, False, "barrier", [], [], [], [], finished or n < number, 5, f"f (train.py:{n})")
        for n in (number - 1, number)
    ]
    return CollectivesReport(int(t_s * SECOND), asked, "recorder", [group], calls)


def mismatch(reports: Mapping[int, CollectivesReport], ended_s: Mapping[int, float]) -> Any:
    ranks = {
        rank: SimpleNamespace(id=rank, final=rank in ended_s, last_seen_ns=int(ended_s.get(rank, 0) * SECOND))
        for rank in range(3)
    }
    stored = {rank: [one] for rank, one in reports.items()}
    file = SimpleNamespace(records_of=lambda *_: stored)
    return _mismatch(SimpleNamespace(file=file, ranks=ranks))  # type: ignore[arg-type]


def test_rank_that_ended_while_others_wait_did_not_join() -> None:
    waiting = {rank: report("h", 30, 7) for rank in (0, 1)}
    missing = mismatch(waiting, {2: 10.0})
    assert (missing.kind, missing.ranks, missing.seq) == ("missing", (2,), 7)
    failed = {rank: report(AT_END, 30, 7) for rank in (0, 1)}
    assert mismatch(failed, {0: 31.0, 1: 31.0, 2: 31.0}).ranks == (2,), "its last batch may come later"


def test_rank_that_was_late_once_and_ended_much_later_has_joined() -> None:
    busy = {0: report("h?1", 30, 6, finished=True), 1: report("h?1", 30, 7), 2: report("h?1", 30, 7)}
    assert mismatch(busy, dict.fromkeys(range(3), 900.0)) is None


def test_reports_of_different_moments_are_not_compared() -> None:
    """Rank 1 was ended by a signal: its report is of an earlier pause."""
    reports = {0: report(AT_END, 900, 99), 1: report("h?1", 30, 7), 2: report(AT_END, 900, 99)}
    assert mismatch(reports, {0: 901.0, 2: 901.0}) is None


def test_exception_of_the_named_rank_says_more() -> None:
    reports = {0: report(AT_END, 30, 7), 1: report(AT_END, 30, 6, finished=True), 2: report(AT_END, 30, 7)}
    assert mismatch(reports, dict.fromkeys(range(3), 31.0)) is None
