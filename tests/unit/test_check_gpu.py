"""GPUs as torch sees them, on a played device: events, sizes, memory next to the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice

from traceml_ray.signals.check import gpu
from traceml_ray.signals.check.gpu import GpuProbe, TorchGpu, torch_gpus
from traceml_ray.signals.check.probe import ProbeError

PIECE_NS = 1_000_000


class PlayedCuda:
    """`torch.cuda` of a machine with GPUs. Work takes time on their played devices."""

    def __init__(self, free: int = 1 << 34, major: int = 9) -> None:
        self.free = free
        self.played = FakeDevice()
        self.current: list[int] = []
        self.properties = SimpleNamespace(
            name="NVIDIA H200", major=major, uuid="bb", pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0
        )
        self._events = 0

    def get_device_properties(self, _number: int) -> Any:
        return self.properties

    def mem_get_info(self, _number: int) -> tuple[int, int]:
        return self.free, 1 << 37

    @contextlib.contextmanager
    def device(self, device: Any) -> Any:
        self.current.append(device)
        yield
        self.current.pop()

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing and self.current, "an event of another device"
        self._events += 1
        number, played = self._events, self.played

        def elapsed_ms(until: Any) -> float:
            elapsed = played.elapsed_ns(number, until.number)
            assert elapsed is not None
            return elapsed / 1e6

        def query() -> bool:
            played.wait(100_000)
            return played.done(number)

        return SimpleNamespace(
            number=number, record=lambda: played.record(number), query=query, elapsed_time=elapsed_ms
        )


class PlayedTorch:
    """torch, whose tensors on GPUs are in host memory."""

    def __init__(self, **cuda: Any) -> None:
        self.cuda = PlayedCuda(**cuda)
        self.pinned: list[int] = []
        self.multiplied: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, _kind: str, _number: int) -> Any:
        return torch.device("cpu")

    def ones(self, *size: int, pin_memory: bool = False, **more: Any) -> Any:
        if pin_memory:
            self.pinned.append(size[0])
        return torch.ones(*size, **more)

    def mm(self, left: Any, right: Any, out: Any) -> Any:
        self.multiplied.append(left)
        self.cuda.played.launch(PIECE_NS)
        return out


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_SIDE", 64), ("_LEAST_SIDE", 16), ("_COPIED", 1 << 16), ("_PINNED", 1 << 14)):
        monkeypatch.setattr(gpu, name, size)
    monkeypatch.setattr(gpu, "_PAUSE_S", 0.0)


def test_multiplication_is_timed_by_events_of_its_device() -> None:
    played = PlayedTorch()
    probe = GpuProbe("gpu_matmul", "FLOP/s", [TorchGpu(played, 0, 3)], together=True)
    (trial,) = probe.trial(0.02)
    assert trial.value == pytest.approx(2 * 64**3 / (PIECE_NS / 1e9), rel=0.01)
    assert probe.subjects[0][:4] == ("gpu_matmul", "GPU 3", "FLOP/s", "NVIDIA H200")
    assert probe.subjects[0].note == "bfloat16, 64 × 64"
    assert {one.dtype for one in played.multiplied} == {torch.bfloat16}


@pytest.mark.parametrize(("major", "kind"), [(6, torch.float32), (7, torch.float16), (8, torch.bfloat16)])
def test_data_type_is_what_the_device_multiplies_fast(major: int, kind: torch.dtype) -> None:
    played = PlayedTorch(major=major)
    TorchGpu(played, 0, 0).prepared("gpu_matmul")
    assert {one.dtype for one in played.multiplied} == {kind}


def test_slow_device_multiplies_smaller_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_LONGEST_S", 1e-9)
    amount, _ = TorchGpu(PlayedTorch(), 0, 0).prepared("gpu_matmul")
    assert amount == 2 * 16**3


def test_little_free_memory_makes_it_smaller_and_none_is_an_error() -> None:
    amount, _ = TorchGpu(PlayedTorch(free=3 * 2 * 64**2), 0, 0).prepared("gpu_matmul")
    assert amount == 2 * 32**3
    with pytest.raises(ProbeError, match="GPU 5 was not measured: only 100 B of it are free"):
        TorchGpu(PlayedTorch(free=100), 0, 5).prepared("gpu_memory")


@pytest.mark.parametrize("probe", ["to_device", "to_host"])
def test_copies_use_pinned_memory_next_to_the_gpu(
    probe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = min(gpu.machine.allowed())
    local = tmp_path / "sys/bus/pci/devices/0000:17:00.0/local_cpulist"
    local.parent.mkdir(parents=True)
    local.write_text(f"{core},1000-1003\n")
    used: list[list[int]] = []
    usual: Callable[[Any], Any] = gpu.machine.running_on

    def running_on(cores: list[int]) -> Any:
        used.append(cores)
        return usual(cores)

    monkeypatch.setattr(gpu.machine, "running_on", running_on)
    played = PlayedTorch()
    amount, work = TorchGpu(played, 0, 0, tmp_path).prepared(probe)
    work()
    assert used == [[core]]
    assert played.pinned == [amount / 4] and amount <= 1 << 14


def test_memory_of_a_gpu_is_read_and_written() -> None:
    amount, work = TorchGpu(PlayedTorch(), 0, 0).prepared("gpu_memory")
    work()
    assert amount == 2 * (1 << 16)


def test_gpus_have_the_index_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_gpus(None, lambda _: None) == [], "there is none here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: PlayedCuda().properties)
    assert [one.index for one in torch_gpus(None, {"bb": 6}.get)] == [6, 6]
    assert [one.index for one in torch_gpus([1], lambda _: None)] == [1]
