"""Reads the memory of rank processes from session files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traceml_ray import wire
from traceml_ray.recordings.recording import FileContents, NoSamplesError, Recording, column
from traceml_ray.store.nodes import process_labels
from traceml_ray.store.rank_processes import shown, world_size
from traceml_ray.store.runs import by_run
from traceml_ray.store.schema import legible
from traceml_ray.store.session_file import SessionFile

FORMAT = "traceml-ray session"
_ALL = 1 << 62


def read(path: Path) -> FileContents:
    """
    Return the memory of every rank process of every run of a session file.

    Raises:
        NoSamplesError: no rank has reported any.
        SessionFileError: the file cannot be read.
    """
    with SessionFile(path) as file, legible(path):
        processes = file.processes()
        labels = process_labels(file.cluster(), processes)
        samples: dict[int, list[wire.ProcessSample]] = {}
        for process, sample in file.process_samples([process.id for process in processes], _ALL):
            samples.setdefault(process, []).append(sample)
        found = []
        for run, own in by_run(processes).items():
            world = world_size(shown(own), None) or None
            for each in own:
                if each.rank is not None and each.id in samples:
                    recording = _host(each.process_id, labels[each.id], samples[each.id])
                    recording.rank, recording.world_size, recording.run = each.rank, world, run
                    found.append(recording)
    if not found:
        raise NoSamplesError("no rank has reported its memory")
    return FileContents(FORMAT, found)


def _host(process: str, node: str, samples: list[wire.ProcessSample]) -> Recording:
    samples = sorted(samples, key=lambda sample: sample.t_ns)
    return Recording(
        process=process,
        node=node,
        device=None,
        t_ns=np.array([sample.t_ns for sample in samples], np.int64),
        columns={"rss_bytes": column(sample.rss_bytes for sample in samples)},
    )
