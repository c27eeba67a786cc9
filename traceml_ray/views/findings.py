"""The findings of a run being viewed, in order, and which one to read first."""

from __future__ import annotations

from traceml_ray.reports.headlines import conclude
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.views import VIEWS, findings_of, questions_on_findings
from traceml_ray.store import query
from traceml_ray.store.summary_shape import Conclusion

from .run_state import RunState
from .session_poll import SessionPoll
from .state import RUNNING


def found_in(cache: SessionPoll, run: RunState, state: str) -> list[Finding]:
    """
    Return the findings of a run. For a run that is over, they come from its summary. The verdict's findings
    belong to the verdict that is shown. For a large live job these may be the only findings, see
    `View.every_s`.
    """
    if run.verdict is None:
        return []
    if state not in RUNNING:
        stored = cache.ask(query.Findings(run.id))
        return findings_of(run.verdict, run.episodes, {}) if stored is None else stored
    answers = {}
    for name, question in questions_on_findings(run.id).items():
        every_s = VIEWS[name].every_s(run.ranks, run.world)
        answer = None if every_s is None else cache.ask(question, every_s=every_s)
        if answer is not None:
            answers[name] = answer
    return findings_of(run.verdict, run.episodes, answers)


def first_of(run: RunState, findings: list[Finding]) -> Conclusion | None:
    """Return the conclusion to read first. None: there is no verdict yet."""
    return None if run.verdict is None else conclude(run.verdict, findings)
