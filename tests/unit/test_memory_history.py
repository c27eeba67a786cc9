"""torch's record of allocations: turned on, written when memory runs out, and never in the script's way."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceml_ray.errors import Errors
from traceml_ray.signals.memory.agent import MAX_ENTRIES, MAX_FILES, PAUSE_S, MemoryHistory
from traceml_ray.wire.messages import Event


class FakeTorch:
    """What `MemoryHistory` uses of torch; a device that runs out of memory calls the observers."""

    def __init__(self) -> None:
        self.initialized = self.on = False
        self.calls: list[dict[str, Any]] = []
        self.observers: list[Callable[..., None]] = []
        self.full = False
        memory = types.SimpleNamespace(_record_memory_history=self.record, _dump_snapshot=self.dump)
        self.cuda = types.SimpleNamespace(is_initialized=lambda: self.initialized, memory=memory)
        attach = self.observers.append
        self._C = types.SimpleNamespace(
            _cuda_attach_out_of_memory_observer=attach, _cuda_isHistoryEnabled=lambda: self.on
        )

    def record(self, enabled: str | None = "all", **given: Any) -> None:
        self.on = enabled is not None
        self.calls.append({"enabled": enabled, **given})

    def dump(self, path: str) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        Path(path).write_bytes(pickle.dumps({"segments": []}))

    def run_out(self) -> None:
        for observer in self.observers:
            observer(0, 1 << 30, 1 << 30, 0)


class Bench:
    def __init__(self, folder: Path, wanted: bool = True) -> None:
        self.torch, self.now = FakeTorch(), 1000.0
        self.events: list[Event] = []
        self.errors, self.missing = Errors(), dict[str, str]()
        self.files, spool = folder / "s", folder / "spool"
        self.files.mkdir(parents=True)
        spool.mkdir()
        (spool / "snapshots").symlink_to(self.files)
        self.history = MemoryHistory(
            wanted, str(spool), self.events.append, self.errors, self.missing,
            lambda: self.torch, lambda: self.now,
        )  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_record_begins_when_cuda_does_and_is_bounded(bench: Bench) -> None:
    bench.history.collect(False)
    assert bench.torch.calls == []
    bench.torch.initialized = True
    bench.history.collect(False)
    bench.history.collect(False)
    assert bench.torch.calls == [{"enabled": "all", "max_entries": MAX_ENTRIES, "stacks": "python"}]
    bench.history.abandon(False)
    assert not bench.torch.on


def test_nothing_is_asked_of_torch_unless_wanted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, wanted=False)
    bench.torch.initialized = True
    bench.history.collect(False)
    bench.history.write()
    bench.history.abandon(False)
    assert bench.torch.calls == bench.torch.observers == bench.events == []


def test_record_of_the_script_itself_stays_as_it_is(bench: Bench) -> None:
    bench.torch.initialized = bench.torch.on = True
    bench.history.collect(False)
    assert bench.torch.calls == [] and len(bench.torch.observers) == 1
    bench.history.abandon(False)
    assert bench.torch.on


def test_file_is_written_when_memory_runs_out_but_not_in_every_step(bench: Bench) -> None:
    bench.torch.initialized = True
    bench.history.collect(False)
    for _ in range(40):
        bench.torch.run_out()
        bench.now += PAUSE_S / 4
    files = sorted(bench.files.iterdir())
    assert len(files) == len(bench.events) == MAX_FILES
    assert pickle.loads(files[0].read_bytes()) == {"segments": []}
    assert [event.data["path"] for event in bench.events] == [str(file) for file in files]


def test_disk_that_is_full_is_counted_and_the_script_goes_on(bench: Bench) -> None:
    bench.torch.initialized = bench.torch.full = True
    bench.history.collect(False)
    bench.torch.run_out()
    assert bench.errors == {"memory snapshot: OSError": 1} and bench.events == []


def test_torch_without_the_observer_is_said(bench: Bench) -> None:
    bench.torch.initialized, bench.torch._C = True, types.SimpleNamespace()
    bench.history.collect(False)
    assert "_cuda_attach_out_of_memory_observer" in bench.missing["memory history"]
    assert bench.torch.calls == []


def test_who_lets_go_never_turns_it_on_and_a_child_leaves_the_device_alone(tmp_path: Path) -> None:
    early, child = Bench(tmp_path / "a"), Bench(tmp_path / "b")
    early.history.abandon(False)
    early.torch.initialized = child.torch.initialized = True
    early.history.collect(True)
    assert early.torch.calls == []
    child.history.collect(False)
    before = list(child.torch.calls)
    child.history.abandon(True)
    child.torch.run_out()
    assert before and child.torch.calls == before and child.events == []
