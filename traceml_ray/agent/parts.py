"""
Names for what torch itself does inside a stage: collectives, checkpoints, putting a batch together.

All of it costs only when it is called, and none of it while torch is compiling. The functions are
replaced where users find them (`torch.distributed.all_reduce`, …): a name imported before the
monitor came stays as it was, and is not timed. DDP exchanges gradients without them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

from traceml_ray.agent.details import Details
from traceml_ray.agent.mark_log import COLLATED
from traceml_ray.agent.recorder import Recorder

CHECKPOINT_MODULE = "torch.distributed.checkpoint"
_COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "scatter", "gather"),
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("barrier", "monitored_barrier", "send", "recv", "batch_isend_irecv"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
"""
Those that this torch has are timed. Not `isend` and `irecv`: `P2POp` accepts no others in their place, and
pipelines are made of it; what they take is in the wait.
"""

_REDUCTIONS = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
"""What gradients are exchanged with by hand, or by a framework that is neither DDP nor FSDP."""
_MAX_HANDLES = 4096

Begun = tuple[int, str | None]
Make = Callable[[Any], Any]
Replace = Callable[[Any, str, Make], Any]
Failed = Callable[[str, BaseException], None]


class Parts:
    """Begins and ends named parts on the training thread; never raises."""

    def __init__(self, recorder: Recorder, details: Details, failed: Failed) -> None:
        self._recorder = recorder
        self._details = details
        self._failed = failed
        self._communicates = False
        self._handles: dict[int, bool] = {}
        """Reductions (by id) that were started and not yet waited for: whether they run on a device."""
        self._largest_reduced = 0
        self.reduction = ""
        """The one of _REDUCTIONS that has reduced most at once."""

    def begin(self, name: str) -> Begun | None:
        """Begin a part; None when there is none to end: this is not the thread that trains."""
        try:
            details = self._details
            if not self._recorder.mine():
                return None
            name = str(name)[:64]
            number = details.number(name)
            if number is None or not self._recorder.part_begin(number):
                return None
            outer, details.open = details.open, name
            return number, outer
        except Exception as error:
            self._failed("part", error)
            return None

    def end(self, begun: Begun, size: int = 0) -> None:
        """End what `begin` began; `size` bytes were moved."""
        try:
            number, self._details.open = begun
            self._recorder.part_end(number, size)
        except Exception as error:
            self._failed("part", error)

    def sync_begin(self) -> bool:
        """Begin a wait for peers; True when `sync_end` has to follow."""
        try:
            return self._recorder.sync_begin()
        except Exception as error:
            self._failed("sync", error)
            return False

    def sync_end(self) -> None:
        """End what `sync_begin` began."""
        try:
            self._recorder.sync_end(True)
        except Exception as error:
            self._failed("sync", error)

    # -- what is patched ---------------------------------------------------------------------------

    def patch_save(self, replace: Replace) -> None:
        """Time `torch.save`."""
        import torch

        replace(torch, "save", self._timed("checkpoint"))

    def patch_checkpoint(self, replace: Replace) -> None:
        """Time `torch.distributed.checkpoint`; of `async_save` what the training thread has to wait for."""
        import torch.distributed.checkpoint as checkpoint

        for function, name in (
            ("save", "checkpoint"),
            ("async_save", "checkpoint"),
            ("load", "checkpoint load"),
        ):
            if hasattr(checkpoint, function):
                replace(checkpoint, function, self._timed(name))

    def patch_collectives(self, replace: Replace) -> None:
        """Time the functions of `torch.distributed`, and the wait for those that were started only."""
        import torch.distributed as dist

        if not dist.is_available():
            return
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                replace(dist, name, self._collective(name))
        replace(dist.Work, "wait", self._timed("wait", waits=True))

    def patch_functional(self, replace: Replace) -> None:
        """Time the wait for a functional collective: DTensor uses them (the norm of sharded gradients)."""
        import torch.distributed._functional_collectives as functional

        replace(functional, "wait_tensor", self._timed("wait", waits=True))

    def patch_collate(self, iterator: Any) -> None:
        """In a DataLoader without workers, note when the samples are there; the loader stays as it is."""
        fetcher = iterator._dataset_fetcher
        collate, recorder = fetcher.collate_fn, self._recorder
        append, clock = recorder.log.append, recorder.clock

        @functools.wraps(collate)
        def noted(samples: Any) -> Any:
            if get_ident() == recorder.ready:
                append(COLLATED)
                append(clock())
            return collate(samples)

        fetcher.collate_fn = noted

    def _timed(self, name: str, waits: bool = False) -> Make:
        """
        Return what makes a timed wrapper; `waits`: all it does is wait for peers.

        Such a wait is a part by itself only where it is not part of a collective, which torch.distributed
        starts and then waits for: what of that is work (pickling an object) stays in its stage.
        """
        from torch.compiler import is_dynamo_compiling

        def make(original: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling():
                    return original(*args, **kwargs)
                begun = None if waits and self._communicates else self.begin(name)
                blocks = waits and self.sync_begin()
                try:
                    return original(*args, **kwargs)
                finally:
                    if blocks:
                        self.sync_end()
                    if begun is not None:
                        self.end(begun)
                        if args and id(args[0]) in self._handles:
                            self._waited(self._handles.pop(id(args[0])))

            return timed

        return make

    def _collective(self, op: str) -> Make:
        from torch.compiler import is_dynamo_compiling

        sized = not op.endswith(("_object", "_object_list"))  # objects have no size before they are pickled
        reduces = op in _REDUCTIONS

        def make(original: Any) -> Any:
            parameters = list(inspect.signature(original).parameters)
            place = parameters.index("group") if "group" in parameters else len(parameters)

            def collective(*args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling() or self._communicates:
                    return original(*args, **kwargs)
                group = args[place] if len(args) > place else kwargs.get("group")
                begun = self.begin(op if group is None else _named(op, group))
                if begun is None:
                    return original(*args, **kwargs)
                self._communicates = True
                blocks = op == "monitored_barrier" and self.sync_begin()
                result, values = None, (*args, *kwargs.values())
                try:
                    result = original(*args, **kwargs)
                finally:
                    self._communicates = False
                    if blocks:
                        self.sync_end()
                    size = self._largest(values) if sized else 0
                    self.end(begun, size)
                if reduces and self._recorder.peers is None:
                    self._reduced(op, group, values, size, result)
                return result

            return collective

        return make

    def _reduced(self, op: str, group: Any, values: Iterable[Any], size: int, handle: Any) -> None:
        """Tell the recorder that a reduction is over, or once it will have been waited for."""
        import torch
        import torch.distributed as dist

        try:
            if dist.get_world_size(group) < 2:
                return
            if size > self._largest_reduced:
                self._largest_reduced, self.reduction = size, op
            tensors = [
                one for value in values for one in (value if type(value) in (list, tuple) else (value,))
            ]
            on_device = any(isinstance(one, torch.Tensor) and one.device.type != "cpu" for one in tensors)
            if not isinstance(handle, dist.Work):
                self._recorder.reduced(on_device)
            elif len(self._handles) < _MAX_HANDLES:
                self._handles[id(handle)] = on_device
        except Exception as error:
            self._failed("part", error)

    def _waited(self, on_device: bool) -> None:
        """Tell the recorder that a reduction that was started has been waited for."""
        try:
            self._recorder.reduced(on_device)
        except Exception as error:
            self._failed("part", error)

    def _largest(self, values: Iterable[Any]) -> int:
        """Return the bytes of the largest of a collective's buffers: a tensor, or a list of tensors."""
        import torch

        largest = 0
        try:
            for value in values:
                buffer = value if type(value) in (list, tuple) else (value,)
                tensors = [one for one in buffer if isinstance(one, torch.Tensor)]
                largest = max(largest, sum(one.numel() * one.element_size() for one in tensors))
        except Exception as error:
            self._failed("part", error)
        return largest


def _named(op: str, group: Any) -> str:
    """Return the name of a collective in a group, which is not that of all ranks as a rule."""
    try:
        import torch.distributed as dist

        if group is dist.group.WORLD:
            return op
        what = group.group_desc
        return f"{op} of {group.size()}" + f" ({what})" * (what not in ("", "undefined"))
    except Exception:  # whatever it is that was given: torch will say what it thinks of it
        return op
