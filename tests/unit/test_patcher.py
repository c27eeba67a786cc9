"""How something is patched and put back: listed where it cannot be, counted where it fails, undone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from traceml_ray.agent.patch.patcher import Patcher, expect


class Owner:
    def method(self, value: int = 1) -> int:
        """What it does."""
        return value

    @staticmethod
    def static(value: int) -> int:
        return value


def doubled(original: Any) -> Any:
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


def test_patch_is_undone_as_it_was_bound() -> None:
    before, patcher = dict(vars(Owner)), Patcher()
    patcher.replace(Owner, "method", doubled)
    patcher.replace(Owner, "method", doubled)
    assert (Owner().method(), Owner().method(3)) == (4, 12)
    assert Owner.method.__doc__ == "What it does."
    patcher.restore()
    patcher.restore()
    assert {name: vars(Owner)[name] for name in before} == before


def test_patch_over_an_agent_patch_stays_when_that_is_undone() -> None:
    owner, patcher = SimpleNamespace(call=lambda: 1), Patcher()
    patcher.replace(owner, "call", doubled)
    ours = owner.call
    owner.call = lambda: ours() + 1
    patcher.restore()
    assert owner.call() == 3


def test_patch_that_does_not_fit_is_listed_and_others_are_applied() -> None:
    owner, patcher = SimpleNamespace(call=lambda: 1), Patcher()
    patcher.apply("gone", lambda: patcher.replace(owner, "absent", doubled))
    patcher.apply("changed", lambda: expect(owner.call, ("self",)))
    patcher.apply("there", lambda: patcher.replace(owner, "call", doubled))
    assert owner.call() == 2
    assert patcher.missing.keys() == {"gone", "changed"}
    assert patcher.missing["changed"] == "TypeError: takes (), expected self"


def test_action_after_a_call_that_fails_is_counted_and_the_result_is_kept() -> None:
    owner, patcher = SimpleNamespace(call=lambda *_, **__: "result"), Patcher()

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    patcher.replace(owner, "call", patcher.after("here", fail))
    assert owner.call(1, module=2) == "result"
    assert patcher.errors == {"here: RuntimeError": 1}
    patcher.errors.debug = True
    with pytest.raises(RuntimeError, match="a fault of ours"):
        owner.call()


@pytest.mark.parametrize("imported", [True, False])
def test_patch_of_a_module_waits_for_its_import_and_is_forgotten(
    imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[Callable[[], object]] = []
    if imported:
        monkeypatch.setitem(sys.modules, "a_module_of_ours", ModuleType("a_module_of_ours"))
    finders, patcher = [*sys.meta_path], Patcher()
    patcher.when_imported("a_module_of_ours", "name", lambda: applied.append(patcher.restore))
    assert len(applied) == imported
    patcher.restore()
    assert sys.meta_path == finders
