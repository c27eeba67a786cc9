"""The message of a test alert."""

from __future__ import annotations

from traceml_ray.signals.finding import Finding, key_of

from .rules import Alert, AlertEvent, AlertMessage

_SESSION = "test"


def trial(destination: str, link: str, now_ns: int) -> AlertMessage:
    """Return a message like the one of a real finding, which says that it is a test."""
    finding = Finding(
        key=key_of("straggler", [5], "data"),
        signal="steps",
        label="straggler",
        severity="warning",
        ranks=(5,),
        nodes=("node-1",),
        stages=("data",),
        from_step=1200,
        from_ns=now_ns - 300_000_000_000,
        cost=0.18,
        cost_s=54.0,
        why="This is a test of the alerts: no rank is late. A real alert has the reason here.",
        next="Nothing to do: the test has arrived.",
    )
    alert = Alert(
        key=f"{_SESSION}:steps:straggler:warning",
        run=_SESSION,
        signal="steps",
        label="straggler",
        severity="warning",
        findings=(finding,),
        started_ns=now_ns,
    )
    return AlertMessage(
        id=f"{_SESSION}/{destination}/{now_ns}",
        made_ns=now_ns,
        session=_SESSION,
        run=_SESSION,
        run_name=_SESSION,
        step=1500,
        world=8,
        outcome="running",
        link=link.replace("{session}", _SESSION),
        events=(AlertEvent(status="firing", alert=alert),),
        dropped=0,
        test=True,
    )
