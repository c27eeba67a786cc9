"""What a training script may say itself; every call is harmless where nothing is being watched."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from traceml_ray.agent import bootstrap
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.agent.ray_data import new_iterator, timed_next
from traceml_ray.identity import RankIdentity, resolve
from traceml_ray.settings import Settings

T = TypeVar("T")


def attach(session: str | None = None, **who: Any) -> bool:
    """
    Watch this process from here on; True when it is watched.

    In a process of Ray (actor, task, driver) it reports to the session of that name (else
    `TRACEML_SESSION`, else `default`), whether that runs already or not. Under
    `python -m traceml_ray.launch` it is watched already; elsewhere this needs the path of a relay's
    socket in `TRACEML_SOCKET`.

    Args:
        session: name.
        who: `rank`, `world_size`, `local_rank`, `local_world_size`, `node_rank`, `nnodes`, `attempt`
            and `job_id` (the run it belongs to), where torch.distributed and the environment do
            not tell. A process of Ray without any rank is numbered by the session.

    Raises:
        IdentityError: ranks that contradict each other, or a rank without a world size.
        ModuleNotFoundError: there is no torch.
        SettingError: a name that cannot be used.
        TypeError: a keyword that is none of these.
    """
    import torch  # noqa: F401 - what is going to be patched

    if bootstrap.current() is not None:
        return True
    settings = Settings.load(session=session)
    if "rank" in who:
        who["global_rank"] = who.pop("rank")
    identity: Callable[[], RankIdentity] = functools.partial(resolve, **who)
    identity()  # what is wrong with it is said here
    try:
        if settings.socket is None and _ray_is_up():
            from traceml_ray.agent import in_ray
            from traceml_ray.agent.actor_channel import ActorChannel

            settings = in_ray.settings(settings)
            channel, identity = ActorChannel(str(settings.session)), in_ray.named(identity)
            return bootstrap.start(settings, channel=channel, identity=identity) is not None
        return bootstrap.start(settings, identity=identity) is not None
    except Exception as error:  # whatever it is, the script goes on as without us
        warnings.warn(f"not watching this process: {type(error).__name__}: {error}", stacklevel=2)
        return False


def _ray_is_up() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def detach() -> None:
    """Stop watching this process and put torch back exactly as it was."""
    bootstrap.stop()


def _listening() -> RankAgent | None:
    """Return this process's agent; None also while torch compiles: a mark is no part of a graph."""
    agent = bootstrap.current()
    return None if agent is None or sys.modules["torch"].compiler.is_dynamo_compiling() else agent


@contextmanager
def trace_step(model: Any = None) -> Generator[None]:
    """
    Cut one step here instead of at the optimizer: `with traceml_ray.trace_step(model): …`.

    The row closes at the end of the last backward inside the block. `model` is the module whose
    call starts the forward, where that cannot be learned from DDP, FSDP or the optimizer.
    """
    agent = _listening()
    if agent is None:
        yield
        return
    recorder, failed = agent.recorder, agent.instrumentation.failed
    try:
        if model is not None and not any(root is model for root in agent.instrumentation.roots.modules()):
            agent.instrumentation.roots.add(model)
        recorder.trace()
    except Exception as error:
        failed("trace_step", error)
    try:
        yield
    finally:
        try:
            recorder.close_traced()
        except Exception as error:
            failed("trace_step", error)
        finally:
            recorder.manual = False


@contextmanager
def stage(name: str) -> Generator[None]:
    """Name a part of the step, `with traceml_ray.stage("tokenize"): …`; shown inside the stage it is in."""
    agent = _listening()
    if agent is None:
        yield
        return
    parts = agent.instrumentation.parts
    begun = parts.begin(name)
    try:
        yield
    finally:
        if begun is not None:
            parts.end(begun)


def watch(iterable: Iterable[T]) -> Iterator[T]:
    """Yield from `iterable`, with the wait for each item counted as `data`."""
    items = iter(iterable)
    agent = bootstrap.current()
    if agent is not None:
        new_iterator(agent.recorder, agent.instrumentation.failed, "watch")
    while True:
        agent = bootstrap.current()
        try:
            if agent is None:
                item = next(items)
            else:
                item = timed_next(items, iterable, agent.recorder, agent.instrumentation.failed, "watch")
        except StopIteration:
            return
        yield item
