"""Reads the memory of rank processes from session files, also from those of bundles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from traceml_ray.analysis.hang import COLLECTIVE
from traceml_ray.analysis.node_clock import NodeClock
from traceml_ray.identity import RankFilter
from traceml_ray.signals.memory.answer import MemoryOfRank
from traceml_ray.signals.memory.judge import judge_recordings
from traceml_ray.signals.memory.recordings import (
    FileContents,
    Ints,
    NoSamplesError,
    Recording,
    merge,
)
from traceml_ray.signals.memory.shapes import Collective, Memory
from traceml_ray.store.bundles import kept_why
from traceml_ray.store.nodes import process_labels
from traceml_ray.store.rank_processes import RankProcess, current_ranks, world_size
from traceml_ray.store.runs import by_run
from traceml_ray.store.samples import MemoryColumns
from traceml_ray.store.schema import legible
from traceml_ray.store.session_file import SessionFile

FORMAT = "traceml-ray session"
BUNDLE = "traceml-ray bundle"
_MOST_SAMPLES = 2_000_000
"""
Largest number of samples read: a quarter of an hour of 1,024 ranks, about 6 s of reading. A longer time is
sampled.
"""


def read(path: Path) -> FileContents:
    """
    Return the memory of every rank process of every run of a session file.

    Raises:
        NoSamplesError: no rank has reported any.
        SessionFileError: the file cannot be read.
    """
    with SessionFile(path) as file, legible(path), file.at_one_moment():
        recordings = recordings_of(file)
    if not recordings:
        raise NoSamplesError("no rank has reported its memory")
    kept = kept_why(path.parent)
    return FileContents(BUNDLE, recordings, [kept]) if kept else FileContents(FORMAT, recordings)


def recordings_of(file: SessionFile) -> list[Recording]:
    """
    Return the memory of every rank process of every run, by device, with its collectives. Raises
    `SessionFileError`.
    """
    processes = {process.id: process for process in file.processes() if process.rank is not None}
    labels = process_labels(file.cluster(), processes.values())
    worlds = {
        run: world_size(current_ranks(processes_of_run), None) or None
        for run, processes_of_run in by_run(processes.values()).items()
    }
    samples, _ = file.memory_samples(processes, most=_MOST_SAMPLES)
    clocks = file.clocks()
    recordings = []
    for columns_of_device in samples:
        process = processes[columns_of_device.process]
        run = process.identity.job_id if process.identity else None
        clock = clocks.get(process.identity.node_id or "") if process.identity else None
        columns_of_device, bound_ns = (
            (columns_of_device, None) if clock is None else _on_one_clock(columns_of_device, clock)
        )
        recording = Recording(
            process=process.process_id,
            node=labels[columns_of_device.process],
            device=columns_of_device.device,
            t_ns=columns_of_device.t_ns,
            columns=columns_of_device.columns,
            step=columns_of_device.step,
            bound_ns=bound_ns,
            rank=process.rank,
            world_size=None if run is None else worlds[run],
            run=run,
            first_step_ns=_first_step_ns(columns_of_device.t_ns, columns_of_device.step),
        )
        recordings.append(recording)
    _add_collectives(file, recordings)
    return recordings


def memory_of(file: SessionFile) -> Memory:
    """Return what is found about the memory of the ranks of a file's run; empty without any sample."""
    run = file.run_id()
    recordings = [recording for recording in recordings_of(file) if recording.run == run]
    return judge_recordings(merge(recordings), RankFilter()) if recordings else Memory()


def memory_by_rank(file: SessionFile, ranks: Mapping[int, RankProcess]) -> dict[int, MemoryOfRank]:
    """Return how much memory the process of each rank has used. Raises `SessionFileError`."""
    resident, allocated = file.memory(), file.allocated_peaks()
    return {
        rank: MemoryOfRank(*resident.get(process.id, (None, None)), allocated.get(process.id))
        for rank, process in ranks.items()
    }


def _add_collectives(file: SessionFile, recordings: Sequence[Recording]) -> None:
    """Add which collectives each process was in, and when, as far as its samples tell when its steps were."""
    processes = {process.id: process.process_id for process in file.processes()}
    timed = {
        recording.process: recording
        for recording in recordings
        if recording.step is not None and (recording.step >= 0).any()
    }
    for run in {recording.run for recording in timed.values()}:
        for span in file.for_run(run).groups():
            recording_of_span = timed.get(processes[span["process"]])
            if (
                recording_of_span is not None
                and recording_of_span.rank is not None
                and recording_of_span.run == run
                and is_collective(span["name"])
            ):
                assert recording_of_span.step is not None
                first, last = when(
                    recording_of_span.t_ns, recording_of_span.step, span["first_step"], span["last_step"] + 1
                )
                group, count, size = span["process_group"], span["count"], span["bytes"]
                recording_of_span.collectives.append(
                    Collective(recording_of_span.rank, span["name"], group, first, last, count, size)
                )


def is_collective(span: str) -> bool:
    """Whether a span of that name is one, not only the wait for it."""
    return bool(COLLECTIVE.match(span)) and span != "wait"


def when(t_ns: Ints, step: Ints, *steps: int) -> list[int]:
    """Return about when a process came to each of `steps`; one of its samples, at least, has a step."""
    known = step >= 0
    return [int(at_ns) for at_ns in np.interp(steps, step[known], t_ns[known])]


def _on_one_clock(measured_columns: MemoryColumns, clock: NodeClock) -> tuple[MemoryColumns, int]:
    """Return samples on the aggregator's clock, in order of time, and how far off the times are at most."""
    t_ns, bound_ns = clock.to_aggregator(measured_columns.t_ns)
    order = np.argsort(t_ns, kind="stable")
    columns = {name: values[order] for name, values in measured_columns.columns.items()}
    return replace(
        measured_columns, t_ns=t_ns[order], step=measured_columns.step[order], columns=columns
    ), int(bound_ns.max())


def _first_step_ns(t_ns: Ints, step: Ints) -> int | None:
    """Return when the first step was over: the first sample in a later one than the first that is known."""
    known = step[step >= 0]
    later = np.flatnonzero(step > known[0]) if len(known) else known
    return int(t_ns[later[0]]) if len(later) else None
