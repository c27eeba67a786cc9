"""
A fake of the library under `pynvml`. The binding itself is the real one, with its structs and
exceptions.
"""

# ruff: noqa: N802, N815  (NVML's names)

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT, TIMEOUT = 3, 4, 6, 7, 10
UNKNOWN_MEMORY = 0xFFFFFFFFFFFFFFFF


@dataclass
class Card:
    """
    One device. `codes`: error codes that functions return instead of an answer, by name of the
    function.
    """

    name: str = "NVIDIA H200"
    util: int = 90
    reasons: int = 0x4
    mig: int | None = 0
    """MIG mode of the card. None: the card has no MIG."""
    processes: list[tuple[int, int]] = field(default_factory=list)
    """Processes on the card: (pid, bytes)."""
    fields: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Field values: field → (value type, value)."""
    codes: dict[str, int] = field(default_factory=dict)
    memory: tuple[int, int] = (10, 100)
    """Memory in bytes: (used, total)."""
    uuid: str = "GPU-0"


class Library:
    """A fake of `libnvidia-ml`. `lacks`: functions that this driver does not have."""

    def __init__(self, cards: Iterable[Card], lacks: Iterable[str] = ()) -> None:
        self.cards, self.lacks = list(cards), set(lacks)

    def function(self, name: str) -> Callable[..., int]:
        """Return the function that the binding calls by that name."""
        function = getattr(self, f"_{name.removesuffix('_v2').removesuffix('_v3')}", None)
        if function is None or name in self.lacks:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

        def call(*args: Any) -> int:
            if not args or not isinstance(args[0], pynvml.c_nvmlDevice_t):
                return function(*args) or 0
            card = self.cards[(ctypes.cast(args[0], ctypes.c_void_p).value or 0) - 1]
            return card.codes.get(name) or function(card, *args[1:]) or 0

        return call

    def _nvmlInitWithFlags(self, _: int) -> None: ...

    def _nvmlDeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(self.cards)

    def _nvmlDeviceGetHandleByIndex(self, index: Any, handle: Any) -> int:
        pointer = ctypes.cast(ctypes.pointer(handle._obj), ctypes.POINTER(ctypes.c_void_p))
        pointer[0] = index.value + 1
        return self.cards[index.value].codes.get("nvmlDeviceGetHandleByIndex_v2", 0)

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        known = [card.uuid for card in self.cards]
        if uuid.value.decode() not in known:
            return NOT_FOUND
        pointer = ctypes.cast(ctypes.pointer(handle._obj), ctypes.POINTER(ctypes.c_void_p))
        pointer[0] = known.index(uuid.value.decode()) + 1
        return 0

    def _nvmlDeviceGetName(self, card: Card, text: Any, _: Any) -> None:
        text.value = card.name.encode()

    def _nvmlDeviceGetUUID(self, card: Card, text: Any, _: Any) -> None:
        text.value = card.uuid.encode()

    def _nvmlDeviceGetMigMode(self, card: Card, now: Any, pending: Any) -> int:
        now._obj.value = pending._obj.value = card.mig or 0
        return NOT_SUPPORTED if card.mig is None else 0

    def _nvmlDeviceGetUtilizationRates(self, card: Card, result: Any) -> int:
        result._obj.gpu = card.util
        return NOT_SUPPORTED if card.mig else 0

    def _nvmlDeviceGetMemoryInfo(self, card: Card, result: Any) -> None:
        result._obj.used, result._obj.total = card.memory

    def _nvmlDeviceGetPowerUsage(self, _: Card, result: Any) -> None:
        result._obj.value = 650_500

    def _nvmlDeviceGetEnforcedPowerLimit(self, _: Card, result: Any) -> None:
        result._obj.value = 700_000

    def _nvmlDeviceGetTemperature(self, _: Card, sensor: Any, result: Any) -> None:
        result._obj.value = 61 if sensor.value == 0 else 0

    def _nvmlDeviceGetClockInfo(self, _: Card, kind: Any, result: Any) -> None:
        result._obj.value = 1200 if kind.value == 1 else 0

    def _nvmlDeviceGetMaxClockInfo(self, _: Card, kind: Any, result: Any) -> None:
        result._obj.value = 1980 if kind.value == 1 else 0

    def _nvmlDeviceGetCurrentClocksEventReasons(self, card: Card, result: Any) -> None:
        result._obj.value = card.reasons

    _nvmlDeviceGetCurrentClocksThrottleReasons = _nvmlDeviceGetCurrentClocksEventReasons

    def _nvmlDeviceGetFieldValues(self, card: Card, count: Any, values: Any) -> None:
        for value in values._obj[: count.value]:
            kind, number = card.fields.get(value.fieldId, (-1, 0))
            value.nvmlReturn = NOT_SUPPORTED if kind < 0 else 0
            if kind == 1:
                value.value.ullVal = 0xDEAD << 32  # the upper half of the union is not used
                value.valueType, value.value.uiVal = kind, number
            elif kind >= 0:
                value.valueType, value.value.ullVal = kind, number

    def _nvmlDeviceGetComputeRunningProcesses(self, card: Card, count: Any, result: Any) -> int:
        if result is None:
            count._obj.value = len(card.processes)
            return INSUFFICIENT if card.processes else 0
        count._obj.value = len(card.processes)
        for slot, (pid, memory) in zip(result, card.processes, strict=False):
            slot.pid, slot.usedGpuMemory = pid, memory
        return 0

    def _nvmlEventSetCreate(self, _: Any) -> None: ...

    def _nvmlDeviceRegisterEvents(self, _card: Card, _kinds: Any, _events: Any) -> None: ...

    def _nvmlEventSetWait(self, *_: Any) -> int:
        return TIMEOUT

    def _nvmlEventSetFree(self, _: Any) -> None: ...


def play(monkeypatch: pytest.MonkeyPatch, *cards: Card, lacks: Iterable[str] = ()) -> None:
    """Make `pynvml` call a fake library with these devices."""
    library = Library(cards, lacks)
    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", library.function)
