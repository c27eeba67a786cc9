"""
Reads how FSDP2 has divided the model of this process. The agent's thread reads it from FSDP2's own state.

Nothing is gathered, copied or recorded for autograd. Sizes come from the local tensors and from the global
shapes of DTensors. The modules are held by weak references.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from traceml_ray.agent.device_use import DeviceUse
from traceml_ray.agent.patch.collectives import group_name
from traceml_ray.agent.patch.data_parallel import DataParallel
from traceml_ray.agent.patch.fsdp import groups_of
from traceml_ray.errors import sendable
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.sharding.records import Sharding, UnevenShard
from traceml_ray.wire.messages import SpanSum

_READ_S = 60.0
"""Interval at which a model that seems unchanged is read again, in s."""
_SEND_S = 10.0
"""Interval at which the traffic of its steps is sent, in s."""
_FIRST_STEPS = 3
"""The model is read after each of this many first steps: the first step makes the optimizer's state."""
_MAX_NAMED = 3
"""Largest number of uneven parameters that are named."""
_MAX_NAME_CHARS = 120
_GATHERS, _REDUCES = ("all_gather",), ("reduce_scatter", "all_reduce")


class _Part(NamedTuple):
    """A parameter: this rank's part of it, and the whole parameter."""

    name: str
    own_bytes: int
    full: int
    dtypes: tuple[str, str, str]
    offloaded: bool
    trains: bool
    rows: int
    own_rows: int
    shards: int


class Shards(Collector):
    """
    Reads the modules that were given to `fully_shard`.

    Args:
        data_parallel: knows the modules, and counts the traffic of their steps.
        device: knows the waits on a device.
        spans: returns the spans since the last round.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        data_parallel: DataParallel,
        device: DeviceUse | None = None,
        spans: Callable[[], Iterable[SpanSum]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._of = data_parallel
        self._device = device
        self._spans, self._clock = spans, clock
        self._known: Sharding | None = None
        """The result of the last reading."""
        self._groups: tuple[set[str], set[str]] = set(), set()
        """Torch's names of the process groups that gather parameters, and of those that reduce gradients."""
        self._first_step: int | None = None
        """Number of the first step, in which ranks still connect to each other. It is not counted."""
        self._on_cpu = True
        self._waits = [0, 0]
        self._wait_steps: tuple[int, int] | None = None
        self._read_at = self._sent_at = -_READ_S
        self._read_for = 0, -1
        """(number of modules, number of steps) at the last reading."""

    @classmethod
    def of_rank(cls, rank: Rank) -> Shards:
        """Make the collector of a rank."""
        return cls(rank.instrumentation.data_parallel, rank.device, lambda: rank.spans)

    def collect(self, final: bool) -> list[Sharding]:
        """Return what is new. May raise any exception of reading the model."""
        if not (modules := self._of.sharded()):
            return []
        self._note(self._spans())
        due = self._due(modules, final)
        return [] if due is None else [due]

    def _note(self, spans: Iterable[SpanSum]) -> None:
        """Count the waits in FSDP2's collectives. On a device the host does not wait in them."""
        for span in spans:
            if self._first_step in (None, span.first_step):
                self._first_step = span.first_step
                continue
            for kind, ops in enumerate((_GATHERS, _REDUCES)):
                if span.process_group in self._groups[kind] and span.name.startswith(ops):
                    self._waits[kind] += span.total_ns
                    first, last = self._wait_steps or (span.first_step, span.last_step)
                    self._wait_steps = min(first, span.first_step), max(last, span.last_step)

    def _due(self, modules: list[Any], final: bool) -> Sharding | None:
        """Return what must be sent. None while nothing is new."""
        if final:
            self._of.traffic.finish()
        now = self._clock()
        state = len(modules), min(self._of.traffic.closed.steps, _FIRST_STEPS)
        changed = False
        if state != self._read_for or now - self._read_at >= _READ_S:
            self._read_at, self._read_for = now, state  # after a failure it is not read again immediately
            before, self._known = self._known, self._read(modules)
            changed = self._known != before
        if self._known is None or not (changed or final or now - self._sent_at >= _SEND_S):
            return None
        self._sent_at = now
        return self._with_traffic(self._known)

    def _with_traffic(self, known: Sharding) -> Sharding:
        moved = self._of.traffic.closed
        gather_wait, reduce_wait, wait_steps = self._waited()
        return msgspec.structs.replace(
            known,
            after_forward_bytes=self._of.memory.after,
            forward_peak_bytes=self._of.memory.peak,
            steps=moved.steps,
            step_ns=moved.step_ns,
            gathers=moved.gathers,
            gathered_bytes=moved.gathered,
            reductions=moved.reductions,
            reduced_bytes=moved.reduced,
            all_reduced_bytes=moved.all_reduced,
            unsharded_peak_bytes=moved.peak,
            unsharded_ns=moved.unsharded_ns,
            unsharded_mean_bytes=moved.byte_ns // max(1, moved.step_ns),
            gather_wait_ns=gather_wait,
            reduce_wait_ns=reduce_wait,
            wait_steps=wait_steps,
        )

    def _waited(self) -> tuple[int | None, int | None, int]:
        """Return (ns in all-gathers, ns in reductions, number of steps that were measured)."""
        if not self._on_cpu:
            waited = self._device.waited if self._device else None
            return waited or (None, None, 0)
        if self._wait_steps is None:
            return None, None, 0
        first, last = self._wait_steps
        return self._waits[0], self._waits[1], last - first + 1

    def _read(self, modules: list[Any]) -> Sharding | None:
        """Return how the model is divided now. None while there is no divided model."""
        groups = [*groups_of(modules)]
        parts = [part for group in groups for part in _parts(group)]
        if not parts:
            return None
        largest = max(groups, key=lambda group: sum(part.full for part in _parts(group)))
        mesh_info = largest.mesh_info
        mesh = mesh_info.mesh
        uneven = sorted(filter(_is_uneven, parts), key=lambda part: (-_differ(part), part.name))
        self._groups, self._on_cpu = _process_groups(groups), largest.device.type == "cpu"
        return Sharding(
            groups=len(groups),
            shard_bytes=sum(part.own_bytes for part in parts),
            full_bytes=sum(part.full for part in parts),
            offloaded_bytes=sum(part.own_bytes for part in parts if part.offloaded),
            gradient_bytes=sum(part.own_bytes for part in parts if part.trains),
            shards=_shards(mesh_info),
            position=int(getattr(mesh_info, "shard_mesh_rank", 0)),
            replicas=int(getattr(mesh_info, "replicate_mesh_size", 1)),
            mesh_shape=[int(size) for size in mesh.mesh.shape],
            mesh_dims=[sendable(str(name))[:_MAX_NAME_CHARS] for name in mesh.mesh_dim_names or ()],
            dtypes=_dtypes(parts),
            resharded=dict(Counter(map(_resharded, groups))),
            uneven=[
                UnevenShard(part.name, part.rows, part.own_rows, part.own_bytes)
                for part in uneven[:_MAX_NAMED]
            ],
            uneven_count=len(uneven),
            optimizer_bytes=_optimizer_bytes([*self._of.traffic.optimizers]),
        )


