"""
Supports jobs on torch.distributed.rpc.

Calls are named on both workers while they are recorded, and are not changed otherwise. A step of such a job
is a backward over several workers, followed by the optimizer, which makes each worker update its own
parameters. The worker that calls them is the one that trains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

from traceml_ray.agent.marks import FORWARD_BEGIN
from traceml_ray.agent.patch.patcher import Failed, Patcher, expect
from traceml_ray.agent.recorder import Recorder

MODULE = "torch.distributed.rpc.api"
_ARGUMENTS = ("should_profile", "qualified_name", "func", "rpc_type", "dst_worker_info")


def is_on() -> bool:
    """Return whether this process is a worker of a job on torch.distributed.rpc."""
    api = sys.modules.get(MODULE)
    return api is not None and bool(api._is_current_rpc_agent_set())


class RpcCalls:
    """
    Names RPC calls in a profile. A call gets the name of torch's own RPC profiling, `rpc_async#run(worker1 ->
    worker2)`. The function that it runs on the other worker gets the function's name.
    """

    def __init__(self, failed: Failed) -> None:
        self.recording = False
        self._failed = failed
        self._running: set[object] = set()
        self._worker = ""

    @property
    def worker(self) -> str:
        """Name of this process as a worker, also after it has left the job. "" if it never was a worker."""
        if not self._worker and is_on():
            from torch.distributed.rpc import api

            self._worker = str(api.get_worker_info().name)
        return self._worker

    @property
    def recorded_run(self) -> bool:
        """Whether functions with a range in the recording are still running."""
        return bool(self._running)

    def patch(self, patcher: Patcher) -> None:
        """Patch torch.distributed.rpc, whose module must be imported."""
        from torch.distributed.rpc import api, internal

        expect(api._enable_rpc_profiler, _ARGUMENTS)
        expect(internal._run_function, ("python_udf",))
        patcher.replace(api, "_enable_rpc_profiler", self._name_call)
        patcher.replace(internal, "_run_function", self._name_function)

    def _name_call(self, original: Any) -> Any:
        def enable_rpc_profiler(
            should_profile: Any, qualified_name: Any, func: Any, rpc_type: Any, dst_worker_info: Any
        ) -> Any:
            if self.recording and not should_profile:
                try:
                    return _call_range(qualified_name or _name_of(func), rpc_type, dst_worker_info)
                except Exception as error:
                    self._failed("rpc", error)
            return original(should_profile, qualified_name, func, rpc_type, dst_worker_info)

        return enable_rpc_profiler

    def _name_function(self, original: Any) -> Any:
        def run_function(python_udf: Any) -> Any:
            if not self.recording:
                return original(python_udf)
            began = self._begin(getattr(python_udf, "func", None))
            try:
                return original(python_udf)
            finally:
                self._end(began)

        return run_function

    def _begin(self, function: Any) -> Any:
        from torch.profiler import record_function

        try:
            began: Any = record_function(_name_of(function))
            began.__enter__()
            self._running.add(began)
        except Exception as error:
            self._failed("rpc", error)
            return None
        return began

    def _end(self, began: Any) -> None:
        try:
            if began is not None:
                began.__exit__(None, None, None)
        except Exception as error:
            self._failed("rpc", error)
        finally:
            self._running.discard(began)


def _call_range(name: str, rpc_type: Any, callee: Any) -> Any:
    from torch.distributed.rpc import api, internal
    from torch.profiler import record_function

    here, key_of = api.get_worker_info().name, cast("Any", internal)._build_rpc_profiling_key
    return record_function(key_of(rpc_type, name, here, callee.name))


def _name_of(function: Any) -> str:
    """Return the name of a function of Python or TorchScript."""
    script = getattr(function, "qualified_name", None)
    if isinstance(script, str):
        return script.removeprefix("__torch__.")
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


AUTOGRAD_MODULE = "torch.distributed.autograd"
OPTIMIZER_MODULE = "torch.distributed.optim.optimizer"


def patch_autograd(patcher: Patcher, recorder: Recorder) -> None:
    """Mark the contexts of torch.distributed.autograd, which begin with a forward, and its backwards."""
    import torch.distributed.autograd as autograd

    if not autograd.is_available():
        return
    begin, end = recorder.backward_begin, recorder.backward_end
    patcher.replace(
        autograd, "backward", lambda original: _between(original, patcher.failed, "backward", begin, end)
    )
    patcher.replace(autograd.context, "__enter__", patcher.after("forward", lambda *_: _forward(recorder)))


def patch_optimizer(patcher: Patcher, recorder: Recorder) -> None:
    """Mark the steps of `DistributedOptimizer`, whose module must be imported."""
    from torch.distributed.optim.optimizer import DistributedOptimizer

    def end(_: bool) -> None:
        recorder.optimizer_end(True)
        if recorder.step_hook is not None:
            recorder.step_hook()

    begin = recorder.optimizer_begin
    patcher.replace(
        DistributedOptimizer,
        "step",
        lambda original: _between(original, patcher.failed, "optimizer", begin, end),
    )


def _forward(recorder: Recorder) -> None:
    recorder.forward_begin(FORWARD_BEGIN)


def _between(
    original: Any, failed: Failed, place: str, begin: Callable[[], bool], end: Callable[[bool], None]
) -> Any:
    """
    Return a function that calls `begin`, the original, and then `end` with whether the
    original returned.
    """

    def marked(*args: Any, **kwargs: Any) -> Any:
        began = ok = False
        try:
            began = begin()
        except Exception as error:
            failed(place, error)
        try:
            result = original(*args, **kwargs)
            ok = True
            return result
        finally:
            try:
                if began:
                    end(ok)
            except Exception as error:
                failed(place, error)

    return marked
