"""
Settings are the same at every door (keyword, `Settings`, callback, flag, variable): each field can be given
there, overrides what it should, and is refused with the same words. The tests loop over the fields, so that a
new one is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from traceml_ray import driver
from traceml_ray.agent.bootstrap import rank_environment
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.launchers import arguments, torchrun
from traceml_ray.settings import RelayPaths, SettingError, Settings, help_of, of_driver, table

FIELDS = table(Settings)
OF_DRIVERS = [name for name, setting in FIELDS.items() if not setting.of_launchers]
WORDS = {"ray_address": ("a:1", "b:2"), "log_to": ("auto", "wandb,comet,aim")}


def values(name: str) -> tuple[Any, Any]:
    """Two values of a setting. The first is not its default, nor the second if there is a choice."""
    setting = FIELDS[name]
    if setting.range is not None:
        return tuple(setting.type(end) for end in (setting.range.low, setting.range.high))
    if setting.choices:
        others = [choice for choice in setting.choices if choice != setting.default]
        return tuple([*others, setting.default][:2])
    return (True, False) if setting.type is bool else WORDS.get(name, ("a", "b"))


def by_keyword(name: str, value: object) -> Settings:
    return Settings.load(**{name: value})


def by_start(name: str, value: object) -> Settings:
    return Settings.load(**of_driver(None, {name: value}))


def by_struct(name: str, value: object) -> Settings:
    return Settings.load(**of_driver(Settings(**{name: value}), {}))


def by_callback(name: str, value: object) -> Settings:
    callback = pytest.importorskip("traceml_ray.launchers.train_callback").TraceMLTrainCallback
    return Settings(**callback(**{name: value})._settings)


def by_flag(name: str, value: object) -> Settings:
    flag = FIELDS[name].flags[-1]
    words = [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [f"{flag}={value}"]
    return arguments.settings_of(torchrun._parse([*words, "train.py"]))


DOORS = {
    "keyword": by_keyword,
    "start": by_start,
    "struct": by_struct,
    "callback": by_callback,
    "flag": by_flag,
}
CASES = [
    pytest.param(door, name, id=f"{title}-{name}")
    for title, door in DOORS.items()
    for name in (FIELDS if title in ("keyword", "flag") else OF_DRIVERS)
]


@pytest.fixture(autouse=True)
def nothing_else_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FIELDS, "socket", "spool"):
        monkeypatch.delenv(f"TRACEML_{name.upper()}", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(("door", "name"), CASES)
def test_what_is_given_overrides_the_environment_which_overrides_the_default(
    door: Callable[[str, object], Settings], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = values(name)
    assert getattr(door(name, one), name) == one
    monkeypatch.setenv(f"TRACEML_{name.upper()}", str(other))
    assert getattr(Settings.load(), name) == other
    assert getattr(door(name, one), name) == one


@pytest.mark.parametrize(("door", "name"), CASES)
def test_value_that_cannot_be_used_is_refused_with_its_place_and_what_is_allowed(
    door: Callable[[str, object], Settings], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, bad = FIELDS[name], "\udc80"
    monkeypatch.setenv(f"TRACEML_{name.upper()}", bad)
    with pytest.raises(SettingError) as caught:
        Settings.load()
    assert str(caught.value) == f"TRACEML_{name.upper()}={bad!r} must be {setting.allowed}"
    if door is by_flag and setting.type is bool:
        return  # the flag takes no value
    with pytest.raises(SettingError) as caught:
        door(name, bad)
    where = setting.flags[-1] if door is by_flag else name
    assert str(caught.value) == f"{where}={bad!r} must be {setting.allowed}"


def test_keyword_overrides_a_field_of_the_settings_that_are_given() -> None:
    given = of_driver(Settings(interval=2, deep=True), {"interval": 3})
    assert given == {"interval": 3.0, "deep": True}


def test_default_in_settings_counts_as_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEML_OUT", "/data")
    assert Settings.load(**of_driver(Settings(deep=True), {})).out == "/data"
    assert Settings.load(**of_driver(None, {"out": Settings().out})).out == Settings().out


def test_thresholds_are_given_by_flag_variable_mapping_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEML_THRESHOLD_STRIDE_STEPS", "7")
    wanted = Thresholds(window_steps=40, stride_steps=7)
    flags = ["--thresholds", "window_steps=40", "train.py"]
    assert arguments.settings_of(torchrun._parse(flags)).thresholds == wanted
    assert of_driver(None, {"thresholds": {"window_steps": 40}}) == {"thresholds": wanted}
    assert of_driver(Settings(thresholds=Thresholds(window_steps=40)), {}) == {"thresholds": wanted}
    for bad in ("window_steps", "windowsteps=4", "window_steps=1"):
        with pytest.raises(SettingError):
            arguments.settings_of(torchrun._parse(["--thresholds", bad, "train.py"]))


@pytest.mark.parametrize("start", [driver.start, by_callback], ids=["start", "callback"])
def test_unknown_name_is_refused_with_the_like_one(start: Callable[..., object]) -> None:
    with pytest.raises(SettingError, match=r"intervall is not a setting; did you mean interval\?"):
        start("intervall", 1) if start is by_callback else start(intervall=1)
    with pytest.raises(SettingError, match=r"threshold is not a setting; did you mean thresholds\?"):
        start("threshold", {}) if start is by_callback else start(threshold={})


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in OF_DRIVERS])
def test_driver_is_told_that_a_setting_is_of_launchers(name: str) -> None:
    for given in ((None, {name: values(name)[0]}), (Settings(**{name: values(name)[0]}), {})):
        with pytest.raises(SettingError, match=f"{name} is a setting of launchers"):
            of_driver(*given)


def test_name_of_a_session_without_its_keyword_is_refused() -> None:
    with pytest.raises(SettingError, match="a session is named by session=NAME"):
        driver.start("nightly")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, setting in FIELDS.items() if setting.of_ranks])
def test_rank_has_the_settings_of_its_launch(name: str) -> None:
    """Also one that has its default there: the environment of the launch may say something else."""
    paths = RelayPaths("/r.sock", "/spool")
    for value in (*values(name), FIELDS[name].default):
        environ = rank_environment(Settings(**{name: value}), paths, {})
        assert getattr(Settings.load(environ), name) == value
        assert RelayPaths.load(environ) == paths


def test_every_setting_has_a_help_and_paths_of_relays_are_no_settings() -> None:
    assert help_of(Settings).keys() == {*FIELDS, "thresholds"}
    assert not {*RelayPaths.__struct_fields__} & {*Settings.__struct_fields__}
