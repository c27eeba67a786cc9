"""A run read from its session file in slices: it is what all of its rows at once come to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from sessions import LIMITS, SECOND, identity
from unit.sample_windows import align, exact, held_bytes, processes
from unit.test_step_history import check_stats, rows

from traceml_ray.analysis import step_history
from traceml_ray.analysis.step_history import Reduction
from traceml_ray.analysis.window import RankRows
from traceml_ray.stages import FLAG_EXCLUDED, N_STAGES, SEGMENT_BITS
from traceml_ray.store.history_reader import HistoryReader
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter

STEPS, RANKS = 60, 3


def stored(path: Path, chunks: list[RankRows], world: int = RANKS) -> SessionFile:
    """A session file with these rows, one batch each, in this order."""
    writer = SessionWriter(path)
    for rank_rows in chunks:
        process = writer.process(f"{rank_rows.rank:016x}", SECOND)
        process.identity = identity(rank_rows.rank, world)
        keys, flags = rank_rows.keys.astype("<i8").tobytes(), rank_rows.flags.tobytes()
        writer.add_rows(process, process.stored, keys, flags, rank_rows.rows.astype("<i8").tobytes())
        process.last_key = int(rank_rows.keys[-1])
    writer.commit()
    writer.close()
    return SessionFile(path)


def read(session: SessionFile, most: int) -> Reduction:
    """All of it, for a report."""
    ranks, _ = session.rows(last=1)
    run = step_history.begun(ranks, LIMITS, None)
    run.last_step = step_history.last_common_step(ranks)
    HistoryReader(session, LIMITS, 0, run).read_all(most)
    return run


@fuzz(1 / 3)
@given(st.data())
def test_slices_of_any_size_come_to_what_all_rows_at_once_come_to(tmp_path_factory, data):
    """Batches in any order between ranks; some end within a step."""
    d = rows(2 * STEPS, RANKS, data.draw(st.integers(0, 9)))
    every, left, chunks = processes(d, exchanges=2), dict.fromkeys(range(RANKS), 0), []
    while left:
        rank = data.draw(st.sampled_from(sorted(left)))
        end = min(2 * STEPS, left[rank] + data.draw(st.integers(9, 60)))
        chunks.append(every[rank].select(slice(left.pop(rank), end)))
        if end < 2 * STEPS:
            left[rank] = end
    with stored(tmp_path_factory.mktemp("file") / "session.sqlite", chunks) as session:
        run, at_once = read(session, data.draw(st.integers(1, 400))), read(session, 1 << 20)
    assert run.rows == 2 * STEPS * RANKS and run.history.left_out == 0
    check_stats(run.history, exact(align(every, RANKS).since(LIMITS.warmup_steps)))
    assert run.history.counts() == dict.fromkeys(range(RANKS), STEPS)
    judged, other = (one.replay.done() for one in (run, at_once))
    assert list(judged.periods) == list(other.periods) and judged.run_verdict() == other.run_verdict()
    assert judged.episodes.clock.now_ns == other.episodes.clock.now_ns > 0


def test_rank_that_ends_first_ends_the_statistics(tmp_path):
    every = processes(rows(STEPS, RANKS))
    chunks = [
        rank_rows.select(slice(begin, begin + 10))
        for begin in range(0, STEPS, 10)
        for rank_rows in every
        if rank_rows.rank or begin < 40
    ]
    with stored(tmp_path / "session.sqlite", chunks) as session:
        run = read(session, 20)
    stats = run.history.stats()
    assert stats is not None and stats.between == (LIMITS.warmup_steps, 39)
    assert run.history.counts() == {0: 40, 1: STEPS, 2: STEPS}
    assert run.replay.done().sample().last_step == 39


def test_rank_of_which_there_is_only_the_first_row_holds_up_no_other(tmp_path):
    every = processes(rows(STEPS, RANKS))
    first = every[2].select(slice(0, 1))
    first.flags[:] = FLAG_EXCLUDED
    with stored(tmp_path / "session.sqlite", [every[0], every[1], first]) as session:
        reader = HistoryReader(session, LIMITS)
        reader.read()
    assert reader.whole and reader.history.last_step == STEPS - 1
    assert reader.history.counts() == {0: STEPS, 1: STEPS, 2: 1}


def test_ranks_that_have_no_step_in_common_take_no_more_memory(tmp_path, monkeypatch):
    """A table of all would have a line for each rank, and a column for each row."""
    monkeypatch.setattr("traceml_ray.analysis.step_history._DEEP_CELLS", 1 << 13)
    ranks, count = 40, 600
    chunks = [
        RankRows(
            rank,
            "n",
            (np.arange(first, first + 20) + 10_000 * rank) << SEGMENT_BITS,
            np.zeros(20, np.uint8),
            np.full((20, N_STAGES), 1_000_000),
        )
        for first in range(0, count, 20)
        for rank in range(ranks)
    ]
    with stored(tmp_path / "session.sqlite", chunks, ranks) as session:
        run = read(session, 1 << 20)
    assert run.rows == ranks * count
    assert held_bytes(run.history.table) < 4 << 20
    assert run.history.last_step == 10_000 * (ranks - 1) + count - 1
