"""Why ranks are late, from the steps and the sizes of batches that are stored."""

from __future__ import annotations

from collections.abc import Sequence

from traceml_ray.analysis.reasons import has_reason, with_reason
from traceml_ray.analysis.uneven_work import amounts
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Float, Int64
from traceml_ray.reports.run_facts import RunFacts
from traceml_ray.reports.stored_totals import StoredTotals
from traceml_ray.signals.experts.view import experts_of
from traceml_ray.store.schema import legible


def with_stored_reason(verdict: Verdict, facts: RunFacts, totals: StoredTotals | None) -> Verdict:
    """Return `verdict` with its reason, where it has one. Raises `SessionFileError`."""
    if totals is None or not has_reason(verdict):
        return verdict

    def sizes(ranks: Sequence[int], steps: Int64) -> dict[str, Float]:
        processes = {facts.ranks[rank].id: rank for rank in ranks if rank in facts.ranks}
        stored = facts.session.step_sizes(processes, steps)
        with legible(facts.session.path):
            return amounts({processes[process]: pieces for process, pieces in stored.items()}, ranks, steps)

    uneven = experts_of(facts.session, facts.ranks.values())
    return with_reason(verdict, totals.sampled(verdict), sizes, uneven)
