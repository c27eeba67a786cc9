"""The sections of `gpu.py` that also run on a played device. Each prints figures."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_env import BACKWARD_MS, Keeper, Played, Real, figure, middle, one_rank, watched
from torch import nn

from traceml_ray.agent.device import EVENT_SLOTS, ClockOffset, DeviceClock
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.settings import SHORTEST_STEP_NS, Settings
from traceml_ray.stages import BACKWARD, STAGES, SYNC_WAIT

ADDED_MS = 10.0
MOST_SHARE = 0.005
"""Largest overhead for the shortest step that `auto` measures although its host never waits."""


def cost(env: Any) -> None:
    """The cost of making a mark, and of reading one."""
    api, slots = env.api(), 1000
    api.make(slots)

    def timed(what: str, call: Callable[[int], object], budget_us: float) -> None:
        took = []
        for slot in range(slots):
            began = time.perf_counter_ns()
            call(slot)
            took.append((time.perf_counter_ns() - began) / 1000)
        value = statistics.median(took)
        figure(
            what,
            f"{value:.2f} us, p99 {sorted(took)[slots * 99 // 100]:.1f}",
            f"<= {budget_us:g} us",
            value <= budget_us,
        )

    timed("is the stream captured", lambda _: api.capturing(), 1.0)
    timed("record", api.record, 4.0)
    env.sync()
    timed("is an event done", api.done, 4.0)
    timed("time between two", lambda slot: api.elapsed_ns(0, slot), 4.0)
    backwards = api.elapsed_ns(500, 100)
    figure(
        "time from a later to an earlier event",
        f"{backwards} ns",
        "<= 0",
        backwards is not None and backwards <= 0,
    )
    clock = DeviceClock(api, None, env.clock, lambda: False)  # type: ignore[arg-type]
    clock.resolve(0)
    timed("mark with its event", lambda _: clock.record(), 5.0)


def stages(env: Any) -> None:
    """Time added to one stage appears in that stage and in no other."""

    def check(name: str, base: list[float], **options: Any) -> None:
        rows, _, _ = watched(env, **options)
        measured, added = middle(rows), options.get("added", {})
        for stage, label in enumerate(STAGES):
            expected = base[stage] + added.get(label, 0.0)
            off = abs(measured[stage] - expected)
            if off > max(0.3, env.tolerance * expected):
                figure(
                    f"{name}: {label}", f"{measured[stage]:.2f} instead of {expected:.2f} ms", "", good=False
                )
        figure(name, " ".join(f"{ms:.2f}" for ms in measured) + " ms", "as planted")

    with one_rank(env.backend):
        ddp = nn.parallel.DistributedDataParallel
        base = middle(watched(env, wrap=ddp)[0])
        figure("nothing added", " ".join(f"{ms:.2f}" for ms in base) + " ms")
        for stage in ("prepare", "forward", "backward", "post_sync"):
            check(f"{ADDED_MS:g} ms in {stage}", base, added={stage: ADDED_MS}, wrap=ddp)
        waiting = middle(watched(env, wrap=ddp, waits="step")[0])
        check(
            f"{ADDED_MS:g} ms in data, host waits", waiting, added={"data": ADDED_MS}, wrap=ddp, waits="step"
        )
        if env.name == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                check("on a stream of its own", base, wrap=ddp)


def peer(env: Any) -> None:
    """The wait for a late peer is `sync_wait`: a communication hook whose future ends on another stream."""
    late_ms = 15.0
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def hook(_: Any, bucket: Any) -> Any:
        wait = env.side(late_ms)
        done: Any = torch.futures.Future()
        if env.name == "cuda":  # its stream is waited for where DDP waits for an exchange
            done = torch.futures.Future(devices=[env.device])
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                wait()
                done.set_result(bucket.buffer())
        else:
            queue(wait)
            done.set_result(bucket.buffer())
        return done

    hook.__annotations__.clear()

    def wrap(net: nn.Module) -> nn.Module:
        model = nn.parallel.DistributedDataParallel(net)
        model.register_comm_hook(None, hook)  # type: ignore[arg-type]
        return model

    with one_rank(env.backend):
        measured = middle(watched(env, wrap=wrap)[0])
    good = abs(measured[SYNC_WAIT] - late_ms) <= 0.05 * late_ms + 0.2
    figure(f"sync_wait with a peer {late_ms:g} ms late", f"{measured[SYNC_WAIT]:.2f} ms", "within 5 %", good)
    good = abs(measured[BACKWARD] - BACKWARD_MS) <= 0.1 * BACKWARD_MS
    figure("backward meanwhile", f"{measured[BACKWARD]:.2f} ms", f"{BACKWARD_MS:g} ms", good)


def offset(env: Any) -> None:
    """How precisely the two clocks can be compared."""
    api, line, errors_us = env.api(), ClockOffset(), []
    api.make(2)
    since, device_ns = EVENT_SLOTS, 0
    api.beat(since)
    env.host(5)
    for beat in range(150):
        until = EVENT_SLOTS + 1 - beat % 2
        now = env.clock()
        api.beat(until)
        env.host(20)
        device_ns += api.elapsed_ns(since, until) or 0
        since = until
        line.add(now, device_ns - now)
        if beat >= 20:
            predicted = line.at(now)
            errors_us.append(float("inf") if predicted is None else abs(device_ns - now - predicted) / 1000)
    p90 = sorted(errors_us)[len(errors_us) * 9 // 10]
    figure("a beat from the line, median", f"{statistics.median(errors_us):.1f} us")
    figure("p90", f"{p90:.1f} us", "<= 100 us", p90 <= 100)


def overhead(env: Any) -> None:
    """Overhead of the device's clock per step: attached and detached in turn, compared in pairs."""
    pairs = _pairs(env, kernel_ms=0, steps=100, count=40)
    added = [after - before for before, after in pairs]
    low, high = statistics.quantiles(added, n=20)[0], statistics.quantiles(added, n=20)[-1]
    us = statistics.median(added)
    most_us = MOST_SHARE * SHORTEST_STEP_NS / 1000
    figure(
        f"added to a step of {statistics.median(before for before, _ in pairs):.0f} us "
        "whose host is never waited for",
        f"{us:.1f} us ({low:.1f} … {high:.1f})",
        f"<= {most_us:.0f} us",
        us <= most_us or not env.cuda,
    )
    pairs = _pairs(env, kernel_ms=20, steps=15, count=20)
    shares = [after / before - 1 for before, after in pairs]
    low, high = statistics.quantiles(shares, n=20)[0], statistics.quantiles(shares, n=20)[-1]
    share = statistics.median(shares)
    what = f"added to a step of {pairs[0][0] / 1000:.1f} ms on the device"
    shown = f"{share:+.3%} ({low:+.3%} … {high:+.3%})"
    figure(what, shown, "<= 0.2 %", share <= 0.002 or not env.cuda)


