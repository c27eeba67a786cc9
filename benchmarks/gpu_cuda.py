"""The sections of `gpu.py` that only a CUDA device can go through."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import gpu_env
import torch
from gpu_env import MS, STEPS, figure, middle, one_rank, train, watched
from torch import nn

from traceml_ray.agent.device import EVENT_SLOTS
from traceml_ray.stages import BACKWARD, FORWARD, POST_SYNC, SYNC_WAIT

HERE = Path(__file__).parent


def capture(env: Any) -> None:
    """
    A graph is captured in mode `global` while another thread reads events; also without our way
    of reading.
    """
    broken = _captures(env, enters=True)
    figure("captures broken by the agent's reading, of 20", str(broken), "0", broken == 0)
    broken = _captures(env, enters=False)
    figure("the same without its capture mode", f"{broken} (expected: some)")


def _captures(env: Any, enters: bool) -> int:
    over, errors, ready = threading.Event(), [], threading.Event()

    def read() -> None:
        try:
            api = env.api()  # creating it makes this thread one that may read
            if not enters:
                api._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(0)))
            ready.set()
            while not over.is_set():
                api.beat(EVENT_SLOTS)
                api.done(0)
        except Exception as error:
            errors.append(error)
            ready.set()

    broken = 0
    thread = threading.Thread(target=read)
    thread.start()
    ready.wait(10)
    x = torch.ones(256, device=env.device)
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                y = x
                for _ in range(200):
                    y = y * 1.0001
            graph.replay()
            env.sync()
        except Exception:
            broken += 1
            if not enters:
                break
    over.set()
    thread.join()
    if errors and enters:
        raise errors[0]
    return broken


def memory(env: Any) -> None:
    """Device memory that all events of the ring take."""
    free, _ = torch.cuda.mem_get_info()
    env.api().make(EVENT_SLOTS)
    env.sync()
    took = (free - torch.cuda.mem_get_info()[0]) / 2**20
    figure(f"{EVENT_SLOTS} events and a stream", f"{took:.1f} MiB", "<= 16 MiB", took <= 16)


def amp(env: Any) -> None:
    """Autocast: rows as without autocast, and the same losses as without the monitor."""

    def wrap(net: nn.Module) -> nn.Module:
        net.forward = torch.autocast("cuda", torch.float16)(net.forward)  # type: ignore[method-assign]
        return net

    alone = train(env, {}, lambda _: None, wrap=wrap)
    rows, _, losses = watched(env, wrap=wrap)
    figure("row", " ".join(f"{ms:.2f}" for ms in middle(rows)) + " ms")
    figure("losses as without", str(losses == alone), "True", losses == alone)


def fsdp2(env: Any) -> None:
    """Every wait of FSDP2 is marked, also in autograd's own thread; rows are complete."""
    import torch.distributed.fsdp as fsdp

    def wrap(net: Any) -> nn.Module:
        for part in (net.first, net.second, net):
            fsdp.fully_shard(part)
        return net  # type: ignore[no-any-return]

    with one_rank(env.backend):
        rows, agent, _ = watched(env, wrap=wrap)
        stages = middle(rows)
        waits = agent.device._waits
        marks = 0 if waits is None else waits._marks / max(1, waits._marked)
    figure("row", " ".join(f"{ms:.2f}" for ms in stages) + " ms")
    figure("waits marked in a step", f"{marks:.1f}", ">= 6", marks >= 6)
    planted = gpu_env.FORWARD_MS, gpu_env.BACKWARD_MS
    good = all(abs(stages[stage] - ms) < 1 for stage, ms in zip((FORWARD, BACKWARD), planted, strict=True))
    shown = f"{stages[FORWARD]:.2f}, {stages[BACKWARD]:.2f} ms"
    figure("forward and backward without them", shown, "4, 8 ms", good)


