"""
A health check for Ray Train (`ray.train.health`, REP 71): turns what the monitor finds in a run into a
decision of Ray Train.

Written for the interface of commit 10c15d9 of Ray, which no released Ray has; `health_check` says so where it
is missing. Ray's controller calls the evaluator between two polls of its workers. It only reads what a thread
has last seen, and never raises: without a fresh answer it decides nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.errors import Errors, error_text
from traceml_ray.store import query
from traceml_ray.wire.codec import ready

from .health_rules import Action, HealthLimits, Look, Opinion, decide, kept, look_at

_FIELDS = {
    "HealthCheck": {"evaluator_creator"},
    "Noop": set[str](),
    "Diagnose": {"reason", "checks"},
    "Reattempt": {"reason"},
    "Evict": {"reason", "target_nodes"},
}
"""The classes of `ray.train.health` that are used, and those of their fields that are."""
_ANSWER_S = 10.0
"""Longest time for an answer of the session, in s."""
_log = logging.getLogger("traceml_ray")


class HealthCheckError(RuntimeError):
    """The installed Ray has no `ray.train.health`, or one with another interface."""


def health_check(*, checks: Sequence[Any] = (), **limits: Any) -> Any:
    """
    Return a `ray.train.health.HealthCheck` that decides by what this monitor finds:
    `RunConfig(health_config=HealthConfig(inflight_checks=[health_check()]))`.

    As it is, it is a dry run: decisions are logged, and noted as events of the run. The run must be watched,
    by `traceml_ray.start()` or `TraceMLTrainCallback`.

    Args:
        checks: the health checks that a Diagnose runs. Without any it has no effect besides
            `UserCallback.after_health_decision`.
        limits: fields of `HealthLimits` by name.

    Raises HealthCheckError where the installed Ray cannot use it, SettingError for a bad limit.
    """
    checked = HealthLimits.checked(limits)
    create = functools.partial(_evaluators, msgspec.to_builtins(checked), tuple(checks))
    return ray_health().HealthCheck(evaluator_creator=create)


def ray_health() -> Any:
    """Return the module `ray.train.health`. Raises HealthCheckError if it is missing or differs."""
    import ray

    try:
        health = importlib.import_module("ray.train.health")
    except ImportError as error:
        raise HealthCheckError(
            f"Ray {ray.__version__} has no ray.train.health ({error}). It is in no release of Ray yet: "
            "remove health_check(), or use a Ray that has it"
        ) from None
    for name, needed in _FIELDS.items():
        cls = getattr(health, name, None)
        fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
        if cls is None or needed - fields:
            missing = ", ".join(sorted(needed - fields)) if cls else "the class"
            raise HealthCheckError(
                f"ray.train.health.{name} of Ray {ray.__version__} lacks {missing}: health_check() was "
                "written for another state of this interface, which Ray may still change"
            )
    return health


def evaluator(limits: dict[str, Any], checks: Sequence[Any]) -> Any:
    """Return a new evaluator for Ray Train's controller. Raises HealthCheckError."""
    health = ray_health()
    judge = HealthJudge(msgspec.convert(limits, ready(HealthLimits)))

    class TraceMLEvaluator(health.Evaluator):  # type: ignore[misc, name-defined]
        def evaluate(self, state: object) -> Any:
            opinion = judge.opinion()
            return health.Noop() if opinion is None else _decision(health, opinion, checks)

        def on_worker_group_start(self) -> None:
            judge.restart()

    return TraceMLEvaluator()


def _decision(health: Any, opinion: Opinion, checks: Sequence[Any]) -> Any:
    reason = f"traceml-ray: {opinion.reason}"
    if opinion.action == "evict":
        return health.Evict(reason=reason, target_nodes=list(opinion.nodes))
    if opinion.action == "reattempt":
        return health.Reattempt(reason=reason)
    return health.Diagnose(reason=reason, checks=list(checks))


