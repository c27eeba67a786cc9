"""`benchmarks/gpu.py` where no played device helps: its verdict, its time-outs, what a profiler prints."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from traceml_ray.stages import BACKWARD, FORWARD, N_STAGES, SYNC_WAIT

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    return gpu


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_cuda

    return gpu_cuda


def figures(gpu: Any, **values: str) -> list[Any]:
    return [gpu.Figure(part, "what", value) for part, value in values.items()]


def test_every_section_is_a_function_and_has_a_docstring(gpu: Any, cuda: Any) -> None:
    import gpu_machine
    import gpu_memory
    import gpu_sections

    for section in gpu.SECTIONS:
        parts = gpu_sections, gpu_machine, gpu_memory, cuda
        functions = [vars(part)[section] for part in parts if section in vars(part)]
        assert functions and functions[0].__doc__, section
    alone = sum(section.limit_s for section in gpu.SECTIONS.values() if section.alone)
    assert set(gpu.SECTIONS) > gpu.MAY_BE_UNSEEN and alone < 600


def test_green_whole_run_says_that_the_device_is_confirmed(gpu: Any) -> None:
    every = list(gpu.SECTIONS)
    line, code = gpu.verdict(figures(gpu, cost="1 us", ray_train="NOT SEEN: no Ray"), every, False)
    assert code == 0
    assert line.startswith("GREEN (not seen here: ray_train): this device is confirmed")


@pytest.mark.parametrize(
    ("values", "left_out", "played", "says", "code"),
    [
        ({"cost": "FAILED: 9 us"}, "", False, "NOT green: 1 FAILED (cost)", 1),
        ({"stages": "NOT SEEN: x"}, "", False, "green, but stages did not run", 0),
        ({"cost": "1 us"}, "graphs", False, "green, but graphs did not run", 0),
        ({"cost": "1 us"}, "", True, "a played device confirms nothing", 0),
    ],
)
def test_anything_less_confirms_nothing(
    gpu: Any, values: dict[str, str], left_out: str, played: bool, says: str, code: int
) -> None:
    chosen = [section for section in gpu.SECTIONS if section != left_out]
    line, exit_code = gpu.verdict(figures(gpu, **values), chosen, played)
    assert says in line and "is confirmed" not in line and exit_code == code


def test_section_that_hangs_is_ended_with_what_it_started(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, begun = tmp_path / "hangs.py", tmp_path / "begun"
    script.write_text(
        "import pathlib, subprocess, time\n"
        'print(\'["begun", "yes | no", ""]\', flush=True)\n'
        "started = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path('{tmp_path}/pid').write_text(str(started.pid))\n"
        f"pathlib.Path('{tmp_path}/pid').rename('{begun}')\n"
        "time.sleep(600)\n"
    )

    class Hanging(subprocess.Popen[str]):
        """The time is over once the script has begun, however long it waits for a core."""

        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
            if timeout is None:
                return super().communicate(input)
            end = time.monotonic() + 240
            while not begun.exists():
                assert time.monotonic() < end
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": Hanging})
    monkeypatch.setattr(gpu, "subprocess", stand_in)
    monkeypatch.setattr(gpu, "__file__", str(script))
    kept, failed = gpu.run("cost", 1.0, False)
    assert kept == ("cost", "begun", "yes / no", "")
    assert failed.value.startswith("FAILED (-9): not over after 1 s")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(begun.read_text())).wait(240)


def test_sections_run_in_turn_and_those_without_clocks_together(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    together = threading.Barrier(3, timeout=240)
    seen: list[str] = []

    def run(section: str, limit_s: float, played: bool) -> list[Any]:
        assert limit_s <= gpu.SECTIONS[section].limit_s and not played
        if not gpu.SECTIONS[section].alone:
            together.wait()
        seen.append(section)
        return figures(gpu, **{section: "1"})

    monkeypatch.setattr(gpu, "run", run)
    chosen = ["mig", "cost", "nvml", "stages", "amp"]
    assert [figure.part for figure in gpu.run_all(chosen, False)] == chosen
    assert seen[:2] == ["cost", "stages"] and "cost" in capsys.readouterr().err
    monkeypatch.setattr(gpu, "ALL_S", 1.0)
    assert "no time left" in gpu.run_all(["cost"], False)[0].value


def test_profilers_ranges_are_compared_with_rows(cuda: Any) -> None:
    rows, events = [], []
    for step in range(6):
        t_us, row = 100_000.0 * step, [0] * N_STAGES
        row[FORWARD], row[BACKWARD], row[SYNC_WAIT] = 10_100_000, 19_000_000, 1_000_000
        rows.append(row)
        for name, begin, dur in (("the forward", t_us, 10_000.0), ("the optimizer", t_us + 30_000, 3_000.0)):
            events.append({"cat": "gpu_user_annotation", "name": name, "ts": begin, "dur": dur})
            events.append({"cat": "user_annotation", "name": name, "ts": begin, "dur": 1.0})
    errors, steps = cuda.stage_errors(rows, [{}, *events])
    assert steps == 4
    assert errors["forward"] == pytest.approx([0.01] * 4) and errors["backward"] == pytest.approx([0.0] * 4)
    with pytest.raises(RuntimeError, match="the profiler has 0 and 0 ranges, of 6 rows"):
        cuda.stage_errors(rows, [])


class Graph:
    def replay(self) -> None: ...


class Reader:
    """What is read while a graph is captured; without the mode of its own a capture breaks."""

    def __init__(self) -> None:
        self.mode = 1
        self._driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=self.exchange)

    def exchange(self, mode: Any) -> None:
        self.mode = mode._obj.value

    def beat(self, slot: int) -> None: ...

    def done(self, slot: int) -> bool:
        return bool(slot == 0)


def test_broken_captures_are_counted(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = Reader()

    @contextlib.contextmanager
    def capture(_: Graph) -> Any:
        yield
        if reader.mode == 0:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    env = SimpleNamespace(api=lambda: reader, device=torch.device("cpu"), sync=lambda: None)
    cuda.capture(env)
    first, second = capsys.readouterr().out.splitlines()
    assert '"0", "0"' in first and "1 (expected: some)" in second


def test_memory_of_events_is_that_which_the_device_has_less(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = iter([(40 << 20, 80 << 20), (20 << 20, 80 << 20)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: next(free))
    cuda.memory(SimpleNamespace(api=lambda: SimpleNamespace(make=lambda _: None), sync=lambda: None))
    assert "FAILED: 20.0 MiB" in capsys.readouterr().out


def test_graphed_models_are_trained_with_and_without_us(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(BENCHMARKS).parent / "tests"))
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda model, _: model)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    import gpu_env
    import pynvml

    for name in ("_LoadNvmlLibrary", "_nvmlGetFunctionPointer"):
        monkeypatch.setattr(pynvml, name, getattr(pynvml, name))
    cuda.graphs(gpu_env.Played())
    printed = capsys.readouterr().out
    assert printed.count("losses as without") == 2 and "FAILED" not in printed
    assert sys.modules["gpu_env"] is gpu_env


@pytest.mark.parametrize(
    ("devices", "rank", "ranks", "device", "backend"),
    [
        (1, 3, 4, "cuda:0", "gloo"),
        (2, 3, 4, "cuda:1", "gloo"),
        (8, 3, 4, "cuda:3", "nccl"),
        (1, 0, 1, "cuda:0", "nccl"),
    ],
)
def test_example_has_ranks_share_devices_over_gloo_where_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch, devices: int, rank: int, ranks: int, device: str, backend: str
) -> None:
    monkeypatch.syspath_prepend(str(Path(BENCHMARKS).parent / "examples"))
    import train_gpt

    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    for name, number in zip(names, (rank, rank, ranks, ranks), strict=True):
        monkeypatch.setenv(name, str(number))
    me = train_gpt.this_process("cuda")
    assert (str(me.device), train_gpt.backend_of(me)) == (device, backend)
    assert train_gpt.backend_of(train_gpt.this_process("cpu")) == "gloo"
