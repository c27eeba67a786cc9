"""How bad something that happened is, and its sign: no view shows that by colour alone."""

from __future__ import annotations

from traceml_ray.analysis.labels import LABELS, Severity

SIGNS = {"critical": "◆", "warning": "▲", "info": "●"}
_SEVERITY: dict[str, Severity] = {
    **{label: meaning.severity for label, meaning in LABELS.items()},
    **dict.fromkeys(("node_lost", "exception", "xid"), "critical"),
    **dict.fromkeys(("restart", "note", "swallowed"), "warning"),
}


def severity(kind: str) -> Severity:
    """Return how bad a kind of event, or the label of a verdict, is."""
    return _SEVERITY.get(kind, "info")
