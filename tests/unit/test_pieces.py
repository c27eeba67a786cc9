"""The rows of a run in pieces: each row in one of them, of a step all in the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import identity

from traceml_ray.stages import N_STAGES, SEGMENT_BITS
from traceml_ray.store.pieces import pieces
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.writer import SessionWriter

STEPS, RANKS = 60, 3


def keys_of(first: int, last: int) -> np.ndarray:
    """Keys of steps that have two rows each."""
    return np.array([step << SEGMENT_BITS | row for step in range(first, last) for row in (0, 1)], "<i8")


def stored(path: Path, chunks: list[tuple[int, np.ndarray]]) -> SessionFile:
    """A session file with these chunks (rank, keys), in this order."""
    writer = SessionWriter(path)
    for rank, keys in chunks:
        stream = writer.stream(f"{rank:016x}", 0)
        stream.identity = identity(rank, RANKS)
        rows = np.ones((len(keys), N_STAGES), "<i8").tobytes()
        writer.add_rows(stream, stream.stored, keys.tobytes(), bytes(len(keys)), rows)
    writer.commit()
    writer.close()
    return SessionFile(path)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_row_is_in_one_piece_and_steps_are_whole(tmp_path_factory, data):
    left = dict.fromkeys(range(RANKS), 0)
    chunks = []
    while left:
        rank = data.draw(st.sampled_from(sorted(left)))
        end = min(2 * STEPS, left[rank] + data.draw(st.integers(9, 60)))
        chunks.append((rank, keys_of(0, STEPS)[left.pop(rank) : end]))
        if end < 2 * STEPS:
            left[rank] = end
    with stored(tmp_path_factory.mktemp("file") / "session.sqlite", chunks) as session:
        newest, _ = session.rows(last=1)
        found = list(pieces(session, newest, data.draw(st.integers(100, 400))))
    seen = set()
    for piece in found:
        steps = [set((own.keys >> SEGMENT_BITS).tolist()) for own in piece]
        assert all(each == steps[0] for each in steps) and seen.isdisjoint(steps[0])
        seen |= steps[0]
    for at in range(RANKS):
        assert np.concatenate([piece[at].keys for piece in found]).tolist() == keys_of(0, STEPS).tolist()


def test_rank_that_ends_first_ends_the_pieces(tmp_path):
    chunks = [
        (rank, keys_of(at, at + 10)) for at in range(0, 60, 10) for rank in range(RANKS) if rank or at < 20
    ]
    with stored(tmp_path / "session.sqlite", chunks) as session:
        found = list(pieces(session, session.rows(last=1)[0], 20))
    assert [np.concatenate([piece[at].keys for piece in found]).tolist() for at in range(RANKS)] == [
        keys_of(0, 20).tolist()
    ] * RANKS


def test_rows_that_come_after_their_piece_are_left_out(tmp_path):
    chunks = [(rank, keys_of(at, at + 10)) for at in range(0, 60, 10) for rank in range(RANKS)]
    late = chunks.pop(1)
    with stored(tmp_path / "session.sqlite", [*chunks, late]) as session:
        found = list(pieces(session, session.rows(last=40)[0], 20))
    read = [sum(len(piece[at].keys) for piece in found) for at in range(RANKS)]
    assert read == [120, 100, 120]
