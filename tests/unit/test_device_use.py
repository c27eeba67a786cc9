"""Whether a device's clock is read, and why not."""

from __future__ import annotations

import types
from unittest.mock import Mock

import pytest
import torch
from fake_device import FakeDevice
from torch import nn
from unit.test_rank_agent import Pipe, make, push

from traceml_ray.agent.device import Cut
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.stages import FORWARD
from traceml_ray.wire import messages as wire


class OnDevices(nn.Module):
    """Its parameters say that they are elsewhere."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.devices = [torch.device(device) for device in devices]

    def parameters(self, recurse: bool = True) -> object:  # type: ignore[override]
        return [types.SimpleNamespace(device=device) for device in self.devices]


def rank(setting: str, *devices: str) -> RankAgent:
    """An agent whose first step is over, of a model on those devices."""
    agent = make(Pipe(), device_clock=setting)
    model = OnDevices(*devices)
    agent.instrumentation.roots.add(model)
    agent.model = model  # type: ignore[attr-defined]
    agent.recorder.steps.rows.first = False
    agent.device.tick()
    return agent


def why(agent: RankAgent) -> str:
    return agent.instrumentation.missing.get("device clock", "")


@pytest.mark.parametrize(
    ("setting", "devices", "reason"),
    [
        ("1", ("cpu",), ""),
        ("auto", ("cpu",), ""),
        ("0", ("cuda:0",), "turned off by TRACEML_DEVICE_CLOCK=0"),
        ("1", ("cuda:0", "cuda:1"), "several devices"),
        ("1", ("xpu:0",), "only of CUDA devices, not of xpu"),
        ("1", ("mps:0",), "only of CUDA devices, not of mps"),
        ("1", ("cuda:0", "cpu"), "CUDA is not initialized"),
    ],
)
def test_reason_is_given_where_there_is_no_device_clock(
    setting: str, devices: tuple[str, ...], reason: str
) -> None:
    agent = rank(setting, *devices)
    assert (reason in why(agent)) if reason else not why(agent)
    assert agent.device.clock is None and agent.recorder.stamp is agent.recorder.clock


@pytest.mark.parametrize(
    ("setting", "warm_up_ms", "step_ms", "begins"),
    [("auto", 400, 41, True), ("auto", 5, 39, False), ("auto", 400, 5, False), ("auto", 30_000, 30_000, True),
     ("1", 400, 5, True)],
)  # fmt: skip
def test_auto_reads_the_device_where_steps_are_long_enough(
    monkeypatch: pytest.MonkeyPatch, setting: str, warm_up_ms: int, step_ms: int, begins: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("traceml_ray.agent.device_use.cuda_api", lambda _: FakeDevice())
    agent = make(Pipe(), device_clock=setting)
    now = [0]
    agent.device._pace._clock = lambda: now[0]
    agent.model = OnDevices("cuda:0")  # type: ignore[attr-defined]
    agent.instrumentation.roots.add(agent.model)  # type: ignore[attr-defined]
    rows = agent.recorder.steps.rows
    rows.first = False
    agent.device.tick()
    assert (agent.device.clock is not None) is (setting == "1")
    for part_ms in (warm_up_ms, step_ms):
        for _ in range(-(-1000 // part_ms)):
            rows.step += 1
            now[0] += part_ms * 1_000_000
        agent.device.tick()
    assert (agent.device.clock is not None) is begins
    short = "not read in steps as short as"
    assert (short in why(agent)) is not begins and ("TRACEML_DEVICE_CLOCK=1" in why(agent)) is not begins
    rows.step += 1
    now[0] += 60_000_000_000
    agent.device.tick()
    assert (agent.device.clock is not None) is begins, "it is decided once"


@pytest.mark.parametrize(
    ("setting", "row_ms", "goes_on"), [("auto", 21, True), ("auto", 19, False), ("1", 1, True)]
)
def test_auto_ends_where_steps_become_short(setting: str, row_ms: int, goes_on: bool) -> None:
    agent = make(Pipe(), device_clock=setting)
    agent.device.begin(FakeDevice())
    clock = agent.device.clock
    assert clock is not None
    clock.medians.extend([row_ms * 1_000_000] * 63)
    agent.device.tick()
    assert agent.device.clock is clock
    clock.medians.append(row_ms * 1_000_000)
    agent.device.tick()
    assert (agent.device.clock is clock) is goes_on
    assert ("not read in steps as short as" in why(agent)) is not goes_on


def test_reason_names_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a device is `cuda` as well, and a query would break the capture of a graph in another thread."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    asked = Mock()
    monkeypatch.setattr("traceml_ray.agent.device_use.cuda_api", asked)
    for setting in ("1", "auto"):
        agent = rank(setting, "cuda:0")
        assert why(agent) == "only of CUDA devices, not with ROCm" and agent.device.clock is None
        assert agent.recorder.stamp is agent.recorder.clock
    agent.tick()
    assert agent.channel.batches()[-1].missing["device clock"] == why(agent)  # type: ignore[attr-defined]
    assert not asked.called


def test_cuda_is_refused_without_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without CUDA has no driver's library in it, and none is loaded."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    agent = rank("1", "cuda:0")
    assert "libcuda.so.1" in why(agent) and agent.device.clock is None


def test_row_and_reason_go_out_where_a_clock_ends_itself() -> None:
    pipe = Pipe()
    agent = make(pipe)
    device = FakeDevice()
    agent.device.begin(device)
    assert agent.device.clock is not None
    device.fails = lambda name, _: name == "done"
    agent.device.clock.put(7, 0, [1, 2, 3, 4, 5, 6], [])
    agent.tick()
    (batch,) = pipe.batches()
    assert len(batch.flags) == 1 and not batch.host_rows
    assert "DeviceError: done failed" in batch.missing["device clock"]
    assert agent.device.clock is None and agent.recorder.device is None


def test_batch_holds_both_rows_and_leads_within_its_size() -> None:
    pipe = Pipe()
    agent = make(pipe)
    push(agent, 2)
    for number in range(2, 1000):
        agent.ring.push(number << 8, 16, [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], b"\1\2\3")
    agent.tick()
    batches = pipe.batches()
    assert sum(len(batch.flags) for batch in batches) == 1000
    assert all(len(data) <= wire.MAX_BATCH_BYTES for data in pipe.taken)
    first = batches[0]
    assert first.host_rows[:96] == first.rows[:96] and first.leads[:6] == b"\xff" * 6
    assert first.host_rows[96:144] != first.rows[96:144] and first.leads[6:9] == b"\1\2\3"


class Parameter(nn.Parameter):
    """One that says that it is on a CUDA device."""

    is_cuda = True

    def __new__(cls) -> Parameter:
        return super().__new__(cls, torch.zeros(1))  # type: ignore[no-any-return]


class OnCuda(nn.Module):
    """A DDP module whose parameters say that they are on a CUDA device."""

    process_group = types.SimpleNamespace(group_name="0")

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def parameters(self, recurse: bool = True) -> object:  # type: ignore[override]
        return iter([Parameter()])


@pytest.mark.parametrize(("part", "inseparable"), [(nn.Linear(1, 1), False), (nn.SyncBatchNorm(1), True)])
def test_only_the_exchange_itself_is_on_the_devices_clock(
    monkeypatch: pytest.MonkeyPatch, part: nn.Module, inseparable: bool
) -> None:
    """DDP's waits are; those of SyncBatchNorm inside forward and backward have no marks."""
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda _: [0, 1])
    agent = make(Pipe())
    agent.instrumentation.data_parallel._add_ddp(OnCuda(part), {})
    exchange = agent.recorder.exchange
    assert exchange.streamed and exchange.inseparable
    agent.device.begin(FakeDevice())
    assert exchange.inseparable == inseparable
    agent.recorder.stop_device_clock()
    assert exchange.inseparable


