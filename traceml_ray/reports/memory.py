"""What is to be said about the memory of a run's ranks: from a session file, and in words."""

from __future__ import annotations

from traceml_ray import text
from traceml_ray.analysis.memory.shapes import Memory
from traceml_ray.rank_filter import RankFilter
from traceml_ray.recordings.merge import merge
from traceml_ray.recordings.sessions import recordings_of
from traceml_ray.reports.analyze import judged
from traceml_ray.store.session_file import SessionFile


def memory_of(file: SessionFile) -> Memory:
    """Return what is to be said about the memory of the ranks of a file's run; empty without any sample."""
    run = file.run_id()
    own = [each for each in recordings_of(file) if each.run == run]
    return judged(merge(own), RankFilter(), "medium") if own else Memory()


def first_words(found: Memory) -> list[str]:
    """Return in sentences which rank's memory grew first, or that none did, and who is missing."""
    cause, onset = found.first_cause, found.collective_onset
    if cause is not None:
        said = [f"Rank {cause.rank}'s memory grew first: {cause.why}", *cause.next[:1]]
    elif onset is not None:
        said = [onset.why]
    elif found.findings:
        said = [found.findings[0].why, *found.findings[0].next[:1]]
    else:
        said = ["No rank's memory has grown above its own level."]
    if found.missing_ranks:
        said.append(f"There are no samples of {text.ranks(found.missing_ranks)}.")
    return said
