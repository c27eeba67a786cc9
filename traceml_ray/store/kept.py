"""What folded rows of a run come to, as bytes in the session file: a report goes on from it."""

from __future__ import annotations

from collections.abc import Sequence

from traceml_ray.analysis.baseline import Baseline, Learner
from traceml_ray.analysis.episodes import AtEnd, Brief, Episodes
from traceml_ray.analysis.history import Replay, RunJudge
from traceml_ray.analysis.past_steps import PastSteps
from traceml_ray.analysis.reduction import Reduction, processes_of
from traceml_ray.analysis.row_table import RowTable, Who
from traceml_ray.analysis.step_history import Mark, StepHistory
from traceml_ray.analysis.step_stats import Histograms, Tally
from traceml_ray.analysis.step_sums import Bins, StepSums
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import Clock, Episode, FindingTrack, Recurring
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.watching import Watch
from traceml_ray.analysis.window import RankRows, Window
from traceml_ray.store.packing import Packer
from traceml_ray.store.schema import NONSENSE

FORM = 10
"""Of what is in the file; to be raised when one of the classes below means something else by it."""
MAX_RANKS = 1024
"""Of a run of more, only the sums are kept: what a report makes of them would take too much memory."""
MAX_BYTES = MAX_RANKS << 19
"""Of one run: of a rank 62 kB of histograms, 40 kB of steps and bins, up to 49 kB of sample per row of a step
and 52 kB that wait for another rank; twice as much of these two where ranks have a device clock."""


def pack(run: Reduction) -> bytes:
    """
    Return the reduction of folded rows as bytes, without the rows that were reduced. Raises TypeError or
    ValueError where it cannot be kept.
    """
    run.history.forget_rows()
    return _PACKER.pack(run)


def unpack(data: bytes | None, rows: Sequence[RankRows]) -> Reduction | None:
    """
    Return what was packed, None where there is nothing of the processes of `rows`. Raises ValueError for what
    cannot be read: it is damaged, or of another version.
    """
    try:
        run: Reduction | None = _PACKER.unpack(data) if data else None
        return run if run is not None and run.processes == processes_of(rows) else None
    except NONSENSE as error:
        raise ValueError(f"statistics of folded rows cannot be read: {error}") from error


_PACKER = Packer(
    FORM,
    MAX_BYTES,
    *(Reduction, StepHistory, RowTable, Who, Mark, StepSums, Bins, Tally, Histograms),
    *(
        Replay,
        RunJudge,
        PastSteps,
        Window,
        Learner,
        Baseline,
        Episodes,
        Brief,
        AtEnd,
        Watch,
        FindingTrack,
        Recurring,
        Clock,
        Episode,
        Verdict,
        Thresholds,
    ),
)
