"""What a message says to a person: in plain text, and in the JSON of webhooks, Slack and Alertmanager."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.signals.finding import Finding

from .rules import FAILURES, Alert, AlertEvent, AlertMessage

_MOST_CHARS = 2900
"""Largest number of characters of a block of Slack, less what escaping may add."""
_ORDER = ("firing", "ended", "resolved", "still_firing")
_BEGIN = {"firing": "FIRING", "still_firing": "STILL FIRING", "resolved": "RESOLVED", "ended": "ENDED"}
_HELD_S = 3600.0
"""How long Alertmanager keeps the reason for a failed run, which nobody sends again."""


def events_of(message: AlertMessage) -> list[AlertEvent]:
    """Return the events, those to be read first coming first, with one for each alert."""
    events = {event.alert.key: event for event in message.events if event.status != "ended"}
    for event in message.events:
        events.setdefault(event.alert.key, event)  # of one that begins with the end, the beginning is told
    critical = [event for event in events.values() if event.alert.severity == "critical"]
    return sorted(events.values(), key=lambda event: (_ORDER.index(event.status), event not in critical))


def headline(alert: Alert) -> str:
    """Return what an alert is about in one line: "straggler: rank 5 (node-1) in data, and 2 more"."""
    more = len(alert.findings) - 1 + alert.more
    return text.one_line(alert.findings[0].headline) + (f", and {more:,} more" if more else "")


def title(message: AlertMessage) -> str:
    """Return a message in one line, for a subject or a notification."""
    first, *rest = events_of(message)
    more = f" (+{len(rest):,})" if rest else ""
    test = "TEST " if message.test else ""
    return f"[{test}{_begin(message, first)}] {message.session}: {headline(first.alert)}{more}"


def _begin(message: AlertMessage, event: AlertEvent) -> str:
    if message.outcome == "failed" and event.status in ("firing", "ended"):
        return "RUN FAILED"
    return _BEGIN[event.status]


def lines(message: AlertMessage) -> list[str]:
    """Return a message as lines of plain text, "" between its parts."""
    parts: list[str] = []
    for event in events_of(message):
        is_new = event.status == "firing"
        head = f"{_begin(message, event)} ({event.alert.severity})"
        parts += [*(_whole(event.alert, head) if is_new else _brief(event)), ""]
    parts.append(_about(message))
    if message.dropped:
        events = text.count(message.dropped, "event")
        parts.append(f"{events} since the last message: not sent, because they took each other back.")
    return [*parts, message.link] if message.link else parts


def body(message: AlertMessage) -> str:
    """Return a message as plain text."""
    return "\n".join(lines(message)) + "\n"


def _about(message: AlertMessage) -> str:
    name = message.session
    run = (
        f", run {text.one_line(message.run_name)}" if message.run_name not in ("", name, message.run) else ""
    )
    world = f", {text.count(message.world, 'rank')}" if message.world else ""
    step = "" if message.step is None else f", step {message.step:,}"
    ended = "" if message.outcome == "running" else f". The run has ended: {message.outcome}"
    return f"Session {text.one_line(name)}{run}{world}{step}{ended}. {moment(message.made_ns)}"


def _whole(alert: Alert, head: str) -> list[str]:
    parts = [f"{head}: {headline(alert)}"]
    for number, one in enumerate(alert.findings):
        if number:
            parts += ["", text.one_line(one.headline)]
        rows = ("Cost", cost(one)), ("Since", since(one)), ("Why", one.why), ("Next", one.next)
        parts += [f"{name}: {text.one_line(value)}" for name, value in rows if value]
    if alert.more:
        parts += ["", f"{alert.more:,} more of this kind."]
    return parts


def _brief(event: AlertEvent) -> list[str]:
    alert = event.alert
    end_ns = alert.ended_ns
    lasted = "" if end_ns is None else f", after {text.duration((end_ns - alert.started_ns) / 1e9)}"
    return [f"{_BEGIN[event.status]}: {headline(alert)}{lasted}"]


def cost(finding: Finding) -> str:
    """Return what a finding costs: "18 % of the time since it began (41 s)"; "": not known."""
    if finding.cost is None:
        return ""
    what = "the run" if finding.about == "run" else "the time since it began"
    seconds = "" if finding.cost_s is None else f" ({text.duration(finding.cost_s)} so far)"
    return f"{text.share(finding.cost)} of {what}{seconds}"


def since(finding: Finding) -> str:
    """Return when a finding began: "step 1,204, 02:13:20 UTC"; "": not known."""
    step = "" if finding.from_step is None else f"step {finding.from_step:,}"
    return ", ".join(filter(None, (step, moment(finding.from_ns))))


def moment(t_ns: int | None) -> str:
    """Return a time as "2026-11-27 02:13:20 UTC". The reader may be in another timezone."""
    if t_ns is None:
        return ""
    return datetime.fromtimestamp(t_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def to_json(message: AlertMessage) -> dict[str, Any]:
    """Return a message as the JSON of a webhook and a command."""
    return {
        "id": message.id,
        "title": title(message),
        "text": body(message),
        "time": _iso(message.made_ns),
        "session": message.session,
        "run": message.run,
        "run_name": message.run_name,
        "step": message.step,
        "world": message.world,
        "outcome": message.outcome,
        "link": message.link or None,
        "dropped": message.dropped,
        "test": message.test,
        "alerts": [{"status": event.status, **_alert(event.alert)} for event in message.events],
    }


def _alert(alert: Alert) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(alert)
    del fields["started_ns"], fields["ended_ns"]
    headlines = {
        "headline": headline(alert),
        "started_at": _iso(alert.started_ns),
        "ended_at": None if alert.ended_ns is None else _iso(alert.ended_ns),
    }
    return {**headlines, **fields}


def _iso(t_ns: int) -> str:
    return datetime.fromtimestamp(t_ns / 1e9, timezone.utc).isoformat(timespec="milliseconds")


def to_slack(message: AlertMessage) -> dict[str, Any]:
    """Return a message as the JSON of an incoming webhook of Slack."""
    sections = [f"*{_escaped(title(message))}*", *map(_escaped, _paragraphs(lines(message)))]
    blocks = [
        {"type": "section", "text": {"type": "mrkdwn", "text": part[:_MOST_CHARS]}} for part in sections[:45]
    ]
    return {"text": _escaped(title(message)), "blocks": blocks}


def _paragraphs(parts: Sequence[str]) -> list[str]:
    return [part for part in "\n".join(parts).split("\n\n") if part]


def _escaped(value: str) -> str:
    """Return a text in which nothing mentions people or makes links."""
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def to_alertmanager(
    message: AlertMessage, labels: dict[str, str], now_ns: int, lasts_s: float
) -> list[dict[str, Any]]:
    """
    Return a message as the body of `POST /api/v2/alerts`.

    Args:
        message: what is sent.
        labels: further labels of each alert.
        now_ns: the time at which it is sent.
        lasts_s: how long Alertmanager keeps an alert that is not sent again.
    """
    posted = {}
    for event in message.events:
        alert = event.alert
        if event.status in ("firing", "still_firing"):
            end_ns = now_ns + int(lasts_s * 1e9)
        elif event.status == "ended" and message.outcome == "failed" and alert.label in FAILURES:
            end_ns = now_ns + int(_HELD_S * 1e9)
        else:
            end_ns = alert.ended_ns or now_ns
        first = alert.findings[0]
        notes = {
            "summary": headline(alert),
            "description": "\n".join(_whole(alert, "")[1:]),
            "cost": cost(first),
            "next": first.next,
            "link": message.link,
        }
        named = {
            "session": message.session,
            "run": alert.run,
            "signal": alert.signal,
            "severity": alert.severity,
        }
        posted[alert.key] = {
            "labels": {"alertname": alert_name(alert.label), **_known({**labels, **named})},
            "annotations": _known(notes),
            "startsAt": _iso(alert.started_ns),
            "endsAt": _iso(end_ns),
            **({"generatorURL": message.link} if message.link else {}),
        }
    return [*posted.values()]


def alert_name(label: str) -> str:
    """Return a label as Prometheus names alerts: "rank_lost" → "TracemlRankLost"."""
    return "Traceml" + "".join(word.capitalize() for word in label.split("_"))


def _known(values: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}
