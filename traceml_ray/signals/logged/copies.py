"""
Reads numbers from tensors without waiting for a device.

The GPU copies the value of a tensor to the host when it reaches that point of its stream; the value is read
once it has arrived. CUDA is not queried for that: a query by another thread would break a graph that is being
captured.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

SLOTS = 1024
"""Largest number of values on their way from the device."""
_NOT_THERE = 0x7FF8_DEAD_BEEF_0001
"""Bits of a NaN that no device computes: it marks a value that has not arrived."""


class _Place(NamedTuple):
    """The slot where a value arrives."""

    slot: int


class DeviceCopies:
    """
    The copies of one process. The logging thread calls `number_of`; the agent calls
    `is_pending` and `read`.
    """

    def __init__(self) -> None:
        self._values: Any = None
        """
        (SLOTS,) float64 in pinned memory, and the same memory as int64. None before the first
        GPU tensor.
        """
        self._bits: Any = None
        self._free: list[int] = []

    def number_of(self, tensor: Any) -> float | _Place:
        """
        Return the value of a one-element tensor, or the slot where it arrives. Raises
        TypeError, ValueError.
        """
        import torch

        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() != 1:
            raise TypeError(f"{type(tensor).__name__} of {tuple(tensor.shape)} is not a number")
        if tensor.is_complex():
            raise TypeError("a complex tensor is not a number")
        if tensor.device.type == "cpu":
            return float(tensor.item())
        if tensor.device.type != "cuda":
            raise TypeError(f"a tensor on {tensor.device.type} is not read: log its item()")
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("a graph is being captured")
        return self._copied(tensor.detach().reshape(()))

    def _copied(self, tensor: Any) -> _Place:
        if self._values is None:
            self._use(self._allocated())
        if not self._free:
            raise ValueError(f"{SLOTS:,} values are on their way from the device")
        slot = self._free.pop()
        self._bits[slot] = _NOT_THERE
        self._values[slot].copy_(tensor, non_blocking=True)
        return _Place(slot)

    def _allocated(self) -> Any:
        """Allocate memory that a GPU writes to without the host. Done once per process."""
        import torch

        return torch.empty(SLOTS, dtype=torch.float64, pin_memory=True)

    def _use(self, values: Any) -> None:
        import torch

        self._values, self._bits, self._free = values, values.view(torch.int64), [*range(SLOTS)]

    def is_pending(self, value: Any) -> bool:
        """Return whether a value has not arrived yet."""
        return isinstance(value, _Place) and int(self._bits[value.slot]) == _NOT_THERE

    def read(self, value: Any) -> float | None:
        """Return a value, or None if it has not arrived. The slot of an arrived value may be reused."""
        if not isinstance(value, _Place):
            return None if value is None else float(value)
        bits = int(self._bits[value.slot])
        if bits == _NOT_THERE:
            return None
        self._free.append(value.slot)
        number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
        return number
