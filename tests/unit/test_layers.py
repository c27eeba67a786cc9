"""Imports point one way: the table "Where things are" in ARCHITECTURE, from the bottom to the top."""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def _layers() -> list[list[str]]:
    """Return what each line of the table holds, the lowest first."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("| place | holds |") :].partition("\n\n")[0]
    lines = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [[name.rstrip("/") for name in re.findall(r"`([a-z0-9_*/]+)`", line)] for line in lines]


def _modules() -> dict[str, Path]:
    """Return the files by their names below `traceml_ray`, without the hook that starts agents."""
    package = ROOT / "traceml_ray"
    files = [
        (path, path.relative_to(package)) for path in package.rglob("*.py") if path.parent.name != "site"
    ]
    for place in ("launchers", "dash_app"):
        files += [(path, path.relative_to(ROOT)) for path in (ROOT / place).rglob("*.py")]
    names = {".".join(below.with_suffix("").parts).removesuffix(".__init__"): path for path, below in files}
    return {name: path for name, path in names.items() if name != "__init__"}


MODULES = _modules()

TWO_MEANINGS = {
    "Finding",  # what one rule says of a window, and what every face lists
    "Question",  # of each signal, in its folder
    "TraceMLTrainCallback",  # also what stands in for it where Ray Train cannot be watched
}


@functools.cache
def _nodes(name: str) -> list[ast.Import | ast.ImportFrom | ast.ClassDef]:
    """Return the imports and classes of a module, also those inside functions."""
    nodes = ast.walk(ast.parse(MODULES[name].read_text()))
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef))]


@functools.cache
def _imports(name: str) -> list[tuple[str, str]]:
    """Return (module, name taken from it) of all imports, also of those inside functions."""
    taken_by: list[tuple[str, str]] = []
    path = MODULES[name]
    package = ("traceml_ray." + name).split(".")[: None if path.name == "__init__.py" else -1]
    for node in _nodes(name):
        if isinstance(node, ast.Import):
            imported = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            imported = [(module, alias.name) for alias in node.names]
        else:
            continue
        for module, taken in imported:
            if module == "traceml_ray" or module.startswith("traceml_ray."):
                whole = f"{module}.{taken}".removeprefix("traceml_ray.")
                owner = next((known for known in (whole, whole.rpartition(".")[0]) if known in MODULES), None)
                if owner is not None and owner != name:
                    taken_by.append((owner, "" if owner == whole else taken))
    return taken_by


def test_imports_have_no_circle() -> None:
    graph = {name: {module for module, _ in _imports(name)} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def _line_of(name: str) -> int | None:
    """Return the line of the table that a module is in, by its own path or its folder's; None: in none."""
    path = name.replace(".", "/")
    matching = [
        (len(place.replace("*", "")), number)
        for number, line in enumerate(_layers())
        for place in line
        if fnmatch.fnmatchcase(path, place) or path.startswith(f"{place}/")
    ]
    return max(matching)[1] if matching else None


def test_imports_point_downwards() -> None:
    lines = {name: _line_of(name) for name in MODULES}
    code = {name for name, path in MODULES.items() if path.name != "__init__.py" or _imports(name)}
    assert {name for name in code if lines[name] is None} == {"launch"}, "ARCHITECTURE knows every module"
    up = [
        f"{name} imports {module}"
        for name in MODULES
        for module, _ in _imports(name)
        if (here := lines[name]) is not None and (there := lines[module]) is not None and here < there
    ]
    assert up == []


def test_views_ask_and_open_no_session_file() -> None:
    views = [
        name
        for name in MODULES
        if name.partition(".")[0] in ("cli", "driver", "live_session", "dash_app", "mcp")
    ]
    reading = {"store.session_file", "store.reader", "reports.summary", "monitor.aggregator"}
    opened = {
        f"{name}: {module}.{taken}" for name in views for module, taken in _imports(name) if module in reading
    }
    assert {call for call in opened if not call.endswith((".moment", ".overhead_of"))} == set()


def test_private_names_stay_in_their_module() -> None:
    taken = [
        f"{name} takes {private} from {module}"
        for name in MODULES
        for module, private in _imports(name)
        if private.startswith("_") and not private.startswith("__")
    ]
    assert taken == []


def _named(path: Path) -> set[str]:
    """Return the modules that a file imports, or names for another process to run."""
    text = path.read_text()
    names = set(re.findall(r"traceml_ray(?:\.\w+)+", text))
    for module, imported in re.findall(
        r"^ *from (traceml_ray[.\w]*) import ([^()]+?|\([^)]+\))$", text, re.MULTILINE
    ):
        names.update(f"{module}.{name}" for name in re.findall(r"\w+", imported))
    return {name.removeprefix("traceml_ray.") for name in names} & MODULES.keys()


def test_each_module_is_reached_by_tests() -> None:
    """No module is left over: tests name it, or what they name does."""
    reached: set[str] = set()
    waiting = set().union(*map(_named, [ROOT / "traceml_ray/__init__.py", *(ROOT / "tests").rglob("*.py")]))
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= (_named(MODULES[name]) | {module for module, _ in _imports(name)}) - reached
    modules = {name for name, path in MODULES.items() if path.name != "__init__.py"}
    assert sorted(modules - reached) == []


def test_a_class_name_means_one_thing() -> None:
    """Public names, of the whole package: a name that two modules define is looked up twice."""
    places: dict[str, list[str]] = {}
    for name in MODULES:
        for node in _nodes(name):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in TWO_MEANINGS} == {}
