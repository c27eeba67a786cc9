"""What ranks printed last, as read by their agents and relays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from traceml_ray import text
from traceml_ray.document.model import Lines, Section
from traceml_ray.signals.output.last_lines import LastOutput, OutputLine, last_lines
from traceml_ray.signals.output.records import OUTPUT
from traceml_ray.signals.view import Run, View
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire.codec import Count, Int64

REPORTED_LINES = 12
"""Number of lines of each stream that are shown with a failure."""
MOST_LINES = 40
"""Number of lines of each stream that a page requests."""


class GetOutput(OfRun[list[LastOutput]], frozen=True):
    """
    What a rank printed last: `most` lines of stdout and of stderr each. Without `rank`: of the ranks that a
    failure names, which only a report knows.
    """

    rank: Int64 | None = None
    most: Count = REPORTED_LINES


def output_lines(output: LastOutput) -> Lines:
    """Return what a rank printed last, each line with its stream."""
    lines = list[tuple[str, str]]()
    for line in output.lines:
        lines += [("", f"… {text.count(line.skipped, 'more line')}")] * (line.skipped > 0)
        lines.append((line.stream, line.text))
    return Lines(f"Last output of rank {output.rank}", lines)


class OutputView(View[list[LastOutput]]):
    """
    See `View`. A requested rank always has an answer. Of the failed ranks, only those that printed something
    have one.
    """

    name = "output"
    question = GetOutput

    def answer(self, run: Run, asked: GetOutput) -> list[LastOutput]:
        """Return the last lines of a rank, or of those that a failure names."""
        if asked.rank is None:
            return outputs_of(run.file, run.failed, asked.most)
        process = run.ranks.get(asked.rank)
        if process is None:
            return [LastOutput(asked.rank, [], "the rank has not reported")]
        lines = lines_of(run.file, [process.id], asked.most).get(process.id, [])
        return [LastOutput(asked.rank, lines, _missing(run.file.meta(), process))]

    def sections(self, answer: list[LastOutput]) -> Sequence[Section]:
        """Return the lines of each rank."""
        return [Section("failure", [output_lines(output) for output in answer])]


def outputs_of(file: SessionFile, processes: Mapping[int, RankProcess], most: int) -> list[LastOutput]:
    """
    Return what the `processes` of some ranks printed last, `most` lines of each stream. Ranks without output
    are left out. Raises `SessionFileError`.
    """
    lines = lines_of(file, [process.id for process in processes.values()], most)
    return [
        LastOutput(rank, lines[process.id], None)
        for rank, process in processes.items()
        if process.id in lines
    ]


def lines_of(file: SessionFile, processes: Iterable[int], most: int) -> dict[int, list[OutputLine]]:
    """
    Return the last lines of each of `processes` (ids) that has printed any, `most` of each stream. Raises
    `SessionFileError`.
    """
    stored = file.records_of(OUTPUT, {*processes})
    return {process: last_lines(outputs, most) for process, outputs in stored.items()}


def _missing(meta: Mapping[str, Any], process: RankProcess) -> str | None:
    """Return why lines may be missing."""
    if str((meta.get("settings") or {}).get("output_lines")) == "0":
        return "turned off: output_lines is 0"
    reasons = [f"{name}: {why}" for name, why in process.missing.items() if name.startswith("last lines")]
    return "; ".join(reasons) or None
