"""Renders a summary as plain text, at most 100 columns wide: `report.txt` and `traceml-ray report`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from traceml_ray.analysis.wording import seconds

WIDTH = 100
_MAX_RANKS = 32
_MAX_LINES = 20
_MAX_STACKS = 4
_MAX_STACK_LINES = 100
_LABEL = 11
_WORTH = 0.03


def render(summary: dict[str, Any], folder: Path) -> str:
    """Return the report on `summary` (schema `traceml_ray/summary/1`) of the session in `folder`."""
    parts = [
        _title(summary),
        _verdict(summary["verdict"], "GPU" if _has_gpus(summary) else "rank"),
        _steps(summary["steps"]) + _baseline(summary),
        _stages(summary["stages"]),
        _parts(summary["parts"], summary["steps"]["median_ms"]),
        _nodes(summary),
        _ranks(summary),
        _suspects(summary["suspects"]) if summary["verdict"]["label"] != "healthy" else [],
        _history(summary["episodes"], summary["brief"], summary["verdicts"]),
        _stacks(summary["verdicts"]),
        _events(summary["events"]),
        run_lines(summary["runs"], summary["run"]),
        ledger_lines(summary["ledger"]),
        _overhead(summary["overhead"]),
        _files(folder),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _title(summary: dict[str, Any]) -> list[str]:
    session = summary["session"]
    ranks, nodes = session["world_size"], session["nnodes"]
    size = f"{_count(ranks, 'rank')} on {_count(nodes, 'node')}" if ranks and nodes else None
    if size and session["silent_ranks"]:
        size += f" (nothing from {_rank_list(session['silent_ranks'])})"
    status = session["status"]
    if status == "failed" and session["exit_code"] is not None:
        status += f" (exit code {session['exit_code']})"
    facts = [status, session["launcher"], size, session["strategy"], _duration(session)]
    title = f"traceml-ray · session {session['id']}"
    lines = [title, "=" * len(title), _cut(" · ".join(fact for fact in facts if fact))]
    return lines + _run_of(summary["runs"], summary["run"])


def _run_of(runs: Sequence[dict[str, Any]], shown: str | None) -> list[str]:
    """Say which run this is of, where there is more than one or it has a name of its own."""
    for at, run in enumerate(runs):
        if run["id"] == shown and (len(runs) > 1 or run["name"] != run["id"]):
            of = f" ({at + 1} of {len(runs)})" if len(runs) > 1 else ""
            return [_cut(f"run {run['name']}{of}: {run['status']}")]
    return []


def run_lines(runs: Sequence[dict[str, Any]], shown: str | None) -> list[str]:
    """Return the list of runs, where there is more than one; `shown` is the one that the rest is of."""
    rows = [
        (
            run["name"],
            run["status"],
            "n/a" if run["started_at"] is None else run["started_at"][11:19],
            "n/a" if run["world_size"] is None else str(run["world_size"]),
            str(run["attempts"]),
            str(run["ledger"]["stored"]),
            (run["label"] or "n/a").replace("_", " ") + " (shown here)" * (run["id"] == shown),
        )
        for run in runs[-_MAX_LINES:]
    ]
    headers = ("run", "status", "began (UTC)", ">ranks", ">attempts", ">rows", "verdict")
    return table("Runs of this session", headers, rows) if len(runs) > 1 else []


def _has_gpus(summary: dict[str, Any]) -> bool:
    return any(node["gpus"] for node in summary["system"]["nodes"])


def named(verdict: dict[str, Any]) -> str:
    """Return what a verdict names in one line: "straggler: rank 5 (node-1) in data"."""
    told = str(verdict["label"]).replace("_", " ")
    if verdict["ranks"]:
        node = f" ({verdict['node']})" if verdict["node"] else ""
        told += f": {_rank_list(verdict['ranks'])}{node}"
    if verdict["label"] == "stalled":
        told += f" in {verdict['part']}"
    elif verdict["stages"] or verdict["stage"]:
        told += " in " + " and ".join(verdict["stages"] or [verdict["stage"]])
    return told


def _verdict(verdict: dict[str, Any], unit: str) -> list[str]:
    facts = []
    if verdict["confidence"]:
        facts.append(f"confidence {verdict['confidence']}")
    if verdict["chronic"] is not None or verdict["transient"]:
        often = "transient" if verdict["transient"] else "now and then"
        facts.append("chronic" if verdict["chronic"] else often)
    if verdict["cost_pct"] and verdict["label"] != "healthy":
        facts.append(f"costs {verdict['cost_pct']:.0f} % of the step")
        facts.append(f"{verdict['gpu_hours_per_hour']:.2f} {unit}-hours per hour")
    if verdict["lost_s"]:
        facts.append(lost(verdict))
    lines = labelled("Verdict", named(verdict))
    if facts:
        lines += labelled("", ", ".join(facts))
    lines += labelled("Why", verdict["why"]) if verdict["why"] else []
    lines += labelled("", verdict["note"]) if verdict["note"] else []
    lines += _machine(verdict["machine"] or ())
    return lines + (labelled("Next", verdict["next"]) if verdict["next"] else [])


def _machine(oddities: Sequence[dict[str, Any]]) -> list[str]:
    """Say what else was odd on the nodes named: beside the verdict, not as its cause."""
    lines = []
    for node in dict.fromkeys(odd["node"] for odd in oddities):
        told = "; ".join(odd["text"] for odd in oddities if odd["node"] == node)
        lines += labelled("", f"at the same time on {node}: {told}")
    return lines


def _steps(steps: dict[str, Any]) -> list[str]:
    if steps["median_ms"] is None:
        return []
    times = f"median {_ms(steps['median_ms'])}, p95 {_ms(steps['p95_ms'])}"
    several = steps["exchanges"] > 1.05  # else one here and there is cut in two
    of = f" of {steps['exchanges']:.3g} exchanges" if several else ""
    error_pct = (steps["covers"] or {}).get("error_pct")
    within = f"; medians and percentiles within {error_pct:.3g} %" if error_pct else ""
    text = f"{_count(steps['count'], 'step')}{of}, {times} (of the {steps['judged']} after warm-up{within})"
    lines = labelled("Steps", text)
    skew = []
    if steps["worst_rank"] is not None and steps["global_skew_pct"] is not None:
        worst = steps["per_rank_median_ms"][str(steps["worst_rank"])]
        skew.append(f"rank {steps['worst_rank']} works longest: {_ms(worst)} a step without waiting,")
        skew.append(f"{steps['global_skew_pct']:.1f} % over the median of {_ms(steps['busy_median_ms'])}")
    lines += labelled("Skew", " ".join(skew)) if skew else []
    if steps["worst_node"] is not None and steps["node_skew_pct"] is not None:
        text = f"slowest node {steps['worst_node']}, {steps['node_skew_pct']:.1f} % over the fastest"
        lines += labelled("", text)
    return lines + _covers(steps)


def _covers(steps: dict[str, Any]) -> list[str]:
    """Say so where the numbers and the verdict leave out the oldest rows."""
    covers = steps["covers"]
    if covers is None or covers["rows_pct"] == 100:
        return []
    what = "medians, shares, the verdict and its history" if covers["counted_pct"] == 100 else "all numbers"
    text = f"not the whole run: {what} are of steps {covers['from_step']}–{covers['to_step']}, "
    text += f"{covers['rows_pct']:.3g} % of the rows that were stored"
    if covers["counted_pct"] == 100:
        text += f"; the {steps['count']} steps and their mean, {_ms(steps['mean_ms'])}, are of the whole run"
    return labelled("Covers", text)


def _baseline(summary: dict[str, Any]) -> list[str]:
    """Say what drift is measured from, where a person gave it or something has drifted."""
    baseline = summary["baseline"]
    labels = {verdict["label"] for verdict in [summary["verdict"], *summary["verdicts"]]}
    if baseline is None or not (baseline["source"] or "group_wide" in labels):
        return []
    where = baseline["source"] or f"steps {baseline['from_step']}–{baseline['to_step']} of this run"
    return labelled("Baseline", f"{where}: {_ms(baseline['step_ms'])} a step")


def _stages(stages: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        (
            stage["name"],
            _number(stage["exposed_ms"]),
            f"{100 * stage['exposed_share']:.1f} %",
            _bar(stage["exposed_share"]),
            _number(stage["median_ms"]),
            _number(stage["max_ms"]),
            f"rank {stage['worst_rank']}" if _stands_out(stage) else "",
        )
        for stage in stages
    ]
    headers = ("stage", ">exposed ms", ">share", "", ">median ms", ">largest ms", "of")
    return table("Where the time of a step goes (exposed: what the job waited for)", headers, rows)


def _parts(parts: Sequence[dict[str, Any]], step_ms: float | None) -> list[str]:
    """Show the parts that take enough of a step to be worth a look."""
    rows = [
        (
            part["name"],
            part["stage"],
            _number(part["median_ms"]),
            _number(part["max_ms"]),
            f"rank {part['worst_rank']}" if _stands_out(part) else "",
            "n/a" if part["share"] is None else f"{100 * part['share']:.0f} %",
        )
        for part in parts
        if step_ms and part["max_ms"] >= _WORTH * step_ms
    ]
    headers = ("part", "in", ">median ms", ">largest ms", "of", ">of its stage")
    return table("Parts inside the stages (mean per step)", headers, rows[:_MAX_LINES])


def _stands_out(stage: dict[str, Any]) -> bool:
    return stage["worst_rank"] is not None and stage["max_ms"] > 1.01 * stage["median_ms"]


def _nodes(summary: dict[str, Any]) -> list[str]:
    busy = summary["steps"]["per_node_median_ms"]
    system = {node["node_id"]: node for node in summary["system"]["nodes"]}
    rows = []
    for node in summary["session"]["nodes"]:
        name = node["hostname"]
        measured = system.get(node["node_id"], {})
        gpus = measured.get("gpus") or []
        load = [gpu["util_pct"]["median"] for gpu in gpus if gpu.get("util_pct")]
        rows.append(
            (
                name + " (lost)" * node["lost"],
                _ranges(node["ranks"]),
                _number(busy.get(name)),
                _spread(measured.get("cpu_pct"), 1, "%"),
                _spread(measured.get("mem_used_bytes"), 2**30, "GiB"),
                f"{len(gpus)} × {sum(load) / len(load):.0f} %" if load else "n/a",
            )
        )
    headers = ("node", "ranks", ">busy ms", ">cpu (peak)", ">memory (peak)", ">gpus")
    return table("Nodes", headers, rows)


def _ranks(summary: dict[str, Any]) -> list[str]:
    busy = summary["steps"]["per_rank_median_ms"]
    median = summary["steps"]["busy_median_ms"]
    ranks = summary["ranks"]
    shown, title = list(ranks), "Ranks"
    if len(shown) > _MAX_RANKS:
        worst = sorted(shown, key=lambda rank: (ranks[rank]["ended"] != "died", -(busy.get(rank) or 0)))
        shown, title = sorted(worst[:_MAX_RANKS], key=int), f"Ranks (the worst {_MAX_RANKS} of {len(ranks)})"
    rows = []
    for rank in shown:
        entry, time = ranks[rank], busy.get(rank)
        memory = summary["memory"]["per_rank"].get(rank, {}).get("rss_peak_bytes")
        restarts = f", attempt {entry['attempt']}" if entry["attempt"] else ""
        rows.append(
            (
                rank,
                entry["name"] or "",
                entry["node"] or "n/a",
                _number(time),
                f"{100 * (time / median - 1):+.1f} %" if time is not None and median else "n/a",
                "n/a" if memory is None else f"{memory / 2**20:.0f} MiB",
                "n/a" if entry["last_step"] is None else str(entry["last_step"]),
                (entry["exit_reason"] or entry["ended"] or "no last word") + restarts,
            )
        )
    headers = (">rank", "name", "node", ">busy ms", ">to median", ">peak rss", ">last step", "end")
    return table(title, headers, rows)


def _suspects(suspects: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        (
            f"rank {suspect['rank']}",
            suspect["node"],
            suspect["stage"],
            _number(suspect["excess_ms"]),
            f"{100 * suspect['share']:.1f} %",
            _number(suspect["gain_ms"]),
        )
        for suspect in suspects
    ]
    headers = ("rank", "node", "stage", ">late by ms", ">of step", ">mending saves ms")
    return table("Suspects", headers, rows)


def lost(verdict: Mapping[str, Any]) -> str:
    """Return what all that was named has cost over the run: "cost 41 s of 16 min"."""
    return f"cost {seconds(verdict['lost_s'])} of {seconds(verdict['elapsed_s'])}"


def brief(found: dict[str, Any]) -> str:
    """Return the findings that nobody was named for: "9 brief ones, 1.1 s in all"."""
    ones = "one brief one" if found["count"] == 1 else f"{found['count']:,} brief ones"
    return f"{ones}, {seconds(found['cost_s'])} in all" if found["count"] else ""


def _history(
    episodes: Sequence[dict[str, Any]], few: dict[str, Any], verdicts: Sequence[dict[str, Any]]
) -> list[str]:
    """Show the hangs, the episodes, and where nobody could be judged."""
    costly = {(episode["label"], episode["from_step"]) for episode in episodes}
    others = [v for v in verdicts if v["label"] != "healthy" and (v["label"], v["from_step"]) not in costly]
    stood = [verdict for verdict in others if verdict["began_ns"] is not None]
    blind = [verdict for verdict in others if verdict["label"] in ("telemetry_limited", "accounting_only")]
    rows = [
        (
            f"{_known(one['from_step'])}–{_known(one['to_step'])}",
            one["label"].replace("_", " "),
            ", ".join(one["stages"]) or "all" * (one["label"] == "group_wide"),
            _rank_list(one["ranks"]) if one["ranks"] else "",
            *_lasted(one),
        )
        for one in [*stood, *episodes, *blind][:_MAX_LINES]
    ]
    headers = ("steps", "verdict", "stage", "who", ">lasted", ">cost", ">of it")
    told = f"  {brief(few)}"
    return table("Episodes, the costliest first", headers, rows) + [told] * (few["count"] > 0)


def _lasted(one: dict[str, Any]) -> tuple[str, str, str]:
    if "cost_s" in one:
        share = "" if one["cost_pct"] is None else f"{one['cost_pct']:.0f} %"
        return seconds(one["seconds"]), seconds(one["cost_s"]), share
    if one["began_ns"] is None:
        return "", "", ""
    return "to the end" if one["lasted_s"] is None else seconds(one["lasted_s"]), "", ""


def _stacks(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """Show where the ranks stood in the last hang: the odd one's threads, then the others, once."""
    every = [span["stacks"] for span in verdicts if span["stacks"]]
    last = every[-1] if every else []
    lines = ["Where the ranks stood"] if last else []
    for stack in last[:_MAX_STACKS]:
        lines.append(f"  {_rank_list(stack['ranks'])}")
        for line in stack["text"].splitlines()[:_MAX_STACK_LINES]:
            lines.append("    " + (line if len(line) <= WIDTH - 4 else f"  …{line[-(WIDTH - 7) :]}"))
    return lines


