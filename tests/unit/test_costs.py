"""The sentence on what a finding costs, which is made of the figures of its whole episode, or of the run."""

from __future__ import annotations

from typing import Any

import pytest

from traceml_ray.analysis.track import with_cost, with_saving
from traceml_ray.analysis.verdict import Verdict

WHY = "rank 1 is 4 ms late: 20 % of the step is not what it costs."


def found(label: Any = "straggler", **given: Any) -> Verdict:
    about = {"rank": 1, "ranks": (1,), "stages": ("data",), "gain_pct": 20.0, "cost_pct": 20.0, **given}
    return Verdict(label=label, why=WHY, **about)


@pytest.mark.parametrize(
    ("given", "saving"),
    [
        ({}, "Fixing it saves 30 % of the step."),
        ({"about": "run"}, "Fixing it saves 30 % of the run."),
        ({"at_most": True}, "Fixing it saves at most 30 % of the step."),
        ({"ranks": (1, 2)}, "Fixing them saves 30 % of the step."),
        ({"label": "ambiguous", "stages": ("data", "forward")}, "Fixing both saves 30 % of the step."),
        (
            {"label": "ambiguous", "stages": ("data", "prepare", "forward")},
            "Fixing all saves 30 % of the step.",
        ),
        (
            {"label": "co_critical", "ranks": (1, 2), "gain_pct": 5.0},
            "Fixing the first alone saves 7.5 % of the step, fixing all together 30 %.",
        ),
        (
            {"label": "co_critical", "at_most": True},
            "Fixing it saves at most 30 % of the step, probably much less.",
        ),
        ({"label": "imbalance", "rank": None, "ranks": ()}, "This waiting takes 30 % of the step."),
        ({"label": "group_wide", "rank": None, "ranks": ()}, "The slow-down costs 30 % of the step."),
    ],
)
def test_what_fixing_saves_is_said_by_the_final_cost_alone(given: dict[str, Any], saving: str) -> None:
    costed = with_cost(found(**given), cost_s=3, of_s=10, ranks=4)
    assert (costed.saving, costed.cost_pct, costed.rank_hours_per_hour) == (saving, 30, pytest.approx(1.2))
    assert costed.why == f"{WHY} {saving}", "a figure of the window that looks the same is left as it is"


@pytest.mark.parametrize("label", ["healthy", "watching", "rank_lost", "telemetry_limited"])
def test_what_is_no_finding_saves_nothing(label: Any) -> None:
    assert with_saving(found(label)) == found(label)
