"""Asks a session whether a rank of its newest attempt was a straggler, after the ranks have ended."""

from __future__ import annotations

from collections.abc import Callable

from traceml_ray.signals.check.confirm import had_straggler
from traceml_ray.store.query import Findings, GetRanks, GetVerdicts, ask


def ask_straggler(send: Callable[[bytes], bytes], run: str | None = None) -> bool:
    """
    Return whether a straggler was named in the newest attempt of a run.

    Args:
        send: sends a question to the session and returns the reply.
        run: the run. None: the newest one.

    Raises `QueryError`, and what `send` raises.
    """
    findings, changes, ranks = ask(send, (Findings(run), GetVerdicts(run), GetRanks(run)))
    verdicts = [(change.t_ns, change.label) for change in changes.items]
    return had_straggler(
        findings, verdicts, min((process.first_seen_ns for process in ranks.values()), default=0)
    )
