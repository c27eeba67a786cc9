"""
When an alert begins and ends, and which messages say so: a state machine without clock, network or file. Its
whole state is a struct, so that a process that is started again continues where the last one was.

An alert is all findings of one run with the same signal, label and severity. If it moves to another rank or
stage it stays the same alert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Literal

import msgspec
from msgspec.structs import replace

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS
from traceml_ray.signals.finding import SEVERITIES, Finding
from traceml_ray.sinks.report import Report

from .config import RUN_FAILED, Config, Pace, Rule

EventStatus = Literal["firing", "still_firing", "resolved", "ended"]
_MOST_STEP_S = 10.0
"""Longest time between two looks that counts as time in which nothing changed, in s."""
_MOST_FINDINGS = 8
"""Largest number of findings in an alert. Further ones are counted."""
_MOST_RUNS = 8
_NO_DATA = "telemetry_limited"
FAILURES = {RUN_FAILED, *(label for label, meaning in LABELS.items() if meaning.kind == "failure")}
"""Labels of findings that end steps: the reasons for a run that fails."""
_HOUR_NS = 3_600_000_000_000
_KNOWN = ("waiting", "live", "ending", "idle", "finished", "stored")
"""States of a session in which its findings are up to date."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of one kind, from the first of them to the last."""

    key: str
    """Identifies the alert in its session: run, signal, label and severity."""
    run: str
    signal: str
    label: str
    severity: str
    findings: tuple[Finding, ...]
    """The newest of them, in the order of the list of findings."""
    more: int = 0
    """Number of further findings."""
    started_ns: int
    """When the first of them was seen (ns since the epoch)."""
    ended_ns: int | None = None
    """When it was resolved, or its run ended (ns since the epoch)."""


class AlertEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What a message says about one alert."""

    status: EventStatus
    """`ended`: the run has ended, and it is not known whether the finding would have gone on."""
    alert: Alert


class AlertMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What one destination is told at one moment."""

    id: str
    """Differs for each message of a session. A message that is sent again has the same id."""
    made_ns: int
    session: str
    run: str
    run_name: str
    step: int | None
    world: int
    outcome: str
    """How the run ended: finished, failed, stopped or ended; "running": it has not ended."""
    link: str
    """URL of the session's page; "": none."""
    events: tuple[AlertEvent, ...]
    dropped: int
    """Number of events since the previous message that were not sent: they took each other back."""
    test: bool = False
    """Whether a person sent it to try the destination."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a session at one moment."""

    now_ns: int
    session: str
    run: str
    """Id of the newest run; "": there is none yet."""
    run_name: str = ""
    step: int | None = None
    world: int = 0
    findings: tuple[Finding, ...] | None
    """None: not known at present, so nothing begins and nothing ends."""
    steps_unknown: bool = False
    """Whether nothing can be said about steps: no finding on steps ends."""
    slowness_unknown: bool = False
    """Whether steps have failed, or cannot be compared: no finding that makes steps slower ends."""
    partial: bool = False
    """Whether some ranks do not report: no finding that names ranks ends."""
    over: bool = False
    """Whether the run has ended."""
    outcome: str = "running"
    exit_code: int | None = None


class AlertWatch(msgspec.Struct, kw_only=True):
    """How an alert stands with one rule."""

    firing: bool = False
    present: bool | None = None
    """Whether the rule was met at the last look. None: not known."""
    lasted_s: float = 0.0
    """For how long it has been met; if it fires, for how long not."""


class Course(msgspec.Struct, kw_only=True):
    """What one destination has been told. produced = sent + dropped + pending, in events."""

    active: dict[str, Alert] = {}
    """The alerts that fire, by key, once all that is pending is sent."""
    pending: list[AlertEvent] = []
    pending_since_ns: int | None = None
    sent_ns: list[int] = []
    """Times of the messages of the last hour."""
    repeated_ns: int = 0
    number: int = 0
    """Number of messages so far."""
    produced: int = 0
    sent: int = 0
    dropped: int = 0
    unsaid: int = 0
    """Number of dropped events that no message has mentioned yet."""


