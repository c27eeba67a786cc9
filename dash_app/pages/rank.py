"""One rank: where its time goes compared with the median rank, its spans, its process, its stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.analysis.uneven_work import sentence
from traceml_ray.analysis.verdict import Suspect
from traceml_ray.document import drawing
from traceml_ray.document.model import Table, per_rank_columns
from traceml_ray.signals.experts.view import GetExperts
from traceml_ray.signals.nodes.quantities import DEVICE_MEMORY, HOST_MEMORY, PROCESS
from traceml_ray.signals.output.last_lines import LastOutput
from traceml_ray.signals.output.view import MOST_LINES, GetOutput
from traceml_ray.signals.views import sections_of
from traceml_ray.store import query
from traceml_ray.store.profiles import Profile
from traceml_ray.store.rank_processes import node_key
from traceml_ray.views import figures, machines
from traceml_ray.views.ranks import position, rank_steps
from traceml_ray.views.run_state import RunState
from traceml_ray.views.tables import SPANS
from traceml_ray.views.values import by_rank, mean, number, whole_number

from .. import axis
from ..charts import Chart, chart
from ..elements import aria, died, facts, link, marked, node_link, panel, part, rank_link, table, trail
from ..route import Route
from ..session_cache import SessionCache
from . import profiles
from .node import quantity_charts

_WITH_PROCESSES = 6
_PROFILES = 3
_OFFERED = 24
"""Largest number of other ranks offered if the requested one does not exist."""


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """
    Return the data of the rank whose number is the key of `route`. If it has not reported, `rank`
    is None.
    """
    rank = int(route.key)
    if rank not in run.ranks:
        return {"rank": None, "ranks": sorted(run.ranks), "world": run.world}
    process = run.ranks[rank]
    identity = process.identity
    node = node_key(process) if identity else ""
    samples = machines.samples_of(cache, query.GetNodeSamples((node,), _WITH_PROCESSES))
    suspects = run.verdict.suspects if run.verdict else ()
    hung = [verdict for verdict in run.verdicts if verdict.began_ns is not None]
    spine = axis.data(cache, run, route)
    between = axis.time_of(spine) or ()
    most = machines.SAMPLES if between else machines.SAMPLES + machines.HELD
    sampled = machines.samples_of(cache, query.GetProcessSamples((process.id,), most, *between))
    asked_memory = query.GetMemorySamples((process.id,), machines.SAMPLES, *between)
    printed = cache.ask(GetOutput(run.id, rank, MOST_LINES))
    return {
        "rank": {
            **position(run, rank),
            "gpu": machines.gpu_of(identity, samples),
            **{name: getattr(process, name) for name in ("exit_code", "errors", "missing")},
            "node": run.node_of(rank),
            "node_key": node or None,
            "pid": identity.pid if identity else None,
            "attempt": identity.attempt if identity else None,
            "mesh": process.placement.get("mesh") or {},
            "experts": [sentence(load) for load in cache.ask(GetExperts(run.id, rank)) or ()],
            "bubble": _bubble(run, process.role),
            "gpu_idle_pct": number(by_rank(run.times, "gpu_idle_pct").get(rank)),
            "signals": {
                column.name: column.cell(rank)
                for column in per_rank_columns(sections_of(run.signals), int)
                if column.value(rank) is not None
            },
        },
        "suspect": next((suspect for suspect in suspects if suspect.rank == rank), None),
        "deaths": [*cache.deaths(run)],
        "output": printed[0] if printed else None,
        "stacks": hung[-1].stacks if hung else [],
        "hangs": run.verdict is not None and run.verdict.label == "hang",
        "profiles": _profiles(cache, run, rank),
        "process": machines.timed_series(sampled, PROCESS),
        "memory": machines.memory_series(machines.samples_of(cache, asked_memory)),
        "axis": spine,
        **rank_steps(cache, run, rank, spine["range"].asked()),
    }


def _bubble(run: RunState, role: str | None) -> float | None:
    """Return the share of its time in which a rank of this role waits for other roles."""
    roles = run.verdict.roles if run.verdict else ()
    return next((one.bubble for one in roles if one.role == role), None)


def _profiles(cache: SessionCache, run: RunState, rank: int) -> list[Profile]:
    """Return the newest profiles that have the rank."""
    of_run = (info.profile for info in profiles.newest_first(cache, run) if info.profile.run == run.id)
    return [one for one in of_run if any(captured.rank == rank for captured in one.captured)][:_PROFILES]


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page. Panels of quantities that were not measured are left out."""
    rank, number = view["rank"], int(route.key)
    if rank is None:
        return _no_rank(number, view["ranks"], view["world"], route)
    title = [f"Rank {number} on ", node_link(rank["node_key"], rank["node"], route)]
    around = [link("← previous", route.to("rank", number - 1), "chip")] if number else []
    around.append(link("next →", route.to("rank", number + 1), "chip"))
    asked = whole_number(route.get("step"))
    step = view["step"] if asked is None else asked
    if step is not None:
        around.append(link(f"step {step:,} of all ranks", route.to("step", step, rank=number), "chip"))
    around += [
        link(f"profile, {one.extent}", route.to("profile", one.id, of=number), "chip")
        for one in view["profiles"]
    ]
    if view["state"] == "live" and not route.get("session"):
        around.append(link("Profile this rank …", route.to("profiles", ranks=number), "chip"))
    node = (rank["node"] or text.NA, route.to("node", rank["node_key"]) if rank["node_key"] else None)
    way = trail(route, node, (f"rank {number}", None))
    chips = part(html.Div(around, id="rank-around", className="chips"))
    head = html.Div([part(html.H1(title, id="rank-title")), chips], className="title-row")
    spans = Table("Spans", SPANS, view["spans"], empty="No span was marked in this run.")
    facts_panel = facts("rank-facts", _facts(rank) | _memory_facts(view["memory"]))
    body: list[Any] = [
        way,
        head,
        axis.panel(view, route),
        part(html.Div(_callout(view, number, route), id="rank-callout")),
        facts_panel,
        *_both_rows(view, route),
        html.H2("Stages, against the median rank"),
        html.Div(
            [_stage_chart(*stage, view, route) for stage in drawing.STAGES.items() if view["stages"]],
            className="grid three",
        ),
        panel("Spans inside the stages, mean per step", part(html.Div(table(spans, route), id="rank-spans"))),
    ]
    if process := view["process"] and quantity_charts(
        "process", PROCESS, view["process"], route, route.key, axis.clock(view["axis"])
    ):
        body += [html.H2("Process"), html.Div(process, className="grid")]
    body += _memory_charts(view, route)
    dead = any(death.rank == number for death in view["deaths"])
    position = 1 + next(index for index, one in enumerate(body) if one is facts_panel)
    position = position if dead or view["hangs"] else len(body)
    return html.Div([*body[:position], *_last_words(view), *body[position:]])


