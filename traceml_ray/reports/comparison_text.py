"""Renders a comparison of two sessions as plain text: `traceml-ray compare`."""

from __future__ import annotations

from traceml_ray import text
from traceml_ray.analysis.comparison import Change
from traceml_ray.reports.comparison import Comparison, Side, interval, signed
from traceml_ray.reports.layout import Columns, facts, page, table
from traceml_ray.stages import STAGES

_MOST_RANKS = 16


def render_comparison(found: Comparison) -> str:
    """Return a comparison as text: verdict, numbers, the ranks that moved, what was not compared."""
    lines = [(name, _side(side)) for name, side in (("A", found.a), ("B", found.b))]
    return page(
        [
            facts(*lines, ("Verdict", found.headline), ("Where", found.where)),
            table("Numbers", _NUMBERS, [each for each in found.changes if _is_shown(each)]),
            table(f"Ranks in {found.stage}", _RANKS, found.ranks[:_MOST_RANKS]),
            facts(*_labelled("Not known", found.cannot)),
            facts(*_labelled("Notes", found.notes)),
        ]
    )


def render_value(of: float | None, unit: str) -> str:
    """Return a number of a comparison: "41.3 ms", "3.2 GB"."""
    return text.size(of) if unit == "B" else text.unit(of, unit)


def label(of: Change) -> str:
    """Return what a number of a comparison is: of a stage, its exposed time."""
    return f"exposed {of.what}" if of.what in STAGES else text.words(of.what)


def change(of: Change) -> str:
    """Return by how much it changed: "+15 %"; of what is in % already, the points."""
    if of.unit == "%":
        return "" if of.change is None else f"{signed(of.change)} points"
    return "" if of.change_pct is None else f"{signed(of.change_pct)} %"


def range_of(of: Change) -> str:
    """Return the interval of the same."""
    return interval(of.low, of.high, "points") if of.unit == "%" else interval(of.low_pct, of.high_pct)


def _side(side: Side) -> str:
    steps = "no step beyond the warm-up"
    if side.first_step is not None:
        steps = f"steps {side.first_step:,} to {side.last_step:,}"
    ranks = text.count(side.world_size, "rank") if side.world_size else "no rank"
    about = [f"{side.session}", side.status, ranks, side.strategy, steps, side.verdict]
    return " · ".join(filter(None, about))


def _is_shown(of: Change) -> bool:
    return not (of.a is None and of.b is None)


_NUMBERS: Columns = {
    "": lambda of: label(of) + (f", rank {of.rank_b}" if of.rank_b is not None else ""),
    ">A": lambda of: render_value(of.a, of.unit),
    ">B": lambda of: render_value(of.b, of.unit),
    ">change": change,
    "95 %": range_of,
    "judged": lambda of: of.word or "",
}
_RANKS: Columns = {
    ">rank": lambda of: str(of.rank),
    "node": lambda of: of.node,
    ">A": lambda of: text.ms(of.a),
    ">B": lambda of: text.ms(of.b),
    ">change": lambda of: f"{signed(of.change)} ms",
    "95 %": lambda of: interval(of.low, of.high, "ms"),
}


def _labelled(label: str, sentences: list[str]) -> list[tuple[str, str]]:
    return [(label if not at else "", each) for at, each in enumerate(sentences)]