def _events(events: Sequence[dict[str, Any]]) -> list[str]:
    silent = ("exit", "relay_start", "process_ended")
    worth = [event for event in events if event["message"] or event["kind"] not in silent]
    worth = [event for event in worth if event["kind"] not in ("stacks", "flight_recorder")]
    rows = [
        (
            "n/a" if event["time"] is None else event["time"][11:19],
            event["kind"],
            event["node"] or "" if event["rank"] is None else f"rank {event['rank']}",
            event["message"].partition("\n")[0],
        )
        for event in worth[-_MAX_LINES:]
    ]
    return table("Events (UTC)", ("time", "kind", "who", "what"), rows)


def ledger_lines(ledger: dict[str, Any]) -> list[str]:
    total = sum(ledger["dropped"].values())
    dropped = ", ".join(f"{where} {rows}" for where, rows in ledger["dropped"].items() if rows)
    text = f"{ledger['produced']} rows produced = {ledger['stored']} stored + {ledger['in_flight']} in flight"
    lines = labelled("Ledger", f"{text} + {total} dropped" + f" ({dropped})" * (total > 0))
    if ledger["folded"]:
        text = f"the oldest {ledger['folded']} stored rows are kept as sums and statistics, not one by one"
        lines += labelled("", text)
    unknown = [rank for rank, entry in ledger["per_rank"].items() if entry["unreported"] is None]
    if unknown:
        who = _rank_list([int(rank) for rank in unknown if rank.isdigit()]) or "a process of unknown rank"
        lines += labelled("", f"what {who} produced after the last report is not known")
    return lines


