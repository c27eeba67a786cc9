"""
Where the time of a step goes inside the model: each layer with the layers it contains, and ranks side by
side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.document import drawing
from traceml_ray.document.drawing import icicle
from traceml_ray.document.model import Column, Table, picked
from traceml_ray.signals.layers.judge import Layer, Layers
from traceml_ray.signals.layers.view import (
    NOTHING,
    GetLayers,
    about_layers,
    layer_columns,
    layer_name,
    layer_rank_columns,
    layers_sentences,
)
from traceml_ray.views import figures
from traceml_ray.views.run_state import RunState
from traceml_ray.wire.messages import MAX_LAYER_STEPS

from .. import listing
from ..charts import chart
from ..elements import aria, form_field, keys_of, marked, panel, part, rank_link, table, trail
from ..route import Route
from ..session_cache import SessionCache

PATH = "/layers"
"""URL that the form posts to."""
_BESIDE = 20
"""Largest number of layers for which ranks are shown side by side."""
_WHAT = (
    "ms and bytes per step, medians of the ranks. Forward and backward exclude the layers inside. Outputs: "
    "size of the returned tensors, an estimate of the activations. Largest: forward and backward on the "
    "slowest rank."
)


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """Return the layers of the run; in the URL `steps` fills the form, `asked` is this browser's request."""
    answer = cache.ask(GetLayers(run.id))
    asked = route.get("asked")
    of_request = cache.ask(GetLayers(run.id, asked)) if asked else None
    layers = answer or Layers()
    return {
        "layers": answer,
        "chosen": listing.choose(
            range(len(layers.layers)), route, partial(_words, layers.layers), keys_of(layer_columns(layers))
        ),
        "answered": len(of_request.ranks) if of_request else 0,
        "world": sum(not process.ended for process in run.ranks.values()),
        "of_run": run.id,
    }


def _words(layers: Sequence[Layer], index: int) -> str:
    return f"{layer_name(layers[index])} {layers[index].kind} {layers[index].region}"


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    head = [html.H1("Layers"), listing.field("layers")]
    body: list[Any] = [trail(route, ("layers", None)), html.Div(head, className="title-row")]
    layers: Layers | None = view["layers"]
    asks = view["state"] == "live" and not route.get("session")
    if asks:
        body.append(panel("Measure the next steps", part(_form(view, route)), part(_asked(view, route))))
    if layers is None or not layers.ranks:
        nothing = marked(f"{NOTHING}{', or on this page' * asks}.")
        return html.Div([*body, part(html.P(nothing, id="layers-missing", className="empty"))])
    body += [
        part(html.Div(_findings(layers), id="layers-found")),
        _icicle(layers, route),
        panel("Layers", part(html.Div(_layers(view, route), id="layers-table"))),
    ]
    if len(layers.ranks) > 1:
        body.append(panel("Ranks side by side", part(html.Div(_beside(layers, route), id="layers-ranks"))))
    return html.Div(body)


def _form(view: Mapping[str, Any], route: Route) -> html.Form:
    """Return the form that has the layers of some steps measured."""
    given = {"name": "steps", "type": "number", "min": 1, "max": MAX_LAYER_STEPS, "required": True}
    steps = form_field(
        "input",
        id="layers-steps",
        defaultValue=route.get("steps") or "20",
        className="goto short",
        inputMode="numeric",
        **given,
    )
    fields = html.Label([html.Span("Steps"), steps], htmlFor="layers-steps")
    hint = "All ranks measure the same steps. Measuring costs at most 3 % of the time."
    return html.Form(
        [
            html.Div(fields, className="fields"),
            html.P(hint, className="hint"),
            form_field("input", type="hidden", name="run", value=view["of_run"]),
            html.Button("Measure layers"),
        ],
        id="layers-form",
        action=PATH,
        method="post",
        **aria(label="Measure the layers of the next steps"),
    )


def _asked(view: Mapping[str, Any], route: Route) -> html.Div:
    """Return the progress of this browser's request."""
    message = ""
    if route.get("asked"):
        done, all_ranks = view["answered"], text.count(view["world"], "rank")
        message = (
            f"{done:,} of {all_ranks} have measured them." if done else "Asked for: they are being measured …"
        )
    return html.Div(message, id="layers-asked", **aria(live="polite"))


def _findings(layers: Layers) -> list[Any]:
    """Return the sentences that name a slow layer, or say that none is slow, with their basis."""
    sentences = layers_sentences(layers)
    tone = "warning" if layers.findings else "good" if sentences else "info"
    about = [about_layers(layers), *layers.limits]
    shown = [html.P(marked(sentence)) for sentence in sentences]
    return [
        html.Div(shown, className=f"callout {tone}") if shown else None,
        *(html.P(marked(line), className="hint") for line in about),
    ]


def _icicle(layers: Layers, route: Route) -> Any:
    named = {one.layer for one in layers.findings}
    boxes = icicle(layers.layers, named)
    figure = figures.icicle(boxes)
    rows = max((box.depth for box in boxes), default=0) + 1
    return chart(
        "layers-icicle",
        "The model: forward and backward of each layer, above the layers inside it",
        figure,
        "Time of each layer with the layers inside it",
        route,
        colours={"takes longer on one rank": drawing.ORANGE} if named - {None} else None,
        height=60 + 26 * rows,
        rows=_tree(layers, route),
    )


def _tree(layers: Layers, route: Route) -> Any:
    columns = [
        Column("layer", layer_name, "code"),
        Column("with those inside, ms", lambda one: one.total_ms, "aligned"),
        Column("of the model", lambda one: one.share, "share"),
    ]
    block = Table("Time of each layer with the layers inside it", columns, layers.layers)
    return table(block, route)


def _layers(view: Mapping[str, Any], route: Route) -> list[Any]:
    layers: Layers = view["layers"]
    shown, chosen = layer_columns(layers), view["chosen"]
    heads = listing.heads(shown, keys_of(shown), route)
    rows = table(Table("Layers", shown, chosen.items, empty="No layer matches."), route, heads=heads)
    return [rows, listing.pages(chosen, route, "layer"), html.P(_WHAT, className="hint")]


def _beside(layers: Layers, route: Route) -> list[Any]:
    """Return the layers that take longest, with a column for each of some ranks."""
    order = sorted(range(len(layers.layers)), key=lambda index: -_longest(layers, index))[:_BESIDE]
    columns = [*picked(layer_columns(layers), "layer"), *layer_rank_columns(layers)]
    which = "" if len(layers.per_rank_ms) == len(layers.ranks) else " Only the slowest ranks are shown."
    hint = f"Forward and backward, ms a step, without the layers inside; the {_BESIDE} largest.{which}"
    heads = {f"rank {rank}": rank_link(rank, route, "rank ") for rank in layers.per_rank_ms}
    return [table(Table("Layers, ranks side by side", columns, sorted(order), hint), route, heads=heads)]


def _longest(layers: Layers, index: int) -> float:
    values: Sequence[float | None] = [times[index] for times in layers.per_rank_ms.values()]
    return max((value for value in values if value is not None), default=0.0)
