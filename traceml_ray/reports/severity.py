"""How bad something that happened is, and its sign: no view shows that by colour alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traceml_ray.analysis.labels import LABELS, Severity
from traceml_ray.document.model import SIGNS

_SEVERITY: dict[str, Severity] = {
    **{label: meaning.severity for label, meaning in LABELS.items()},
    **dict.fromkeys(("node_lost", "exception", "xid"), "critical"),
    **dict.fromkeys(("restart", "note", "swallowed"), "warning"),
}


def severity(kind: str) -> Severity:
    """Return how bad a kind of event, or the label of a verdict, is."""
    return _SEVERITY.get(kind, "info")


def tone_of(verdict: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return how bad a verdict is, as colour and sign."""
    label = verdict["label"] if verdict else ""
    tone = "good" if label == "healthy" else severity(label).replace("info", "unsure")
    return tone, sign_of(tone)


def sign_of(tone: str) -> str:
    """Return the sign of a tone."""
    return {"good": "✓", "unsure": "○"}.get(tone) or SIGNS[tone]
