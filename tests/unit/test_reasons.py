"""Why ranks are late in turn: the same live and stored, in numbers and in a sentence."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played import QUIET, Played
from sessions import LIMITS, MS, written_summary
from unit.sample_windows import of_ms, window

from traceml_ray.agent.batch_size import packed
from traceml_ray.analysis.reasons import with_reason
from traceml_ray.analysis.uneven_work import ExpertLoad, Reason
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.signals.throughput.records import StepSizes
from traceml_ray.stages import DATA, FORWARD, N_STAGES, POST_SYNC, SYNC_WAIT
from traceml_ray.store import query
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import to_builtins

RANKS, LONG, SHORT = 4, 1000, 200
PER_TOKEN_MS = 0.02
LATE_IN_TURN = Verdict(label="ambiguous", pattern="rotating", stage="forward", stages=("forward",), why="W.")


class Uneven(Played):
    """
    Each rank in turn has a long batch, which takes it longer in `stage`; of the ranks `unknown`, no sizes are
    sent.
    """

    def __init__(self, folder: Path, stage: int = FORWARD, unknown: tuple[int, ...] = ()) -> None:
        super().__init__(folder, RANKS, late=None, per_node=2, jitter_ms=0.3)
        self._stage, self._unknown = stage, unknown
        self._tokens = np.empty((RANKS, 0), np.int64)

    def rows(self, n: int) -> np.ndarray:
        steps = np.arange(self.step, self.step + n)
        self._tokens = self.tokens(steps)
        local = np.array(QUIET) + self._rng.uniform(0, self._jitter, (RANKS, n, N_STAGES))
        local[:, :, self._stage] += PER_TOKEN_MS * self._tokens
        busy = local[:, :, :SYNC_WAIT].sum(axis=2)
        local[:, :, SYNC_WAIT] = busy.max(axis=0) - busy + QUIET[SYNC_WAIT]
        return (local * MS).astype("<i8")

    def tokens(self, steps: np.ndarray) -> np.ndarray:
        return np.where((steps + np.arange(RANKS)[:, None]) % RANKS == 0, LONG, SHORT)

    def of_rank(self, rank: int) -> dict[str, Any]:
        if rank in self._unknown:
            return {}
        return {
            "sizes": packed(
                [(self.step + number, 4, n) for number, n in enumerate(self._tokens[rank].tolist())]
            )
        }

    def live(self) -> dict[str, Any]:
        verdict = query.ask_one(self.aggregator.query, query.GetVerdict())
        assert verdict is not None
        return dict(to_builtins(verdict))

    def stored(self) -> dict[str, Any]:
        """The verdict in the summary of the session, which ends."""
        self.end()
        self.aggregator.close()
        with SessionFile(self.folder / "session.sqlite") as file:
            return dict(written_summary(file, LIMITS)["verdict"])


@pytest.mark.parametrize("stage", [FORWARD, DATA])
def test_tokens_are_the_reason_live_and_stored(tmp_path: Path, stage: int) -> None:
    played = Uneven(tmp_path / "s", stage)
    for _ in range(30):
        played.play(10)
    assert played.aggregator.errors == {}
    for verdict in (played.live(), played.stored()):
        reason = verdict["reason"]
        assert (reason["what"], reason["sizes_known"], reason["unknown_ranks"]) == ("tokens", True, [])
        assert reason["share"] == pytest.approx(1, abs=0.01)
        assert reason["in_compute"] == pytest.approx(float(stage == FORWARD), abs=0.02)
        assert reason["steps"] >= 200
        assert "tokens in the ranks' batches explains" in verdict["why"]
        assert "bucket by length" in verdict["next"]


class Larger(Uneven):
    """The batches of rank 1 are larger in every step."""

    def tokens(self, steps: np.ndarray) -> np.ndarray:
        return (
            self._rng.integers(380, 421, (RANKS, len(steps))) * np.where(np.arange(RANKS) == 1, 2, 1)[:, None]
        )


def test_late_rank_with_larger_batches_says_so_live_and_stored(tmp_path: Path) -> None:
    played = Larger(tmp_path / "s")
    for _ in range(30):
        played.play(10)
    for verdict in (played.live(), played.stored()):
        assert (verdict["label"], verdict["rank"], verdict["stage"]) == ("straggler", 1, "forward")
        reason = verdict["reason"]
        assert (reason["what"], reason["share"]) == ("tokens", 1)
        assert reason["times"] == pytest.approx(2, rel=0.02)
        assert "Its batches have 2 times as many tokens as those of the others" in verdict["why"]
        assert verdict["next"].startswith("Give all ranks about as many tokens")


def test_sizes_that_some_ranks_do_not_send_are_said_to_be_unknown(tmp_path: Path) -> None:
    played = Uneven(tmp_path / "s", unknown=(1, 2, 3))
    for _ in range(15):
        played.play(10)
    for verdict in (played.live(), played.stored()):
        reason = verdict["reason"]
        assert (reason["what"], reason["unknown_ranks"]) == ("unknown", [1, 2, 3])
        assert "sizes of ranks 1-3 are known for too few steps" in verdict["why"]
        assert "traceml_ray.count" in verdict["next"]


def test_sizes_that_cannot_be_read_are_counted_and_left_out(tmp_path: Path) -> None:
    played = Uneven(tmp_path / "s", unknown=tuple(range(RANKS)))
    for second in range(15):
        sizes = StepSizes(10 * second, 10 * second + 9, b"nonsense")
        played.play(10, sizes=[sizes])
    assert dict(played.aggregator.errors) == {"sizes of batches by step: malformed": 15 * RANKS}
    for verdict in (played.live(), played.stored()):
        assert (verdict["rank"], verdict["reason"]["what"]) == (None, "unknown")


def test_sizes_that_are_damaged_in_the_file_are_said_to_be(tmp_path: Path) -> None:
    played = Uneven(tmp_path / "s")
    for _ in range(15):
        played.play(10)
    played.stored()
    with sqlite3.connect(played.folder / "session.sqlite") as connection:
        connection.execute("UPDATE step_sizes SET body = x'789c'")
    with (
        SessionFile(played.folder / "session.sqlite") as file,
        pytest.raises(SessionFileError, match="the session file is damaged"),
    ):
        written_summary(file, LIMITS)


def test_sizes_are_found_by_their_steps(tmp_path: Path) -> None:
    played = Uneven(tmp_path / "s")
    for _ in range(5):
        played.play(10)
    played.end()
    played.aggregator.close()
    with SessionFile(played.folder / "session.sqlite") as file:
        ranks = {process.id: rank for rank, process in file.ranks().items()}
        sizes = file.step_sizes([process for process, rank in ranks.items() if rank == 2], np.array([15, 40]))
        assert [
            (piece.first_step, piece.last_step) for (pieces,) in [sizes.values()] for piece in pieces
        ] == [(begin, begin + 9) for begin in (10, 20, 30, 40)]
        assert file.step_sizes(ranks, np.empty(0, np.int64)) == {}
    with sqlite3.connect(played.folder / "session.sqlite") as connection:
        plan = connection.execute("EXPLAIN QUERY PLAN SELECT * FROM step_sizes WHERE last_step > 5")
        assert "step_sizes_of" in str(plan.fetchall())


def rows_of(stage: int, steps: int = 60) -> Any:
    """A window in which one rank in turn takes 20 ms more in a stage."""
    d = of_ms([QUIET] * RANKS, steps)
    d[np.arange(steps), np.arange(steps) % RANKS, stage] += 20 * MS
    return window(d)


LOADS = (ExpertLoad(router="gate", experts=8, tokens=800, most=5, times_mean=2.4, idle=0),)
STEADY = {"samples": np.full((60, RANKS), 4.0)}


@pytest.mark.parametrize(
    ("stage", "loads", "what", "why", "advice"),
    [
        (
            DATA,
            (),
            "data",
            "preparing batches takes unevenly long: 100 % of the differences (60 steps)",
            "prefetch",
        ),
        (
            POST_SYNC,
            (),
            "between_steps",
            "work between two steps makes up 100 % of the differences",
            "in the same step",
        ),
        (FORWARD, LOADS, "experts", "gate: expert 5 of 8 has 2.4 times the mean", "auxiliary loss"),
        (
            FORWARD,
            (),
            "other",
            "sizes of the ranks' batches do not explain the differences (60 steps)",
            "besides",
        ),
    ],
)
def test_each_reason_has_a_sentence_and_says_what_to_do(
    stage: int, loads: tuple[ExpertLoad, ...], what: str, why: str, advice: str
) -> None:
    verdict = with_reason(LATE_IN_TURN, rows_of(stage), lambda *_: STEADY, loads)
    assert verdict.reason is not None and verdict.reason.what == what
    assert verdict.why.startswith("W. ") and why in verdict.why and advice in verdict.next
    assert "not known" not in verdict.why


def test_reason_found_before_stays_while_newer_sizes_are_not_known() -> None:
    before = Reason(what="tokens", share=0.9, tokens=0.9, sizes_known=True, steps=300)
    few = {"tokens": np.where(np.arange(60)[:, None] // 30 == np.arange(RANKS) % 2, 9.0, 1.0)}
    rows = rows_of(FORWARD)
    rows.d[:, :, FORWARD] = 10 * MS * few["tokens"]
    verdict = with_reason(LATE_IN_TURN, rows, lambda *_: few)
    assert (
        verdict.reason is not None
        and verdict.reason.what == "unknown"
        and verdict.next == "Wait for more steps."
    )
    assert "may explain them, but too few are known (60 steps)" in verdict.why
    assert with_reason(LATE_IN_TURN, rows, lambda *_: few, before=before).reason == before
    kept = with_reason(LATE_IN_TURN, rows_of(FORWARD), lambda *_: {}, before=before)
    assert kept.reason == before and "explains 90 % of the differences (300 steps)" in kept.why
    now = with_reason(LATE_IN_TURN, rows_of(FORWARD), lambda *_: STEADY, before=before)
    assert now.reason is not None and now.reason.what == "other"


def test_other_verdicts_are_left_as_they_are() -> None:
    two_stages = Verdict(label="ambiguous", pattern="lasting", rank=1, ranks=(1,))
    for verdict in (Verdict(label="healthy"), two_stages):
        assert with_reason(verdict, rows_of(FORWARD), lambda *_: STEADY) is verdict
