"""traceml-ray: names the rank, node and stage that makes a distributed training step slow."""

TYPE_CHECKING = False  # `typing` costs more than all that is here
if TYPE_CHECKING:
    from traceml_ray.adapters.huggingface import TraceMLTrainerCallback as TraceMLTrainerCallback
    from traceml_ray.adapters.lightning import TraceMLCallback as TraceMLCallback
    from traceml_ray.api import (
        attach,
        capture_oom,
        count,
        detach,
        log,
        profile,
        stage,
        trace_step,
        watch,
        watch_router,
    )
    from traceml_ray.driver import start
    from traceml_ray.interactive.stored import StoredSession, open
    from traceml_ray.launchers.train_callback import TraceMLTrainCallback as TraceMLTrainCallback
    from traceml_ray.live_session import Session, StartError
    from traceml_ray.reports.analyze import analyze
    from traceml_ray.reports.comparison import compare
    from traceml_ray.settings import Settings
    from traceml_ray.store.summary_shape import to_builtins

__version__ = "0.1.0"
__all__ = [
    "Session",
    "Settings",
    "StartError",
    "StoredSession",
    "__version__",
    "analyze",
    "attach",
    "capture_oom",
    "compare",
    "count",
    "detach",
    "log",
    "open",
    "profile",
    "stage",
    "start",
    "to_builtins",
    "trace_step",
    "watch",
    "watch_router",
]
_MODULES = {
    "Session": "traceml_ray.live_session",
    "Settings": "traceml_ray.settings",
    "StartError": "traceml_ray.live_session",
    "StoredSession": "traceml_ray.interactive.stored",
    "open": "traceml_ray.interactive.stored",
    "analyze": "traceml_ray.reports.analyze",
    "compare": "traceml_ray.reports.comparison",
    "profile": "traceml_ray.api",
    "start": "traceml_ray.driver",
    "to_builtins": "traceml_ray.store.summary_shape",
    # Not in __all__: each needs its framework, see _NEEDED.
    "TraceMLCallback": "traceml_ray.adapters.lightning",
    "TraceMLTrainCallback": "traceml_ray.launchers.ray_train",
    "TraceMLTrainerCallback": "traceml_ray.adapters.huggingface",
}

_NEEDED = {
    "TraceMLCallback": ("lightning", "pytorch_lightning"),
    "TraceMLTrainCallback": ("ray",),
    "TraceMLTrainerCallback": ("transformers",),
}
"""Any of these has to be installed; the first is what we advise."""


def __getattr__(name: str) -> object:
    # Loaded at first use: importing the package costs a training script nothing.
    from importlib import import_module

    if name not in __all__ and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(import_module(_MODULES.get(name, "traceml_ray.api")), name)
    except ImportError as error:
        if name not in _NEEDED:
            raise
        # `inspect` and `hasattr` continue after this type of error only.
        what_to_do = f"{__name__}.{name} needs {_NEEDED[name][0]}: pip install {_NEEDED[name][0]} ({error})"
        raise AttributeError(what_to_do) from error
    globals()[name] = value  # so that a training loop pays for this call once
    return value


def __dir__() -> list[str]:
    # Importing a submodule adds its name to the package; submodules are not public.
    missing = {name for name, any_of in _NEEDED.items() if not any(map(_is_installed, any_of))}
    of_every_module = {name for name in globals() if name.startswith("__")}
    return sorted({*of_every_module, *__all__, *_MODULES} - missing)


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(package) is not None
    except ValueError:  # it is loaded, but not from a file, or kept from being
        import sys

        return sys.modules.get(package) is not None
