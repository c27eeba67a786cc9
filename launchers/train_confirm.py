"""
Confirms stragglers under Ray Train (`confirm=restart`): before the workers of a new attempt start, the nodes
of the attempt before are checked if one of its ranks was a straggler.

It runs in Ray Train's controller, which waits for it in a bounded time. Whatever goes wrong, the attempt
starts.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from traceml_ray import text
from traceml_ray.errors import error_text
from traceml_ray.signals.check.coordinator import Coordinator, Outcome
from traceml_ray.signals.check.nodes import CheckNode
from traceml_ray.signals.check.records import Checked
from traceml_ray.signals.check.tasks import Plan

from .stragglers import ask_straggler

LIMIT_S = 180.0
"""How long an attempt waits for a check, in s."""
DECIDE_S = 10.0
"""How long an attempt waits until it is known whether there is a straggler, in s."""
SECONDS = 10.0
"""About how long each node measures, in s."""
_ANSWER_S = 5.0
_FREE_S = 10.0
_TOLD = 3


class TrainNode(CheckNode, Protocol):
    """A node of a run."""

    def leave(self, session: str, checks: Sequence[Checked]) -> None:
        """Have the ranks of the node store checks."""

    def end(self) -> None:
        """End what measures there. Does not wait."""


def confirm(
    session: str,
    run_id: str,
    node_ids: Collection[str],
    limit_s: float = LIMIT_S,
    decide_s: float = DECIDE_S,
    *,
    has_straggler: Callable[[str, str], bool] | None = None,
    reach: Callable[[Collection[str]], Sequence[TrainNode]] | None = None,
) -> str:
    """
    Check nodes of a run if one of its ranks is a straggler. Return what the check says; "": nothing was
    checked. Raises nothing.

    Args:
        session: name of the session.
        run_id: the run.
        node_ids: Ray's ids of the nodes.
        limit_s: most seconds to wait for the check.
        decide_s: most seconds to wait until it is known whether there is a straggler.
        has_straggler: tells whether a run has a straggler.
        reach: makes the nodes.
    """
    results, made = queue.SimpleQueue[str](), list[TrainNode]()
    is_decided, over = threading.Event(), threading.Event()

    def check() -> None:
        try:
            is_needed = (has_straggler or _has_straggler)(session, run_id)
            is_decided.set()
            if over.is_set() or not is_needed:
                results.put("")
                return
            made.extend((reach or _reach)(node_ids))
            if over.is_set():
                return
            outcome = Coordinator(made, Plan(SECONDS)).run()
            if over.is_set():  # what was measured beside the attempt is no measure
                return
            for node in made:
                _leave(node, session, outcome)
            results.put(_words(outcome))
        except Exception as error:
            results.put(f"no check: {error_text(error)}")
            is_decided.set()
        finally:
            _end(made)

    # A thread: the controller is an asynchronous actor, in which Ray's calls may not wait.
    threading.Thread(target=check, name="traceml-confirm", daemon=True).start()
    try:
        if not is_decided.wait(decide_s):
            return f"no check: the session did not answer within {text.duration(decide_s)}"
        return results.get(timeout=limit_s)
    except queue.Empty:
        over.set()
        # Another thread: it may be Ray that does not answer.
        threading.Thread(target=_end, args=(made,), name="traceml-confirm-end", daemon=True).start()
        return f"no check: it was not done within {text.duration(limit_s)}"
    finally:
        over.set()


def _end(nodes: Sequence[TrainNode]) -> None:
    """End what measures on nodes, also if it was ended before."""
    for node in [*nodes]:
        with contextlib.suppress(Exception):
            node.end()


def _leave(node: TrainNode, session: str, outcome: Outcome) -> None:
    """Have the ranks of a node store what was measured there. A node that cannot is an error of the check."""
    mine = [one for one in outcome.checks if one.node == node.name]
    try:
        node.leave(session, [msgspec.structs.replace(one, kind="restart") for one in mine])
    except Exception as error:  # it may have died since; the other nodes have measured
        outcome.errors.append(f"{node.name}: its check is not in the session: {error_text(error)}.")


def _words(outcome: Outcome) -> str:
    from traceml_ray.signals.check.conclusion import concluded, lines

    return "check: " + " ".join(lines(concluded(outcome))[:_TOLD])


def _has_straggler(session: str, run_id: str) -> bool:
    """Return whether a session names a straggler in a run. Raises QueryError, and what Ray raises."""
    import ray

    from traceml_ray.ray.actors import find_aggregator

    aggregator = find_aggregator(session)
    if aggregator is None:
        return False

    def reply(message: bytes) -> bytes:
        answer: bytes = ray.get(aggregator.query.remote(message), timeout=_ANSWER_S)
        return answer

    return ask_straggler(reply, run_id)


def _reach(node_ids: Collection[str]) -> Sequence[TrainNode]:
    from traceml_ray.ray.check import ray_nodes, wait_until_free

    wait_until_free(node_ids, _FREE_S)
    return ray_nodes(only=node_ids)