def _pairs(env: Any, kernel_ms: float, steps: int, count: int) -> list[tuple[float, float]]:
    """Return the step time in us without and with an agent, in adjacent pairs."""
    model = nn.Linear(16, 1).to(env.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(4, 16, device=env.device)
    settings = Settings(session="gpu", device_clock="1")
    if not env.cuda:
        env.fake.__class__.__call__ = lambda _: time.perf_counter_ns()
    agent = RankAgent(settings, Keeper())  # type: ignore[arg-type]

    def stretch() -> float:
        env.sync()
        began = time.perf_counter_ns()
        for _ in range(steps):
            if kernel_ms:
                env.kernel(kernel_ms)
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if kernel_ms:
            env.sync()
        took = (time.perf_counter_ns() - began) / steps / 1000
        env.sync()
        agent.recorder.replay()
        if clock is not None:
            clock.resolve(agent.recorder.first_event())
        agent.ring.drain(100_000)
        return took

    clock = None
    stretch()
    pairs = []
    for _ in range(count):
        before = stretch()
        agent.instrumentation.install()
        agent.instrumentation.roots.add(model)
        clock = DeviceClock(env.api(), agent.ring, agent.recorder.clock, lambda: False)
        clock.resolve(agent.recorder.first_event())
        agent.recorder.use(clock)
        stretch()
        pairs.append((before, stretch()))
        agent.recorder.stop_device_clock()
        agent.instrumentation.remove()
        clock = None
    return pairs


def run(section: str, played: bool) -> int:
    """Run one section in this process."""
    import gpu_cuda  # type: ignore[import-not-found]
    import gpu_machine  # type: ignore[import-not-found]
    import gpu_memory  # type: ignore[import-not-found]

    env = Played() if played else Real()
    chosen_section = next(
        vars(part)[section] for part in (_HERE, gpu_machine, gpu_memory, gpu_cuda) if section in vars(part)
    )
    chosen_section(env)
    return 0


_HERE = sys.modules[__name__]
