"""
Patches torch.distributed as user code calls it: process groups, collectives, and waits for asynchronous
collectives.

A process that joins a group is a rank. If a job is not only data parallel, the rank's position is read from
its device mesh and its pipeline. Each collective is a span inside the stage that calls it.

Collectives are replaced where users look them up (`torch.distributed.all_reduce`, …). A name that was
imported before the monitor started keeps the original function and is not timed. DDP exchanges gradients
without these functions. If nothing else shows when gradients are exchanged, reductions do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from typing import Any
from weakref import ref

from traceml_ray.agent.marks import MAX_NAME_CHARS, STARTED
from traceml_ray.agent.patch.call_log import CallLog
from traceml_ray.agent.patch.patcher import Failed, Make, Patcher
from traceml_ray.agent.recorder import Recorder, Spans
from traceml_ray.agent.steps import GradientExchange
from traceml_ray.wire import messages as wire


def patch_process_group(patcher: Patcher, joined: Callable[[], None]) -> None:
    """Make `torch.distributed.init_process_group` call `joined` afterwards."""
    import torch.distributed as dist

    if dist.is_available():
        patcher.replace(dist, "init_process_group", patcher.after("rank", lambda *_: joined()))


TENSOR_MODULE = "torch.distributed.tensor.parallel"
PIPELINE_MODULE = "torch.distributed.pipelining.stage"
MESH_MODULE = "torch.distributed.device_mesh"
_COMPILED = "compiled collectives"
_MAX_DIMENSIONS, _MAX_STAGES, _MAX_NAME_CHARS = 8, 64, 32


class ModelParallel:
    """Which model parallelism this process uses. `strategies` contains tp and pp if they are used."""

    def __init__(self, exchange: GradientExchange, patcher: Patcher) -> None:
        self.strategies: set[str] = set()
        self.mesh: dict[str, list[int]] = {}
        """Dimension of the rank's largest device mesh → [the rank's coordinate, size of the dimension]."""
        self.stages: dict[int, int] = {}
        """Pipeline stage of this rank → number of stages in all."""
        self._exchange = exchange
        self._patcher = patcher

    @property
    def placement(self) -> wire.Placement | None:
        """Position of this rank. None if nothing is known."""
        if not self.mesh and not self.stages:
            return None
        stages = sorted(self.stages)[:_MAX_STAGES]
        return wire.Placement(dict(self.mesh), stages, max(self.stages.values(), default=0))

    def patch_mesh(self) -> None:
        """Record device meshes when they are made."""
        import torch.distributed as dist

        if dist.is_available():
            made = self._patcher.after("mesh", self._add_mesh)
            self._patcher.replace(dist.device_mesh.DeviceMesh, "__init__", made)

    def patch_tensor(self) -> None:
        """Record the use of `parallelize_module`, whose module must be imported."""
        import torch.distributed.tensor.parallel as parallel

        self._patcher.replace(parallel, "parallelize_module", self._patcher.after("tp", self._add_tensor))

    def patch_pipeline(self) -> None:
        """Record pipeline stages when they are made. Their module must be imported."""
        from torch.distributed.pipelining.stage import _PipelineStageBase

        self._patcher.replace(_PipelineStageBase, "__init__", self._patcher.after("pp", self._add_stage))

    def look_again(self) -> None:
        """Check for graphs of `torch.compile`: collectives in such a graph wait without a mark."""
        if "tp" in self.strategies and self._exchange.roles and _compiled():
            self._exchange.couple(_COMPILED)

    def _add_mesh(self, mesh: Any, _: dict[str, Any]) -> None:
        """
        Record a mesh with named dimensions if it has more dimensions than the recorded one. A slice of a
        mesh, or a flattened mesh, has fewer.
        """
        names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
        if names and coordinate and len(self.mesh) < len(names) <= _MAX_DIMENSIONS:
            sizes = mesh.mesh.shape
            self.mesh = {
                str(name)[:_MAX_NAME_CHARS]: [int(coordinate[i]), int(sizes[i])]
                for i, name in enumerate(names)
            }

    def _add_stage(self, stage: Any, _: dict[str, Any]) -> None:
        self.stages[int(stage.stage_index)] = int(stage.num_stages)
        self._add("pp", str(getattr(stage.device, "type", stage.device)))

    def _add_tensor(self, module: Any, _: dict[str, Any]) -> None:
        meshes = [getattr(parameter, "device_mesh", None) for parameter in module.parameters()]
        devices = {str(mesh.device_type) for mesh in meshes if mesh is not None}
        self._add("tp", "cpu" if devices == {"cpu"} else "")

    def _add(self, strategy: str, device: str) -> None:
        """
        Record a strategy. On the CPU the training thread itself waits; on a device the
        device's streams wait.
        """
        self.strategies.add(strategy)
        if device.startswith("cpu"):
            self._exchange.see(strategy)
        else:
            self._exchange.couple(strategy)


def _compiled() -> bool:
    """Return whether torch.compile has made a graph in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"]["unique_graphs"])


