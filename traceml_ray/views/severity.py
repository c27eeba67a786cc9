"""How bad something that happened is, and its sign, as reports have it."""

from __future__ import annotations

from traceml_ray.reports.severity import SIGNS as SIGNS
from traceml_ray.reports.severity import severity as severity
