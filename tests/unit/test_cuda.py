"""CUDA events behind the seam, on a driver that is played: what is called in which order, what is refused."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from traceml_ray.agent import cuda
from traceml_ray.agent.device import EVENT_SLOTS

DEFAULT_STREAM, OWN_STREAM = 0, 0x700


class Driver:
    """`libcuda` of a machine with two devices, of which this process has a context on `active`."""

    def __init__(self, active: tuple[int, ...] = (1,)) -> None:
        self.active = set(active)
        self.calls: list[str] = []
        self.current: int | None = None
        self.mode = self.made = 0
        self.times: dict[int, float] = {}
        """Per handle: when it is done, in ms."""
        self.now_ms = 0.0
        self.codes: dict[str, int] = {}
        self.lacks: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name in self.__dict__.get("lacks", ()):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls.append(name)
            if self.codes.get(name):
                return self.codes[name]
            return getattr(self, f"_{name}")(*args) or 0

        return call

    def _cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count._obj.value = 2

    def _cuDeviceGet(self, device: Any, index: Any) -> None:  # noqa: N802
        device._obj.value = index.value

    def _cuDevicePrimaryCtxGetState(self, device: Any, _: Any, active: Any) -> None:  # noqa: N802
        active._obj.value = device.value in self.active

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:  # noqa: N802
        assert device.value in self.active, "this makes a context"
        context._obj.value = 0x100 + device.value

    def _cuCtxSetCurrent(self, context: Any) -> None:  # noqa: N802
        self.current = context.value

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802
        assert self.current is not None, "asked without a context, it makes one on device 0"
        self.mode = mode._obj.value

    def _cuStreamCreate(self, stream: Any, flags: Any) -> None:  # noqa: N802
        assert self.mode == 1 and flags.value == 1
        stream._obj.value = OWN_STREAM

    def _cuEventCreate(self, event: Any, flags: Any) -> None:  # noqa: N802
        assert flags.value == 0, "timing is not disabled"
        event._obj.value = self.new_event()

    def _cuEventRecord(self, event: Any, stream: Any) -> None:  # noqa: N802
        assert stream.value == OWN_STREAM
        self.times[event.value] = self.now_ms

    def _cuEventQuery(self, event: Any) -> int:  # noqa: N802
        return 0 if self.times[event.value] <= self.now_ms else 600

    def _cuEventElapsedTime(self, ms: Any, since: Any, until: Any) -> int:  # noqa: N802
        if max(self.times[since.value], self.times[until.value]) > self.now_ms:
            return 600
        ms._obj.value = self.times[until.value] - self.times[since.value]
        return 0

    def new_event(self) -> int:
        self.made += 1
        return 0x1000 + self.made


class Torch:
    """What `CudaApi` uses of torch, on a driver."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = DEFAULT_STREAM
        self.recorded: list[tuple[int, int]] = []
        """Event and stream."""
        self.asked = 0

    def record(self, event: Any, stream: Any) -> None:
        if event.cuda_event == 0:  # made where it is first recorded
            event.cuda_event = self.driver.new_event()
        self.driver.times[event.cuda_event] = self.driver.now_ms
        self.recorded.append((event.cuda_event, stream.cuda_stream))

    def current_stream(self, index: int) -> Any:
        assert index == 1
        self.asked += 1
        return types.SimpleNamespace(cuda_stream=self.stream)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Torch:
    made = Torch(driver)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name, mode: driver if name == "libcuda.so.1" else mode)
    monkeypatch.setattr(cuda, "_apis", {})
    base = types.SimpleNamespace(record=made.record)
    monkeypatch.setattr(torch._C, "_CudaEventBase", base, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: made.stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    event = lambda enable_timing: types.SimpleNamespace(cuda_event=0, timing=enable_timing)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    external = lambda pointer, device: types.SimpleNamespace(cuda_stream=pointer)  # noqa: ARG005, E731
    monkeypatch.setattr(torch.cuda, "ExternalStream", external)
    return made


def test_reading_thread_has_the_context_before_it_asks_for_its_capture_mode(
    driver: Driver, played: Torch
) -> None:
    api = cuda.cuda_api(1)
    order = [
        call for call in driver.calls if call in ("cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode")
    ]
    assert order == ["cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"]
    assert driver.current == 0x101 and driver.mode == 1
    assert cuda.cuda_api(1) is api and driver.calls.count("cuStreamCreate") == 1
    assert all(stream == OWN_STREAM for _, stream in played.recorded)


def test_marks_are_recorded_on_the_stream_that_is_current_there(driver: Driver, played: Torch) -> None:
    api = cuda.cuda_api(1)
    api.make(8)
    made = len(played.recorded)
    for stream in (DEFAULT_STREAM, 0x900, 0x900, DEFAULT_STREAM):
        played.stream = stream
        driver.now_ms += 1.5
        api.record(3)
    assert [stream for _, stream in played.recorded[made:]] == [DEFAULT_STREAM, 0x900, 0x900, DEFAULT_STREAM]
    assert played.asked == 2 and not api.elsewhere()
    played.stream = 0x900
    assert api.elsewhere()
    driver.now_ms += 2.5
    api.record(4)
    assert api.done(4) and api.elapsed_ns(3, 4) == 2_500_000 and api.elapsed_ns(4, 3) == -2_500_000


def test_time_is_none_until_both_events_are_done(driver: Driver, played: Torch) -> None:
    api = cuda.cuda_api(1)
    api.beat(EVENT_SLOTS)
    api.beat(EVENT_SLOTS + 1)
    driver.times[api._handles[EVENT_SLOTS + 1].value] = 5.0
    assert not api.done(EVENT_SLOTS + 1) and api.elapsed_ns(EVENT_SLOTS, EVENT_SLOTS + 1) is None
    driver.now_ms = 5.0
    assert api.done(EVENT_SLOTS + 1) and api.elapsed_ns(EVENT_SLOTS, EVENT_SLOTS + 1) == 5_000_000
    assert not played.asked


@pytest.mark.parametrize("name", ["cuEventQuery", "cuEventElapsedTime", "cuEventRecord"])
def test_any_other_code_is_an_error(driver: Driver, played: Torch, name: str) -> None:
    api = cuda.cuda_api(1)
    driver.codes[name] = 700
    calls = {
        "cuEventQuery": lambda: api.done(0),
        "cuEventElapsedTime": lambda: api.elapsed_ns(0, 1),
        "cuEventRecord": lambda: api.beat(EVENT_SLOTS),
    }
    with pytest.raises(cuda.CudaError, match=f"{name}: error 700"):
        calls[name]()
    assert played.recorded


def test_no_context_is_made(driver: Driver, played: Torch) -> None:
    driver.active = {0}
    with pytest.raises(cuda.CudaError, match="no context on device 1"):
        cuda.cuda_api(1)
    assert "cuDevicePrimaryCtxRetain" not in driver.calls and not played.recorded


def test_second_context_is_noticed(driver: Driver, played: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played, "record", None)
    record = Torch.record

    def makes_one(event: Any, stream: Any) -> None:
        driver.active.add(0)
        record(played, event, stream)

    monkeypatch.setattr(torch._C._CudaEventBase, "record", makes_one)
    with pytest.raises(cuda.CudaError, match=r"contexts on devices \[True, True\], before that"):
        cuda.cuda_api(1)
    assert not cuda._apis


def test_device_that_comes_to_no_event_is_refused(
    driver: Driver, played: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_CHECK_S", 0.02)
    driver.codes["cuEventQuery"] = 600
    with pytest.raises(cuda.CudaError, match="an event on an idle stream is not done"):
        cuda.cuda_api(1)
    assert played.recorded


@pytest.mark.parametrize("name", cuda._SYMBOLS)
def test_driver_that_lacks_a_function_is_refused(driver: Driver, played: Torch, name: str) -> None:
    driver.lacks = {name}
    with pytest.raises(cuda.CudaError, match=f"the driver has no {name}"):
        cuda.cuda_api(1)
    assert not driver.calls and not played.recorded
