"""One rank: where its time goes against the median rank, its parts, its process, its stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import dcc, html

from traceml_ray import text
from traceml_ray.analysis.quantities import PROCESS, charts

from .. import figures
from ..place import Place
from . import bits

_PROCESS = {f"process-{each[0].name}": (title, each[0]) for title, each in charts(PROCESS).items()}


def layout(view: Mapping[str, Any]) -> Any:
    """Return the elements of the page; panels of what was not measured are absent."""
    if view["rank"] is None:
        return html.Div([html.H1(id="rank-title"), html.Div(id="rank-around", className="chips")])
    stages = [_stage(name, colour) for name, colour in figures.STAGES.items() if name in view["stages"]]
    process = [
        bits.chart(id, title, f"{title} of the process over time", tall="low")
        for id, (title, each) in _PROCESS.items()
        if _any(view["process"].get(each.name))
    ]
    body: list[Any] = [
        html.Div(
            [html.H1(id="rank-title"), html.Div(id="rank-around", className="chips")], className="title-row"
        ),
        html.Div(id="rank-suspect"),
        html.Div(id="rank-facts"),
        html.H2("Stages, against the median rank"),
        html.Div(stages, className="grid three"),
        bits.panel("Parts inside the stages, mean per step", html.Div(id="rank-parts")),
    ]
    if process:
        body += [html.H2("Process"), html.Div(process, className="grid")]
    if view["stacks"]:
        body.append(bits.panel("Where the ranks were in the last hang", html.Div(id="rank-stacks")))
    return html.Div(body)


def parts(view: Mapping[str, Any], place: Place) -> dict[str, dict[str, Any]]:
    """Return the content of the elements, by id."""
    rank, stages, process = view["rank"], view["stages"], view["process"]
    number = int(place.key)
    around = [dcc.Link("← previous", href=place.to("rank", number - 1), className="chip")] if number else []
    around.append(dcc.Link("next →", href=place.to("rank", number + 1), className="chip"))
    if rank is None:
        return {
            "rank-title": {"children": f"Rank {number} has not reported in this run."},
            "rank-around": {"children": around},
        }
    made: dict[str, dict[str, Any]] = {
        "rank-title": {
            "children": [f"Rank {number} on ", bits.node_link(rank["node_key"], rank["node"], place)]
        },
        "rank-around": {"children": around},
        "rank-suspect": {"children": _suspect(view["suspect"])},
        "rank-facts": {"children": bits.facts(_facts(rank))},
        "rank-parts": {"children": _parts(view["parts"])},
    }
    for name, colour in figures.STAGES.items():
        if name in stages:
            series = {"this rank": stages[name], "median rank": view["median"][name]}
            figure = figures.lines(
                stages["steps"],
                series,
                "ms",
                unit="ms",
                colours=(colour, figures.ROSE),
                dashed="median rank",
                revision=place.key,
            )
            made[f"stage-{name}"] = {"figure": figure}
    for id, (_, each) in _PROCESS.items():
        if _any(process.get(each.name)):
            axis, values = each.unit.axis, bits.scaled(process[each.name], each.unit.scale)
            drawn = {each.name: values}
            made[id] = {
                "figure": figures.lines(
                    process["t_ns"], drawn, axis, unit=axis, kind="time", revision=place.key
                )
            }
    if view["stacks"]:
        made["rank-stacks"] = {"children": [_stack(stack) for stack in view["stacks"]]}
    return made


def _stage(name: str, colour: str) -> Any:
    label = f"Time in {name} by step, this rank and the median rank"
    key = bits.legend({"this rank": colour, "median rank": figures.ROSE})
    return bits.chart(f"stage-{name}", text.words(name), label, note=key, tall="low")


def _any(values: Sequence[Any] | None) -> bool:
    return any(value is not None for value in values or ())


def _facts(rank: Mapping[str, Any]) -> dict[str, Any]:
    unseen = [f"{name} ({why})" if why else name for name, why in (rank["missing"] or {}).items()]
    return {
        "state": text.words(rank["state"] or text.NA),
        "last step": rank["last_step"],
        "now in": text.words(rank["open_stage"] or text.NA),
        "local rank": rank["local_rank"],
        "GPU": rank["gpu"],
        "process": rank["pid"] and str(rank["pid"]),
        "attempt": rank["attempt"],
        "errors of the monitor": sum((rank["errors"] or {}).values()),
        **({"exit code": rank["exit"]} if rank["exit"] is not None else {}),
        **({"not seen": ", ".join(unseen)} if unseen else {}),
    }


def _suspect(suspect: Mapping[str, Any] | None) -> Any:
    if suspect is None:
        return None
    late, share = text.ms(suspect["excess_ms"]), text.share(suspect["share"])
    sentence = f"▲ Late out of {text.words(suspect['stage'])} by {late} a step ({share} of it); "
    sentence += f"fixing it saves {text.ms(suspect['gain_ms'])}."
    return html.P(sentence, className="callout warning")


def _parts(found: Sequence[Mapping[str, Any]]) -> Any:
    columns: bits.Columns = {
        "part": lambda part: part["name"],
        "in": lambda part: text.words(part["stage"]),
        ">this rank": lambda part: text.ms(part["ms"]),
        ">median rank": lambda part: text.ms(part["median_ms"]),
        ">of its stage": lambda part: text.share(part["share"]),
        ">times a step": lambda part: text.number(part["times_per_step"]),
        ">bytes each": lambda part: text.size(part["bytes"]),
    }
    return bits.table(columns, found, empty="No part was marked in this run.", label="Parts")


def _stack(stack: Mapping[str, Any]) -> html.Details:
    return html.Details([html.Summary(text.ranks(stack["ranks"])), html.Pre(stack["text"])], open=True)