class AlertState(msgspec.Struct, kw_only=True):
    """The state of the machine."""

    run: str = ""
    watches: dict[str, AlertWatch] = {}
    """By number of the rule and key of the alert."""
    alerts: dict[str, Alert] = {}
    """The newest findings of all alerts that are watched, by key."""
    courses: dict[str, Course] = {}
    """By name of the destination."""
    ended: list[str] = []
    """The runs whose end was told."""


def seen_of(report: Report, now_ns: int, session: str) -> Seen:
    """Return what a report says, as the machine needs it. `session` is the name of the session."""
    verdict = report.verdict
    kind = "" if verdict is None else LABELS[verdict.label].kind
    coverage = 1.0 if verdict is None or verdict.coverage is None else verdict.coverage
    known = report.state in _KNOWN and (verdict is not None or report.run_over)
    return Seen(
        now_ns=now_ns,
        session=session,
        run=report.run or "",
        run_name=report.run_name or report.run or "",
        step=report.step,
        world=report.world,
        findings=report.findings if known else None,
        steps_unknown=report.state == "ending" or (verdict is not None and verdict.label == _NO_DATA),
        slowness_unknown=kind in ("failure", "abstention"),
        partial=coverage < 1.0 or report.state == "ending",
        over=report.run_over,
        outcome=report.outcome,
        exit_code=report.exit_code,
    )


