"""How evenly the routers of a run use their experts, from the records of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from traceml_ray.analysis.experts import ExpertLoad, loads
from traceml_ray.signals.experts.answer import GetExperts
from traceml_ray.signals.experts.records import EXPERTS
from traceml_ray.signals.view import Run, View
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire.codec import ready


class ExpertsView(View[list[ExpertLoad]]):
    """See `View`. A report has the loads in what it says of steps (`reports.contents`)."""

    name = "experts"
    question = GetExperts

    def answer(self, run: Run, asked: GetExperts) -> list[ExpertLoad]:
        """Return the load of each router, of all ranks together, or of one."""
        return experts_of(
            run.file, [process for rank, process in run.ranks.items() if asked.rank in (None, rank)]
        )

    def block(self, answer: list[ExpertLoad]) -> Any:
        """Return the loads as plain values."""
        return msgspec.to_builtins(answer)

    def of_block(self, block: Any) -> list[ExpertLoad]:
        """Return the loads of a block; an older summary has none."""
        return msgspec.convert(block or [], ready(list[ExpertLoad]), strict=False)


def experts_of(file: SessionFile, processes: Iterable[RankProcess]) -> list[ExpertLoad]:
    """Return the load of each router, of some rank processes together. Raises `SessionFileError`."""
    ids = [process.id for process in processes]
    tokens = file.records_of(EXPERTS, {*ids})
    return loads(tokens.get(process, []) for process in ids)
