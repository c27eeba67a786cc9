"""The dashboard for Grafana: its panels and their questions, as Grafana would ask them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "integrations" / "grafana" / "traceml-ray.json").read_text()
)
VARIABLES: list[dict[str, Any]] = DASHBOARD["templating"]["list"]
RANGE_S, INTERVAL_S = 300, 60
"""What stands for the time that the dashboard shows, and for the interval of a rate, in s."""


class Question(NamedTuple):
    """One question of a panel."""

    panel: dict[str, Any]
    target: dict[str, Any]

    @property
    def expression(self) -> str:
        """The expression as it is written in the dashboard."""
        return str(self.target["expr"])

    @property
    def legend_labels(self) -> list[str]:
        """The labels of a series that are in its legend."""
        return re.findall(r"\{\{(\w+)\}\}", self.target.get("legendFormat", ""))


QUESTIONS = [Question(panel, target) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def filled(expression: str, **values: str) -> str:
    """Return an expression with the variables of Grafana replaced, those of the dashboard by `values`."""
    known = {"__range": f"{RANGE_S}s", "__rate_interval": f"{INTERVAL_S}s", **values}
    return re.sub(r"\$\{?(\w+)\}?", lambda name: known[name.group(1)], expression)
