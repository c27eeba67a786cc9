"""The node sampler on the real `pynvml`, its library played: what cards, MIG and containers do not say."""

from __future__ import annotations

import os

import pynvml
import pytest
from played_nvml import NO_PERMISSION, NOT_SUPPORTED, UNKNOWN_MEMORY, Card, play

from traceml_ray.signals.nodes.records import GpuSample
from traceml_ray.signals.nodes.sampler import _THROTTLE, MIG, NodeSampler
from traceml_ray.wire.messages import NOT_MEASURED

ME = os.getpid()
NONE = "not measured: nvml {}: {}"
ABSENT = "not supported by the device"
FULL = {4: (3, 2), 138: (3, 7), 139: (3, 8), 197: (3, 11), 198: (3, 12)}


def sampled() -> tuple[list[GpuSample], dict[str, int]]:
    sampler = NodeSampler()
    gpus = sampler.sample(1).gpus
    assert gpus is not None
    return gpus, {name: count for name, count in sampler.errors.items() if "nvml" in name or "MIG" in name}


def test_full_card_is_known_wholly(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Card(processes=[(ME, 5 << 30)], fields=FULL))
    [gpu], lacks = sampled()
    assert (gpu.name, gpu.util_pct, gpu.mem_used_bytes, gpu.mem_total_bytes) == ("NVIDIA H200", 90, 10, 100)
    assert (gpu.power_w, gpu.power_limit_w, gpu.temperature_c) == (650.5, 700.0, 61.0)
    assert (gpu.sm_mhz, gpu.sm_max_mhz, gpu.throttle, gpu.xid) == (1200.0, 1980.0, ["sw_power_cap"], [])
    assert (gpu.ecc_uncorrected, gpu.pcie_rx_bytes, gpu.pcie_tx_bytes) == (2, 12, 11)
    assert (gpu.nvlink_rx_bytes, gpu.nvlink_tx_bytes) == (8 * 1024, 7 * 1024)
    assert [(process.pid, process.mem_bytes) for process in gpu.processes or ()] == [(ME, 5 << 30)]
    assert not lacks


def test_what_a_card_does_not_support_is_null_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = dict.fromkeys(("nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit"), NOT_SUPPORTED)
    simple = Card("GeForce", mig=None, util=0, codes=codes, fields={197: (3, 1), 198: (3, 1)})
    play(monkeypatch, simple, simple)
    gpus, lacks = sampled()
    for gpu in gpus:
        assert (gpu.power_w, gpu.power_limit_w, gpu.ecc_uncorrected, gpu.nvlink_rx_bytes) == (None,) * 4
        assert (gpu.sm_mhz, gpu.processes) == (1200.0, [])
    missing = "power", "power limit", "ecc_uncorrected", "nvlink_rx_bytes", "nvlink_tx_bytes"
    assert lacks == {NONE.format(what, ABSENT): 2 for what in missing}


def test_slices_are_said_to_be_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"nvmlDeviceGetMemoryInfo": NO_PERMISSION}
    play(monkeypatch, Card(mig=1, fields=FULL, codes=codes, processes=[(ME, 1)]))
    [gpu], lacks = sampled()
    assert (gpu.name, gpu.util_pct, gpu.mem_used_bytes) == ("NVIDIA H200 (MIG)", None, None)
    assert gpu.power_w == 650.5
    assert lacks == {
        NOT_MEASURED + MIG: 1,
        NONE.format("utilization", ABSENT): 1,
        NONE.format("memory", "no permission"): 1,
    }


def test_device_that_a_container_may_not_use_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = Card(codes={"nvmlDeviceGetHandleByIndex_v2": NO_PERMISSION})
    play(monkeypatch, forbidden, Card("mine", fields=FULL, processes=[(ME, 1)]))
    [gpu], lacks = sampled()
    assert (gpu.index, gpu.name) == (1, "mine")
    assert lacks == {NONE.format("device", "no permission"): 1}


@pytest.mark.parametrize(
    ("processes", "util", "known"),
    [
        ([(ME, 1)], 90, [ME]),
        ([(ME, 1), (4194305, 1)], 90, [ME, 4194305]),
        ([(4194305, 1)], 90, None),  # a pid of the host's namespace
        ([], 90, None),  # somebody computes, nobody is shown
        ([], 3, []),
    ],
)
def test_processes_of_another_namespace_are_not_known(
    monkeypatch: pytest.MonkeyPatch, processes: list[tuple[int, int]], util: int, known: list[int] | None
) -> None:
    play(monkeypatch, Card(util=util, processes=processes, fields=FULL))
    [gpu], lacks = sampled()
    assert (None if gpu.processes is None else [process.pid for process in gpu.processes]) == known
    assert bool(lacks) == (known is None)
    if known is None:
        assert "a container without the host's pids" in next(iter(lacks))


def test_memory_of_a_process_that_the_driver_does_not_know_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Card(processes=[(ME, UNKNOWN_MEMORY)], fields=FULL))
    [gpu], _ = sampled()
    assert [process.mem_bytes for process in gpu.processes or ()] == [None]


def test_counter_is_read_as_the_type_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Card(fields=FULL | {197: (1, 9)}))
    assert sampled()[0][0].pcie_tx_bytes == 9


def test_every_reason_has_the_name_that_nvml_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = "nvmlClocksThrottleReason"
    bits = {name.removeprefix(begin): value for name, value in vars(pynvml).items() if name.startswith(begin)}
    known = {bit: name.replace("_", "") for bit, name in _THROTTLE.items()}
    for name, bit in bits.items():
        if name not in ("None", "All", "UserDefinedClocks"):
            assert known[bit] == name.lower(), name
    play(monkeypatch, Card(reasons=0x1 | 0x40 | 0x400 | 0x8000, fields=FULL))
    assert sampled()[0][0].throttle == ["gpu_idle", "hw_thermal_slowdown", "reliability", "0x8000"]


def test_older_driver_is_asked_for_reasons_by_their_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Card(fields=FULL, util=0), lacks=["nvmlDeviceGetCurrentClocksEventReasons"])
    [gpu], lacks = sampled()
    assert gpu.throttle == ["sw_power_cap"] and not lacks


def test_what_neither_driver_nor_binding_has_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Card(fields=FULL, util=0), lacks=["nvmlDeviceGetPowerUsage"])
    monkeypatch.delattr(pynvml, "nvmlDeviceGetTemperature")
    [gpu], lacks = sampled()
    assert (gpu.power_w, gpu.temperature_c) == (None, None)
    assert lacks == {
        NONE.format("power", "unknown to this driver"): 1,
        NONE.format("temperature", "unknown to this version of nvidia-ml-py"): 1,
    }
