"""How late each rank was in the newest steps of a run: more steps than a window has, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from traceml_ray.analysis.chance import COMPARED, correlation_steps
from traceml_ray.analysis.evidence import Evidence
from traceml_ray.analysis.window import Float, Int64
from traceml_ray.stages import SYNC_WAIT

MOST_STEPS = 1000
MOST_ROWS = 400_000
"""Largest number of rows (steps × ranks). With very many ranks fewer steps are kept."""
_Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PastSteps:
    """
    The newest steps of one run with a fixed set of `ranks` (R,), up to step `last`.

    Each of `pieces` has the excess of every rank in each local stage, in ns (k, R, 5), the reference that it
    exceeds, in ns (k, 5), and the time of the steps, in ns (k,).
    """

    ranks: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    last: int = -1
    pieces: tuple[tuple[_Float32, _Float32, Float], ...] = ()
    _stays: dict[int | None, float] = field(default_factory=dict, compare=False)
    _continued: list[tuple[Int64, PastSteps]] = field(default_factory=list, compare=False)
    """What `then` made last, and of which excess: rules, doubts and the history of a run ask for the same."""

    def __len__(self) -> int:
        return self._steps

    @cached_property
    def _steps(self) -> int:
        return sum(len(step_ns) for *_, step_ns in self.pieces)

    def then(self, evidence: Evidence) -> PastSteps:
        """Return these steps followed by those of a window. If its ranks differ, only the window's."""
        if self._continued and self._continued[0][0] is evidence.by_step:
            return self._continued[0][1]
        window = evidence.window
        before = self if np.array_equal(window.ranks, self.ranks) else PastSteps(window.ranks)
        new = window.steps > before.last
        if not new.any():
            return before
        piece = (
            evidence.by_step[new, :, :SYNC_WAIT].astype(np.float32),
            window.by_step(evidence.ref)[new, :SYNC_WAIT].astype(np.float32),
            evidence.step_ns[new].astype(np.float64),
        )
        pieces, steps = [*before.pieces, piece], len(before) + len(piece[2])
        most = min(MOST_STEPS, MOST_ROWS // max(1, len(window.ranks)))
        while len(pieces) > 1 and steps - len(pieces[0][1]) >= most:
            steps -= len(pieces.pop(0)[2])
        continued = PastSteps(window.ranks, int(window.steps[-1]), tuple(pieces))
        self._continued[:] = [(evidence.by_step, continued)]
        return continued

    def excess(self, steps: int) -> Float:
        """Return the excess of each rank in each local stage in the newest steps, in ns (L, R, 5)."""
        return np.concatenate([excess for excess, *_ in self.pieces])[-steps:].astype(np.float64)

    def lateness(self, stage: int | None) -> _Float32:
        """Return how late each rank was in `stage` (None: in all stages), in all steps, in ns (L, R)."""
        parts = [excess.sum(axis=2) if stage is None else excess[:, :, stage] for excess, *_ in self.pieces]
        return np.concatenate(parts)

    def work(self, stage: int | None, columns: Int64) -> Float:
        """
        Return what ranks worked in a stage (None: in all local ones) in all steps, ns (L, C).

        Args:
            stage: a local one, or None.
            columns: the ranks, by their places (C,).
        """
        parts = []
        for excess, usual, _ in self.pieces:
            late, ref = excess[:, columns], usual[:, None]
            parts.append(
                late.sum(axis=2) + ref.sum(axis=2) if stage is None else late[..., stage] + ref[..., stage]
            )
        return np.concatenate(parts).astype(np.float64)

    def stay(self, stage: int | None) -> float:
        """Return the number of steps for which work in `stage` (None: in all stages) stays alike."""
        if stage not in self._stays:
            subset = slice(None, None, -(-len(self.ranks) // COMPARED))
            parts = [excess[:, subset] for excess, *_ in self.pieces]
            late = [part.sum(axis=2) if stage is None else part[:, :, stage] for part in parts]
            self._stays[stage] = correlation_steps(np.concatenate(late).astype(np.float64))
        return self._stays[stage]

    def mean_step_ns(self, steps: int) -> float:
        """Mean time of the newest steps, in ns."""
        return float(np.concatenate([step_ns for *_, step_ns in self.pieces])[-steps:].mean())
