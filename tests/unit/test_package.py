"""The package as it is installed: what the wheel holds, and what an import costs."""

import inspect
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from unittest.mock import create_autospec

import pytest

import traceml_ray

ROOT = Path(__file__).parents[2]
MAPPED = {
    "traceml_ray": "traceml_ray",
    "launchers": "traceml_ray/launchers",
    "dash_app": "traceml_ray/dash_app",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Build a source distribution, and the wheel from that, as an installation from source does. They are built
    from a copy: a build in place would pick up what an earlier one left.
    """
    source = tmp_path_factory.mktemp("source")
    for name in MAPPED:
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


def test_wheel_holds_the_tree_and_nothing_else(wheel):
    source = wheel.parents[1]
    expected = {
        f"{target}/{path.relative_to(source / folder).as_posix()}"
        for folder, target in MAPPED.items()
        for path in (source / folder).rglob("*")
        if path.is_file() and path.suffix != ".md"
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"traceml_ray-{traceml_ray.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == expected
    assert {info + "licenses/LICENSE", info + "entry_points.txt"} <= names


def test_wheel_alone_can_be_imported(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import traceml_ray, traceml_ray.launchers, traceml_ray.dash_app as d; print(d.__file__)"
    assert run(code, cwd=tmp_path) == str(tmp_path / "traceml_ray/dash_app/__init__.py")


def test_checkout_is_whole_where_its_folder_hides_an_installed_package():
    done = subprocess.run(  # without `site`, which is what finds the folders of an editable install
        [
            sys.executable,
            "-S",
            "-c",
            "import traceml_ray.launchers, traceml_ray.dash_app as d; print(d.__file__)",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.stdout.strip(), done.stderr) == (str(ROOT / "traceml_ray/dash_app/__init__.py"), "")


def test_import_loads_only_the_standard_library():
    code = (
        "import sys; before = set(sys.modules); import traceml_ray; print(*sorted(set(sys.modules) - before))"
    )
    brought = {name.partition(".")[0] for name in run(code).split()}
    assert brought - sys.stdlib_module_names == {"traceml_ray"}


def test_calling_an_actor_does_not_import_its_work():
    """Ray imports an actor's module into each rank that calls it: 126 ms in the middle of training, once."""
    code = "import sys, traceml_ray.ray.node_relay, traceml_ray.ray.aggregator; print(*sys.modules)"
    brought = {tuple(name.split(".")[1:3]) for name in run(code).split() if name.startswith("traceml_ray.")}
    work = {name for name in brought if name[0] in ("analysis", "monitor", "reports", "store")}
    tables = {("analysis",), ("analysis", "labels"), ("analysis", "thresholds")}
    assert work == {*tables, ("monitor",), ("monitor", "finish")}


def test_a_page_of_text_imports_nothing_more_once_it_is_loaded():
    code = """if True:
        import sys
        from traceml_ray.document import text
        text.load()
        before = set(sys.modules)
        text.page([text.Facts(("label", "Zeit → 3 µs, 漢字")), ["a line"]])
        assert set(sys.modules) == before, set(sys.modules) - before
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_names_of_missing_frameworks_are_left_out_and_name_what_to_install(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, package in (("TraceMLCallback", "lightning"), ("TraceMLTrainerCallback", "transformers")):
        monkeypatch.delitem(vars(traceml_ray), name, raising=False)
        monkeypatch.delitem(sys.modules, traceml_ray._MODULES[name], raising=False)
        assert name not in dir(traceml_ray)
        assert not hasattr(traceml_ray, name)
        with pytest.raises(AttributeError, match=f"pip install {package}") as caught:
            getattr(traceml_ray, name)
        assert isinstance(caught.value.__cause__, ImportError)
    assert {"watch", "TraceMLTrainCallback"} <= dict(inspect.getmembers(traceml_ray)).keys()
    assert create_autospec(traceml_ray).watch
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    assert "TraceMLTrainerCallback" in dir(traceml_ray)


def test_import_cost_is_printed(capsys):
    """Prints the figure; it asserts none, because it depends on the machine."""
    code = "import time; t = time.perf_counter(); import traceml_ray; print((time.perf_counter() - t) * 1e3)"
    milliseconds = min(float(run(code)) for _ in range(5))
    with capsys.disabled():
        print(f"\nimport traceml_ray: {milliseconds:.1f} ms")


def test_public_names_are_there_and_others_are_not():
    names = "attach, detach, stage, trace_step, watch"
    assert (
        run(f"from traceml_ray import {names}; import traceml_ray; print(all(map(callable, ({names}))))")
        == "True"
    )
    import traceml_ray.wire.codec

    public = {name for name in dir(traceml_ray) if not name.startswith("_")}
    of_frameworks = {"TraceMLCallback", "TraceMLTrainCallback", "TraceMLTrainerCallback"}
    assert {*traceml_ray.__all__} - {"__version__"} == public - of_frameworks, "and no module of ours"
    assert traceml_ray.wire.codec.VERSION
    with pytest.raises(AttributeError, match="module 'traceml_ray' has no attribute 'nothing'"):
        _ = traceml_ray.nothing


def run(code: str, cwd: Path = ROOT) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