class AlertMachine:
    """
    Turns what is seen of a session into messages.

    Args:
        config: rules and destinations.
        state: of the machine before, if there was one.
    """

    def __init__(self, config: Config, state: AlertState | None = None) -> None:
        self._config = config
        self.state = state or AlertState()
        numbers = {str(number) for number in range(len(config.rules))}
        watches = self.state.watches.items()
        self.state.watches = {name: one for name, one in watches if name.partition("|")[0] in numbers}
        self._forget_when_seen()
        names = [one.name for one in config.destinations]
        self.state.courses = {name: self.state.courses.get(name) or Course() for name in names}
        self._last_ns: int | None = None

    def step(self, seen: Seen) -> dict[str, list[AlertMessage]]:
        """Return the messages that are to be sent now, by destination."""
        state, elapsed_s = self.state, 0.0
        if self._last_ns is not None:
            elapsed_s = min(max(0.0, (seen.now_ns - self._last_ns) / 1e9), _MOST_STEP_S)
        self._last_ns = seen.now_ns
        if seen.run and seen.run != state.run:
            if state.run:
                self._end(seen)
            state.run = seen.run
        if seen.over:
            if seen.run not in state.ended and seen.findings is not None:
                self._fire_failures(seen, seen.findings)
                self._end(seen)
                state.ended = [*state.ended[-_MOST_RUNS:], seen.run]
        elif seen.findings is not None:
            state.ended = [run for run in state.ended if run != seen.run]  # it has been started again
            self._look(seen, seen.findings, elapsed_s)
        else:
            self._forget_when_seen()
        return {one.name: [*self._due(one.name, one.pace, seen)] for one in self._config.destinations}

    def mark(self) -> object:
        """Return what differs whenever the state has changed so that it is to be stored."""
        state = self.state
        firing = [name for name, watch in state.watches.items() if watch.firing]
        counts = [(c.number, c.produced, c.dropped) for c in state.courses.values()]
        return state.run, firing, counts, [*state.ended]

    def _forget_when_seen(self) -> None:
        """Note that it is not known what has happened since the last look."""
        for watch in self.state.watches.values():
            watch.present = None

    def _look(self, seen: Seen, findings: Iterable[Finding], elapsed_s: float) -> None:
        """Compare the findings with the rules."""
        state, by_key = self.state, _by_key(seen.run, findings)
        for key, same in by_key.items():
            state.alerts[key] = _alert(key, seen, same, state.alerts.get(key))
        for number, rule in enumerate(self._config.rules):
            met = {key for key, same in by_key.items() if any(_meets(rule, one) for one in same)}
            prefix = f"{number}|"
            known = {name.removeprefix(prefix) for name in state.watches if name.startswith(prefix)}
            for key in sorted(met | known):
                watch = state.watches.setdefault(prefix + key, AlertWatch())
                if key not in met and _may_go_on(state.alerts[key], seen):
                    watch.present = None
                elif not _advance(watch, rule, key in met, elapsed_s):
                    del state.watches[prefix + key]
        self._compare(seen)
        kept = {name.partition("|")[2] for name in state.watches}
        state.alerts = {key: alert for key, alert in state.alerts.items() if key in kept}

    def _compare(self, seen: Seen) -> None:
        """Note for each destination which alerts have begun or ended for it."""
        for destination in self._config.destinations:
            course = self.state.courses[destination.name]
            firing = {
                name.partition("|")[2]
                for name, watch in self.state.watches.items()
                if watch.firing and _goes_to(self._config.rules, name, destination.name)
            }
            for key in sorted(firing - course.active.keys()):
                _note(course, "firing", self.state.alerts[key], seen.now_ns)
            for key in sorted(course.active.keys() - firing):
                _note(course, "resolved", course.active[key], seen.now_ns)
            course.active = {key: self.state.alerts[key] for key in sorted(firing)}

    def _fire_failures(self, seen: Seen, findings: Iterable[Finding]) -> None:
        """Have the reason for a failed run sent, however short it was there."""
        if seen.outcome != "failed":
            return
        failures = [one for one in findings if _is_failure(one)] or [_run_failed(seen)]
        for key, same in _by_key(seen.run, failures).items():
            alert = _alert(key, seen, same, self.state.alerts.get(key))
            for destination in self._config.destinations:
                course = self.state.courses[destination.name]
                met = any(
                    _meets(rule, one)
                    for rule in self._config.rules
                    for one in same
                    if destination.name in rule.to or not rule.to
                )
                if met and key not in course.active:
                    _note(course, "firing", alert, seen.now_ns)
                if met:
                    course.active[key] = alert

    def _end(self, seen: Seen) -> None:
        """End all alerts: their run has ended."""
        for course in self.state.courses.values():
            for alert in course.active.values():
                _add(
                    course,
                    AlertEvent(status="ended", alert=replace(alert, ended_ns=seen.now_ns)),
                    seen.now_ns,
                )
            course.active = {}
        self.state.watches, self.state.alerts = {}, {}

    def _due(self, name: str, pace: Pace, seen: Seen) -> Iterator[AlertMessage]:
        """Yield the message that a destination is to be sent now, if there is one."""
        course, now_ns = self.state.courses[name], seen.now_ns
        course.sent_ns = [sent for sent in course.sent_ns if sent > now_ns - _HOUR_NS]
        if not course.pending:
            course.pending_since_ns = None
        grouped = now_ns - (course.pending_since_ns or now_ns) >= pace.group_s * 1e9
        ended = seen.over or any(event.status == "ended" for event in course.pending)
        urgent = any(e.status == "firing" and e.alert.severity == "critical" for e in course.pending)
        allowed = len(course.sent_ns) < pace.per_hour
        sends = bool(course.pending) and (ended or (grouped and (urgent or allowed)))
        repeats = bool(pace.repeat_s) and now_ns - course.repeated_ns >= pace.repeat_s * 1e9 and allowed
        going_on = [
            AlertEvent(status="still_firing", alert=alert)
            for key, alert in course.active.items()
            if pace.repeat_s and not any(event.alert.key == key for event in course.pending)
        ]
        if not sends and not (repeats and going_on and not course.pending):
            return
        events = (*course.pending, *going_on)
        course.number += 1
        yield AlertMessage(
            id=f"{seen.session}/{name}/{course.number}",
            made_ns=now_ns,
            session=seen.session,
            run=seen.run,
            run_name=seen.run_name,
            step=seen.step,
            world=seen.world,
            outcome=seen.outcome if seen.over else "running",
            link=self._config.link.replace("{session}", seen.session),
            events=events,
            dropped=course.unsaid,
        )
        course.sent += len(course.pending)
        course.unsaid, course.pending, course.pending_since_ns = 0, [], None
        course.sent_ns.append(now_ns)
        course.repeated_ns = now_ns