def graphs(env: Any) -> None:
    """
    `torch.compile(mode="reduce-overhead")` and `make_graphed_callables`: same losses as without
    the monitor.
    """

    def inner() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(env.device)

    def compiled(_: nn.Module) -> nn.Module:
        return torch.compile(inner(), mode="reduce-overhead")  # type: ignore[return-value]

    def graphed(_: nn.Module) -> nn.Module:
        sample = torch.ones(1, 16, device=env.device)
        made: nn.Module = torch.cuda.make_graphed_callables(inner(), (sample,))
        return made

    for name, wrap in (("make_graphed_callables", graphed), ("reduce-overhead", compiled)):
        alone = train(env, {}, lambda _: None, wrap=wrap)
        rows, agent, losses = watched(env, wrap=wrap)
        same = losses == alone
        figure(f"{name}: losses as without", str(same), "True", same)
        lost = agent.instrumentation.errors.get("device rows without an event", 0)
        shown = f"{len(rows)} of {STEPS}, {lost} lost"
        figure(f"{name}: rows on the device's clock", shown, "", len(rows) > STEPS // 2)


def kineto(env: Any) -> None:
    """Stages compared with the device ranges that the profiler recorded: the median error is below 2 %."""
    from torch.profiler import ProfilerActivity, profile, record_function

    matrix = torch.randn(3072, 3072, device=env.device)

    class Heavy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3072, 3072, device=env.device) / 100)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with record_function("the forward"):
                for _ in range(8):
                    x = x @ self.weight
                return x

    def body(after: Any) -> None:
        model = Heavy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        for step in range(STEPS):
            next(iter(torch.utils.data.DataLoader([torch.zeros(1)])))
            model(matrix).sum().backward()
            with record_function("the optimizer"):
                for _ in range(3):
                    torch.mm(matrix, matrix)
                optimizer.step()
            optimizer.zero_grad()
            after(step)

    kept = gpu_env.train
    try:
        gpu_env.train = lambda _env, _added, after: body(after) or []  # type: ignore[assignment]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            rows, _, _ = watched(env)
    finally:
        gpu_env.train = kept
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    errors, used = stage_errors(rows, events)
    for name, errors_ms in errors.items():
        error = statistics.median(map(abs, errors_ms))
        figure(f"{name} against the profiler, {used} steps", f"{error:.2%}", "< 2 %", error < 0.02)
    figure("optimizer's stage", f"{statistics.median(row[POST_SYNC] for row in rows) / MS:.2f} ms")


def stage_errors(rows: list[list[int]], events: list[dict[str, Any]]) -> tuple[dict[str, list[float]], int]:
    """Return the differences of stages from the profiler's ranges on the device, and the number of steps."""
    ranges: dict[str, list[tuple[float, float]]] = {"the forward": [], "the optimizer": []}
    for event in events:
        if event.get("cat") == "gpu_user_annotation" and event.get("name") in ranges:
            ranges[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    forward, stepped = (sorted(values) for values in ranges.values())
    last = min(len(rows), len(forward), len(stepped))
    pairs = list(zip(rows[-last:], forward[-last:], stepped[-last:], strict=True))[2:] if last else []
    if not pairs:
        raise RuntimeError(f"the profiler has {len(forward)} and {len(stepped)} ranges, of {len(rows)} rows")
    errors = {
        "forward": [row[FORWARD] / 1000 / (b - a) - 1 for row, (a, b), _ in pairs],
        "backward": [(row[BACKWARD] + row[SYNC_WAIT]) / 1000 / (c - b) - 1 for row, (_, b), (c, _) in pairs],
    }
    return errors, len(pairs)


def judge(env: Any) -> None:
    """Two ranks on this one device, one slow in backward: the whole product names the slow rank."""
    with tempfile.TemporaryDirectory() as folder:
        script = [HERE / "training/gpu_ranks.py"]
        if not env.cuda:
            late = {"stage": "backward", "ranks": [1], "share": 0.4, "rotating": False}
            plan = {"world": 2, "seed": 0, "step_ms": 40, "noise": 0.05, "work": "sleep", "rows": 200,
                    "segments": [{"first": 0, "steps": 200, "late": [late]}], "measured": [2, 20],
                    "device": True}  # fmt: skip
            Path(folder, "plan.json").write_text(json.dumps(plan))
            script = [HERE / "training/planted.py", Path(folder, "plan.json")]
        ran = subprocess.run(
            [sys.executable, "-m", "traceml_ray.launch", "--nproc-per-node", "2", *script],
            env={**os.environ, "TRACEML_OUT": folder, "TRACEML_SESSION": "gpu", "TRACEML_DEVICE_CLOCK": "1"},
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
        )
        if ran.returncode:
            raise RuntimeError(ran.stderr.strip()[-300:])
        verdict = json.loads(Path(folder, "gpu", "summary.json").read_text())["verdict"]
    named = verdict.get("label"), verdict.get("stage"), verdict.get("ranks")
    shown, good = ", ".join(map(str, named)), named == ("straggler", "backward", [1])
    figure("a backward three times as long on rank 1", shown, "straggler, backward, [1]", good)
