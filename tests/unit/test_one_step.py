"""One step of all ranks, from wherever it is in the file: exactly what the ranks sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played import Played
from sessions import MS, Rank, Relay, aggregation, ask

from traceml_ray.stages import FLAG_NO_SPLIT, N_STAGES, SEGMENT_BITS
from traceml_ray.store.summary_shape import to_builtins


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_step_has_the_rows_that_ranks_sent(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Of the first or the second run, with ranks whose batches come late, or never."""
    played = Played(tmp_path_factory.mktemp("out") / "s", 6, per_node=3, late=4, onset=9)
    played.memory_s = 100
    sent: dict[tuple[str, int], np.ndarray[Any, Any]] = {}
    rows, some = played.rows, st.lists(st.integers(0, 5), max_size=3).map(tuple)

    def noted(n: int) -> np.ndarray[Any, Any]:
        made = rows(n)
        for index in range(n):
            sent[run, played.step + index] = made[:, index]
        return made

    played.rows = noted  # type: ignore[method-assign]
    for run in ("job", "second"):
        if run == "second":
            played.begin(job_id="second")
        for _ in range(data.draw(st.integers(1, 40))):
            played.play(data.draw(st.integers(1, 9)), late=data.draw(some), judge=False)
        played.play(1)
    (run, number), expected = data.draw(st.sampled_from([*sent.items()]))
    step = ask(played.aggregator, "step", run=run, step=number)
    assert step.ranks == step.row_ranks == [*range(6)]
    np.testing.assert_allclose(step.stages, expected / MS)
    last = max(step for name, step in sent if name == run)
    assert (step.first, step.last) == (0, last)
    arrived = expected[:, :-1].sum(axis=1) / MS
    np.testing.assert_allclose(step.late, arrived - np.median(arrived), atol=1e-9)
    assert step.took_ms == pytest.approx(expected.sum(axis=1).max() / MS)
    assert {span.rank for span in step.spans} == {*range(6)}
    assert all(span.from_step <= number <= span.to_step for span in step.spans)
    played.aggregator.close()


def test_step_of_several_exchanges_has_a_row_for_each(tmp_path: Path) -> None:
    aggregator, relay = aggregation(tmp_path / "s"), Relay()
    keys = np.array([step << SEGMENT_BITS | segment for step in range(3) for segment in range(2)], "<i8")
    for rank in (Rank(0), Rank(1)):
        rows = (np.arange(36).reshape(6, N_STAGES) + rank.identity.global_rank) * MS
        flags = np.full(6, FLAG_NO_SPLIT * rank.identity.global_rank, np.uint8)
        batch = rank.batch(6, keys=keys.tobytes(), rows=rows.astype("<i8").tobytes(), flags=flags.tobytes())
        aggregator.ingest(relay.message(batch))
    aggregator.commit()
    step = ask(aggregator, "step", run=None, step=1)
    assert step.row_ranks == [0, 0, 1, 1]
    np.testing.assert_allclose(step.stages[:2], np.arange(12, 24).reshape(2, 6))
    assert step.arrived[0] == sum(range(12, 23)) and np.isnan(step.arrived[1])
    assert to_builtins(ask(aggregator, "step", run=None, step=3)) == {
        "step": 3, "first": 0, "last": 2, "ranks": [], "row_ranks": [], "stages": [], "took_ms": None,
        "arrived": [], "late": [], "device": [], "spans": [],
    }  # fmt: skip
    aggregator.close()


def test_step_is_found_though_many_others_were_stored_between(tmp_path: Path) -> None:
    """A rank that is far behind the others, as one whose relay was cut off."""
    aggregator, relay = aggregation(tmp_path / "s"), Relay()
    one, other = Rank(0), Rank(1)
    held = [other.batch(1) for _ in range(300)]
    for _ in range(300):
        aggregator.ingest(relay.message(one.batch(1)))
    aggregator.commit()
    for batch in held:
        aggregator.ingest(relay.message(batch))
    aggregator.commit()
    for step in (0, 7, 150, 299):
        assert ask(aggregator, "step", run=None, step=step).ranks == [0, 1]
    aggregator.close()
