"""What a person reads first of a run: its verdict, or a finding of another signal that is more severe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from traceml_ray import text
from traceml_ray.analysis.labels import Label
from traceml_ray.reports.headlines import named
from traceml_ray.reports.severity import tone_of
from traceml_ray.signals.finding import Finding
from traceml_ray.store.summary_shape import Conclusion, Tone

_WORST: tuple[Tone, ...] = ("critical", "warning", "notice", "unsure", "good")
"""The most severe first."""
_BEFORE_VERDICT = ("critical", "warning")
"""Severities of findings that may be read before the verdict."""


def conclude(verdict: Mapping[str, Any], findings: Iterable[Finding]) -> Conclusion:
    """
    Return what to read first: the most severe of the verdict and the findings of other signals; of equally
    severe ones the verdict, then the first of the `findings`.
    """
    first, others = None, list[Conclusion]()
    for one in findings:
        if one.signal == "steps":
            first = first or one.key
        elif one.severity in _BEFORE_VERDICT:
            others.append(_of(one))
    return min([_of_steps(verdict, first), *others], key=lambda one: _WORST.index(one.tone))


def _of_steps(verdict: Mapping[str, Any], key: str | None) -> Conclusion:
    label: Label = verdict["label"]
    tone: Any = tone_of(verdict)[0]
    about = named(verdict), verdict["why"], verdict["next"] or "", verdict["rank"]
    return Conclusion("steps", tone, text.words(label), *about, key)


def _of(one: Finding) -> Conclusion:
    tone: Any = one.severity
    rank = one.ranks[0] if one.ranks else None
    return Conclusion(one.signal, tone, text.words(one.label), one.headline, one.why, one.next, rank, one.key)
