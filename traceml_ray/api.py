"""The functions that a training script may call. In a process that is not watched every call does nothing."""

from __future__ import annotations

import functools
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from traceml_ray.agent import bootstrap
from traceml_ray.agent.channel import Channel
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.agent.watched import watched
from traceml_ray.errors import error_text, is_out_of_memory
from traceml_ray.identity import RankIdentity, resolve
from traceml_ray.ray.channels import channel_to_relay
from traceml_ray.settings import RelayPaths, Settings
from traceml_ray.signals.logged.agent import MetricLog
from traceml_ray.signals.memory.agent import MemoryHistory
from traceml_ray.signals.throughput.agent import WorkReport
from traceml_ray.wire import messages as wire

if TYPE_CHECKING:
    from typing import Self

    from traceml_ray.live_session import Session
    from traceml_ray.store.profiles import Profile


Items = TypeVar("Items", bound=Iterable[Any])


def attach(
    session: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    node_rank: int | None = None,
    nnodes: int | None = None,
    attempt: int | None = None,
    job_id: str | None = None,
) -> bool:
    """
    Watch this process from here on. Returns True when it is watched.

    In a process of Ray (actor, task, driver) it reports to the session `session` (else `TRACEML_SESSION`,
    else `default`), which may start later. Under
    `python -m traceml_ray.launch` and `traceml-ray run` ranks are watched already. In any other process rank
    0 prints once on stderr that it is not watched.

    Give the ranks only where neither torch.distributed nor a launcher's environment has them. The session
    numbers a process of Ray without ranks. Any thread may call it; rows begin with the next
    step. It patches torch (some ms) and starts one daemon thread. A second call does nothing.

    Args:
        session: name.
        rank: of `world_size`, both or neither; at most 2²⁰.
        world_size: number of ranks of the job.
        local_rank: on this node, of `local_world_size`.
        local_world_size: number of ranks on this node.
        node_rank: of `nnodes`.
        nnodes: number of nodes of the job.
        attempt: number of restarts of the job before this one.
        job_id: the run it belongs to: processes with the same are ranks of one job.

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
    identity: Callable[[], RankIdentity] = functools.partial(
        resolve,
        global_rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        nnodes=nnodes,
        attempt=attempt,
        job_id=job_id,
    )
    identity()  # what is wrong with it is raised here
    channel: Channel | None
    spool: str | None
    since_ns: int | None = None
    try:
        ray = sys.modules.get("ray")
        paths = RelayPaths.load()
        if paths.socket is None and ray is not None and ray.is_initialized():
            from traceml_ray.ray import in_ray
            from traceml_ray.ray.actor_calls import ActorChannel
            from traceml_ray.ray.actors import DEFAULT_SESSION

            name = settings.session or DEFAULT_SESSION
            settings, spool = msgspec.structs.replace(settings, session=name), in_ray.spool_of(name)
            channel, identity, since_ns = ActorChannel(name), in_ray.named(identity), time.time_ns()
        else:
            channel, spool = channel_to_relay(settings, paths), paths.spool
        how: dict[str, Any] = {"channel": channel, "spool": spool, "part_of_run_ns": since_ns}
        watched = bootstrap.start(settings, identity=identity, **how) is not None
        if not watched and identity().global_rank == 0:
            _print_advice()
        return watched
    except Exception as error:  # whatever it is, the script goes on as without us
        warnings.warn(f"not watching this process: {type(error).__name__}: {error}", stacklevel=2)
        return False


@functools.cache  # once
def _print_advice() -> None:
    sys.stderr.write(
        "traceml-ray: attach: no monitor runs here; start the job with `traceml-ray run -- COMMAND`, "
        "or call traceml_ray.start() after ray.init()\n"
    )


def detach() -> None:
    """
    Stop watching this process and put torch back exactly as it was.

    Unsent rows are sent first, which takes at most a second. Any thread may call it.
    """
    bootstrap.stop()


def _listening() -> RankAgent | None:
    """
    Return this process's agent. None also while torch compiles, because a mark cannot be
    part of a graph.
    """
    agent = bootstrap.current()
    return None if agent is None or sys.modules["torch"].compiler.is_dynamo_compiling() else agent


class _Block(ContextDecorator):
    """
    A `with` block that can also be used as a decorator. It can be entered again, even inside itself, and
    pickled.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._open: list[Any] = []
        """The state that each open entry has begun, the innermost last."""

    def _recreate_cm(self) -> Self:  # a decorated function may be called by several threads at once
        return type(self)(self._given)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._given,)


