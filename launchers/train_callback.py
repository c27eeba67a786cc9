"""
Our callback for Ray Train v2: watches its workers, and follows the run.

The object exists in three places: it is made in the driver, sent to the controller, and from there to every
worker, again for each attempt. Ray ends a run when a hook raises, so none of our hooks raises. The object
must also be unpickled where our package may be missing, so the function that unpickles it is sent with it.

It reports one run to a session's aggregator in a separate thread. Only the end waits for that thread.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import ray
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerCallback, WorkerGroupCallback

from traceml_ray.agent import bootstrap
from traceml_ray.agent.imports import forget, when_imported
from traceml_ray.errors import Errors, error_text
from traceml_ray.identity import RankIdentity
from traceml_ray.monitor.finish import ANSWER_S, ASK_S, REPORT_S, STARTING_S, WORD_S
from traceml_ray.ray.actors import (
    ActorConfig,
    configure,
    current_config,
    find_aggregator,
    with_environment,
)
from traceml_ray.settings import Settings, of_driver
from traceml_ray.text import masked
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready

MADE_S = 5.0
"""Time that an answer may take while the run goes on, in s. The first one includes creating the actor."""
TRIES = 4
RETRY_S = 0.5


class RunReporter:
    """
    Reports a run from Ray Train's controller. No method raises, and only `end` waits.

    Undelivered data is kept and sent with the next message. The last message is sent at the end of the run.
    """

    def __init__(self, config: ActorConfig, job_id: str) -> None:
        self.errors = Errors()
        """Number of messages that could not be sent, by kind of failure."""
        self._config = config
        self._job_id = job_id
        self._info: dict[str, codec.Value] = {}
        self._events: list[wire.Event] = []
        self._aggregator: Any | None = None
        self._make = False
        self._status: str | None = None
        self._answer: wire.Finished | None = None
        self._written = self._gave_up = False
        self._heard = self._waits_at = 0.0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traceml-run", daemon=True)
        self._thread.start()

    def ensure(self) -> None:
        """If the session has ended, create it again. A session ends itself when it is idle."""
        self._make = True
        self._wake.set()

    def report(self, info: dict[str, codec.Value] | None = None, *events: wire.Event) -> None:
        """Send `info` and `events` of the run."""
        self._info = {**self._info, **(info or {})}
        self._events.extend(events)
        self._wake.set()

    def end(self, status: str) -> bool:
        """
        Report that the run is over, and return whether its files are written.

        The aggregator decides when they are (see `monitor.finish`). If it does not answer, this does not wait
        for it.
        """
        started = self._heard = self._waits_at = time.monotonic()
        self._status = status
        self._wake.set()
        while self._thread.is_alive() and self._waits(started):
            self._thread.join(ASK_S)
        self._gave_up = True
        return self._written

    def _waits(self, started: float) -> bool:
        """Whether a reply arrived recently, so that the reply that all files are written may still arrive."""
        silent_s = STARTING_S if self._answer is None else ANSWER_S
        return time.monotonic() < min(self._heard + silent_s, self._waits_at + WORD_S, started + REPORT_S)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._status is None:
            self._wake.wait()
            self._wake.clear()
            for _ in range(TRIES):
                if self._status is not None or self._send() is not None:
                    break
                time.sleep(RETRY_S)
        finished = self._send(self._status)
        while (finished is None or finished.pending) and not self._gave_up:
            time.sleep(ASK_S)
            finished = self._send(self._status)
        self._written = finished is not None and finished.state == "written"

    def _send(self, status: str | None = None) -> wire.Finished | None:
        """Send everything that has not been delivered. Return the answer. None: there was no answer."""
        events = self._events[: codec.MAX_ITEMS]
        message = wire.RunEnd(codec.VERSION, self._job_id, self._info, events, status)
        try:
            aggregator = self._aggregator = self._find()
            if aggregator is None:
                return None
            timeout_s = ANSWER_S if status else MADE_S
            reply = ray.get(aggregator.finish.remote(codec.encode(message)), timeout=timeout_s)
            self._answer = finished = codec.decode(reply, wire.Finished)
            self._heard = time.monotonic()
            if finished.waiting or finished.state == "writing":
                self._waits_at = self._heard
        except Exception as error:
            self.errors.note("run", error)
            self._aggregator = None
            return None
        del self._events[: len(events)]
        return finished

    def _find(self) -> Any | None:
        if self._make:
            from traceml_ray.ray.aggregator import ensure_aggregator  # imported late: its import is slow

            made = ensure_aggregator(self._config, ray.get_runtime_context().get_node_id())
            self._make = False
            return made
        return self._aggregator or find_aggregator(self._config.session)


_MESSAGE_CHARS = 2000

_chosen: dict[str, str] = {}
"""In a controller: which callback watches a run, if the run was given several of ours."""


class WatchedRun(NamedTuple):
    """A run whose controller is this process, and that one of our callbacks watches."""

    session: str
    run_id: str
    attempt: Callable[[], int]
    """Returns the number of the attempt that runs now."""
    note: Callable[[str], None]
    """Adds an event with this text to the run. It does not wait."""


_watched: dict[str, WatchedRun] = {}
"""The runs that are going on, by id."""


def watched_run() -> WatchedRun | None:
    """Return the run of this controller. None: no run is watched here, or there are several."""
    runs = [*_watched.values()]
    return runs[0] if len(runs) == 1 else None


def _hook(result: Callable[[], object] = lambda: None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method safe for Ray to call: if it raises, count the error and return `result()`."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: TraceMLTrainCallback, *args: Any, **kwargs: Any) -> Any:
            try:
                if self._watching:
                    return method(self, *args, **kwargs)
            except (Exception, SystemExit) as error:  # a SystemExit of a library would also end the run
                self._failed(method.__name__, error)
            return result()

        return call

    return decorate


class TraceMLTrainCallback(WorkerCallback, WorkerGroupCallback, ControllerCallback):
    """
    Watches a Ray Train run: `RunConfig(callbacks=[TraceMLTrainCallback()])`.

    It is not needed after `traceml_ray.start()` in the same driver; if given, it takes precedence. It reports
    to the session that this driver started last, else to the session of the default name, which it starts if
    needed. Local mode (`num_workers=0`) trains in the driver and takes no callbacks: use
    `traceml_ray.attach()` there.

    Args:
        settings: settings of a session that this callback makes. What ranks read (`interval`, `deep`, …) is
            for the ranks of this run also in a session that runs already. `session` names another session.
        fields: fields of `Settings` by name, as for `traceml_ray.start`. They override `settings`.

    Raises SettingError for a name or value that cannot be used.
    """

    _settings: Mapping[str, Any] = {}
    _config = b""
    """ActorConfig as JSON, from when it leaves the driver."""
    _watching = True
    _attempt = -1
    """Number of the attempt. It is counted here, because Ray gives an elastic resize no number."""
    _nnodes = 0
    _group_ns = 0
    """When Ray Train began to start the workers of this attempt (ns since the epoch)."""
    _world_size = 0
    _starting = False
    _node_ids: frozenset[str] = frozenset()
    """Ray's ids of the nodes of this attempt."""
    _run: RunReporter | None = None
    _run_id = ""
    _reported: object = None
    """The newest failure that was reported."""

    def __init__(self, settings: Settings | None = None, **fields: Any) -> None:
        if settings is not None or fields:
            # Without any, it is made by `fit()`, which is to go on whatever is in the environment.
            self._settings = of_driver(settings, fields)
        self._id = secrets.token_hex(8)
        self._errors = Errors()

    # -- being sent ------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        state: dict[str, Any] = {"_watching": False}
        try:
            config = self._config or msgspec.json.encode(_config(self._settings))
            kept = ("_id", "_watching", "_attempt", "_nnodes", "_group_ns")
            state = {"_config": config, **{name: getattr(self, name) for name in kept}}
        except (Exception, SystemExit) as error:
            self._failed("__reduce__", error)
        return _unpickled, (state,)

    @classmethod
    def _from_state(cls, state: dict[str, Any]) -> TraceMLTrainCallback:
        made = cls.__new__(cls)
        made.__dict__.update({"_id": "", "_errors": Errors(), **state})
        return made

    def _failed(self, place: str, error: BaseException) -> None:
        try:
            if not self._errors:
                _log.warning("Ray Train's %s: %s", place, error_text(error))
            self._errors.note(f"train: {place}", error)
            agent = bootstrap.current()
            if agent is not None:
                agent.instrumentation.errors.note(f"train: {place}", error)
        except Exception:
            pass  # the error cannot be counted anywhere

    # -- in the controller -----------------------------------------------------------------------

    @_hook()
    def after_controller_start(self, train_run_context: Any) -> None:
        """Begin a run. If there are several of our callbacks, the one that the user gave watches it."""
        run_id, given = train_run_context.run_id, train_run_context.run_config.callbacks or []
        ours = [callback._id for callback in given if isinstance(callback, TraceMLTrainCallback)]
        self._watching = _chosen.setdefault(run_id, (ours or [self._id])[0]) == self._id
        if self._watching:
            config = msgspec.json.decode(self._config, type=ready(ActorConfig))
            self._run, self._run_id = RunReporter(config, run_id), run_id
            self._run.report({"name": train_run_context.run_config.name, "launcher": "ray_train"})
            _watched[run_id] = WatchedRun(config.session, run_id, lambda: max(0, self._attempt), self._note)

    @_hook()
    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Create or find the session's actors while the workers start."""
        self._starting, self._nnodes, self._group_ns = True, 0, time.time_ns()
        if self._run is not None:
            self._run.ensure()
            self._confirm()

    def _confirm(self) -> None:
        """Check the nodes of the attempt before, if the settings say so. It may take some seconds."""
        nodes, self._node_ids = self._node_ids, frozenset()
        config = msgspec.json.decode(self._config, type=ready(ActorConfig))
        if nodes and config.settings.confirm == "restart":
            from .train_confirm import confirm  # imported late: it imports numpy

            if message := confirm(config.session, self._run_id, nodes):
                self._note(message)

    @_hook(dict)
    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Begin an attempt (or replace some of its workers). The workers' identities are known now."""
        if self._starting:
            self._starting = False
            self._attempt += 1
        contexts = [worker.distributed_context for worker in workers]
        self._world_size = max(context.world_size for context in contexts)
        self._nnodes = max(self._nnodes, *(context.node_rank + 1 for context in contexts))
        if self._run is not None:
            self._run.report(
                {"world_size": self._world_size, "nnodes": self._nnodes, "attempt": self._attempt}
            )
        self._node_ids |= {worker.metadata.node_id for worker in workers}
        return {}

    @_hook()
    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Report failures and resizes. Restarts are visible in the rows."""
        after = getattr(current_state, "next_state", current_state)  # set while a run is shutting down
        self._failure(getattr(after, "training_failed_error", None))
        name = type(current_state).__name__
        if name == "ResizingState":
            self._resize(current_state.scaling_decision.num_workers)
        elif name == "AbortedState":
            self._end("stopped")

    @_hook()
    def after_controller_finish(self, result: Any) -> None:
        """Wait for the files of a run that is over and whose workers have ended."""
        self._failure(result.error)
        self._end("finished" if result.error is None else "failed")

    def _failure(self, error: Any) -> None:
        if error is None or error is self._reported or self._run is None:
            return
        self._reported = error
        failures: dict[int, Exception] = getattr(error, "worker_failures", {})
        causes = [f"rank {rank}: {_in_a_line(failure)}" for rank, failure in sorted(failures.items())]
        data: dict[str, codec.Value] = {"attempt": max(0, self._attempt)}
        if failures:
            data["ranks"] = ",".join(map(str, sorted(failures)))[:_MESSAGE_CHARS]
        if len(failures) == 1:
            data["rank"] = next(iter(failures))
        message = "; ".join(causes) or _in_a_line(error)
        kind = "worker_failure" if failures else "failure"
        self._run.report(None, wire.Event(kind, time.time_ns(), message=message[:_MESSAGE_CHARS], data=data))

    def _resize(self, num_workers: int) -> None:
        if self._run is not None:
            data: dict[str, codec.Value] = {"attempt": self._attempt, "world_size_after": num_workers}
            text = f"Ray Train goes from {self._world_size} to {num_workers} workers"
            self._run.report(None, wire.Event("resize", time.time_ns(), message=text, data=data))

    def _note(self, message: str) -> None:
        if self._run is not None:
            text = message[:_MESSAGE_CHARS]
            self._run.report(None, wire.Event("note", time.time_ns(), message=text))

    def _end(self, status: str) -> None:
        _watched.pop(self._run_id, None)
        if self._run is None:
            return
        if errors := self._errors + self._run.errors:
            places = ", ".join(f"{place} ({count})" for place, count in errors.items())
            self._note(f"swallowed in Ray Train's controller: {places}")
        if not self._run.end(status):
            _log.warning("the summary of this run may be missing: the session's aggregator did not answer")

    # -- in a worker -----------------------------------------------------------------------------

    @_hook()
    def after_init_train_context(self) -> None:
        """Watch this worker as soon as torch is imported, which is usually now."""
        when_imported("torch", self._watch)

    @_hook()
    def before_worker_shutdown(self) -> None:
        """Hand over the remaining data, and report how the training loop ended."""
        forget("torch")
        agent = bootstrap.current()
        if agent is not None:
            end = agent.guard("exit", lambda: _ending(agent))
            bootstrap.stop([end] if end else [])

    @_hook()
    def _watch(self) -> None:
        from ray.train.v2._internal.execution.context import get_train_context

        from traceml_ray.ray import in_ray
        from traceml_ray.ray.actor_calls import ActorChannel

        context = get_train_context()
        distributed = context.distributed_context
        config = msgspec.json.decode(self._config, type=ready(ActorConfig))
        identity = RankIdentity(
            global_rank=distributed.world_rank,
            local_rank=distributed.local_rank,
            node_rank=distributed.node_rank,
            world_size=distributed.world_size,
            local_world_size=distributed.local_world_size,
            nnodes=max(self._nnodes, distributed.node_rank + 1),
            hostname=os.uname().nodename,
            node_id=None,
            job_id=context.train_run_context.run_id,
            attempt=max(0, self._attempt),
            pid=os.getpid(),
            source="ray_train",
        )
        settings = msgspec.structs.replace(config.settings, session=config.session)
        channel, spool = ActorChannel(config.session), in_ray.spool_of(config.session)
        bootstrap.start(
            settings,
            channel=channel,
            identity=lambda: identity,
            spool=spool,
            part_of_run_ns=self._group_ns,
        )


_log = logging.getLogger("traceml_ray")


def _config(chosen: Mapping[str, Any]) -> ActorConfig:
    """Return the configuration of the session that this driver uses, with the settings of the callback."""
    current = current_config()
    if current is not None and chosen.get("session") in (None, current.session):
        settings = msgspec.structs.replace(current.settings, **chosen)
        return with_environment(msgspec.structs.replace(current, settings=settings))
    return configure(msgspec.structs.replace(Settings.load(), **chosen))


def _ending(agent: Any) -> wire.Event:
    """Return the event that reports how the training thread ended: normally, by an exception, or stopped."""
    from ray.train.v2._internal.execution.context import get_train_context

    runner = get_train_context().execution_context.training_thread_runner
    error = runner.get_error()
    kind = "stopped" if runner.is_running() else "exit"
    opened = agent.recorder.open_stage()
    # `_base_exc` is the error as the training loop raised it.
    return bootstrap.event(opened, getattr(error, "_base_exc", error), kind)


def _in_a_line(error: Exception) -> str:
    error = getattr(error, "health_check_failure", error)
    error = getattr(error, "_base_exc", error)  # Ray 2.51 wraps what the loop raised
    kind, _, text = error_text(error).partition(":")
    return masked(f"{kind}: {next(iter(text.strip().splitlines()), '')}")


def _unpickled(state: dict[str, Any]) -> Any:
    """
    Return the callback. If our package is missing or broken, return one of Ray's own that does nothing.

    This function is pickled by value, so it may use no globals of this module.
    """
    try:
        from traceml_ray.launchers.train_callback import TraceMLTrainCallback

        return TraceMLTrainCallback._from_state(state)
    except Exception as error:
        import logging

        from ray.train.v2._internal.execution.callback import WorkerCallback

        log = logging.getLogger("traceml_ray")
        if not log.__dict__.get("warned"):  # the callback exists in several copies
            log.__dict__["warned"] = True
            log.warning("traceml-ray: not watching this process: %s: %s", type(error).__name__, error)
        return WorkerCallback()


_unpickled.__module__ = "__main__"  # what is there, cloudpickle sends whole
