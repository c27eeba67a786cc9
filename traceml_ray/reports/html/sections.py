"""The parts of `report.html`, from the first that is read to the last."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.reports import contents
from traceml_ray.reports.charted import Charted
from traceml_ray.reports.deaths import place_words
from traceml_ray.reports.heading import about_session, bundles_in, run_of
from traceml_ray.reports.headlines import cost, cost_of, findings_in, line_of, named, part_of, since
from traceml_ray.reports.headlines import coverage as covered
from traceml_ray.reports.html import charts
from traceml_ray.reports.html.charts import heatmap
from traceml_ray.reports.html.elements import NOTHING, Markup, block, facts, grid, join, panel, sentence, tag
from traceml_ray.reports.layout import Columns, Facts, Table
from traceml_ray.reports.present import present
from traceml_ray.reports.profiles import by_operation
from traceml_ray.reports.run_facts import moment
from traceml_ray.reports.severity import SIGNS, sign_of
from traceml_ray.reports.tiles import tiles
from traceml_ray.signals.layers.sections import layers_facts, layers_table
from traceml_ray.signals.memory.sections import memory_facts
from traceml_ray.signals.output.sections import output_lines
from traceml_ray.signals.sharding.sections import sharding_facts, sharding_table
from traceml_ray.signals.views import signal_numbers
from traceml_ray.store.step_shapes import DeathInfo

_MAX_DEATHS, _MAX_STACKS, _MAX_OUTPUTS, _MAX_ALIKE = 8, 4, 4, 4
_MAX_FINDINGS, _MAX_ALSO, _MAX_SETTINGS = 12, 4, 60
_MAX_LINES, _MAX_LINE = 60, 300
"""Of a traceback, a stack, and what a rank printed last."""
_SIGNS = {
    "good": "M8 1a7 7 0 1 0 .01 0zM7 11.5 3.8 8.3l1.3-1.3L7 8.9l4-4 1.3 1.3z",
    "warning": "M8 1 15.5 15H.5z",
    "critical": "M8 0 16 8 8 16 0 8z",
    "notice": "M8 1 15.5 15H.5zM8 4.6 3.4 13.4h9.2z",
    "unsure": "M8 1a7 7 0 1 0 .01 0zM8 4a4 4 0 1 1-.01 0z",
}
_TONES = {
    "good": "#1b7a43", "notice": "#8a6d00", "warning": "#c05f0c", "critical": "#c22f2f", "unsure": "#6a7887",
}  # fmt: skip


def heading(summary: Mapping[str, Any]) -> Markup:
    """Return which session this is of."""
    name = tag("h1", "traceml-ray · session ", tag("b", str(summary["session"]["id"])))
    lines = [" · ".join(about_session(summary)), *run_of(summary["runs"], summary["run"])]
    return tag("header", name, (tag("p", line) for line in lines))


def verdict(charted: Charted) -> Markup:
    """Return the verdict: what, why, what to do; what it costs and how sure it is; how much that is of."""
    summary = charted.summary
    one, first = summary["verdict"], summary["conclusion"]
    is_first = first["subject"] == "steps"
    tone, sign, headline = first["tone"], sign_of(first["tone"]), first["headline"]
    ends = is_first or contents.meaning(one).kind == "finding"  # whether it says what to do
    before = [tag("p", sentence(first["why"])), tag("p", tag("b", "Next "), sentence(first["next"]))]
    episode = _episode(summary)
    began = since(episode) if episode else ""
    operation = by_operation(summary)
    others = contents.findings_beside(summary)[:_MAX_ALSO]
    sentences = [
        tag("h2", headline[:1].upper() + headline[1:]),
        *(() if is_first else (*before, tag("h3", f"Steps: {named(one)}"))),
        tag("p", sentence(one["why"])),
        tag("p", sentence(one["note"])) if one["note"] else None,
        *(tag("p", line) for line in contents.evidence(findings_in(summary))),
        tag("p", tag("b", "By operation "), sentence(". ".join(operation))) if operation else None,
        tag("p", tag("b", "Next "), sentence(one["next"])) if one["next"] and ends else None,
        *(tag("p", tag("b", "Also "), f"{SIGNS[other.severity]} {line_of(other)}") for other in others),
        tag("p", sentence(f"{began[:1].upper()}{began[1:]}."), cls="hint") if began else None,
    ]
    path = tag("path", d=_SIGNS[tone], fill=_TONES[tone])
    icon = tag("svg", path, viewBox="0 0 16 16", width=28, height=28, role="img", aria_label=f"{sign} {tone}")
    beside = tag("div", _cost(summary, episode), tag("p", coverage(charted), cls="hint"), cls="cost")
    inside = icon, tag("div", sentences, cls="sentences"), beside
    return tag("section", inside, cls=f"verdict {tone}", aria_label="Verdict")


def _episode(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the episode that the verdict is about; of a run that is over none goes on."""
    episode = present({**summary["verdict"], "episodes": summary["episodes"]})
    running = summary["session"]["status"] == "running"
    return episode and {**episode, "goes_on": episode["goes_on"] and running}


