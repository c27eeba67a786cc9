"""Ends a session whose aggregator does not: from its file, and from spool files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from traceml_ray.files import remove
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.finish import LOCKED_S
from traceml_ray.settings import Settings
from traceml_ray.store.fence import take_over
from traceml_ray.store.schema import damaged
from traceml_ray.store.session import SessionFolder
from traceml_ray.wire import messages as wire


def finish_offline(
    folder: Path,
    settings: Settings,
    finish: wire.Finish,
    spool: Path | None = None,
    info: dict[str, Any] | None = None,
    why: str = "",
) -> Path | None:
    """
    End a session whose aggregator does not answer, from its file and what agents and relays left in `spool`;
    that aggregator, should it go on later, writes nothing any more. `info` as for `AggregatorCore`; `why` it
    is ended in this way becomes an event.

    A file that is damaged is set aside, and the session made from `spool` alone; returns where it is then.
    Raises `SessionFileError`, OSError or `sqlite3.Error` when the files cannot be read or written.
    """
    aside, file = None, SessionFolder(Path(folder)).sqlite
    while True:
        try:
            take_over(file, LOCKED_S)
            with contextlib.closing(AggregatorCore(folder, settings, info or {})) as aggregation:
                read = aggregation.ingest_spool(spool) if spool is not None else []
                aggregation.finish(finish, f"finished without the aggregator: {why}" if why else "")
                remove(read)
            return aside
        except Exception:
            if aside is not None or not damaged(file):
                raise
        aside = file.replace(file.with_suffix(".damaged"))
        for rest in ("-wal", "-shm"):
            file.with_name(file.name + rest).unlink(missing_ok=True)
