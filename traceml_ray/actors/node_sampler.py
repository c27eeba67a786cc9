"""One look at a machine: processor, memory, disk, network, and its GPUs through NVML."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from traceml_ray.wire import GpuSample, NodeSample

_T = TypeVar("_T")
_NO_GPUS = {"NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"}
"""A machine without NVIDIA GPUs is no error; NVML's exceptions are made at run time, so they go by name."""


class NodeSampler:
    """
    Samples this node. What cannot be had is None, and counted in `errors` by name.

    Args:
        nvml: the NVML binding; None imports `pynvml`. It is tried once: a machine without a driver
            costs nothing from then on.

    """

    def __init__(self, nvml: Any = None) -> None:
        self.errors: Counter[str] = Counter()
        self._devices: list[tuple[int, str | None, Any]] | None = None
        self._nvml = nvml
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._devices = [self._device(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        except Exception as error:
            if type(error).__name__ not in _NO_GPUS:
                self.errors[f"nvml: {type(error).__name__}"] += 1
        self._have_cpu = False

    def sample(self, t_ns: int) -> NodeSample:
        """Return one sample stamped `t_ns` (ns since the epoch). CPU percent is since the sample before."""
        cpu = self._try("cpu", lambda: psutil.cpu_percent(None))
        memory = self._try("memory", psutil.virtual_memory)
        disk = self._try("disk", psutil.disk_io_counters)
        net = self._try("net", psutil.net_io_counters)
        sample = NodeSample(
            t_ns=t_ns,
            cpu_pct=cpu if self._have_cpu else None,  # the first value has no interval behind it
            cpu_count=os.cpu_count(),
            load1=self._try("load", lambda: os.getloadavg()[0]),
            mem_used_bytes=memory.total - memory.available if memory else None,
            mem_total_bytes=memory.total if memory else None,
            disk_read_bytes=disk.read_bytes if disk else None,
            disk_write_bytes=disk.write_bytes if disk else None,
            net_rx_bytes=net.bytes_recv if net else None,
            net_tx_bytes=net.bytes_sent if net else None,
            gpus=None if self._devices is None else [self._gpu(*device) for device in self._devices],
        )
        self._have_cpu = True
        return sample

    def _device(self, index: int) -> tuple[int, str | None, Any]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        name = self._try("nvml name", lambda: self._nvml.nvmlDeviceGetName(handle))
        return index, name.decode() if isinstance(name, bytes) else name, handle

    def _gpu(self, index: int, name: str | None, handle: Any) -> GpuSample:
        rates = self._try("nvml utilization", lambda: self._nvml.nvmlDeviceGetUtilizationRates(handle))
        memory = self._try("nvml memory", lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle))
        return GpuSample(
            index=index,
            name=name,
            util_pct=float(rates.gpu) if rates else None,
            mem_used_bytes=memory.used if memory else None,
            mem_total_bytes=memory.total if memory else None,
        )

    def _try(self, what: str, look: Callable[[], _T]) -> _T | None:
        try:
            return look()
        except Exception as error:
            self.errors[f"{what}: {type(error).__name__}"] += 1
            return None


class SamplerThread:
    """Samples once a second in a thread of its own: a hanging driver must not hold up the relay."""

    def __init__(self, sampler: NodeSampler, interval: float = 1.0) -> None:
        self.errors = sampler.errors
        self._sampler = sampler
        self._interval = interval
        self._latest: NodeSample | None = None
        threading.Thread(target=self._run, name="traceml-node-sampler", daemon=True).start()

    def latest(self) -> NodeSample | None:
        """Return the newest sample, once."""
        sample, self._latest = self._latest, None
        return sample

    def _run(self) -> None:
        while True:
            self._latest = self._sampler.sample(time.time_ns())
            time.sleep(self._interval)