def _cost(summary: Mapping[str, Any], episode: Mapping[str, Any] | None) -> list[Markup]:
    """Return what the cause that is named costs, and how sure it is."""
    one = summary["verdict"]
    shown = []
    if one["cost_pct"] and one["label"] != "healthy":
        shown.append(tag("p", tag("span", text.percent(one["cost_pct"]), cls="value"), f" {part_of(one)}"))
    if episode:
        shown.append(tag("p", f"cost {cost(episode, contents.has_gpus(summary))}"))
    prefixes = ("costs ", "cost ") if episode and len(summary["episodes"]) == 1 else ("costs ",)
    rest = [line for line in contents.about_verdict(summary) if not (shown and line.startswith(prefixes))]
    return [*shown, *(tag("p", line) for line in rest)]


def coverage(charted: Charted) -> str:
    """Return of how many ranks this is, and of when."""
    summary = charted.summary
    world, silent = summary["session"]["world_size"], summary["session"]["silent_ranks"]
    newest = max((rank["last_seen"] for rank in summary["ranks"].values() if rank["last_seen"]), default=None)
    when = summary["session"]["ended_at"] or newest
    known = world - len(silent) if world else 0
    reported = covered(known, world, len(charted.deaths)) if known else "no rank has reported"
    return reported + (f", as of {text.date(when)} UTC" if when else "")


def numbers(charted: Charted) -> Markup:
    """Return the numbers above all charts."""
    if not charted.times or not charted.columns:
        return NOTHING
    return charts.tiles(tiles(charted.times, charted.columns, signal_numbers(charted.signals)))


def ranks_by_time(charted: Charted) -> Markup:
    """Return the heatmap."""
    if charted.columns is None:
        return NOTHING
    drawn = heatmap(charted.columns, charted.summary["verdict"])
    return panel("Busy time by rank, against the median of the step", drawn, wide=True)


def times_by_step(charted: Charted) -> Markup:
    """Return the charts over the steps."""
    if charted.columns is None:
        return NOTHING
    episode = _episode(charted.summary)
    onset = episode["from_step"] if episode else None
    stacked, lines = charts.exposed(charted.columns, onset), charts.timeline(charted.columns, onset)
    return join(
        panel("Where a step's time goes (exposed: what the job waited for)", stacked),
        panel("Step timeline (busy: without waiting)", lines),
    )


def before_and_since(charted: Charted) -> Markup:
    """Return what each stage has added to a step since the onset; nothing where one of both is not known."""
    change = charted.change
    if change is None or change["before"]["stages"] is None or change["since"]["stages"] is None:
        return NOTHING
    steps = f"{text.count(change['before']['steps'], 'step')} before, {change['since']['steps']:,} since"
    drawn = charts.waterfall(change["before"]["stages"], change["since"]["stages"])
    return panel("A step before the onset, and since", tag("p", steps, cls="hint"), drawn)


def step_tables(charted: Charted) -> Markup:
    """Return the stages and spans in numbers."""
    summary = charted.summary
    return join(
        panel("Steps", facts(contents.steps_facts(summary)), wide=True),
        block("Stages of a step", contents.stages_table(summary["stages"])),
        block("", contents.spans_table(summary["spans"], summary["steps"]["median_ms"])),
    )


def places(charted: Charted) -> Markup:
    """Return nodes and ranks."""
    summary = charted.summary
    return join(
        block("", contents.suspects_table(summary), wide=True),
        block("", contents.nodes_table(summary), wide=True),
        block("", contents.roles_table(summary), wide=True),
        block("", contents.ranks_table(summary), wide=True),
    )


def deaths(charted: Charted) -> Markup:
    """Return how ranks died, the first cause first, and their last words."""
    shown = [_death(death, charted.summary) for death in charted.deaths[:_MAX_DEATHS]]
    left = len(charted.deaths) - len(shown)
    more = tag("p", f"and {text.count(left, 'more rank')} that died after them", cls="hint") if left else None
    return panel("Ranks that died, the first cause first", shown, more, wide=True)


def _death(death: DeathInfo, summary: Mapping[str, Any]) -> Markup:
    node = (summary["ranks"].get(str(death["rank"])) or {}).get("node")
    when = f"{'at' if death['exact'] else 'about'} {text.date(moment(death['t_ns']))} UTC"
    place = place_words(death["step"], death["stage"])
    manner = ", ".join(filter(None, (f"{death['how']} {when}", place)))
    name = f"rank {death['rank']}{f' ({node})' if node else ''}: "
    words = death["traceback"] or (death["message"] if "\n" in death["message"] else "")
    return join(tag("p", tag("b", name), sentence(manner)), _lines(words.splitlines()))


def outputs(charted: Charted) -> Markup:
    """Return what ranks that died or hang printed last."""
    shown = []
    for output in charted.signals["output"][:_MAX_OUTPUTS]:
        lines = [f"{mark}  {line}" if mark else line for mark, line in output_lines(output).lines]
        shown += [tag("h3", f"Rank {output.rank}"), _lines(lines)] if lines else []
    return panel("Last output", shown, wide=True)


