"""What a training script may say itself; every call is harmless where nothing is being watched."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from traceml_ray.agent import bootstrap

T = TypeVar("T")


def attach() -> bool:
    """
    Watch this process from here on; True when it is watched.

    Under `python -m traceml_ray.launch` that has happened already. Elsewhere it needs the path of a
    relay's socket in `TRACEML_SOCKET`.
    """
    import torch  # noqa: F401 - what is going to be patched

    return bootstrap.start() is not None


def detach() -> None:
    """Stop watching this process and put torch back exactly as it was."""
    bootstrap.stop()


@contextmanager
def trace_step(model: Any = None) -> Generator[None]:
    """
    Cut one step here instead of at the optimizer: `with traceml_ray.trace_step(model): …`.

    The row closes at the end of the last backward inside the block. `model` is the module whose
    call starts the forward, where that cannot be learned from DDP, FSDP or the optimizer.
    """
    agent = bootstrap.current()
    if agent is None:
        yield
        return
    recorder, failed = agent.recorder, agent.instrumentation.failed
    try:
        if model is not None and not any(root is model for root in agent.instrumentation.roots.modules()):
            agent.instrumentation.roots.add(model)
        recorder.manual = True
    except Exception as error:
        failed("trace_step", error)
    try:
        yield
    finally:
        try:
            recorder.close_traced()
            recorder.manual = False
        except Exception as error:
            failed("trace_step", error)


@contextmanager
def stage(name: str) -> Generator[None]:
    """Name a part of the step, `with traceml_ray.stage("tokenize"): …`; shown inside the stage it is in."""
    agent = bootstrap.current()
    if agent is None:
        yield
        return
    recorder = agent.recorder
    began, inside = recorder.clock(), recorder.stage
    try:
        yield
    finally:
        try:
            if recorder.mine():
                agent.details.add(name, inside, recorder.step, recorder.clock() - began)
        except Exception as error:
            agent.instrumentation.failed("stage", error)


def watch(iterable: Iterable[T]) -> Iterator[T]:
    """Yield from `iterable`, with the wait for each item counted as `data`."""
    items = iter(iterable)
    agent = bootstrap.current()
    if agent is not None:
        agent.recorder.new_iterator()
    while True:
        agent = bootstrap.current()
        began = got = False
        try:
            if agent is not None:
                began = _quietly_begin(agent, iterable)
            item = next(items)
            got = True
        except StopIteration:
            return
        finally:
            if began and agent is not None:
                _quietly_end(agent, got)
        yield item


def _quietly_begin(agent: Any, loader: object) -> bool:
    try:
        return bool(agent.recorder.data_begin(loader))
    except Exception as error:
        agent.instrumentation.failed("watch", error)
        return False


def _quietly_end(agent: Any, got: bool) -> None:
    try:
        agent.recorder.data_end(got)
    except Exception as error:
        agent.instrumentation.failed("watch", error)
