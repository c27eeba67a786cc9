"""Reads the batches that agents, and relays before, left in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from traceml_ray.errors import Errors
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import SUFFIX, read_spool

Batches = list[tuple[wire.RankBatch, bytes]]
"""Each as decoded, and as it was sent."""


def spooled(folder: Path, errors: Errors, seen: set[Path]) -> Iterator[tuple[Path, Batches]]:
    """
    Yield each spool file of `folder` that is not among `seen`, in order of names, with its batches; all that
    were looked at are added to `seen`. A file or batch that cannot be read is counted at `spool`.
    """
    for path in sorted(set(folder.glob(f"*{SUFFIX}")) - seen):
        seen.add(path)
        batches: Batches = []
        try:
            for frame in read_spool(path):
                try:
                    batches.append((wire.decode(frame, wire.RankBatch), frame))
                except wire.WireError as error:
                    errors.note("spool", error)
        except OSError as error:
            errors.note("spool", error)
        else:
            yield path, batches