def stacks(charted: Charted) -> Markup:
    """Return where the ranks were in the last hang."""
    last = contents.last_stacks(charted.summary["verdicts"])[:_MAX_STACKS]
    shown = (join(tag("h3", text.ranks(s["ranks"])), _lines(s["text"].splitlines())) for s in last)
    return panel("Where the ranks were", shown, wide=True)


def _lines(lines: Sequence[str]) -> Markup:
    """Return lines as they are, the last ones of many, the ends of long ones."""
    kept = [line if len(line) <= _MAX_LINE else f"…{line[1 - _MAX_LINE :]}" for line in lines[-_MAX_LINES:]]
    return tag("pre", "\n".join(kept), tabindex=0) if kept else NOTHING


def layers(charted: Charted) -> Markup:
    """Return where the time goes inside the model, where that was measured."""
    block_ = charted.summary.get("layers", {})
    named = {one["layer"] for one in block_.get("findings", ())}
    return join(
        panel(
            "Layers",
            facts(layers_facts(block_, with_findings=False)),
            charts.icicle(block_.get("layers", ()), named),
            wide=True,
        ),
        block("", layers_table(block_), wide=True),
    )


def findings(charted: Charted) -> Markup:
    """Return what was found beside the verdict, whatever it is about, and what is only information."""
    listed = findings_in(charted.summary)
    verdict_key = next((one.key for one in listed if one.signal == "steps"), None)
    columns: Columns = {
        "": lambda one: f"{SIGNS[one.severity]} {one.severity}",
        "finding": lambda one: one.headline,
        ">cost": cost_of,
        "confidence": lambda one: one.confidence or "",
        "why": lambda one: one.why.replace("`", ""),
        "next": lambda one: one.next.replace("`", ""),
    }
    shown = [one for one in listed if one.key != verdict_key]
    unknown = memory_facts(charted.signals["memory"])
    return join(
        block("", Table("Findings beside the verdict", columns, shown), _MAX_FINDINGS, wide=True),
        panel("Memory", facts(unknown), wide=True) if any(line for _, line in unknown.pairs) else NOTHING,
    )


def shards(charted: Charted) -> Markup:
    """Return how FSDP2 has divided the model, and what each rank holds."""
    known = charted.summary.get("sharding")
    about = panel("How the model is divided", facts(sharding_facts(known, uneven=False)), wide=True)
    return join(about, block("", sharding_table(known), wide=True)) if known else NOTHING


def history(charted: Charted) -> Markup:
    """Return what was named when, what happened, and the runs."""
    summary = charted.summary
    return join(
        block("", contents.history_table(summary), wide=True),
        block("", contents.events_table(summary["events"]), wide=True),
        block("", contents.runs_table(summary["runs"], summary["run"]), wide=True),
    )


def surroundings(charted: Charted, folder: Path) -> Markup:
    """Return how it was run, with what, what the monitor has recorded and cost, and how to see more."""
    summary = charted.summary
    session = summary["session"]
    rows = [
        {"name": name, "value": value, "ranks": text.ranks(same["ranks"])}
        for same in charted.environment[:_MAX_ALIKE]
        for name, value in same["values"].items()
    ]
    settings = [{"setting": name, "value": value} for name, value in charted.settings.items()][:_MAX_SETTINGS]
    run = Facts(
        ("Command", session["command"] or ""),
        ("Launcher", session["launcher"] or ""),
        ("Began", f"{text.date(session['started_at'])} UTC" if session["started_at"] else ""),
        ("Ended", f"{text.date(session['ended_at'])} UTC" if session["ended_at"] else ""),
    )
    return join(
        panel("How it was run", facts(run), grid("Settings that are not as by default", settings)),
        panel("Environment", grid("Environment", rows)),
        panel("Monitor", _monitor(summary)),
        panel("To see more", _more(folder), wide=True),
    )


def _monitor(summary: Mapping[str, Any]) -> Iterable[Markup]:
    rows, spent = contents.ledger_facts(summary["ledger"]), contents.overhead_facts(summary["overhead"])
    return facts(rows), facts(spent)


def _more(folder: Path) -> list[Markup]:
    """Return which bundles there are, and how the web app and the other files are opened."""
    here, (count, newest) = shlex.quote(str(folder)), bundles_in(folder)
    kept = "The bundle of its incident" if count == 1 else f"The newest of its {count:,} bundles of incidents"
    return [
        *([tag("p", f"{kept}, in {folder}:"), tag("pre", "\n".join(newest), tabindex=0)] if newest else []),
        tag("p", "Each step, rank and node in the web app, on the machine that has the session:"),
        tag("pre", f"traceml-ray dashboard {here}", tabindex=0),
        tag("p", "This page anew, or all of it as data:"),
        tag("pre", f"traceml-ray report {here} --html\ntraceml-ray report {here} --json", tabindex=0),
    ]