class trace_step(_Block):  # noqa: N801 - used as a function is
    """
    Cut one step here instead of at the optimizer: `with traceml_ray.trace_step(model): …`.

    The row closes at the end of the last backward inside the block; without one it ends with the block.
    Also a decorator. Used by the thread that trains.

    Args:
        model: the module whose call starts the forward, where that cannot be learned from DDP, FSDP or the
            optimizer.
    """

    def __init__(self, model: Any = None) -> None:
        super().__init__(model)

    def __enter__(self) -> None:
        agent = _listening()
        self._open.append(agent)
        if agent is None:
            return
        patches = agent.instrumentation
        try:
            model = self._given
            if model is not None and not any(root is model for root in patches.roots.modules()):
                patches.roots.add(model)
            agent.recorder.trace()
        except Exception as error:
            patches.failed("trace_step", error)

    def __exit__(self, *_: object) -> None:
        agent = self._open.pop()
        if agent is None:
            return
        try:
            agent.recorder.close_traced()
            if agent.recorder.step_hook is not None:
                agent.recorder.step_hook()
        except Exception as error:
            agent.instrumentation.failed("trace_step", error)


class stage(_Block):  # noqa: N801
    """
    Name a span of the step, `with traceml_ray.stage("tokenize"): …`. The span is shown inside the stage that
    it is in.

    Also a decorator. Blocks may be nested; a block inside a block of the same name counts once. In a thread
    that does not train it does nothing.

    Args:
        name: name of the span, cut to 64 characters. A process may use 256 names; later names are dropped and
            counted.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)

    def __enter__(self) -> None:
        agent = _listening()
        spans = agent.instrumentation.spans if agent is not None else None
        self._open.append((spans, spans.begin(self._given) if spans is not None else None))

    def __exit__(self, *_: object) -> None:
        spans, begun = self._open.pop()
        if begun is not None:
            spans.end(begun)


class capture_oom:  # noqa: N801
    """
    Note where memory ran out: `with traceml_ray.capture_oom("optimizer step"): …`.

    An out-of-memory error in the block, of the host or of a device (`torch.OutOfMemoryError`, `MemoryError`,
    `CUBLAS_STATUS_ALLOC_FAILED`, the error of the CPU allocator), passes through unchanged and makes a
    bundle: the last minutes of every rank. An error that nothing catches makes a bundle by itself; use this
    where your script catches the error. Any thread may use it.

    Args:
        where: a name for the operation in the block, cut to 64 characters.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, calls: object) -> None:
        agent = None if error is None else bootstrap.current()
        if agent is None or error is None:
            return
        try:
            if is_out_of_memory(error_text(error)):
                agent.collector(MemoryHistory).write()
                agent.add_event(bootstrap.out_of_memory(agent.recorder.open_stage(), error, str(self._where)))
        except Exception as failure:
            agent.instrumentation.failed("capture_oom", failure)


def count(
    samples: int | None = None,
    tokens: int | None = None,
    *,
    flops_per_step: float | None = None,
    total_steps: int | None = None,
    steps_done: int | None = None,
) -> None:
    """
    State the size of this rank's current step if its batches do not show it. Calls in a step add up.

    It replaces the sizes read from a loader's batches (samples from dimension 0, tokens from `input_ids`).
    Used by the thread that trains, between the wait for a batch and the optimizer. A call costs some
    microseconds.

    Args:
        samples: number of samples of this rank, in this step or micro-batch.
        tokens: number of tokens of this rank, in this step or micro-batch.
        flops_per_step: FLOPs of the model in one step of all ranks together. One call on one rank is enough.
        total_steps: number of steps of the whole job. One call on one rank is enough.
        steps_done: number of steps done before the next one, in a script that continues from a checkpoint.
            Steps are numbered from there on, so it is known which steps a restart repeats. Each rank calls
            it. A number below the current one is ignored.
    """
    agent = _listening()
    if agent is None:
        return
    try:
        if samples is not None or tokens is not None:
            agent.recorder.count(
                None if samples is None else int(samples), None if tokens is None else int(tokens)
            )
        if flops_per_step is not None or total_steps is not None:
            flops = None if flops_per_step is None else float(flops_per_step)
            steps = None if total_steps is None else int(total_steps)
            agent.collector(WorkReport).declare(job_flops=flops, total_steps=steps)
        if steps_done is not None:
            agent.recorder.number(int(steps_done))
    except Exception as error:
        agent.instrumentation.failed("count", error)


