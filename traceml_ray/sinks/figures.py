"""The figures of a session, as series with labels. Each sink writes them in the form of its place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS
from traceml_ray.analysis.spread import quantiles
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.nodes.quantities import GPU, NODE, Quantity
from traceml_ray.signals.views import sections_of
from traceml_ray.views.findings import found_in
from traceml_ray.views.run_state import RunState
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.state import state_of

_MOST_FINDINGS = 32
"""Largest number of findings with a series each. If there are more, only their number is known."""
MOST = 1024
"""Usual largest number of ranks, or devices, with a series each."""
STATES = (
    *("empty", "starting", "unwatched", "waiting"),
    *("live", "stale", "ending", "idle", "finished", "stored"),
)
_QUANTILES = ("0.5", "0.95")
Series = Iterable[tuple[Sequence[object], float | None]]
"""Label values and measured value of each series. Unknown values are left out."""


class Family(msgspec.Struct, frozen=True):
    """One figure: its series differ in the values of their labels."""

    name: str
    """Without prefix and unit: `step`."""
    about: str
    """What it measures, in a sentence."""
    labels: tuple[str, ...]
    """Names of the labels."""
    series: list[tuple[tuple[str, ...], float]]
    """Values of the labels ("": unknown), and the figure, of each series. Unknown figures are left out."""
    unit: str = ""
    """Base unit: `seconds`, `bytes`, `ratio`, …; "": none."""
    counter: bool = False
    """Whether it counts up from the start of the session."""


def _gauge(name: str, about: str, labels: Sequence[str], series: Series, unit: str = "") -> Family:
    return Family(name, about, tuple(labels), _known(series), unit)


def _counter(name: str, about: str, labels: Sequence[str], series: Series, unit: str = "") -> Family:
    return Family(name, about, tuple(labels), _known(series), unit, counter=True)


def _known(series: Series) -> list[tuple[tuple[str, ...], float]]:
    return [
        (tuple("" if label is None else str(label) for label in labels), float(value))
        for labels, value in series
        if value is not None and value == value
    ]


def families_of(session: SessionPoll, most: int) -> Iterator[Family]:
    """
    Yield the figures of a session. Called from `SessionPoll.make`.

    Args:
        session: what is known of it.
        most: largest number of ranks, or devices, with a series each; of more, only nodes and the worst rank
            have one.
    """
    state = state_of(session, session.newest)
    yield _gauge("state", "1 for the state of the session.", ["state"], [((s,), s == state) for s in STATES])
    poll = quantiles(np.array(session.poll_ms or [np.nan]) / 1e3, (0.5, 0.95)).tolist()
    about = "Time to bring the session up to date."
    yield _gauge("dashboard_poll", about, ["quantile"], _by_quantile(poll), "seconds")
    errors, aggregator = session.errors, session.status.errors if session.status else {}
    yield _counter("dashboard_errors", "Errors of the dashboard, by place.", ["place"], _by_key(errors))
    yield _counter("aggregator_errors", "Errors of the aggregator, by place.", ["place"], _by_key(aggregator))
    rows = dict[str, int]()
    if session.status is not None:
        ledger = session.status.ledger
        rows = {"produced": ledger.produced, "stored": ledger.stored}
        rows |= {f"dropped_{name}": count for name, count in asdict(ledger.dropped).items()}
    yield _counter("rows", "Rows (rank-steps), by where they are.", ["where"], _by_key(rows))
    if (run := session.newest) is not None:
        yield from _run_metrics(run)
        yield from _finding_metrics(run, found_in(session, run, state))
        yield from _step_metrics(run, most)
        yield from _signal_metrics(run, most)
        yield from _node_metrics(run, most)


def _by_key(counts: Mapping[str, float]) -> Series:
    return (((key,), count) for key, count in counts.items())


def _by_quantile(values: Iterable[float], *labels: object) -> Series:
    return (((*labels, name), value) for name, value in zip(_QUANTILES, values, strict=True))


def _run_metrics(run: RunState) -> Iterator[Family]:
    name, verdict = run.id, run.verdict
    if verdict is not None:
        states = [((name, label), float(label == verdict.label)) for label in LABELS]
        yield _gauge("verdict", "1 for the label of the current verdict.", ["run", "label"], states)
        named = ("label", "stage", "rank", "node")
        series = [((name, *(getattr(verdict, key) for key in named)), 1.0)]
        about = "1; its labels name the rank, node and stage of the current verdict."
        yield _gauge("verdict_info", about, ["run", *named], series)
        cost = verdict.cost_pct if verdict.label != "healthy" else 0.0
        about = "Cost of what the verdict names, as a share of the time since it began, or of the run."
        yield _gauge("verdict_cost", about, ["run"], [((name,), cost and cost / 100)], "ratio")
        confirmed = None if verdict.confirmed is None else float(verdict.confirmed)
        about = "1 if a check confirms that the machines of the named ranks are slow, 0 if they are not."
        yield _gauge("verdict_confirmed", about, ["run"], [((name,), confirmed)])
    ranks = {"expected": run.world or None, "reporting": len(run.reporting())}
    series_of = [((name, which), count) for which, count in ranks.items()]
    yield _gauge("ranks", "Ranks of the run.", ["run", "which"], series_of)
    yield _gauge("last_step", "The newest step that all ranks reported.", ["run"], [((name,), run.last_step)])


def _finding_metrics(run: RunState, findings: Sequence[Finding]) -> Iterator[Family]:
    """Yield each of the first findings, in order, and the cost of the findings that have a cost."""
    labels = ["run", "signal", "label", "severity", "what", "stage", "rank", "node"]
    first: dict[tuple[object, ...], Finding] = {}
    for one in findings:
        if len(first) < _MOST_FINDINGS:
            stage, node = (next(iter(names), None) for names in (one.stages, one.nodes))
            rank = next(iter(one.ranks), None)
            who = stage, rank, node or run.node_of(rank)
            first.setdefault((run.id, one.signal, one.label, one.severity, one.what, *who), one)
    about = "1 for each of the first findings of the run, including those of the verdict."
    yield _gauge("finding", about, labels, [(values, 1.0) for values in first])
    costs = [(values, one.cost) for values, one in first.items() if one.cost]
    about = (
        "Cost of each finding that is named, or watched, as a share of the time, see traceml_verdict_cost."
    )
    yield _gauge("finding_cost", about, labels, costs, "ratio")
    counts = Counter((run.id, one.signal, one.severity) for one in findings)
    about = "Findings of the run, of each signal and severity."
    yield _gauge("findings", about, ["run", "signal", "severity"], counts.items())


def _step_metrics(run: RunState, most: int) -> Iterator[Family]:
    name, times = run.id, run.times
    if times is None or not times.steps:
        return
    quantile = (times.median_ms / 1e3, times.p95_ms / 1e3)
    about = "Step time over the newest steps."
    yield _gauge("step", about, ["run", "quantile"], _by_quantile(quantile, name), "seconds")
    exposed = [((name, stage), ms / 1e3) for stage, ms in times.stages.items()]
    yield _gauge("exposed", "Mean exposed time of a step, by stage.", ["run", "stage"], exposed, "seconds")
    nodes = [((name, node), values.median_ms / 1e3) for node, values in times.nodes.items()]
    yield _gauge("node_busy", "Median busy time of a step, by node.", ["run", "node"], nodes, "seconds")
    per_rank = zip(times.ranks, times.busy_ms.tolist(), strict=True)
    shown = [pair for pair in per_rank if len(times.ranks) <= most or pair[0] == times.worst_rank]
    busy = [((name, rank, run.node_of(rank)), ms / 1e3) for rank, ms in shown]
    about = "Median busy time of a step, by rank."
    yield _gauge("rank_busy", about, ["run", "rank", "node"], busy, "seconds")
    waits = zip(times.ranks, times.gpu_idle_pct.tolist(), strict=True)
    idle = [((name, rank, run.node_of(rank)), pct / 100) for rank, pct in waits if rank in dict(shown)]
    about = "Share of its time in which the GPU of a rank waited for its host."
    yield _gauge("rank_gpu_idle", about, ["run", "rank", "node"], idle, "ratio")


def _signal_metrics(run: RunState, most: int) -> Iterator[Family]:
    for gauge in (gauge for section in sections_of(run.signals) for gauge in section.gauges):
        if len(gauge.series) > most:
            continue
        series = [((run.id, *labels), value) for labels, value in gauge.series]
        yield _gauge(gauge.name, gauge.about, ["run", *gauge.labels], series, gauge.unit)


def _node_metrics(run: RunState, most: int) -> Iterator[Family]:
    """Yield the quantities of the newest sample of each node, and of its devices."""
    name = run.id
    samples = [(run.labels.get(node, node), sample) for node, sample in run.samples.items()]
    for quantity in NODE:
        yield from _quantity(quantity, "node", ["run", "node"], [((name, node), s) for node, s in samples])
    devices = [((name, node, gpu["index"]), gpu) for node, s in samples for gpu in s["gpus"] or ()]
    for quantity in GPU if len(devices) <= most else ():
        if not quantity.counter:  # not every sample has the counters of devices
            yield from _quantity(quantity, "gpu", ["run", "node", "gpu"], devices)


def _quantity(
    quantity: Quantity,
    kind: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[object], Mapping[str, Any]]],
) -> Iterator[Family]:
    if quantity.single:
        (field,), unit = quantity.fields, quantity.unit
        sample_values = [(values, sample[field]) for values, sample in samples]
        series = [(values, None if value is None else value * unit.base) for values, value in sample_values]
        about = " ".join(filter(None, (quantity.chart, quantity.line))) or text.words(field)
        kind_of = _counter if quantity.counter else _gauge
        name = re.sub("_(pct|bytes|ns|w|c|mhz)$", "", field)
        yield kind_of(f"{kind}_{name}", f"{about}, newest sample.", labels, series, unit.metric)
