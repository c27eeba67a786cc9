"""Traces of a real job: one valid trace of all ranks, and the operation that one rank does more of."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from trace_format import check

from traceml_ray.launchers.cluster import free_port
from traceml_ray.store.profiles import ProfileStep
from traceml_ray.traces.difference import difference
from traceml_ray.traces.merged_trace import merge
from traceml_ray.traces.sources import Source, sources_of_files

RANKS = 3


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    folder = tmp_path_factory.mktemp("job")
    script = Path(__file__).with_name("profiled_ranks.py")
    command = [sys.executable, str(script), str(folder), str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    sources = []
    for rank in range(RANKS):
        edges = json.loads((folder / f"edges-{rank}").read_text())
        steps = [ProfileStep(number, *pair, None) for number, pair in enumerate(pairwise(edges))]
        sources.append(
            Source(folder / f"rank-{rank}.json.gz", rank, node="n", clock_offset_ns=0, steps=tuple(steps))
        )
    return sources


def test_collectives_of_all_ranks_are_found_in_one_valid_trace(job: list[Source], tmp_path: Path) -> None:
    merged = merge(job, tmp_path / "m.json.gz")
    assert (merged.collectives, merged.unmatched, merged.apart) == (2, 0, 0)
    document = check(tmp_path / "m.json.gz")
    arrows = [event for event in document["traceEvents"] if event.get("cat") == "collective"]
    assert len(arrows) == 2 * 2 * (RANKS - 1)
    of_users = merge(sources_of_files([source.path for source in job]), tmp_path / "u.json.gz")
    assert [rank.rank for rank in of_users.ranks] == [0, 1, 2] and of_users.collectives >= 2


def test_difference_names_the_operation_and_keeps_waiting_apart(job: list[Source]) -> None:
    compared = difference(job, 1)
    assert (compared.operations[0].name, compared.others, compared.steps) == ("aten::copy_", [0, 2], 2)
    assert compared.operations[0].calls - compared.operations[0].other_calls == 12
    assert (
        compared.sentences[0].startswith("rank 1 spends ")
        and "`aten::copy_` (12 calls more)" in compared.sentences[0]
    )
    assert compared.waiting_ms < compared.other_waiting_ms
    peer = difference(job, 0, 1)
    assert peer.operations[-1].name == "aten::copy_" and peer.operations[-1].more_ms < 0
    assert {"gloo:all_reduce", "c10d::allreduce_"} <= {row.name for row in peer.waits}