def test_clock_ends_where_gradients_are_reduced_by_hand() -> None:
    agent = make(Pipe())
    agent.device.begin(FakeDevice())
    agent.recorder.exchange.inferred = True
    agent.device.tick()
    assert "gradients are not exchanged by DDP or FSDP" in why(agent) and agent.device.clock is None


def test_launch_blocking_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("traceml_ray.agent.device_use.cuda_api", lambda _: FakeDevice())
    agent = rank("1", "cuda:3")
    assert agent.device.clock is not None and not why(agent)
    assert "no host is ahead" in agent.instrumentation.missing["device clock: lead"]


def test_rows_that_the_device_is_not_done_with_at_the_end_go_out_and_are_counted() -> None:
    pipe, device = Pipe(), FakeDevice()
    agent = make(pipe)
    agent.recorder.clock = device
    agent.device.begin(device)
    assert agent.device.clock is not None
    device.launch(3_600_000_000_000)
    first, last = agent.device.clock.record(), agent.device.clock.record()
    agent.device.clock.put(7, 0, [1, 2, 3, 4, 5, 6], [Cut(FORWARD, first, last)])
    agent.tick(final=True)
    final = pipe.batches()[-1]
    assert final.final and sum(len(batch.flags) for batch in pipe.batches()) == 1
    assert final.errors["device rows not read at the end"] == 1


def test_model_that_is_being_changed_is_asked_again() -> None:
    agent = make(Pipe(), device_clock="0")
    model = OnDevices("cuda:0")
    agent.instrumentation.roots.add(model)
    agent.recorder.steps.rows.first = False
    parameters, model.parameters = model.parameters, Mock(side_effect=RuntimeError("changed size"))  # type: ignore[method-assign]
    agent.device.tick()
    assert not why(agent)
    model.parameters = parameters  # type: ignore[method-assign]
    agent.device.tick()
    assert "turned off" in why(agent)
