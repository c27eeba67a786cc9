"""MLflow: the active run of the main thread, or the run of Lightning's `MLFlowLogger`."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from typing import Any, NamedTuple

from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.text import without_login
from traceml_ray.wire.messages import Figures

from .tracker import VERDICT, WHY, ImportPatch, TrackerPlace, values_of

_FLUENT = "mlflow.tracking.fluent"
_LOGGERS = ("lightning.pytorch.loggers.mlflow", "pytorch_lightning.loggers.mlflow")
_TAG_CHARS = 4000


class _OpenRun(NamedTuple):
    run_id: str
    client: Any
    """The client that the script itself uses for the run. None: one is made for the current tracking URI."""


class MlflowRun:
    """Figures are metrics of a run, with the step of each. The verdict is a tag."""

    name = "mlflow"

    def __init__(self) -> None:
        self._loggers: list[weakref.ref[Any]] = []
        """Lightning's loggers, which open a run without making it the active one."""
        self._client: tuple[str, Any] | None = None
        """The tracking URI and its client."""

    def patches(self) -> list[ImportPatch]:
        """Return what is patched to know Lightning's loggers."""
        return [(module, self.name, functools.partial(self._patch, module)) for module in _LOGGERS]

    def _patch(self, module: str, patcher: Patcher) -> None:
        note = patcher.after("mlflow", lambda logger, _: self._loggers.append(weakref.ref(logger)))
        patcher.replace(sys.modules[module].MLFlowLogger, "__init__", note)

    def open_run(self) -> _OpenRun | None:
        """Return the innermost active run of the main thread, else of any other thread, else of a logger."""
        for stack in self._stacks():
            if stack:
                return _OpenRun(stack[-1].info.run_id, None)
        for known in self._loggers:
            logger = known()
            if (run_id := getattr(logger, "_run_id", None)) is not None:
                return _OpenRun(run_id, getattr(logger, "_mlflow_client", None))
        return None

    def _stacks(self) -> list[list[Any]]:
        """Return the active runs of each thread, the main thread first. MLflow keeps them by thread."""
        known = getattr(sys.modules.get(_FLUENT), "_active_run_stack", None)
        if known is None or isinstance(known, list):  # before MLflow 2.14, all threads had one list
            return [known or []]
        by_thread = known.get_all_thread_values()
        main = by_thread.pop(threading.main_thread().ident, [])
        return [main, *by_thread.values()]

    def place(self, run: _OpenRun) -> TrackerPlace:
        """Return the tracking URI, and the id of the run."""
        uri = without_login(self._client_of(run).tracking_uri)
        return TrackerPlace(run.run_id, f"run {run.run_id} at {uri}", uri)

    def write(self, run: _OpenRun, figures: Figures, changed: bool) -> None:
        """Write figures as one batch of metrics; a new verdict as tags."""
        from_client = sys.modules["mlflow.entities"]
        now = time.time_ns() // 1_000_000
        metrics = [from_client.Metric(k, v, now, figures.step) for k, v in values_of(figures).items()]
        tags = {VERDICT: figures.label, WHY: figures.why[:_TAG_CHARS]} if changed else {}
        self._client_of(run).log_batch(
            run.run_id, metrics, tags=[from_client.RunTag(name, text) for name, text in tags.items()]
        )

    def _client_of(self, run: _OpenRun) -> Any:
        if run.client is not None:
            return run.client
        mlflow: Any = sys.modules["mlflow"]
        uri = mlflow.get_tracking_uri()
        if self._client is None or self._client[0] != uri:
            self._client = uri, mlflow.MlflowClient(uri)
        return self._client[1]
