"""The panel of a model that FSDP2 divides: what each rank holds, moves and waits for."""

from __future__ import annotations

from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.reports.sharding import about_model, columns
from traceml_ray.summary_shape import ShardedModel, ShardingInfo

from .components import Columns, panel, part, rank_link, table
from .route import Route

_MOST = 64
"""Ranks that are listed: of more, those that hold most."""


def panels(found: ShardingInfo | None, route: Route) -> list[Any]:
    """Return the panel, none where no model is divided."""
    if not found:
        return []
    rows = [(int(rank), own) for rank, own in found["per_rank"].items()]
    hint = f"Gathered, reduced and waited for: mean per step. {_LISTED}" if len(rows) > _MOST else _HINT
    rows = sorted(sorted(rows, key=lambda row: (-row[1]["shard_bytes"], row[0]))[:_MOST])
    shown: Columns = {**columns(rows), ">rank": lambda row: rank_link(row[0], route)}
    body = [*(_model(each, len(found["models"])) for each in found["models"])]
    listed = table(shown, rows, label="Shards of ranks")
    inside = html.Div([*body, listed, html.P(hint, className="hint")], id="memory-shards")
    return [panel("Shards of the model (FSDP2)", part(inside))]


_HINT = (
    "Gathered, reduced and waited for: mean per step. Whole at once: the most that gathered parameters took."
)
_LISTED = f"Of more than {_MOST} ranks, those that hold most."


def _model(model: ShardedModel, among: int) -> html.Div:
    who = f"{text.ranks(model['ranks'])}: " if among > 1 else ""
    lines: list[Any] = [html.P(who + "; ".join(about_model(model)))]
    if imbalance := model["imbalance"]:
        lines.append(
            html.Div([html.P(imbalance["why"]), html.P(imbalance["next"])], className="callout warning")
        )
    return html.Div(lines)
