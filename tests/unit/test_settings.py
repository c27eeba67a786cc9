import subprocess
import sys
from pathlib import Path

import pytest

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.settings import SHORTEST_STEP_NS, SettingError, Settings, check_session_name, help_of


def test_defaults_apply_without_environment_and_keywords():
    assert Settings.load({}) == Settings()


def test_keyword_beats_environment_beats_default():
    environ = {"TRACEML_INTERVAL": "0.5", "TRACEML_OUT": "/data"}
    settings = Settings.load(environ, interval=0.25)
    assert (settings.interval, settings.out, settings.channel) == (0.25, "/data", "auto")


def test_process_environment_is_the_default_source(monkeypatch):
    monkeypatch.setenv("TRACEML_SESSION", "nightly-7")
    assert Settings.load().session == "nightly-7"


def test_missing_and_empty_values_are_the_default():
    assert (
        Settings.load({"TRACEML_OUT": "", "TRACEML_CHANNEL": ""}, session=None, interval=None) == Settings()
    )


def test_path_becomes_text():
    assert Settings.load({}, out=Path("a") / "b").out == "a/b"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("interval", "fast", "a number from 0.05 to 60"),
        ("interval", "0", "a number from 0.05 to 60"),
        ("interval", "nan", "a number from 0.05 to 60"),
        ("interval", "inf", "a number from 0.05 to 60"),
        ("ring_rows", "63", "an integer from 64 to 1048576"),
        ("ring_rows", "100.5", "an integer from 64 to 1048576"),
        ("channel", "pigeon", "auto, socket or actor"),
        ("debug", "perhaps", "true or false"),
        ("session", "a/b", "1 to 64 letters, digits, '.', '_' or '-', and not begin with '.'"),
    ],
)
def test_bad_value_is_one_line_with_name_value_and_allowed_values(name, value, allowed):
    variable = f"TRACEML_{name.upper()}"
    for where, call in (
        (variable, lambda: Settings.load({variable: value})),
        (name, lambda: Settings.load({}, **{name: value})),
    ):
        with pytest.raises(SettingError) as caught:
            call()
        assert str(caught.value) == f"{where}={value!r} must be {allowed}"


@pytest.mark.parametrize(
    ("name", "value"), [("interval", True), ("out", 7), ("ring_rows", [1]), ("debug", 2)]
)
def test_keyword_of_the_wrong_type_is_refused(name, value):
    with pytest.raises(SettingError, match=f"^{name}="):
        Settings.load({}, **{name: value})


def test_unknown_keyword_is_refused_with_the_known_ones():
    with pytest.raises(
        SettingError,
        match=r"^intervall is not a setting; did you mean interval\? these are: session, out, interval,",
    ):
        Settings.load({}, intervall=1)


def test_thresholds_come_from_environment_keyword_and_struct():
    environ = {"TRACEML_THRESHOLD_MIN_EXCESS": "0.1", "TRACEML_THRESHOLD_WINDOW_STEPS": "30"}
    loaded = Settings.load(environ, thresholds={"window_steps": 40}).thresholds
    assert loaded == Thresholds(min_excess=0.1, window_steps=40)
    assert Settings.load(environ, thresholds=Thresholds()).thresholds == Thresholds()


def test_default_thresholds_are_all_allowed():
    assert Settings.load({}, thresholds=Thresholds()).thresholds == Thresholds()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MIN_EXCESS", "5%", "TRACEML_THRESHOLD_MIN_EXCESS='5%' must be a number from 0 to 1"),
        ("MIN_EXCESS", "5", "TRACEML_THRESHOLD_MIN_EXCESS='5' must be a number from 0 to 1"),
        ("WINDOW_STEPS", "1", "TRACEML_THRESHOLD_WINDOW_STEPS='1' must be an integer from 2 to 10000"),
        ("MIN_EXCES", "0.1", "TRACEML_THRESHOLD_MIN_EXCES is not a setting; did you mean min_excess?"),
    ],
)
def test_bad_threshold_is_named(variable, value, message):
    with pytest.raises(SettingError) as caught:
        Settings.load({f"TRACEML_THRESHOLD_{variable}": value})
    assert str(caught.value).startswith(message)


def test_variables_of_others_are_ignored():
    assert Settings.load({"TRACEML_ELSEWHERE": "x", "INTERVAL": "x"}) == Settings()


@pytest.mark.parametrize("name", ["a", "default", "run-7.b_c", "-x", "A" * 64])
def test_valid_session_names_are_accepted(name):
    assert check_session_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "é", "A" * 65, "a\0"])
def test_session_names_unusable_as_a_folder_are_refused(name):
    with pytest.raises(SettingError) as caught:
        check_session_name(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_texts_about_the_device_clock_name_the_shortest_step_that_it_is_read_in():
    shortest = f"steps take {SHORTEST_STEP_NS // 1_000_000} ms or more"
    root = Path(__file__).parents[2]
    texts = {name: (root / name).read_text() for name in ("README.md", "docs/gpu.md", "docs/index.md")}
    texts["help"] = help_of(Settings)["device_clock"]
    assert [name for name, text in texts.items() if shortest not in text] == []


def test_loading_settings_imports_nothing_heavy():
    code = (
        "import sys; from traceml_ray.settings import Settings; Settings.load();"
        "print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "[]"
