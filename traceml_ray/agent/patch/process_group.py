"""When this process joins a process group: then it is a rank."""

from __future__ import annotations

from collections.abc import Callable

from traceml_ray.agent.patch.patcher import Patcher


def patch(patcher: Patcher, joined: Callable[[], None]) -> None:
    """Have `joined` called after `torch.distributed.init_process_group`."""
    import torch.distributed as dist

    if dist.is_available():
        patcher.replace(dist, "init_process_group", patcher.after("rank", lambda *_: joined()))