def log(values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
    """
    Log numbers of your own beside the step time: `traceml_ray.log(loss=loss, lr=3e-4)`.

    A number belongs to the step of the call; between the optimizer and the next step, to the previous step.
    If a name is logged several times in a step, the last value counts. NaN and infinities are kept, and are
    findings. One rank or all may call it, in any thread. It costs one or two microseconds, and one more for
    each tensor.

    A tensor with one element is read at once on the CPU. On a CUDA device it is copied to the host
    without a wait, and read once it has arrived, so that `log(loss=loss)` costs no synchronisation, where
    `loss.item()` does. A value that is not a number is counted under `errors` of the rank, never raised.

    Args:
        values: by name, where names are no keywords: `{"train/loss": 0.3}`.
        named: the same. Names are cut to 64 characters; of more than 32 names of a process those that come
            last are dropped and counted.
    """
    agent = _listening()
    if agent is None:
        return
    try:
        agent.collector(MetricLog).log(named if values is None else {**values, **named})
    except Exception as error:
        agent.instrumentation.failed("log", error)


def watch(iterable: Items) -> Items:
    """
    Return `iterable`; the wait for each item counts as `data`.

    Length, attributes and `isinstance` stay as they are, and it can be iterated again if it could before. A
    DataLoader, and batches of Ray Data, are returned unchanged: they are timed anyway. Exceptions of the
    iterable pass through.
    """
    result: Items = watched(iterable)
    return result


def watch_router(
    module: Any, experts: int, *, name: str = "router", chosen: Callable[[Any], Any] | None = None
) -> None:
    """
    Count how many tokens a router of a mixture of experts gives to each expert, from here on.

    Report and pages compare the busiest expert with the mean. Counting adds some small operations on the
    router's device to each forward of training; nothing waits for it. Call it on each rank, once per router,
    after the process is watched.

    Args:
        module: the router.
        experts: number of experts that it chooses from, 512 at most.
        name: name of the router, the same on all ranks.
        chosen: function that receives the module's result and returns the indices of the chosen experts, a
            tensor of integers of any shape. Default: the first such tensor in the result. Indices outside 0
            to experts - 1, such as those of dropped tokens, are counted separately, under `errors` of the
            rank.
    """
    agent = bootstrap.current()
    if agent is None:
        return
    try:
        agent.instrumentation.routers.watch(module, int(experts), str(name), chosen)
    except Exception as error:
        agent.instrumentation.failed("router", error)


class profile:  # noqa: N801 - used as a function is
    """
    Profile some steps of the running job with torch's profiler: all of `ranks` record the same steps.

    `traceml_ray.profile(steps=3)` requests the profile and returns at once. In a driver, `with
    traceml_ray.profile(): …` waits for the result at the end of the block. A watched rank never waits:
    training continues, and the profile is in the session's folder. All ranks may make the same request. In a
    process that has no session and is not watched it does nothing.

    The steps that are recorded begin some seconds later; a driver may ask before its run has begun.

    Args:
        ranks: `all`, or ranks and ranges of them: `0,4-7`. Of more than 64 the lowest.
        steps: how many, 1 to 50.
        memory: record what each operation allocates,
        stacks: where in the code it is called (slow),
        shapes: the shapes of its inputs.

    Raises ValueError for arguments that cannot be used, and in a driver StartError when its session does not
    answer.
    """

    def __init__(
        self,
        ranks: str = "all",
        steps: int = 3,
        *,
        memory: bool = False,
        stacks: bool = False,
        shapes: bool = False,
    ) -> None:
        fields = {"ranks": ranks, "steps": steps, "memory": memory, "stacks": stacks, "shapes": shapes}
        request, self._id = wire.ProfileRequest.checked(fields), secrets.token_hex(8)
        self._session: Session | None = None
        agent = bootstrap.current()
        if agent is not None:
            run = None if agent.identity is None else agent.identity.job_id
            agent.request(wire.MeasureRequest(self._id, msgspec.structs.replace(request, run=run)))
            return
        from traceml_ray.driver import session_here

        self._session = session_here()
        if self._session is not None:
            self._session.request_profile(self._id, request)

    def result(self, timeout: float = 300.0) -> Profile | None:
        """
        Wait for the result of the profile and return it; None in a process that is a rank, or has no session.

        `ranks` of the result has the outcome of each rank. Raises StartError if there is no result after
        `timeout` s.
        """
        return None if self._session is None else self._session.wait_for_profile(self._id, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, calls: object) -> None:
        if error is None:
            self.result()