def _overhead(overhead: dict[str, Any]) -> list[str]:
    facts = [
        ("training_thread_us_per_step", "{:.1f} µs a step on the training thread"),
        ("agent_cpu_pct", "{:.2f} % of a core for the agent"),
        ("bytes_per_step", "{:.0f} bytes a step sent"),
    ]
    known = [text.format(overhead[name]) for name, text in facts if overhead[name] is not None]
    return labelled("Monitor", f"{', '.join(known)} ({overhead['of']})") if known else []


def _files(folder: Path) -> list[str]:
    return [f"{'Files':{_LABEL}}{folder}", f"{'':{_LABEL}}session.sqlite · summary.json · report.txt"]


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """
    Return a titled table; a header that begins with `>` is of a column of numbers. A column `name` in
    which nothing stands is left out. Nothing for no rows.
    """
    if not rows:
        return []
    kept = [at for at, header in enumerate(headers) if header != "name" or any(row[at] for row in rows)]
    headers, rows = [headers[at] for at in kept], [[row[at] for at in kept] for row in rows]
    table = [[header.lstrip(">") for header in headers], *([*row] for row in rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(headers))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if header.startswith(">") else cell.ljust(width)
            for cell, width, header in zip(row, widths, headers, strict=True)
        ]
        lines.append(_cut("  " + "  ".join(cells).rstrip()))
    return [title, *lines]


def labelled(label: str, text: str) -> list[str]:
    """Return `text`, wrapped, in the column beside `label`."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:{_LABEL}}", subsequent_indent=" " * _LABEL)


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def _bar(share: float) -> str:
    return "█" * round(20 * share)


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _ms(value: float | None) -> str:
    return "n/a" if value is None else f"{_number(value)} ms"


def _spread(spread: dict[str, float | None] | None, unit: int, name: str) -> str:
    if spread is None or spread["median"] is None or spread["peak"] is None:
        return "n/a"
    return f"{spread['median'] / unit:.1f} {name} ({spread['peak'] / unit:.1f})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}" if ranks else ""


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as `0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _duration(session: dict[str, Any]) -> str | None:
    if session["started_at"] is None or session["ended_at"] is None:
        return None
    times = [datetime.fromisoformat(session[name]) for name in ("started_at", "ended_at")]
    seconds = int((times[1] - times[0]).total_seconds())
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
