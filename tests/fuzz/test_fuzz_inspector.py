"""Foreign bytes as a file of NCCL Inspector: lines are read, or counted."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from fuzzing import bounded, fuzz, json_values, limited, mutated
from hypothesis import given
from hypothesis import strategies as st
from inspector_lines import line, pair

from traceml_ray.signals.collectives.inspector import _File, add_line
from traceml_ray.signals.collectives.judge import OfRank, collective_times
from traceml_ray.signals.collectives.records import CALLS, MAX_SUMS
from traceml_ray.signals.collectives.sums import CallSums
from traceml_ray.signals.kinds import encoded

LINES = [line(1, 50), line(2, 60, coll="AllGather", traced=4), pair(3, 40), line(4, 50, name="DP Group 0")]
PIECES = [b"[" * 50_000, b'{"a":' * 20_000, b"9" * 5000, b"null", b"-1", b"1e308", b'"', b"\n", b"\xff"]
files = st.lists(st.sampled_from(LINES), min_size=1, max_size=8).map(b"".join)
fields = st.fixed_dictionaries(
    {},
    optional={
        "coll": st.text(max_size=80) | json_values,
        "coll_sn": json_values,
        "coll_msg_size_bytes": json_values,
        "coll_exec_time_us": json_values,
        "coll_timing_source": json_values,
    },
)


def checked(sums: CallSums) -> None:
    """What is summed can be sent, stored and judged."""
    records = sums.due(0.0, True)
    assert len(records) <= MAX_SUMS
    for record in records:
        (raw,) = encoded([record])["collectives"]
        assert CALLS.decode(raw) == record
    msgspec.json.encode(collective_times(OfRank(0, None, record) for record in records))


@fuzz()
@given(files.flatmap(lambda data: mutated(data, PIECES)))
def test_changed_file_is_read_and_counted(tmp_path_factory: Any, data: bytes) -> None:
    path: Path = tmp_path_factory.mktemp("inspector") / "host-pid1.log"
    path.write_bytes(data)
    errors: Counter[str] = Counter()
    with bounded(20.0), limited(256):
        file = _File(os.open(path, os.O_RDONLY))
        try:
            file.read(errors, last=True)
        finally:
            os.close(file.fd)
    checked(file.sums)


@fuzz()
@given(fields, st.integers() | st.none(), st.text(max_size=80))
def test_any_values_of_a_call_are_added_or_refused(
    call: dict[str, Any], ranks: int | None, name: str
) -> None:
    known = json.loads(line(1, 50))
    known["coll_perf"] |= call
    known["header"] |= {"n_ranks": ranks, "comm_name": name, "id": name}
    sums = CallSums("inspector")
    try:
        text = json.dumps(known, allow_nan=False).encode()
    except ValueError:
        return
    try:
        add_line(sums, text)
    except (msgspec.MsgspecError, ValueError):
        assert sums.due(0.0, True) == []
    checked(sums)
