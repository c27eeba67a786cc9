"""The shapes of the memory analysis, and what it says of ranks that sent nothing."""

from __future__ import annotations

import msgspec
import numpy as np

from traceml_ray.analysis.memory.judge import judge
from traceml_ray.analysis.memory.shapes import Memory, Series


def test_missing_ranks_are_named_where_their_number_is_known() -> None:
    one = Series(1, "node-a", "p1", None, np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert judge([one], expected=3).missing_ranks == [0, 2]
    assert judge([one]).missing_ranks == []


def test_answer_survives_json() -> None:
    memory = judge([], expected=1)
    assert msgspec.json.decode(msgspec.json.encode(memory), type=Memory) == memory