def _by_key(run: str, findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    by_key: dict[str, list[Finding]] = {}
    for one in findings:
        by_key.setdefault(f"{run}:{one.signal}:{one.label}:{one.severity}", []).append(one)
    return by_key


def _alert(key: str, seen: Seen, findings: list[Finding], before: Alert | None) -> Alert:
    first = findings[0]
    return Alert(
        key=key,
        run=seen.run,
        signal=first.signal,
        label=first.label,
        severity=first.severity,
        findings=tuple(findings[:_MOST_FINDINGS]),
        more=max(0, len(findings) - _MOST_FINDINGS),
        started_ns=seen.now_ns if before is None else before.started_ns,
    )


def _meets(rule: Rule, finding: Finding) -> bool:
    """Return whether a finding meets all conditions of a rule."""
    if rule.labels and not any(fnmatchcase(finding.label, label) for label in rule.labels):
        return False
    if SEVERITIES.index(finding.severity) > SEVERITIES.index(rule.severity):
        return False
    return rule.cost <= 0 or (finding.cost is not None and 100 * finding.cost >= rule.cost)


def _goes_to(rules: tuple[Rule, ...], name: str, destination: str) -> bool:
    """Return whether the rule of that watch sends to a destination."""
    to = rules[int(name.partition("|")[0])].to
    return not to or destination in to


def _may_go_on(alert: Alert, seen: Seen) -> bool:
    """Return whether an alert that is not seen may go on: what is known says nothing about it."""
    of_steps = alert.signal == "steps"
    if of_steps and (seen.steps_unknown or (seen.slowness_unknown and not _is_failure(alert))):
        return True
    return seen.partial and any(one.ranks for one in alert.findings)


def _is_failure(one: Finding | Alert) -> bool:
    return one.label in FAILURES


def _advance(watch: AlertWatch, rule: Rule, present: bool, elapsed_s: float) -> bool:
    """Add the time since the last look. Return whether the alert is still watched."""
    if present is watch.firing:
        watch.lasted_s = 0.0  # it fires, and is there
    elif watch.present is present:
        watch.lasted_s += elapsed_s
    if not watch.firing and not present:
        return False
    watch.present = present
    if present and not watch.firing and watch.lasted_s >= rule.for_s:
        watch.firing, watch.lasted_s = True, 0.0
    return not (watch.firing and not present and watch.lasted_s >= rule.resolve_after_s)


def _note(course: Course, status: EventStatus, alert: Alert, now_ns: int) -> None:
    """Add an event, unless it takes back one that was not sent yet: then both are dropped."""
    event = AlertEvent(status=status, alert=alert if status == "firing" else replace(alert, ended_ns=now_ns))
    contrary = [e for e in course.pending if e.alert.key == alert.key and e.status != "ended"]
    if not contrary:
        _add(course, event, now_ns)
        return
    course.pending = [e for e in course.pending if e is not contrary[-1]]
    course.produced += 1
    course.dropped += 2
    course.unsaid += 2


def _add(course: Course, event: AlertEvent, now_ns: int) -> None:
    course.pending = [*course.pending, event]
    course.produced += 1
    if course.pending_since_ns is None:
        course.pending_since_ns = now_ns


def _run_failed(seen: Seen) -> Finding:
    code = "" if seen.exit_code is None else f" with exit code {seen.exit_code}"
    return Finding(
        key=RUN_FAILED,
        signal="steps",
        label=RUN_FAILED,
        severity="critical",
        why=f"The run has failed{code}. No finding says why.",
        next=f"Read the last output of its ranks: traceml-ray report {text.one_line(seen.session)}",
    )
