"""When alerts begin and end: the state machine, by hand and by random reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceml_ray.signals.finding import Finding
from traceml_ray.sinks.alerts.config import Config, Destination, Pace, Rule, Webhook, parse
from traceml_ray.sinks.alerts.rules import AlertMachine, AlertMessage, AlertState, Seen

SECOND = 1_000_000_000
WEBHOOK = Webhook(url="http://place")


def finding(label: str = "straggler", rank: int = 5, severity: str = "warning", **fields: object) -> Finding:
    return Finding(
        key=f"{label}:{rank}",
        signal="steps",
        label=label,
        severity=severity,
        ranks=(rank,),
        **fields,  # type: ignore[arg-type]
    )


DEAD = finding("rank_lost", severity="critical")


def config_of(*rules: Rule, group_s: float = 0.0, **pace: object) -> Config:
    """Return rules for one destination, `a`."""
    place = Destination(name="a", pace=Pace(group_s=group_s, **pace), place=WEBHOOK)  # type: ignore[arg-type]
    return Config(rules=rules or (Rule(for_s=10, resolve_after_s=20),), destinations=(place,))


class Play:
    """Shows a machine a session, one second at a time."""

    def __init__(self, config: Config, state: AlertState | None = None) -> None:
        self.config = config
        self.machine = AlertMachine(config, state)
        self.now_s = 1000
        self.messages: list[AlertMessage] = []
        self.by_name: dict[str, list[AlertMessage]] = {}

    def show(
        self, seconds: int, *findings: Finding, known: bool = True, run: str = "r", **fields: object
    ) -> None:
        for _ in range(seconds):
            self.now_s += 1
            seen = Seen(
                now_ns=self.now_s * SECOND,
                session="s",
                run=run,
                findings=findings if known else None,
                **fields,  # type: ignore[arg-type]
            )
            for name, messages in self.machine.step(seen).items():
                self.messages += messages
                self.by_name.setdefault(name, []).extend(messages)

    def restart(self, after_s: int = 0) -> None:
        """Go on with a new machine, from the state as it is stored."""
        stored = msgspec.json.decode(msgspec.json.encode(self.machine.state), type=AlertState)
        self.machine = AlertMachine(self.config, stored)
        self.now_s += after_s

    def events(self) -> list[tuple[str, str]]:
        return [(event.status, event.alert.label) for message in self.messages for event in message.events]


def test_a_finding_fires_once_it_has_lasted_and_is_resolved_once_it_has_been_gone() -> None:
    play = Play(config_of())
    play.show(10, finding())
    assert play.events() == [], "9 s since it was first seen"
    play.show(1, finding())
    assert play.events() == [("firing", "straggler")]
    play.show(600, finding())
    play.show(20)
    assert len(play.events()) == 1
    play.show(1)
    assert play.events()[1:] == [("resolved", "straggler")]
    alert = play.messages[1].events[0].alert
    assert (alert.ended_ns or 0) - alert.started_ns == (600 + 11 + 21 - 1) * SECOND


def test_a_verdict_that_flaps_sends_one_alert() -> None:
    play = Play(config_of())
    for _ in range(50):
        play.show(9, finding())
        play.show(3)
    assert play.events() == [], "it never lasted 10 s"
    play.show(12, finding())
    for _ in range(50):
        play.show(15)
        play.show(2, finding())
    assert play.events() == [("firing", "straggler")]


def test_another_rank_or_stage_is_the_same_alert_and_another_label_is_not() -> None:
    play = Play(config_of())
    play.show(12, finding(rank=5))
    play.show(60, finding(rank=3))
    assert play.events() == [("firing", "straggler")]
    play.show(30, finding("imbalance"))
    assert play.events()[1:] == [("firing", "imbalance"), ("resolved", "straggler")]
    assert play.messages[-1].events[0].alert.findings[0].ranks == (3,), "as it was last"


def test_no_news_is_not_good_news() -> None:
    play = Play(config_of())
    play.show(5, finding())
    play.show(1000, known=False)
    assert play.events() == []
    play.show(12, finding())
    play.show(1000, known=False)
    play.show(10)
    play.show(1000, known=False)
    assert play.events() == [("firing", "straggler")]
    play.show(15)
    assert play.events()[1:] == [("resolved", "straggler")], "it was known to be gone for 20 s"


def test_what_was_not_known_meanwhile_did_not_last() -> None:
    play = Play(config_of(Rule(for_s=1, resolve_after_s=1)))
    for _ in range(3):
        play.show(1, finding())
        play.show(5, known=False)
    assert play.events() == []


@pytest.mark.parametrize("blind", ["steps_unknown", "slowness_unknown", "partial"])
def test_what_cannot_be_seen_is_not_resolved(blind: str) -> None:
    play = Play(config_of())
    play.show(12, finding())
    play.show(600, DEAD, **{blind: True})
    assert ("resolved", "straggler") not in play.events()
    play.show(30, DEAD)
    assert ("resolved", "straggler") in play.events()


def test_a_failure_that_is_gone_is_resolved_though_another_one_is_there() -> None:
    play = Play(config_of())
    play.show(12, finding("hang", severity="critical"))
    play.show(60, DEAD, slowness_unknown=True)
    assert ("resolved", "hang") in play.events()


def test_findings_that_begin_together_are_one_message() -> None:
    play = Play(config_of(group_s=10))
    play.show(5, finding())
    play.show(30, finding(), finding("imbalance"))
    assert [len(message.events) for message in play.messages] == [2]


def test_a_machine_that_stood_still_does_not_count_the_time() -> None:
    play = Play(config_of(Rule(for_s=60, resolve_after_s=60)))
    play.show(1, finding())
    play.now_s += 3600
    play.show(1, finding())
    assert play.events() == []


def test_a_restart_sends_nothing_again_and_resolves_what_it_has_not_seen_begin() -> None:
    play = Play(config_of())
    play.show(12, finding())
    play.restart(after_s=300)
    play.show(60, finding())
    assert play.events() == [("firing", "straggler")]
    play.restart(after_s=300)
    play.show(20)
    assert len(play.events()) == 1, "it may have come back while nobody looked"
    play.show(1)
    assert play.events()[1:] == [("resolved", "straggler")]
    assert len({message.id for message in play.messages}) == 2


def test_the_end_of_a_run_ends_its_alerts_once() -> None:
    play = Play(config_of())
    play.show(12, finding())
    play.show(5, finding(), over=True, outcome="finished")
    assert play.events() == [("firing", "straggler"), ("ended", "straggler")]
    assert play.messages[-1].outcome == "finished"
    play.restart()
    play.show(5, finding(), over=True, outcome="finished")
    assert len(play.messages) == 2


def test_a_run_that_fails_says_why_however_short_that_was_seen() -> None:
    play = Play(config_of())
    play.show(2, finding())
    play.show(1, DEAD, finding(), over=True, outcome="failed")
    assert play.events() == [("firing", "rank_lost"), ("ended", "rank_lost")]


def test_a_run_that_fails_without_a_finding_is_an_alert() -> None:
    play = Play(config_of())
    play.show(9, over=True, outcome="failed", exit_code=3, run="")
    assert play.events() == [("firing", "run_failed"), ("ended", "run_failed")]
    assert "exit code 3" in play.messages[0].events[0].alert.findings[0].why


def test_a_run_that_is_stopped_or_finished_is_no_alert() -> None:
    for outcome in ("stopped", "finished", "ended"):
        play = Play(config_of())
        play.show(3)
        play.show(3, DEAD, over=True, outcome=outcome)
        assert play.messages == []


def test_the_next_run_ends_the_alerts_of_the_one_before() -> None:
    play = Play(config_of())
    play.show(12, finding())
    play.show(30, finding(), run="r2")
    assert play.events() == [("firing", "straggler"), ("ended", "straggler"), ("firing", "straggler")]
    assert [event.alert.run for message in play.messages for event in message.events] == ["r", "r", "r2"]


def test_over_the_limit_a_change_waits_and_what_takes_itself_back_is_counted() -> None:
    play = Play(config_of(Rule(resolve_after_s=0), per_hour=2))
    for _ in range(5):
        play.show(10, finding())
        play.show(10)
    assert play.events() == [("firing", "straggler"), ("resolved", "straggler")]
    play.show(1, finding())
    play.show(3600, finding())
    assert play.events()[2:] == [("firing", "straggler")]
    assert play.messages[-1].dropped == 8


def test_over_the_limit_what_is_critical_is_sent() -> None:
    play = Play(config_of(Rule(), per_hour=1))
    play.show(2, finding())
    play.show(2, finding(), finding("imbalance"))
    assert len(play.messages) == 1
    play.show(2, finding(), finding("imbalance"), DEAD)
    assert [event.alert.label for event in play.messages[1].events] == ["imbalance", "rank_lost"]


def test_what_goes_on_is_repeated_where_that_is_asked_for_also_while_nothing_is_known() -> None:
    play = Play(config_of(Rule(), repeat_s=60))
    play.show(61, finding())
    play.show(120, known=False)
    assert [status for status, _ in play.events()] == ["firing", *["still_firing"] * 3]


def test_a_rule_names_labels_severity_cost_and_destinations() -> None:
    text = """
    [[rule]]
    severity = "critical"
    to = ["pager"]
    [[rule]]
    labels = ["memory_*", "straggler"]
    cost = 10
    to = ["team"]
    [to.pager]
    kind = "webhook"
    url = "http://a"
    [to.team]
    kind = "webhook"
    url = "http://b"
    """
    cheap, dear = finding(cost=0.05), finding(cost=0.2)
    creep = finding("memory_creep", severity="critical", cost=None)
    for shown, expected in (
        ([cheap], {}),
        ([dear], {"team": ["straggler"]}),
        ([finding("imbalance", cost=0.5)], {}),
        ([creep], {"pager": ["memory_creep"]}),
        ([DEAD, dear], {"pager": ["rank_lost"], "team": ["straggler"]}),
    ):
        play = Play(parse(text))
        play.show(30, *shown)
        labels = {n: [e.alert.label for m in ms for e in m.events] for n, ms in play.by_name.items() if ms}
        assert labels == expected


LABELS = ("straggler", "imbalance", "rank_lost")
LOOKS = st.lists(
    st.tuples(
        st.sets(st.sampled_from(LABELS)),  # what is seen
        st.integers(1, 40),  # for how many seconds
        st.sampled_from(["known", "known", "known", "unknown", "restart", "run", "over"]),
    ),
    max_size=25,
)
SPANS = st.sampled_from([0.0, 3.0, 10.0, 30.0])


@settings(max_examples=300, deadline=None)
@given(LOOKS, SPANS, SPANS, SPANS, st.sampled_from([1, 3, 100]))
def test_every_alert_begins_once_and_ends_once_and_no_event_is_lost(
    looks: Sequence[tuple[set[str], int, str]], for_s: float, after_s: float, group_s: float, per_hour: int
) -> None:
    play = Play(config_of(Rule(for_s=for_s, resolve_after_s=after_s), group_s=group_s, per_hour=per_hour))
    run = 0
    for labels, seconds, how in looks:
        findings = [
            finding(label, severity="critical" if label == "rank_lost" else "warning") for label in labels
        ]
        run += how == "run"
        if how == "restart":
            play.restart()
        if how == "over":
            play.show(
                seconds, *findings, run=f"r{run}", over=True, outcome="failed" if seconds % 2 else "finished"
            )
            run += 1
        play.show(seconds, *findings, run=f"r{run}", known=how != "unknown")
        course = play.machine.state.courses["a"]
        assert course.produced == course.sent + course.dropped + len(course.pending)
    play.show(1, run=f"r{run}", over=True, outcome="stopped")
    course = play.machine.state.courses["a"]
    events = [(event.alert.key, event.status) for message in play.messages for event in message.events]
    assert course.pending == [] and course.active == {}
    assert course.produced == len(events) + course.dropped
    firing: Counter[str] = Counter()
    for key, status in events:
        firing[key] += 1 if status == "firing" else -1
        assert firing[key] in (0, 1), f"{key} {status}"
    assert not +firing, "each one was resolved or has ended"
    assert sum(message.dropped for message in play.messages) + course.unsaid == course.dropped


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 19)), max_size=40), st.integers(11, 30))
def test_flapping_faster_than_its_limits_sends_at_most_one(
    flaps: Sequence[tuple[int, int]], first_s: int
) -> None:
    """Present for less than `for` (10 s), or gone for less than `resolve_after` (20 s)."""
    before, after = Play(config_of()), Play(config_of())
    after.show(first_s, finding())
    for present_s, gone_s in flaps:
        for play in (before, after):
            play.show(present_s, finding())
            play.show(gone_s)
    assert before.events() == []
    assert after.events() == [("firing", "straggler")]
