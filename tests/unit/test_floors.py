"""Versions of torch and Ray that are too old are one line that says where they are and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from traceml_ray import driver
from traceml_ray.launchers import torchrun
from traceml_ray.launchers.min_versions import FLOORS, release_of, too_old


@pytest.fixture
def old_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have an installation of torch 2.3 found before the real one."""
    (tmp_path / "torch-2.3.1.dist-info").mkdir()
    (tmp_path / "torch-2.3.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.3.1+cpu\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_installed_torch_and_ray_are_new_enough() -> None:
    assert [too_old(package) for package in FLOORS] == ["", ""]


def test_old_torch_is_named_with_its_place_and_what_to_do(old_torch: Path) -> None:
    line = too_old("torch")
    assert "needs torch 2.4 or newer and found 2.3.1+cpu in" in line
    assert str(old_torch) in line
    assert "pip install -U 'torch>=2.4'" in line


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.4.0a0+git1234", (2, 4)), ("2.10.0", (2, 10)), ("3.0rc1", (3, 0)), ("nightly", ())],
)
def test_release_of_a_build_is_that_of_its_release(version: str, release: tuple[int, ...]) -> None:
    assert release_of(version) == release


def test_version_that_cannot_be_parsed_is_not_too_old(old_torch: Path) -> None:
    (old_torch / "torch-2.3.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: nightly\n")
    assert too_old("torch") == ""


def test_launch_below_the_floor_trains_without_a_monitor(
    old_torch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = []
    monkeypatch.setattr(torchrun, "_train", lambda _, monitor, *__: launched.append(monitor))
    assert torchrun.main(["--out", str(old_torch / "out"), __file__]) == 0
    assert launched == [None]
    assert not (old_torch / "out").exists()
    assert capsys.readouterr().err.splitlines() == [
        f"traceml-ray: no monitor for this run: {too_old('torch')}"
    ]


def test_start_below_the_floor_raises_a_start_error(old_torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(driver.StartError, match=r"needs torch 2\.4 or newer"):
        driver.start(out=old_torch)


def test_floors_are_those_of_the_package() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for package, floor in FLOORS.items():
        assert f'"{package}>={".".join(map(str, floor))}"' in project
