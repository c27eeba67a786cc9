"""
Implements `DeviceApi` with CUDA events.

Events are made and recorded through torch. That call releases the GIL and clears an error that it raises. An
error of ours that stayed in the training thread would be raised by the script's next launch.

Events are read through the driver's library, which torch has loaded. torch's own `query` holds the GIL and
may wait for a lock of the context. A call of the driver never makes a context; a call of the runtime may.
Both use the same handles.
"""

from __future__ import annotations

import ctypes
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

from traceml_ray.agent.device import EVENT_SLOTS

_NOT_READY = 600
_NON_BLOCKING = 1
_THREAD_LOCAL = 1
_SYMBOLS = (
    *("cuDeviceGet", "cuDeviceGetCount", "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain"),
    *("cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode", "cuStreamCreate", "cuEventCreate"),
    *("cuEventRecord", "cuEventQuery", "cuEventElapsedTime"),
)
_CHECK_S = 2.0

_apis: dict[int, CudaApi] = {}


class CudaError(Exception):
    """A call of the driver failed or returned an impossible value."""


def cuda_api(index: int) -> CudaApi:
    """
    Return the checked CUDA API of device `index`. The agent's thread calls it after CUDA was initialized
    there.

    Raises:
        CudaError, or anything that torch raises: the API must not be used.
    """
    if index not in _apis:
        api = CudaApi(index)
        api.check()
        _apis[index] = api
    else:
        _apis[index].enter()
    return _apis[index]


class CudaApi:
    """
    Events on the CUDA device `index` of this process.

    Events are never destroyed: a forked child would destroy them at its end, in a context that it does not
    have.
    """

    def __init__(self, index: int) -> None:
        import torch

        cuda: Any = torch.cuda
        self._index = index
        self._driver = load_driver()
        lacking = [name for name in _SYMBOLS if not hasattr(self._driver, name)]
        if lacking:
            raise CudaError(f"the driver has no {', '.join(lacking)}")
        self._contexts = self._active()
        if not self._contexts[index]:
            raise CudaError(f"no context on device {index}")
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()

        self._event, self._record = cuda.Event, torch._C._CudaEventBase.record
        self._raw_stream, self._current = torch._C._cuda_getCurrentRawStream, cuda.current_stream
        self.capturing = torch._C._cuda_isCurrentStreamCapturing
        self._own = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self._own), ctypes.c_uint(_NON_BLOCKING))
        self._own_stream = cuda.ExternalStream(self._own.value, device=index)
        self._streams: dict[int, Any] = {}
        self._last: int | None = None
        self._events: list[Any] = []
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._events))
        self._handles = [ctypes.c_void_p() for _ in range(EVENT_SLOTS + 2)]
        for handle in self._handles[EVENT_SLOTS:]:
            self._call("cuEventCreate", ctypes.byref(handle), ctypes.c_uint(0))
        self._ms = ctypes.c_float()
        self.record = self._recorder()

    def enter(self) -> None:
        """
        Allow this thread to read events while other threads capture graphs, even in mode `global`.

        The context is set first, because the mode is read in the context of the thread.
        """
        self._call("cuCtxSetCurrent", self._context)
        mode = ctypes.c_int(_THREAD_LOCAL)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def check(self) -> None:
        """Try every call that is needed on a stream of our own. Raises CudaError if one fails."""
        self.make(2)
        end = time.monotonic() + _CHECK_S
        while not (self.done(0) and self.done(1)):
            if time.monotonic() > end:
                raise CudaError(f"an event on an idle stream is not done after {_CHECK_S:g} s")
            time.sleep(0.002)
        elapsed = self.elapsed_ns(0, 1)
        if elapsed is None or not 0 <= elapsed < _CHECK_S * 1e9:
            raise CudaError(f"{elapsed} ns between two events recorded one after the other")
        if self.capturing() not in (True, False) or not isinstance(self._raw_stream(self._index), int):
            raise CudaError("torch does not report the current stream")
        if self._active() != self._contexts:
            raise CudaError(f"contexts on devices {self._active()}, before that {self._contexts}")

    # -- DeviceApi -------------------------------------------------------------------------------

    def _recorder(self) -> Callable[[int], None]:
        """Return `record` of DeviceApi as a closure that keeps everything it needs in local variables."""
        raw_stream, current, index = self._raw_stream, self._current, self._index
        streams, events, record_event = self._streams, self._events, self._record

        def record(slot: int) -> None:
            self._last = raw = raw_stream(index)
            stream = streams.get(raw)
            if stream is None:
                stream = streams[raw] = current(index)
            record_event(events[slot], stream)

        return record

    def elsewhere(self) -> bool:
        """See DeviceApi."""
        return bool(self._raw_stream(self._index) != self._last)

    def make(self, slots: int) -> None:
        """See DeviceApi. CUDA makes an event when it is first recorded, so each event is recorded here."""
        while len(self._events) < slots:
            event = self._event(enable_timing=True)
            self._record(event, self._own_stream)
            self._handles[len(self._events)].value = event.cuda_event
            self._events.append(event)

    def beat(self, slot: int) -> None:
        """See DeviceApi."""
        self._call("cuEventRecord", self._handles[slot], self._own)

    def done(self, slot: int) -> bool:
        """See DeviceApi."""
        return self._ready("cuEventQuery", self._handles[slot])

    def elapsed_ns(self, since: int, until: int) -> int | None:
        """See DeviceApi."""
        handles = self._handles[since], self._handles[until]
        if not self._ready("cuEventElapsedTime", ctypes.byref(self._ms), *handles):
            return None
        return round(self._ms.value * 1e6)

    # -- the driver --------------------------------------------------------------------------------

    def _ready(self, name: str, *args: Any) -> bool:
        code = getattr(self._driver, name)(*args)
        if code not in (0, _NOT_READY):
            raise CudaError(f"{name}: error {code}")
        return bool(code == 0)

    def _call(self, name: str, *args: Any) -> None:
        if not self._ready(name, *args):
            raise CudaError(f"{name}: not ready")

    def _active(self) -> list[bool]:
        return contexts(self._driver)


def load_driver() -> Any:
    """Return the driver's library, which torch has loaded. Raises OSError if torch has not."""
    return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def contexts(driver: Any) -> list[bool]:
    """Return for each device whether this process has a context on it, by torch's index. Makes no context."""
    count, device = ctypes.c_int(), ctypes.c_int()
    call(driver, "cuDeviceGetCount", ctypes.byref(count))
    active = []
    for index in range(count.value):
        flags, state = ctypes.c_uint(), ctypes.c_int()
        call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        call(driver, "cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(state))
        active.append(bool(state.value))
    return active


def device_uuid(driver: Any, index: int) -> str:
    """Return the uuid of a device, or of its MIG slice, in NVML's spelling without the prefix."""
    device, uuid_bytes = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    name = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    call(driver, name, ctypes.byref(uuid_bytes), device)
    return str(uuid.UUID(bytes=bytes(uuid_bytes)))


def call(driver: Any, name: str, *args: Any) -> None:
    """Call the driver. Raises CudaError if the call fails."""
    if code := getattr(driver, name)(*args):
        raise CudaError(f"{name}: error {code}")
