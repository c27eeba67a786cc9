"""The state of this machine while it is checked: CPU quota, steal, clocks, and its GPUs through NVML."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from traceml_ray.signals.check import cores as machine
from traceml_ray.signals.check.kernel import STEAL, core_ticks
from traceml_ray.signals.check.records import MachineState
from traceml_ray.signals.nodes.records import GpuSample
from traceml_ray.signals.nodes.sampler import LIMITS, QUESTIONS, held_back_ns, quota_files


class CpuTime:
    """
    What a CPU quota has withheld from a process.

    Args:
        root: the folder that contains `proc` and `sys`.
        process: "self", or a pid.
    """

    def __init__(self, root: Path = Path("/"), process: str = "self") -> None:
        self._files: list[Path] = []
        with contextlib.suppress(OSError, ValueError):
            self._files = quota_files(root, process)

    def withheld_ns(self) -> int | None:
        """
        Return the CPU time that quotas have withheld so far, in ns. None: it cannot be read, as after the end
        of the process.
        """
        try:
            return held_back_ns(self._files) or 0
        except (OSError, ValueError, KeyError):
            return None

    def periods(self) -> int | None:
        """Return the number of periods in which a quota has withheld CPU time so far. None: not known."""
        periods = 0
        try:
            for file in self._files:
                values = dict(line.split() for line in file.read_text().splitlines())
                periods += int(values.get("nr_throttled", 0))
        except (OSError, ValueError):
            return None
        return periods

    def quota_cores(self) -> float | None:
        """Return the number of cores that the smallest quota allows. None: there is no quota."""
        quotas = []
        for folder in (file.parent for file in self._files):
            with contextlib.suppress(OSError, ValueError):
                quotas.append(_quota(folder))
        return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    """Return the cores that the quota of a cgroup allows; None: no quota. Raises OSError, ValueError."""
    if (folder / "cpu.max").exists():
        allowed, period = (folder / "cpu.max").read_text().split()
        return None if allowed == "max" else int(allowed) / int(period)
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None


class StateWatch:
    """
    Watches the state of the machine during a check.

    Args:
        root: the folder that contains `proc` and `sys`.
        cores: cores that the process may use.
        nvml: the NVML binding. None: `pynvml` is imported when GPUs are sampled.
        process: the process whose CPU quota counts: "self", or a pid.
    """

    def __init__(self, root: Path, cores: Sequence[int], nvml: Any = None, process: str = "self") -> None:
        self.cpu_time = CpuTime(root, process)
        self._root, self._cores, self._nvml = root, cores, nvml
        self.restart()

    def restart(self) -> None:
        """Forget what was seen so far."""
        ticks = core_ticks(self._cores, self._root)
        self._began = self.cpu_time.withheld_ns(), self.cpu_time.periods(), ticks
        self._clocks = list[float]()
        self._samples = defaultdict[int, list[GpuSample]](list)

    def sample_cpu(self) -> None:
        """Read the clocks of the cores, which should be busy."""
        clocks = [self._frequency(core, "scaling_cur_freq") for core in self._cores]
        known = [clock for clock in clocks if clock is not None]
        if known:
            self._clocks.append(sum(known) / len(known))

    def gpus(self) -> dict[int, str]:
        """Return the names of the GPUs, by NVML's index. Empty without NVML."""
        with contextlib.suppress(Exception):  # no GPU, no driver or no library
            nvml = self._started()
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
            return {
                index: name.decode() if isinstance(name, bytes) else name for index, name in enumerate(names)
            }
        return {}

    def sample_gpu(self, index: int, name: str) -> GpuSample | None:
        """Sample a GPU, by NVML's index. It should be busy. None: it cannot be sampled."""
        with contextlib.suppress(Exception):  # a machine without NVML has no states of GPUs
            handle = self._started().nvmlDeviceGetHandleByIndex(index)
            known: dict[str, Any] = {"util_pct": None, "mem_used_bytes": None, "mem_total_bytes": None}
            for question in (*QUESTIONS.values(), *LIMITS.values()):
                known |= self._answer(question, handle)
            sample = GpuSample(index=index, name=name, **known)
            self._samples[index].append(sample)
            return sample
        return None

    def nvml_index(self, uuid: str) -> int | None:
        """Return NVML's index of the GPU with a UUID (torch's, without prefix). None if it is not known."""
        with contextlib.suppress(Exception):
            nvml = self._started()
            for index in range(nvml.nvmlDeviceGetCount()):
                known = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
                known = known.decode() if isinstance(known, bytes) else known
                if known.removeprefix("GPU-") == uuid:
                    return index
        return None

    def _started(self) -> Any:
        """Return the NVML binding after its start. Raises what it raises."""
        if self._nvml is None:
            self._nvml = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        return self._nvml

    def _answer(self, question: Callable[[Any, Any], dict[str, Any]], handle: Any) -> dict[str, Any]:
        try:
            return question(self._nvml, handle)
        except Exception:  # this device, or this driver, does not say
            return {}

    def result(self) -> MachineState:
        """Return the state since the beginning."""
        withheld, periods, ticks = self._began
        gpus = [_usual(samples) for _, samples in sorted(self._samples.items())]
        highest = [self._frequency(core, "cpuinfo_max_freq") for core in self._cores]
        return MachineState(
            cpu_name=machine.cpu_name(self._root)[:256] or None,
            cores=len(self._cores),
            quota_cores=self.cpu_time.quota_cores(),
            throttled_ns=_growth(withheld, self.cpu_time.withheld_ns()),
            throttled_periods=_growth(periods, self.cpu_time.periods()),
            steal=_stolen(ticks, core_ticks(self._cores, self._root)),
            cpu_mhz=median(self._clocks) if self._clocks else None,
            cpu_max_mhz=max((clock for clock in highest if clock is not None), default=None),
            governor=self._governor(),
            gpus=gpus or None,
        )

    def _frequency(self, core: int, name: str) -> float | None:
        """Return a clock of a core in MHz."""
        try:
            folder = self._root / f"sys/devices/system/cpu/cpu{core}/cpufreq"
            return int((folder / name).read_text()) / 1e3
        except (OSError, ValueError):
            return None

    def _governor(self) -> str | None:
        try:
            folder = self._root / f"sys/devices/system/cpu/cpu{self._cores[0]}/cpufreq"
            return (folder / "scaling_governor").read_text().strip()[:64]
        except (OSError, IndexError):
            return None


def _growth(before: int | None, after: int | None) -> int | None:
    """Return by how much a counter has grown. None: not known, also if it began again."""
    return after - before if before is not None and after is not None and after >= before else None


def _stolen(before: list[int] | None, after: list[int] | None) -> float | None:
    if before is None or after is None:
        return None
    total = sum(after) - sum(before)
    return (after[STEAL] - before[STEAL]) / total if total > 0 else None


def _usual(samples: Sequence[GpuSample]) -> GpuSample:
    """Return one sample: medians, and the reasons for a lower clock that most samples have."""
    seen = Counter(reason for sample in samples for reason in sample.throttle or ())
    any_known = any(sample.throttle is not None for sample in samples)
    reasons = sorted(reason for reason, times in seen.items() if 2 * times > len(samples))

    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    return msgspec.structs.replace(
        samples[-1],
        throttle=reasons if any_known else None,
        util_pct=middle(sample.util_pct for sample in samples),
        sm_mhz=middle(sample.sm_mhz for sample in samples),
        power_w=middle(sample.power_w for sample in samples),
        temperature_c=middle(sample.temperature_c for sample in samples),
    )
