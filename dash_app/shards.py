"""The panel of a model that FSDP2 divides: what each rank holds, moves and waits for."""

from __future__ import annotations

from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.reports.sharding import Row, about_model, columns, per_step
from traceml_ray.store.summary_shape import ShardedModel, ShardingInfo

from .components import Columns, marked, panel, part, rank_link, table
from .route import Route


def panels(sharding: ShardingInfo | None, route: Route) -> list[Any]:
    """Return the panel, none where no model is divided."""
    if not sharding:
        return []
    rows: list[Row] = [(int(rank), values) for rank, values in sharding["per_rank"].items()]
    total = sum(len(model["ranks"]) for model in sharding["models"])
    hint = _HINT + f" Of {total:,} ranks those that hold most." * (total > len(rows))
    shown: Columns = {**columns(rows), ">rank": lambda row: rank_link(row[0], route)}
    body = [_model(sharding, model) for model in sharding["models"]]
    listed = table(shown, rows, label="Shards of ranks")
    inside = html.Div([*body, listed, html.P(hint, className="hint")], id="memory-shards")
    return [panel("Shards of the model (FSDP2)", part(inside))]


_HINT = "Waits: time in all-gathers, and in reductions of gradients, mean per step."


def _model(sharding: ShardingInfo, model: ShardedModel) -> html.Div:
    who = f"{text.ranks(model['ranks'])}: " if len(sharding["models"]) > 1 else ""
    lines: list[Any] = [html.P(who + "; ".join(about_model(model)))]
    if moved := per_step(sharding, model):
        lines.append(html.P(f"Per step: {moved}"))
    if imbalance := model["imbalance"]:
        sentences = [html.P(marked(sentence)) for sentence in (imbalance["why"], imbalance["next"])]
        lines.append(html.Div(sentences, className="callout warning"))
    return html.Div(lines)
