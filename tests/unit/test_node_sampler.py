"""The node sampler, with an NVML of our own making and without any."""

# ruff: noqa: N802  (NVML's names)

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from traceml_ray.actors.node_sampler import NodeSampler, SamplerThread
from traceml_ray.wire import GpuSample


class Nvml:
    """Two devices; the second one cannot tell its utilisation."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def nvmlInit(self) -> None:
        self.calls.append("init")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        self.calls.append("name")
        return b"old binding" if handle else "H200"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle:
            raise RuntimeError("not supported")
        return SimpleNamespace(gpu=37)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=10 + handle, total=100)


class NoDriver(Nvml):
    def nvmlInit(self) -> None:
        super().nvmlInit()
        raise OSError("no driver")


def test_devices_are_sampled_and_what_one_cannot_tell_is_none() -> None:
    nvml = Nvml()
    sampler = NodeSampler(nvml)
    for t_ns in (5, 6):
        sample = sampler.sample(t_ns)
    assert sample.t_ns == 6
    assert sample.gpus == [
        GpuSample(0, "H200", 37.0, 10, 100),
        GpuSample(1, "old binding", None, 11, 100),
    ]
    assert sampler.errors == {"nvml utilization: RuntimeError": 2}
    assert nvml.calls == ["init", "name", "name"]


def test_a_machine_without_gpus_is_no_error() -> None:
    class NVMLError_LibraryNotFound(Exception):  # noqa: N801,N818 - as NVML names it
        pass

    nvml = Nvml()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError_LibraryNotFound())  # type: ignore[method-assign]
    sampler = NodeSampler(nvml)
    assert sampler.sample(1).gpus is None and not sampler.errors


def test_without_a_driver_there_are_no_devices_and_it_is_tried_once() -> None:
    nvml = NoDriver()
    sampler = NodeSampler(nvml)
    assert [sampler.sample(t).gpus for t in (1, 2, 3)] == [None, None, None]
    assert nvml.calls == ["init"]
    assert sampler.errors == {"nvml: OSError": 1}


def test_this_machine_has_memory_and_processors_and_no_cpu_percent_before_the_second_look() -> None:
    sampler = NodeSampler(NoDriver())
    first, second = sampler.sample(1), sampler.sample(2)
    assert first.cpu_pct is None
    assert second.cpu_pct is not None
    assert second.mem_total_bytes == psutil.virtual_memory().total
    assert 0 < (second.mem_used_bytes or 0) < second.mem_total_bytes
    assert (second.cpu_count or 0) >= 1


def test_what_the_system_does_not_have_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise PermissionError

    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    monkeypatch.setattr(psutil, "net_io_counters", broken)
    sampler = NodeSampler(NoDriver())
    sample = sampler.sample(1)
    assert (sample.disk_read_bytes, sample.net_rx_bytes) == (None, None)
    assert sampler.errors["net: PermissionError"] == 1


def test_a_sample_of_the_thread_is_given_out_once() -> None:
    thread = SamplerThread(NodeSampler(NoDriver()), interval=3600)
    while (sample := thread.latest()) is None:
        pass
    assert sample.t_ns > 0
    assert thread.latest() is None