WORLD = "world"
"""Name of the process group of all ranks."""
FUNCTIONAL_MODULE = "torch.distributed._functional_collectives"
_COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "scatter", "gather"),
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("barrier", "monitored_barrier", "send", "recv", "batch_isend_irecv"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
"""
Collectives that are timed if this torch has them. `isend` and `irecv` are not: `P2POp` accepts no replacement
for them, and pipelines use it. Their time is in the wait.
"""
_REDUCTIONS = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
"""Collectives that exchange gradients by hand, or in a framework that is neither DDP nor FSDP."""


class Collectives:
    """Times the collectives of this process, and marks reductions."""

    def __init__(self, recorder: Recorder, spans: Spans, failed: Failed) -> None:
        self._recorder = recorder
        self._spans = spans
        self._failed = failed
        self._inside = False
        """
        Whether the training thread is inside a collective. Calls and waits inside belong to
        that collective.
        """
        self._handles: dict[int, tuple[ref[Any], bool]] = {}
        """
        Reductions that were started and not waited for yet: id of the handle → (weak reference to the handle,
        whether it runs on a device). An entry is removed with its handle, because another object may get the
        same id.
        """
        self._merged: Mapping[Any, Any] = {}
        """Torch's own record of the groups whose collectives are being merged into one, by group."""
        self.log: CallLog | None = None
        """The newest calls. None: torch records them itself."""
        self._largest_reduced = 0
        self.reduction = ""
        """The name in _REDUCTIONS that has reduced the most bytes in one call."""

    def patch(self, patcher: Patcher) -> None:
        """Time the functions of `torch.distributed`, and the waits for asynchronous collectives."""
        import torch
        import torch.distributed as dist

        if not dist.is_available():
            return
        if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
            self.log = CallLog()
        self._merged = getattr(dist.distributed_c10d._world, "pg_coalesce_state", {})
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                patcher.replace(dist, name, self._collective(name))
        patcher.replace(dist.Work, "wait", self._wait())
        patcher.replace(torch._C.Future, "wait", self._wait(future=True))
        if hasattr(dist.distributed_c10d, "_coalescing_manager"):
            patcher.replace(dist.distributed_c10d, "_coalescing_manager", self._coalesced)

    def patch_functional(self, patcher: Patcher) -> None:
        """
        Time the wait for a functional collective. DTensor uses them (for the norm of sharded
        gradients).
        """
        import torch.distributed._functional_collectives as functional

        patcher.replace(functional, "wait_tensor", self._wait())

    def _wait(self, *, future: bool = False) -> Make:
        """
        Return the function that makes the wrapper of a wait for peers. With `future`, waits count only on a
        device, where the wait is one of the stream; elsewhere a future may be for anything.

        The wait is a separate span only if it is not part of a collective that torch.distributed starts and
        waits for itself. Work inside such a collective (pickling an object) stays in its stage.
        """
        from torch.compiler import is_dynamo_compiling

        spans, recorder = self._spans, self._recorder

        def make(original: Any) -> Any:
            def wait(*args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling() or (future and recorder.device is None):
                    return original(*args, **kwargs)
                span = None if self._inside else spans.begin("wait")
                blocks = spans.sync_begin()
                try:
                    return original(*args, **kwargs)
                finally:
                    if blocks:
                        spans.sync_end()
                    else:
                        self._unmarked()
                    if span is not None:
                        spans.end(span)
                        if args and id(args[0]) in self._handles:
                            self._waited(args[0])

            return wait

        return make

    def _collective(self, op: str) -> Make:
        from torch.compiler import is_dynamo_compiling

        spans, recorder, exchange = self._spans, self._recorder, self._recorder.exchange
        # the size of an object is unknown before it is pickled
        sized = not op.endswith(("_object", "_object_list"))
        reduces = op in _REDUCTIONS
        # `recv` returns the number of a rank
        starts, merged = op != "recv", self._merged
        log = None if op in ("send", "recv", "batch_isend_irecv") else self.log  # of two ranks, or of none

        def make(original: Any) -> Any:
            parameters = list(inspect.signature(original).parameters)
            place = parameters.index("group") if "group" in parameters else len(parameters)

            def collective(*args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling() or self._inside:
                    return original(*args, **kwargs)
                group = args[place] if len(args) > place else kwargs.get("group")
                named = (op, WORLD) if group is None else _named(op, group)
                call = None if log is None else log.begin(op, named[1] or "", args)
                span = spans.begin(*named)
                result, buffers = None, (*args, *kwargs.values())
                if span is None:
                    result = original(*args, **kwargs)
                    if call is not None:
                        call.finished = True
                    self._unmarked(buffers, result)
                    return result
                self._inside = True
                whole = op == "monitored_barrier" or recorder.device is not None
                blocks = whole and spans.sync_begin()
                try:
                    result = original(*args, **kwargs)
                finally:
                    self._inside = False
                    if blocks:
                        spans.sync_end()
                    size = self._largest(buffers) if sized else 0
                    started = (starts and result is not None) or merged
                    spans.end(span, size | STARTED if started else size)
                if call is not None:
                    call.finished = True
                if reduces and exchange.peers is None:
                    self._reduced(op, group, buffers, size, result)
                return result

            return collective

        return make

    def _unmarked(self, buffers: Iterable[Any] | None = None, result: Any = None) -> None:
        """
        Mark the rows of a device as coupled if another thread waited on the stream of their marks.

        The wait is in a collective of these `buffers` or, in autograd's thread, for one: a hook of a backward
        has called it, and the wait cannot be separated from work. Waits of FSDP have marks around them and
        need no coupling.
        """
        recorder = self._recorder
        device, exchange = recorder.device, recorder.exchange
        if device is None or recorder.ready or exchange.bracketed or get_ident() == recorder.owner:
            return
        try:
            import torch

            if buffers is None:
                waits = torch._C._current_graph_task_id() >= 0
            else:
                waits = not isinstance(result, torch.distributed.Work) and self._on_device(buffers)
            if waits and not device.elsewhere():
                exchange.couple("collectives in hooks of a backward")
        except Exception as error:
            self._failed("span", error)

    def _coalesced(self, original: Any) -> Any:
        """
        Make the wrapper of the context manager that merges several collectives into one. If that waits on a
        device, its kernel is outside of all waits that have marks.
        """

        def manager(*args: Any, **kwargs: Any) -> Any:
            waits = not (args[2] if len(args) > 2 else kwargs.get("async_ops"))
            if self._recorder.device is not None and waits and not self._inside:
                self._recorder.exchange.couple("coalesced collectives")
            return original(*args, **kwargs)

        return manager

    def _on_device(self, buffers: Iterable[Any]) -> bool:
        return any(tensor.device.type != "cpu" for one in buffers for tensor in _tensors(one))

    def _reduced(self, op: str, group: Any, buffers: Iterable[Any], size: int, handle: Any) -> None:
        """Report a reduction to the recorder: now if it is over, else after the wait for it."""
        import torch.distributed as dist

        try:
            if dist.get_world_size(group) < 2:
                return
            if size > self._largest_reduced:
                self._largest_reduced, self.reduction = size, op
            on_device = self._on_device(buffers)
            if not isinstance(handle, dist.Work):
                self._recorder.reduced(on_device)
            else:
                key, handles = id(handle), self._handles
                handles[key] = ref(handle, lambda _: handles.pop(key, None)), on_device
        except Exception as error:
            self._failed("span", error)

    def _waited(self, handle: Any) -> None:
        """Report to the recorder that an asynchronous reduction has been waited for."""
        try:
            known, on_device = self._handles.pop(id(handle))
            if known() is handle:
                self._recorder.reduced(on_device)
        except Exception as error:
            self._failed("span", error)

    def _largest(self, buffers: Iterable[Any]) -> int:
        """Return the size of the largest of a collective's buffers, in bytes."""
        largest = 0
        try:
            for buffer in buffers:
                largest = max(largest, sum(one.numel() * one.element_size() for one in _tensors(buffer)))
        except Exception as error:
            self._failed("span", error)
        return largest


def _tensors(buffer: Any) -> list[Any]:
    """Return the tensors of one buffer of a collective. A buffer is a tensor or a list of tensors."""
    import torch

    items = buffer if type(buffer) in (list, tuple) else (buffer,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _named(op: str, group: Any) -> tuple[str, str | None]:
    """Return (name of a collective in a group, name of the group). The group need not contain all ranks."""
    try:
        import torch.distributed as dist

        if group is dist.group.WORLD:
            return op, WORLD
        what = group.group_desc
        named = f"{op} of {group.size()}" + f" ({what})" * (what not in ("", "undefined"))
        return named, group_name(group)
    except Exception:  # an argument has the wrong type; torch will raise its own error
        return op, None


def named_groups() -> dict[str, Any]:
    """Return the process groups of this process by their names, see `group_name`: WORLD is one of them."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return {}
    groups = dict(dist.distributed_c10d._world.pg_names)  # without groups that this process is no member of
    return {**{str(name): group for group, name in groups.items()}, WORLD: dist.group.WORLD}


def group_name(group: Any) -> str:
    """Return torch's name of a process group, or WORLD for the group of all ranks."""
    import torch.distributed as dist

    return WORLD if group is dist.group.WORLD else str(group.group_name)[:MAX_NAME_CHARS]
