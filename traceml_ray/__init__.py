"""traceml-ray: names the rank, node and stage that makes a distributed training step slow."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceml_ray.agent.api import attach, detach, stage, trace_step, watch

__version__ = "0.1.0"
__all__ = ["__version__", "attach", "detach", "stage", "trace_step", "watch"]


def __getattr__(name: str) -> object:
    # Loaded at first use: importing the package costs a training script nothing.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from traceml_ray.agent import api

    value: object = getattr(api, name)
    globals()[name] = value  # so that a training loop pays for this call once
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
