"""How evenly the routers of a run use their experts, from the session file."""

from __future__ import annotations

from collections.abc import Iterable

from traceml_ray.analysis.experts import ExpertLoad, loads
from traceml_ray.signals.experts.records import EXPERTS
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile


def experts_of(file: SessionFile, processes: Iterable[RankProcess]) -> list[ExpertLoad]:
    """Return the load of each router, of some rank processes together. Raises `SessionFileError`."""
    ids = [process.id for process in processes]
    tokens = file.records_of(EXPERTS, {*ids})
    return loads(tokens.get(process, []) for process in ids)