def _last_words(view: Mapping[str, Any]) -> list[Any]:
    """Return where the ranks were in the last hang, and the last output of this rank."""
    shown = [panel("Last output", part(html.Div(_output(view["output"]), id="rank-output")))]
    if view["stacks"]:
        stacks = part(html.Div([_stack(stack) for stack in view["stacks"]], id="rank-stacks"))
        shown.insert(0, panel("Where the ranks were in the last hang", stacks))
    return shown


def _memory_charts(view: Mapping[str, Any], route: Route) -> list[Any]:
    """Return the charts of the process's memory. Those of each device are below its number."""
    frame, several, body = axis.clock(view["axis"]), len(view["memory"]) > 1, list[Any]()
    for memory in view["memory"]:
        name = "host" if memory["device"] is None else f"gpu-{memory['device']}"
        drawn = quantity_charts(f"memory-{name}", DEVICE_MEMORY, memory, route, route.key, frame)
        if memory is view["memory"][0]:
            drawn += quantity_charts("memory", HOST_MEMORY, memory, route, route.key, frame)
        if drawn:
            title = f"Memory of GPU {memory['device']}" if several else "Memory"
            body += [html.H2(title), html.Div(drawn, className="grid")]
    return body


def _memory_facts(memory: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the newest memory figures that are known."""
    shown = {}
    for device_memory in memory:
        newest, name = (
            device_memory["newest"],
            "GPU memory" if len(memory) == 1 else f"memory of GPU {device_memory['device']}",
        )
        if newest["allocated_bytes"] is not None:
            allocated, reserved = (text.size(newest[f"{name}_bytes"]) for name in ("allocated", "reserved"))
            shown[name] = f"{allocated} allocated, {reserved} reserved"
        if newest["rss_bytes"] is not None:
            shown["RSS"] = text.size(newest["rss_bytes"])
        if newest["limit_bytes"] is not None:
            used = text.size(newest["limit_used_bytes"])
            shown["host memory in use"] = f"{used} of {text.size(newest['limit_bytes'])}"
    return shown


def _no_rank(rank: int, ranks: Sequence[int], world: int, route: Route) -> html.Div:
    """Return what is said of a rank that is not there (yet), and the others to choose from."""
    title = f"Rank {rank:,} has not reported in this run."
    if 0 < world <= rank:
        title = f"There is no rank {rank:,} in this run: it has {text.count(world, 'rank')}."
    chips = [link(f"rank {other}", route.to("rank", other), "chip") for other in ranks[:_OFFERED]]
    return html.Div(part(html.Div([html.H1(title), html.Nav(chips, className="chips")], id="rank-missing")))


def _both_rows(view: Mapping[str, Any], route: Route) -> list[Chart]:
    """
    Return the mean row on the device's clock and, below it, on its host's clock. Empty if there
    is only one.
    """
    if view["host"] is None:
        return []
    both = {}
    for clock, rows in (("GPU", view["stages"]), ("host", view["host"])):
        row = {stage: mean(rows[stage]) for stage in drawing.STAGES}
        both[f"{clock}, {text.ms(sum(row.values()))} "] = row
    return [
        chart(
            "rank-rows",
            "Mean step on the GPU, and on its host",
            figures.rows(both, revision=route.key),
            "Mean time of each stage, by the clock of the GPU and below it by that of its host",
            route,
            series=drawing.STAGES,
            tall="low",
        )
    ]


def _stage_chart(stage: str, colour: str, view: Mapping[str, Any], route: Route) -> Chart:
    lines = {"its host": view["host"], "this rank": view["stages"], "median rank": view["median"]}
    shown = {name: rows[stage] for name, rows in lines.items() if rows is not None}
    colours = {"its host": drawing.GREEN, "this rank": colour, "median rank": drawing.ROSE}
    colours = {name: colours[name] for name in shown}
    frame = axis.frame(view["axis"])
    return chart(
        f"stage-{stage}",
        stage,
        figures.lines(
            view["stages"]["steps"],
            shown,  # a rank is drawn over its host
            "ms",
            unit="ms",
            colours=[*colours.values()],
            dashed="median rank",
            revision=route.key,
            frame=frame,
        ),
        f"Time in {stage} by step, this rank and the median rank",
        route,
        series=colours,
        tall="low",
        clock=frame.get("clock"),
    )


def _facts(rank: Mapping[str, Any]) -> dict[str, Any]:
    unseen = [f"{name} ({why})" if why else name for name, why in (rank["missing"] or {}).items()]
    return {
        "state": text.words(rank["state"]),
        "last step": rank["last_step"],
        "now in": rank["open_stage"] or text.NA,
        **_role_facts(rank),
        "local rank": rank["local_rank"],
        "GPU": rank["gpu"],
        **({} if (idle := rank["gpu_idle_pct"]) is None else {"GPU idle": text.percent(idle)}),
        **rank["signals"],
        "process": rank["pid"] and str(rank["pid"]),
        "attempt": rank["attempt"],
        "errors of the monitor": sum((rank["errors"] or {}).values()),
        **({} if (code := rank["exit_code"]) is None else {"exit code": code}),
        **({"not seen": ", ".join(unseen)} if unseen else {}),
    }


def _role_facts(rank: Mapping[str, Any]) -> dict[str, str]:
    """Return where the rank is in a job that is not only data parallel."""
    mesh = ", ".join(f"{name} {coordinate} of {size}" for name, (coordinate, size) in rank["mesh"].items())
    waits = "" if rank["bubble"] is None else text.share(rank["bubble"])
    shown = {"role": rank["role"], "device mesh": mesh, "waits for other roles": waits}
    shown["experts"] = rank["experts"][0] if rank["experts"] else ""
    return {name: value for name, value in shown.items() if value}


def _callout(view: Mapping[str, Any], number: int, route: Route) -> Any:
    """Return how the rank died, or, of a living rank, what it is suspected of."""
    death = next((death for death in view["deaths"] if death.rank == number), None)
    if death is None:
        return None if view["suspect"] is None else _suspect(view["suspect"])
    first = [death.rank for death in view["deaths"] if death.first]
    after: list[Any] = [f"It ended first of {text.count(len(view['deaths']), 'rank')} that died."]
    if not death.first:
        after = ["It ended after ", rank_link(first[0], route, "rank "), ", the first."]
    elif len(first) > 1:
        after = ["No clock can tell which was first of ", text.ranks(first), "."]
    raised = death.traceback or death.message
    message = [html.Pre(raised)] if raised else []
    return html.Div(
        [html.P([html.B(["◆ ", *died(death)]), ". ", *after]), *message], className="callout critical"
    )


def _suspect(suspect: Suspect) -> html.P:
    late, saves = text.ms(suspect.excess_ms), text.ms(suspect.gain_ms)
    sentence = f"▲ This rank is {late} late in `{suspect.stage}` in each step. "
    sentence += f"Fixing it saves {saves} a step ({text.percent(suspect.cost_pct)})."
    return html.P(marked(sentence), className="callout warning")


def _output(output: LastOutput | None) -> Any:
    """Return the lines that a rank printed last, those of stderr marked."""
    if output is None:
        return html.P("No output is known yet.", className="empty")
    if not output.lines:
        why = output.missing
        nothing = f"No output is known: {why}." if why else "This rank has printed nothing."
        return html.P(nothing, className="empty")
    lines: list[Any] = []
    for line in output.lines:
        if line.skipped:
            lines.append(html.I(f"… {text.count(line.skipped, 'more line')}\n"))
        is_error = line.stream == "stderr"
        lines.append(html.Span(f"{line.text}\n", className="stderr" if is_error else ""))
    return html.Pre(lines, className="output", tabIndex=0, **aria(label="Last lines of stdout and stderr"))


def _stack(stack: Any) -> html.Details:
    return html.Details([html.Summary(text.ranks(stack.ranks)), html.Pre(stack.text)], open=True)