def _parts(group: Any) -> list[_Part]:
    import torch

    with torch.no_grad():  # otherwise autograd records `to_local`
        return [_part(parameter, group) for parameter in group.fsdp_params]


def _part(fsdp_parameter: Any, group: Any) -> _Part:
    parameter = fsdp_parameter.sharded_param
    local = parameter.to_local()
    dim = getattr(getattr(fsdp_parameter, "fsdp_placement", None), "dim", 0)
    whole = getattr(fsdp_parameter, "_orig_size", None) or parameter.shape
    stored = parameter.dtype
    policy = group.mp_policy
    computed = getattr(fsdp_parameter, "param_dtype", None) or policy.param_dtype or stored
    reduced = getattr(fsdp_parameter, "reduce_dtype", None) or policy.reduce_dtype or computed
    name = getattr(fsdp_parameter, "_param_fqn", None) or fsdp_parameter._module_info.param_name
    return _Part(
        name=sendable(str(name))[-_MAX_NAME_CHARS:],
        own_bytes=local.numel() * local.element_size(),
        full=parameter.numel() * parameter.element_size(),
        dtypes=(_named(stored), _named(computed), _named(reduced)),
        offloaded=bool(getattr(fsdp_parameter, "offload_to_cpu", False)),
        trains=bool(parameter.requires_grad),
        rows=int(whole[dim]) if len(whole) else 1,
        own_rows=int(local.shape[dim]) if local.dim() else local.numel(),
        shards=_shards(getattr(fsdp_parameter, "mesh_info", None) or group.mesh_info),
    )


def _named(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _shards(mesh_info: Any) -> int:
    return int(getattr(mesh_info, "shard_mesh_size", 1))


def _is_uneven(part: _Part) -> bool:
    return part.rows % part.shards != 0


def _differ(part: _Part) -> float:
    """Return the difference between the largest and the smallest part of a parameter, in bytes."""
    most = -(-part.rows // part.shards)
    least = max(0, part.rows - most * (part.shards - 1))
    return (most - least) * part.full / max(1, part.rows)


def _dtypes(parts: Iterable[_Part]) -> dict[str, str]:
    """Return the data types in each of the three uses. Several are separated by a comma."""
    stored, computed, reduced = (
        sorted(set(dtypes)) for dtypes in zip(*(p.dtypes for p in parts), strict=True)
    )
    return {"stored": ", ".join(stored), "computed": ", ".join(computed), "reduced": ", ".join(reduced)}


def _resharded(group: Any) -> str:
    """Return what happens to the parameters of a group after its forward, see `Sharding`."""
    after = group.post_forward_mesh_info
    if after is None:
        return "no"
    return "yes" if _shards(after) == _shards(group.mesh_info) else str(_shards(after))


def _process_groups(groups: Iterable[Any]) -> tuple[set[str], set[str]]:
    """Return the names of the process groups that gather parameters, and of those that reduce gradients."""
    gathering, reducing = set[str](), set[str]()
    for group in groups:
        infos = group.mesh_info, group.post_forward_mesh_info
        gathering |= {
            group_name(process_group) for info in infos if (process_group := _of(info, "shard_process_group"))
        }
        reducing_group = _of(group.mesh_info, "reduce_scatter_process_group") or _of(
            group.mesh_info, "shard_process_group"
        )
        every = reducing_group, _of(group.mesh_info, "replicate_process_group")
        reducing |= {group_name(process_group) for process_group in every if process_group is not None}
    return gathering, reducing


def _of(mesh_info: Any, name: str) -> Any:
    return getattr(mesh_info, name, None)


def _optimizer_bytes(optimizers: Iterable[Any]) -> int | None:
    """
    Return the size of the optimizers' state on this rank, in bytes. None before an optimizer has taken a
    step.
    """
    import torch

    n_bytes = None
    with torch.no_grad():
        for optimizer in optimizers:
            n_bytes = n_bytes or 0
            for state in [*optimizer.state.values()]:
                tensors = [value for value in [*state.values()] if isinstance(value, torch.Tensor)]
                local = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors]
                n_bytes += sum(tensor.numel() * tensor.element_size() for tensor in local)
    return n_bytes
