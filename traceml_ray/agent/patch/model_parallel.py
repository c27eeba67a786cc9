"""
Process groups: when this process joins one, then it is a rank. Jobs that are not only data parallel: where a
rank is in its device mesh and its pipeline, and whether its waits for ranks that do other work are seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.steps import GradientExchange
from traceml_ray.wire import messages as wire


def patch_process_group(patcher: Patcher, joined: Callable[[], None]) -> None:
    """Have `joined` called after `torch.distributed.init_process_group`."""
    import torch.distributed as dist

    if dist.is_available():
        patcher.replace(dist, "init_process_group", patcher.after("rank", lambda *_: joined()))


TENSOR_MODULE = "torch.distributed.tensor.parallel"
PIPELINE_MODULE = "torch.distributed.pipelining.stage"
MESH_MODULE = "torch.distributed.device_mesh"
_COMPILED = "compiled collectives"
_MAX_DIMENSIONS, _MAX_STAGES, _MAX_NAME_CHARS = 8, 64, 32


class ModelParallel:
    """What of it this process uses: `strategies` holds tp, pp."""

    def __init__(self, exchange: GradientExchange, patcher: Patcher) -> None:
        self.strategies: set[str] = set()
        self.mesh: dict[str, list[int]] = {}
        """The rank's coordinate in each dimension of its largest device mesh, and how large that is."""
        self.stages: dict[int, int] = {}
        """The stages of a pipeline that the rank has, each with how many there are in all."""
        self._exchange = exchange
        self._patcher = patcher

    @property
    def placement(self) -> wire.Placement | None:
        """Where this rank is, None where there is nothing to tell."""
        if not self.mesh and not self.stages:
            return None
        stages = sorted(self.stages)[:_MAX_STAGES]
        return wire.Placement(dict(self.mesh), stages, max(self.stages.values(), default=0))

    def patch_mesh(self) -> None:
        """Note device meshes as they are made."""
        import torch.distributed as dist

        if dist.is_available():
            made = self._patcher.after("mesh", self._add_mesh)
            self._patcher.replace(dist.device_mesh.DeviceMesh, "__init__", made)

    def patch_tensor(self) -> None:
        """Note the use of `parallelize_module`, whose module has been imported."""
        import torch.distributed.tensor.parallel as parallel

        self._patcher.replace(parallel, "parallelize_module", self._patcher.after("tp", self._add_tensor))

    def patch_pipeline(self) -> None:
        """Note pipeline stages as they are made; their module has been imported."""
        from torch.distributed.pipelining.stage import _PipelineStageBase

        self._patcher.replace(_PipelineStageBase, "__init__", self._patcher.after("pp", self._add_stage))

    def look_again(self) -> None:
        """Collectives in a graph of `torch.compile` wait without a mark: note that there may be some."""
        if "tp" in self.strategies and self._exchange.roles and _compiled():
            self._exchange.couple(_COMPILED)

    def _add_mesh(self, mesh: Any, _: dict[str, Any]) -> None:
        """A mesh of named dimensions; those that are a part of another one, or flattened, have fewer."""
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
        """On the CPU the training thread itself waits; on a device its streams do."""
        self.strategies.add(strategy)
        if device.startswith("cpu"):
            self._exchange.see(strategy)
        else:
            self._exchange.couple(strategy)


def _compiled() -> bool:
    """Return whether torch.compile has made a graph in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"]["unique_graphs"])
