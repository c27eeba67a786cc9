"""Warnings name the same line, in the same module, with and without the monitor."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

import traceml_ray
from traceml_ray.agent.imports import forget, when_imported
from traceml_ray.agent.instrument import Instrumentation
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.patch.root_modules import RootModules
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing

ONE = torch.ones(1)


class Warns(nn.Module):
    """Warns in its forward, of the line so many frames above."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("forward", stacklevel=self.level)
        return x * self.weight


class Calls(Warns):
    """One whose class has a `__call__` of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Derived(Calls):
    """One that has it from its base."""


def collates(samples: list[Any]) -> list[Any]:
    warnings.warn("collate", stacklevel=2)
    return samples


class Items:
    """Iterated, warns of the line that asks for an item."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        warnings.warn("next", stacklevel=2)
        raise StopIteration


def deprecated_argument() -> None:
    torch.autograd.backward([(ONE * nn.Parameter(ONE)).sum()], grad_variables=[torch.ones(())])


def deprecated_collective() -> None:
    dist.all_reduce_coalesced([ONE.clone()])


def deprecated_option() -> None:
    nn.parallel.DistributedDataParallel(nn.Linear(1, 1), check_reduction=True)


def loader() -> None:
    next(iter(DataLoader([1, 2], collate_fn=collates)))


CASES: dict[str, Callable[[], object]] = {
    "argument": deprecated_argument,
    "collective": deprecated_collective,
    "option": deprecated_option,
    "loader": loader,
    **{f"forward {level}": lambda level=level: Warns(level)(ONE) for level in (2, 4, 5)},
}


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def monitor() -> Iterator[Instrumentation]:
    made = Instrumentation(Recorder(StepRing(64)))
    yield made
    made.remove()
    assert not made.errors


def warned(call: Callable[[], object]) -> list[tuple[str, int, str]]:
    """File, line and text of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(one.filename, one.lineno, str(one.message)) for one in caught]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("world")
def test_warning_of_torch_names_the_line_that_it_names_without_us(
    name: str, monitor: Instrumentation
) -> None:
    call = CASES[name]
    before = warned(call)
    assert before
    monitor.install()
    monitor.roots.add(Warns(1))
    assert warned(call) == before


@pytest.mark.usefixtures("world")
def test_filters_and_once_work_as_without(monitor: Instrumentation) -> None:
    monitor.install()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
        deprecated_argument()
        assert not caught
        warnings.simplefilter("default")
        for _ in range(3):
            deprecated_argument()
    assert [one.filename for one in caught] == [__file__]
    assert any(
        "grad_variables" in str(key[0]) for key in globals()["__warningregistry__"] if key != "version"
    )


@pytest.mark.parametrize("kind", [Calls, Derived])
def test_own_call_of_a_class_is_counted_and_our_mark_is_not(kind: type[Warns]) -> None:
    roots = RootModules(Recorder(StepRing(16)), lambda *_: None)
    module = kind(5)

    def calls() -> None:
        module(ONE)

    before = warned(calls)
    assert before[0][0] == __file__
    roots.add(module)
    try:
        assert warned(calls) == before
    finally:
        roots.restore()


def test_watched_iterable_warns_of_the_line_that_asks() -> None:
    def asks(items: Any) -> None:
        list(map(str, zip(items, strict=False)))

    expected = warned(lambda: asks(Items()))
    assert expected[0][0] == __file__
    assert warned(lambda: asks(traceml_ray.watch(Items()))) == expected


def test_module_that_warns_when_it_is_imported_names_who_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "deprecated_one.py").write_text("import warnings; warnings.warn('old', stacklevel=2)")
    (tmp_path / "imports_it.py").write_text("import deprecated_one")
    when_imported("deprecated_one", lambda: None)
    try:
        assert warned(lambda: importlib.import_module("imports_it")) == [
            (str(tmp_path / "imports_it.py"), 1, "old")
        ]
    finally:
        forget("deprecated_one")
        for name in ("imports_it", "deprecated_one"):
            sys.modules.pop(name, None)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="logging counts all frames")
def test_log_message_names_the_line_that_it_names_without_us(caplog: pytest.LogCaptureFixture) -> None:
    owner, patcher = SimpleNamespace(call=lambda: logging.warning("here", stacklevel=2)), Patcher()
    patcher.replace(owner, "call", patcher.after("call", lambda *_: None))
    owner.call()
    assert [record.pathname for record in caplog.records] == [__file__]


def test_file_of_a_wrapper_is_where_its_code_is() -> None:
    owner, patcher = SimpleNamespace(call=lambda: 1 / 0), Patcher()
    patcher.replace(owner, "call", lambda original: lambda: original())
    try:
        owner.call()
    except ZeroDivisionError as error:
        _, ours, theirs = traceback.extract_tb(error.__traceback__)
    assert Path(ours.filename).samefile(__file__) and ours.filename != theirs.filename == __file__
    assert "lambda original" in (ours.line or ""), "a traceback shows its line"
