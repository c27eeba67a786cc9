"""Foreign bytes as torch's flight recorder: read and matched, or refused with a reason in one line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from fuzzing import bounded, fuzz, json_values, limited, mutated
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray.signals.collectives.calls import RankCollectives, table_of
from traceml_ray.signals.collectives.dumps import DumpError, read_dump
from traceml_ray.signals.collectives.examined import as_text, examine, to_json

JOBS = Path(__file__).parents[1] / "data" / "collectives"
RECORDED = (JOBS / "other_order" / "trace_rank_0").read_bytes()
OTHERS = [(JOBS / "other_order" / f"trace_rank_{rank}").read_bytes() for rank in (1, 2)]
SECONDS, MEMORY_MIB = 20.0, 256
PIECES = [
    *(
        b"r\xff\xff\xff\x7f",
        b"j\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\x7f",
        b"X\xff\xff\xff\xff",
        b"cos\nsystem\n",
    ),
    *(
        b"]" * 50_000,
        b"}" * 50_000,
        b"(" * 50_000,
        b"\x85" * 50_000,
        b"2" * 1000,
        b"0",
        b"R",
        b"b",
        b"\x81",
        b".",
    ),
    *(b"h\x00" * 1000, b"l", b"t", b"s", b"u", b"a", b"e", b"\x95" + b"\xff" * 8, b"K\x01", b"N", b"\x88"),
]


def _examined(data: bytes, folder: Path) -> None:
    """Match a file with those of two other ranks, and show the result."""
    path = folder / "trace_rank_0"
    path.write_bytes(data)
    ranks = list[RankCollectives]()
    with bounded(SECONDS), limited(MEMORY_MIB):
        for rank, content in enumerate(OTHERS, 1):
            (folder / f"trace_rank_{rank}").write_bytes(content)
            ranks.append(read_dump(folder / f"trace_rank_{rank}", rank))
        try:
            ranks.append(read_dump(path, 0))
        except DumpError as error:
            assert 0 < len(str(error)) < 1000
            assert str(error).isprintable()
            return
        for hang in (True, False, None):
            examined = examine(table_of(ranks), hang=hang, world=3)
            json.loads(to_json(examined))
            assert as_text(examined).endswith("\n")


@fuzz()
@given(data=st.data())
def test_changed_pickles(tmp_path: Path, data: st.DataObject) -> None:
    _examined(data.draw(mutated(RECORDED, PIECES)), tmp_path)


@fuzz()
@given(data=st.binary(max_size=200))
def test_pickles_of_any_bytes(tmp_path: Path, data: bytes) -> None:
    _examined(b"\x80\x02" + data, tmp_path)


CONTENT: dict[str, Any] = pickle.loads(RECORDED)
VALUES = json_values | st.sampled_from(
    [
        0,
        1,
        -1,
        1 << 40,
        (1 << 63) - 1,
        1 << 63,
        "1",
        "9" * 5000,
        "0",
        "default_pg",
        "gloo:send 0->1",
        "nccl:coalesced",
    ]
)


@pytest.mark.parametrize("form", ["pickle", "json"])
@fuzz()
@given(data=st.data())
def test_entries_with_other_values(tmp_path: Path, form: str, data: st.DataObject) -> None:
    entries = [dict(entry) for entry in CONTENT["entries"]]
    content = {**CONTENT, "entries": entries}
    for _ in range(data.draw(st.integers(1, 6))):
        changed = data.draw(st.sampled_from([*entries, content, content["pg_config"]]))
        if isinstance(changed, dict) and changed:
            changed[data.draw(st.sampled_from(sorted(changed)))] = data.draw(VALUES)
    try:
        encoded = pickle.dumps(content, 2) if form == "pickle" else json.dumps(content).encode()
    except RecursionError:
        return
    _examined(encoded, tmp_path)


def test_lists_that_name_each_other_many_times_take_little(tmp_path: Path) -> None:
    """A billion sizes in 50 kB: a thousand lists of the same thousand lists of the same thousand numbers."""
    numbers = [7] * 1000
    entry = {
        "profiling_name": "nccl:all_to_all",
        "input_sizes": [numbers] * 1000,
        "frames": [[numbers] * 1000] * 1000,
    }
    entry |= {"input_dtypes": ["Float"] * 1000, "collective_seq_id": 1}
    entries = [{**entry, "collective_seq_id": number} for number in range(1000)]
    _examined(pickle.dumps({"entries": entries}, 2), tmp_path)
