"""traceml-ray: names the rank, node and stage that makes a distributed training step slow."""

TYPE_CHECKING = False  # `typing` costs more than all that is here
if TYPE_CHECKING:
    from traceml_ray.adapters.huggingface import TraceMLTrainerCallback as TraceMLTrainerCallback
    from traceml_ray.adapters.lightning import TraceMLCallback as TraceMLCallback
    from traceml_ray.agent.api import attach, detach, stage, trace_step, watch
    from traceml_ray.driver import Session, StartError, start
    from traceml_ray.launchers.ray_train import TraceMLTrainCallback as TraceMLTrainCallback

__version__ = "0.1.0"
__all__ = [
    "Session",
    "StartError",
    "__version__",
    "attach",
    "detach",
    "stage",
    "start",
    "trace_step",
    "watch",
]
_MODULES = {
    "Session": "traceml_ray.driver",
    "StartError": "traceml_ray.driver",
    "start": "traceml_ray.driver",
    # Not in __all__: each needs its framework.
    "TraceMLCallback": "traceml_ray.adapters.lightning",
    "TraceMLTrainCallback": "traceml_ray.launchers.ray_train",
    "TraceMLTrainerCallback": "traceml_ray.adapters.huggingface",
}


def __getattr__(name: str) -> object:
    # Loaded at first use: importing the package costs a training script nothing.
    from importlib import import_module

    if name not in __all__ and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES.get(name, "traceml_ray.agent.api")), name)
    globals()[name] = value  # so that a training loop pays for this call once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
