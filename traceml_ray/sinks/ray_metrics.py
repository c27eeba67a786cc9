"""
Some figures of the run among Ray's own metrics, which Ray's agents serve for Prometheus. Only a process of
Ray can record them, so the figures are sent to the aggregator (`store.query.SetRayMetrics`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from traceml_ray.settings import Settings
from traceml_ray.store import query
from traceml_ray.store.query import RayGauge
from traceml_ray.store.results import SinkState
from traceml_ray.views.session_poll import SessionPoll

from .figures import Family
from .report import Report
from .sink import Sender

EVERY_S = 5.0
"""
Seconds between two reports, also of the same figures: Ray drops a series that is not recorded again in twice
the interval at which processes pass their metrics on (10 s).
"""
MOST_RANKS = 64
"""Largest number of ranks with a series each. Of more, only the slowest has one."""
RUN = "ray_train_run_name", "ray_train_run_id"
"""Tags of the run, named as in the metrics of Ray Train."""
RANK = "ray_train_worker_world_rank"
"""Tag of a rank, named as in the metrics of Ray Train."""


@dataclass(frozen=True)
class _Chosen:
    """A figure that is also one of Ray's metrics."""

    family: str
    ended: float = math.nan
    """Last value of a series that has ended: 0 for what counts or names, NaN for what is measured."""


CHOSEN = (
    _Chosen("verdict", 0.0),
    _Chosen("verdict_info", 0.0),
    _Chosen("verdict_cost"),
    _Chosen("ranks", 0.0),
    _Chosen("last_step"),
    _Chosen("step"),
    _Chosen("exposed"),
    _Chosen("rank_busy"),
)


def gauges_of(report: Report) -> list[RayGauge]:
    """Return the gauges of a report. There is none before the first run and once the run has ended."""
    if report.run is None or report.run_over:
        return []
    return [*_gauges(report, report.run)]


def _gauges(report: Report, run: str) -> Iterator[RayGauge]:
    families = {family.name: family for family in report.figures}
    for chosen in CHOSEN:
        family = families.get(chosen.family)
        if family is None:
            continue
        tags = tuple(RANK if label == "rank" else label for label in family.labels if label != "run")
        series = [((report.run_name or run, *labels), value) for labels, value in _bounded(family)]
        name = "_".join(filter(None, ("traceml", family.name, family.unit)))
        yield RayGauge(name, family.about, (*RUN, *tags), series, chosen.ended)


def _bounded(family: Family) -> list[tuple[tuple[str, ...], float]]:
    """Return the series, of too many ranks only the one of the slowest. The first label is the run."""
    if "rank" in family.labels and len(family.series) > MOST_RANKS:
        return [max(family.series, key=lambda series: series[1])]
    return family.series


class RayMetrics:
    """
    Sends the figures to the aggregator.

    Args:
        reply: asks the aggregator.
        every_s: least number of seconds between two reports.
    """

    takes_reports = True

    def __init__(self, reply: Callable[[bytes], bytes], every_s: float = EVERY_S) -> None:
        self._reply = reply
        self._sender = Sender("ray", "metrics of Ray", self._send, every_s=every_s, again=True)

    def offer(self, report: Report) -> None:
        """Have the figures recorded. At the end of the session Ray drops them with the aggregator."""
        if not report.over:
            self._sender.offer(gauges_of(report))

    def state(self) -> SinkState:
        """Return how often the figures were recorded."""
        return self._sender.state()

    def close(self, deadline_s: float) -> None:
        """Send no more."""
        self._sender.close(deadline_s)

    def _send(self, gauges: list[RayGauge]) -> None:
        query.ask(self._reply, [query.SetRayMetrics(gauges)], watching=True)


def opened(session: SessionPoll, _settings: Settings) -> RayMetrics:
    """Return what sends the figures of `session` to its aggregator."""
    return RayMetrics(session.source.reply)
