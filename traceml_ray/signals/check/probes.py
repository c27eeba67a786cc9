"""
Runs the probes of this machine, trial by trial, so that what changes meanwhile affects all of them alike.

Only processes of a check run them, never a training process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from traceml_ray.errors import error_text
from traceml_ray.signals.check import cores as machine
from traceml_ray.signals.check.cpu import cpu_probes
from traceml_ray.signals.check.disk import DiskProbe
from traceml_ray.signals.check.gpu import PROBES, Gpu, gpu_probes, torch_gpus
from traceml_ray.signals.check.probe import Probe, ProbeError, ProbeTrial
from traceml_ray.signals.check.records import Checked, Measure
from traceml_ray.signals.check.state import StateWatch

CPU_PROBES = "cpu_matmul", "core_matmul", "host_memory"
ALL = (*PROBES, *CPU_PROBES, "disk_read")
"""Names of all probes of one machine."""
TRIALS = 10
"""Number of trials of a check."""
_ROOT = Path("/")
_MOST_ERRORS = 32


class Prober:
    """
    All probes of this process's part of the machine, and the values of their trials.

    Use `with Prober(...) as prober:`, call `round` as often as there are trials (nodes on one machine take
    turns, round by round), then `checked`.

    Args:
        node: label of the node.
        rank: global rank, if the check is of a rank.
        path: file or folder whose disk is read. None: no disk.
        devices: indices of the GPUs (torch's order) to measure. None: all visible ones.
        only: names of the probes to run. None: all that this machine has.
    """

    def __init__(
        self,
        node: str,
        *,
        rank: int | None = None,
        path: Path | None = None,
        devices: Sequence[int] | None = None,
        only: Iterable[str] | None = None,
    ) -> None:
        self._node, self._rank, self._path, self._devices = node, rank, path, devices
        self._only = frozenset(ALL if only is None else only)
        self._probes = list[Probe]()
        self._trials: dict[int, list[Sequence[ProbeTrial]]] = {}
        self._failed = set[int]()
        self._errors = list[str]()
        self._t_ns, self._began = time.time_ns(), time.perf_counter()
        self._watch = StateWatch(_ROOT, machine.allowed())
        self._rounds = 0

    def __enter__(self) -> Prober:
        """Prepare the probes, which takes some time."""
        self._probes += self._made()
        self._watch.restart()
        self._t_ns, self._began = time.time_ns(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        for probe in self._probes:
            probe.close()

    def _made(self) -> Iterator[Probe]:
        makers: Sequence[Callable[[], Iterator[Probe]]] = (
            lambda: gpu_probes(self._gpus(), self._only, self._watch, self._errors),
            lambda: cpu_probes(_ROOT, self._only, self._watch.cpu_time, self._errors),
            self._disk,
        )
        for make in makers:
            try:
                yield from make()
            except Exception as error:
                self._failed_with(error)

    def _gpus(self) -> Sequence[Gpu]:
        if not self._only.intersection(PROBES) or self._devices == ():
            return ()
        return torch_gpus(self._devices, self._watch.nvml_index)

    def _disk(self) -> Iterator[Probe]:
        if self._path is not None and "disk_read" in self._only:
            yield DiskProbe(self._path)

    def _failed_with(self, error: Exception) -> None:
        sentence = str(error) if isinstance(error, ProbeError) else f"A probe failed: {error_text(error)}."
        if sentence not in self._errors and len(self._errors) < _MOST_ERRORS:
            self._errors.append(sentence[:256])

    def round(self, seconds: float) -> None:
        """Make one trial of each probe, all together in about `seconds`."""
        working = [number for number in range(len(self._probes)) if number not in self._failed]
        weights = sum(self._probes[number].weight for number in working)
        shift = self._rounds % max(1, len(working))
        self._rounds += 1
        for number in working[shift:] + working[:shift]:
            probe = self._probes[number]
            try:
                trial = probe.trial(seconds * probe.weight / weights)
            except Exception as error:
                self._failed.add(number)
                self._failed_with(error)
                continue
            self._trials.setdefault(number, []).append(trial)
            if probe.subjects[0].probe == "cpu_matmul":
                self._watch.sample_cpu()

    def checked(self) -> Checked:
        """Return all trials so far, and the state of the machine meanwhile."""
        return Checked(
            t_ns=self._t_ns,
            node=self._node,
            host=boot_id(),
            rank=self._rank,
            state=self._watch.result(),
            measures=[*self._measures()],
            errors=self._errors[:_MOST_ERRORS],
            seconds=time.perf_counter() - self._began,
        )

    def _measures(self) -> Iterator[Measure]:
        for number, probe in enumerate(self._probes):
            trials = self._trials.get(number, [])
            for place, subject in enumerate(probe.subjects):
                results = [trial[place] for trial in trials]
                others = [result.others for result in results if result.others is not None]
                yield Measure(
                    probe=subject.probe,
                    subject=subject.subject[:256],
                    unit=subject.unit,
                    values=[result.value for result in results],
                    like=subject.like[:256],
                    others=others if results and len(others) == len(results) else None,
                    device=subject.device,
                    note=subject.note[:256],
                )


def boot_id() -> str:
    """Return the id of this boot of the machine's kernel. "": it is not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def check_here(
    node: str,
    seconds: float = 20.0,
    *,
    rank: int | None = None,
    path: Path | None = None,
    only: Iterable[str] | None = None,
) -> Checked:
    """Check this machine alone, in about `seconds`."""
    with Prober(node, rank=rank, path=path, only=only) as prober:
        for _ in range(TRIALS):
            prober.round(seconds / TRIALS)
        return prober.checked()
