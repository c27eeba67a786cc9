"""The mark on the class of a root module: what it changes for modules of that class, and what it does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.patch.root_modules import RootModules
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.ring import StepRing


def depth() -> int:
    """How many frames there are on the stack."""
    frame, frames = sys._getframe(1), 0
    while frame is not None:
        frame, frames = frame.f_back, frames + 1  # type: ignore[assignment]
    return frames


class Nest(nn.Module):
    """Modules of one class inside each other; the innermost returns the depth of the stack."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return depth() if self.inner is None else self.inner(x)


class Calls(nn.Module):
    """A module whose class has a `__call__` of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return "own", super().__call__(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Derived(Calls):
    """One that has it from its base."""


@pytest.fixture
def roots() -> Iterator[RootModules]:
    patcher = Patcher()
    made = RootModules(Recorder(StepRing(16)), patcher.failed)
    yield made
    made.restore()
    assert not patcher.errors


def test_mark_takes_no_place_on_the_stack(roots: RootModules) -> None:
    nest, x = Nest(None), torch.ones(1)
    for _ in range(50):
        nest = Nest(nest)
    before = nest(x) - depth()
    roots.add(nest)
    assert nest(x) - depth() == before
    roots.restore()
    assert nest(x) - depth() == before and "__call__" not in vars(Nest)


@pytest.mark.parametrize("kind", [Calls, Derived])
def test_own_call_of_a_class_is_called(roots: RootModules, kind: type[nn.Module]) -> None:
    module, x = kind(), torch.ones(1)
    roots.add(module)
    assert module(x) == ("own", x)
    roots.restore()
    assert module(x) == ("own", x)


def test_call_that_another_library_puts_in_later_is_called(
    roots: RootModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    nest, original = Nest(None), nn.Module.__call__
    roots.add(nest)
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: ("theirs", original(self, *args)))
    assert nest(torch.ones(1))[0] == "theirs"


def test_compiled_call_of_a_module_is_used(roots: RootModules, monkeypatch: pytest.MonkeyPatch) -> None:
    nest = Nest(None)
    roots.add(nest)
    monkeypatch.setattr(nest, "_compiled_call_impl", lambda _x: "compiled")
    assert nest(torch.ones(1)) == "compiled"
