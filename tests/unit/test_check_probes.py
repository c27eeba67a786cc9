"""Probes: what each measures of this machine, and what they say if they cannot."""

from __future__ import annotations

from traceml_ray.signals.check.probes import ProbeError


def test_an_error_is_a_sentence() -> None:
    assert str(ProbeError("There is no disk here.")) == "There is no disk here."
