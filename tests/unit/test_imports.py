"""Callbacks after an import, on real modules in a folder of the test's own."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from traceml_ray.agent.imports import forget, when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"awaited_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    forget(name)
    sys.modules.pop(name, None)


def test_callback_runs_once_when_the_module_is_whole(module: str) -> None:
    seen: list[object] = []
    when_imported(module, lambda: seen.append(sys.modules[module].value))
    assert seen == []
    importlib.import_module(module)
    importlib.reload(sys.modules[module])
    assert seen == [1]


def test_find_spec_of_a_module_changes_nothing(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    when_imported(module, lambda: seen.append(1))
    monkeypatch.setattr(
        sys, "meta_path", [*sys.meta_path[:1], object(), *sys.meta_path[1:]]
    )  # a very old one
    for _ in range(2):
        assert importlib.util.find_spec(module) is not None
    assert seen == []
    imported = importlib.import_module(module)
    assert seen == [1] and "exec_module" not in vars(imported.__loader__)


def test_callback_of_an_imported_module_runs_at_once(module: str) -> None:
    importlib.import_module(module)
    seen: list[int] = []
    when_imported(module, lambda: seen.append(1))
    assert seen == [1]


def test_module_is_as_without_the_hook(module: str) -> None:
    when_imported(module, lambda: None)
    imported = importlib.import_module(module)
    assert "exec_module" not in vars(imported.__loader__)
    assert inspect.getsource(imported) == "value = 1\n"
    assert imported.__spec__ is not None and imported.__spec__.loader is imported.__loader__


def test_forgotten_callback_is_not_called(module: str) -> None:
    before = list(sys.meta_path)
    seen: list[int] = []
    when_imported(module, lambda: seen.append(1))
    forget(module)
    importlib.import_module(module)
    assert seen == [] and sys.meta_path == before


def test_missing_module_is_still_an_import_error(module: str) -> None:
    when_imported(f"{module}.nothing", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{module}.nothing")
    forget(f"{module}.nothing")


def test_failing_module_raises_its_own_error(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise RuntimeError('its own')\n")
    seen: list[int] = []
    when_imported(module, lambda: seen.append(1))
    with pytest.raises(RuntimeError, match="its own"):
        importlib.import_module(module)
    assert seen == []