class HealthJudge:
    """
    Judges the run that this process controls. A thread, started by the first question, asks the session.

    Args:
        limits: when to decide what.
        look: asks the session once and returns what it saw; None: no run is watched here. It may raise.
        clock: monotonic time in s.
    """

    def __init__(
        self,
        limits: HealthLimits,
        look: Callable[[HealthLimits, float], Look | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.errors = Errors()
        """Number of failures, by kind. After each of them nothing was decided."""
        self._limits, self._look, self._clock = limits, look or look_at_run, clock
        self._looks: tuple[Look, ...] = ()
        self._since_s = self._heard_s = clock()
        self._warned = False
        self._made: set[tuple[Action, str]] = set()
        self._evictions = 0
        self._restarts = False
        """Whether a decision that ends this attempt was returned."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traceml-health", daemon=True)

    def opinion(self) -> Opinion | None:
        """Return the decision that Ray Train is to make now, if any. It does not wait and does not raise."""
        try:
            if self._thread.ident is None:
                self._thread.start()
            return None if self._restarts else self._decide()
        except Exception as error:
            if self.errors.note("health: opinion", error):
                _log.warning("health check: nothing is decided: %s", error_text(error))
            return None

    def restart(self) -> None:
        """Forget what was seen of an earlier attempt: a new one begins."""
        self._since_s = self._clock()
        self._made.clear()
        self._restarts = False

    def see(self) -> bool:
        """Look at the run once. Return whether it goes on."""
        try:
            look = self._look(self._limits, self._clock())
        except Exception as error:
            self.errors.note("health: look", error)
            self._silent(error)
            return True
        self._heard_s, self._warned = self._clock(), False
        if look is None:
            if not self._looks:
                _log.warning("health check: nothing is decided: no session watches this run")
            return False
        self._looks = kept((*self._looks, look), self._limits)
        return True

    def _run(self) -> None:
        while self.see():
            self._over.wait(self._limits.poll_s)

    def _decide(self) -> Opinion | None:
        opinion = decide(
            self._looks,
            self._limits,
            now_s=self._clock(),
            since_s=self._since_s,
            evictions=self._evictions,
            made=self._made,
        )
        if opinion is None:
            return None
        self._made.add((opinion.action, opinion.key))
        dry = self._limits.dry_run
        _announce(f"health check{' (dry run, nothing is done)' if dry else ''}: {opinion.reason}")
        if dry:
            return None
        self._evictions += len(opinion.nodes) if opinion.action == "evict" else 0
        self._restarts = opinion.action != "diagnose"
        return opinion

    def _silent(self, error: Exception) -> None:
        """Warn once when the session has not answered for too long."""
        silent_s = self._clock() - self._heard_s
        if silent_s > self._limits.stale_s and not self._warned:
            self._warned = True
            why = f"no answer of the session for {text.duration(silent_s)} ({error_text(error)})"
            _log.warning("health check: nothing is decided: %s", why)


def _announce(message: str) -> None:
    from .train_callback import watched_run

    _log.warning("%s", message)
    run = watched_run()
    if run is not None:
        run.note(message)


def look_at_run(limits: HealthLimits, asked_s: float) -> Look | None:
    """
    Return what the session knows of the run that this process controls. None: none is watched here.

    Raises QueryError, and what Ray raises, if the session does not answer.
    """
    import ray

    from traceml_ray.ray.actors import find_aggregator

    from .train_callback import watched_run

    run = watched_run()
    if run is None:
        return None
    aggregator = find_aggregator(run.session)
    if aggregator is None:
        raise query.QueryError(f"session {run.session!r} does not run")

    def reply(message: bytes) -> bytes:
        answer: bytes = ray.get(aggregator.query.remote(message), timeout=_ANSWER_S)
        return answer

    return ask(reply, run.run_id, run.attempt(), limits, asked_s, time.time_ns())


def ask(
    reply: Callable[[bytes], bytes],
    run_id: str,
    attempt: int,
    limits: HealthLimits,
    asked_s: float,
    now_ns: int,
) -> Look:
    """Return what the answers of `reply` show of an attempt of a run, see `look_at`. Raises QueryError."""
    questions = (
        query.Findings(run_id),
        query.GetVerdict(run_id),
        query.GetRanks(run_id),
        query.GetNodes(run_id),
    )
    findings, verdict, processes, nodes = query.ask(reply, questions)
    return look_at(
        findings,
        verdict,
        [process.identity for process in processes.values() if process.identity is not None],
        nodes,
        attempt=attempt,
        asked_s=asked_s,
        now_ns=now_ns,
        stale_s=limits.stale_s,
    )


def _evaluators(limits: dict[str, Any], checks: tuple[Any, ...]) -> list[Any]:
    """
    Return the evaluator, or none if our package is missing in the controller, or does not fit its Ray.

    This function is pickled by value, so it may use no globals of this module.
    """
    try:
        from traceml_ray.launchers.health_policy import evaluator

        return [evaluator(limits, checks)]
    except Exception as error:
        import logging

        logging.getLogger("traceml_ray").warning(
            "traceml-ray: no health check in this run: %s: %s", type(error).__name__, error
        )
        return []


_evaluators.__module__ = "__main__"  # what is there, cloudpickle sends whole
