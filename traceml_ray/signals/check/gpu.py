"""
Probes of GPUs: matrix multiplication, their memory, and copies from and to the host.

All GPUs multiply at the same time, as in training: power and cooling are shared. Copies take turns, because
they share the host's memory. Times are taken by events of the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from traceml_ray import text
from traceml_ray.signals.check import cores as machine
from traceml_ray.signals.check.probe import Probe, ProbeError, ProbeSubject, ProbeTrial
from traceml_ray.signals.check.state import StateWatch

_SIDE, _LEAST_SIDE = 8192, 2048
_COPIED, _PINNED = 1 << 30, 256 << 20
_OF_FREE = 0.5
"""Largest share of the free memory of a GPU that is used."""
_LONGEST_S = 0.02
"""Longest time that one multiplication should take, in s."""
_PAUSE_S = 0.0005


class Gpu(Protocol):
    """A GPU, as the probes need it. `mark` and the work are queued; nothing waits but `elapsed_s`."""

    index: int
    """Index in NVML's order, or torch's if that is not known."""
    name: str
    described: str
    """Data type and size of the multiplication."""

    def prepared(self, probe: str) -> tuple[float, Callable[[], object]]:
        """
        Return the size of one piece of a probe's work (FLOPs or bytes), and the function that queues it.
        Raises ProbeError.
        """

    def mark(self) -> Any:
        """Queue an event and return it."""

    def elapsed_s(self, since: Any, until: Any) -> float:
        """Wait for two events, and return the time between them in s."""


class GpuProbe:
    """
    A kind of work on several GPUs, at the same time or in turn.

    Args:
        probe: name of the probe.
        unit: unit of its values.
        gpus: the GPUs.
        together: whether they work at the same time.
        watch: samples each GPU while it works. None: no samples.
    """

    def __init__(
        self, probe: str, unit: str, gpus: Sequence[Gpu], together: bool, watch: StateWatch | None = None
    ) -> None:
        self.weight = 3.0 if together else float(len(gpus))
        self._gpus, self._together, self._watch = gpus, together, watch
        prepared = [gpu.prepared(probe) for gpu in gpus]
        self._amounts, self._work = [amount for amount, _ in prepared], [work for _, work in prepared]
        self.subjects: Sequence[ProbeSubject] = [
            ProbeSubject(
                probe, f"GPU {gpu.index}", unit, gpu.name, gpu.index, gpu.described if unit != "B/s" else ""
            )
            for gpu in gpus
        ]
        self._piece_s = [self._timed(number, 1)[1] for number in range(len(gpus))]  # compiles and connects
        self._piece_s = [self._timed(number, 2)[1] for number in range(len(gpus))]

    def _timed(self, number: int, pieces: int) -> tuple[int, float]:
        return pieces, self._elapsed(number, self._queued(number, pieces)) / pieces

    def _queued(self, number: int, pieces: int) -> tuple[Any, Any]:
        gpu, work = self._gpus[number], self._work[number]
        began = gpu.mark()
        for _ in range(pieces):
            work()
        return began, gpu.mark()

    def _elapsed(self, number: int, events: tuple[Any, Any]) -> float:
        return max(self._gpus[number].elapsed_s(*events), 1e-9)

    def trial(self, seconds: float) -> list[ProbeTrial]:
        """Measure for about `seconds`."""
        share = seconds if self._together else seconds / len(self._gpus)
        pieces = [max(1, round(share / piece_s)) for piece_s in self._piece_s]
        every = range(len(self._gpus))
        if self._together:
            events = [self._queued(number, pieces[number]) for number in every]
            self._sample(share)
            took = [self._elapsed(number, events[number]) for number in every]
        else:
            took = [self._elapsed(number, self._queued(number, pieces[number])) for number in every]
        self._piece_s = [took_s / count for took_s, count in zip(took, pieces, strict=True)]
        return [
            ProbeTrial(count * amount / took_s)
            for took_s, count, amount in zip(took, pieces, self._amounts, strict=True)
        ]

    def _sample(self, seconds: float) -> None:
        """Sample the GPUs in the middle of their work."""
        if self._watch is not None:
            time.sleep(seconds / 2)
            for gpu in self._gpus:
                self._watch.sample_gpu(gpu.index, gpu.name)

    def close(self) -> None:
        """Release the memory."""
        self._work = [lambda: None for _ in self._work]


PROBES: dict[str, tuple[str, bool]] = {
    "gpu_matmul": ("FLOP/s", True),
    "gpu_memory": ("B/s", True),
    "to_device": ("B/s", False),
    "to_host": ("B/s", False),
}
"""Unit of each probe, and whether all GPUs run it at the same time."""


def gpu_probes(
    gpus: Sequence[Gpu], only: Any, watch: StateWatch | None, errors: list[str]
) -> Iterator[Probe]:
    """Yield the probes of GPUs. What cannot be measured is added to `errors`."""
    for probe, (unit, together) in PROBES.items():
        if probe not in only or not gpus:
            continue
        able = list[Gpu]()
        for gpu in gpus:
            try:
                gpu.prepared(probe)
                able.append(gpu)
            except ProbeError as error:
                errors.append(str(error))
        if able:
            yield GpuProbe(probe, unit, able, together, watch if probe == "gpu_matmul" else None)


class TorchGpu:
    """
    A GPU of this process.

    Args:
        torch: the module.
        number: index of the device in torch's order.
        index: its index in NVML's order.
        root: the folder that contains `sys`.
    """

    def __init__(self, torch: Any, number: int, index: int, root: Path = Path("/")) -> None:
        self._torch, self._number, self.index = torch, number, index
        self._device = torch.device("cuda", number)
        properties = torch.cuda.get_device_properties(number)
        self.name = str(properties.name)
        self._type = torch.float32 if properties.major < 7 else torch.float16
        if properties.major >= 8:
            self._type = torch.bfloat16
        self._local = _local_cores(properties, root)
        self._made: dict[str, tuple[float, Callable[[], object]]] = {}
        self.described = ""

    def prepared(self, probe: str) -> tuple[float, Callable[[], object]]:
        """Return the size of one piece of work, and the function that queues it. Raises ProbeError."""
        if probe not in self._made:
            with self._torch.cuda.device(self._device):
                make = self._multiplication if probe == "gpu_matmul" else self._copy
                self._made[probe] = make(probe)
        return self._made[probe]

    def mark(self) -> Any:
        """Queue an event and return it."""
        with self._torch.cuda.device(self._device):
            event = self._torch.cuda.Event(enable_timing=True)
            event.record()
        return event

    def elapsed_s(self, since: Any, until: Any) -> float:
        """Wait for two events, and return the time between them in s."""
        while not until.query():  # `synchronize` would keep a core busy, which other probes may need
            time.sleep(_PAUSE_S)
        return float(since.elapsed_time(until)) / 1e3

    def _room(self, size: int) -> int:
        """Return how many bytes may be used, at most `size`. Raises ProbeError if these are too few."""
        free, _ = self._torch.cuda.mem_get_info(self._number)
        room = min(size, int(_OF_FREE * free))
        if room < size / 16:
            raise ProbeError(f"GPU {self.index} was not measured: only {text.size(free)} of it are free.")
        return room

    def _multiplication(self, _probe: str) -> tuple[float, Callable[[], object]]:
        torch, side = self._torch, _SIDE
        bytes_each = 4 if self._type is torch.float32 else 2
        room = self._room(3 * bytes_each * side**2)
        while 3 * bytes_each * side**2 > room:
            side //= 2
        while True:
            made = [torch.full((side, side), 0.5, dtype=self._type, device=self._device) for _ in range(3)]
            left, right, result = made
            for _ in range(2):  # the first one loads the library
                began = self.mark()
                torch.mm(left, right, out=result)
                took_s = self.elapsed_s(began, self.mark())
            if took_s <= _LONGEST_S or side <= _LEAST_SIDE:
                break
            side //= 2
        self.described = f"{str(self._type).rpartition('.')[2]}, {side} × {side}"
        return 2.0 * side**3, lambda: torch.mm(left, right, out=result)

    def _copy(self, probe: str) -> tuple[float, Callable[[], object]]:
        torch = self._torch
        buffers, wanted = (2, _COPIED) if probe == "gpu_memory" else (1, _PINNED)
        size = self._room(buffers * wanted) // buffers // 4 * 4
        here = torch.ones(size // 4, device=self._device)
        if probe == "gpu_memory":
            other = torch.empty_like(here)
            return 2.0 * size, lambda: other.copy_(here)  # it is read and written
        with machine.running_on(self._local) if self._local else contextlib.nullcontext():
            host = torch.ones(size // 4, pin_memory=True)  # in the memory next to the GPU
        if probe == "to_device":
            return float(size), lambda: here.copy_(host, non_blocking=True)
        return float(size), lambda: host.copy_(here, non_blocking=True)


def _local_cores(properties: Any, root: Path) -> list[int]:
    """Return the cores next to a GPU that this process may use. Empty if they are not known."""
    try:
        where = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        listed = (root / f"sys/bus/pci/devices/{where}/local_cpulist").read_text()
        return sorted(set(machine.numbers(listed)).intersection(machine.allowed()))
    except (AttributeError, OSError, ValueError):
        return []


def torch_gpus(devices: Sequence[int] | None, nvml_index: Callable[[str], int | None]) -> list[Gpu]:
    """
    Return GPUs of this process.

    Args:
        devices: indices in torch's order. None: all.
        nvml_index: returns NVML's index of the device with a UUID; None: not known.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    numbers = range(torch.cuda.device_count()) if devices is None else devices
    gpus = list[Gpu]()
    for number in numbers:
        uuid = str(getattr(torch.cuda.get_device_properties(number), "uuid", ""))
        known = nvml_index(uuid) if uuid else None
        gpus.append(TorchGpu(torch, number, number if known is None else known))
    return gpus
