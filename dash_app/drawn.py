"""What is drawn step by step, put together from answers that hold what is new alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from traceml_ray.analysis.step_sums import MAX_BINS

_ABOUT = ("by", "ranks", "nodes")


def joined(before: Mapping[str, Any] | None, answer: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return what was held `before` with what is new in `answer`, see `analysis.step_numbers.columns`. `next` is
    `since` of the next question.
    """
    found = {name: value for name, value in answer.items() if name not in ("token", "since")}
    if answer["since"] is not None:
        if before is None or before["next"][0] != answer["token"]:
            return dict(before or {})  # it is of another one: the next answer is whole
        keep = slice(0, int(np.searchsorted(before["last"], answer["since"])))
        for name, value in found.items():
            axis = 1 if name == "z" else 0
            old = before[name][:, keep] if axis else before[name][keep]
            whole = np.concatenate([old, value], axis)
            found[name] = whole[:, -MAX_BINS:] if axis else whole[-MAX_BINS:]
        found |= {name: before[name] for name in _ABOUT}
    last = int(found["last"][-1]) if len(found["last"]) else -1
    return {**found, "next": [answer["token"], last]}
